"""A stand-in for the runs of a set: what a finished run leaves behind."""

import sys
import textwrap

import pytest

from mmrl.sets import queue

# Without importing mmrl, which takes seconds.
STAND_IN = """
import fcntl, json, os, sys, time
from pathlib import Path
command, words = sys.argv[1], dict(word.split("=", 1) for word in sys.argv[2:] if "=" in word)
with open(os.environ["CALLS"], "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if words.get("algo") == os.environ.get("BREAKS", "none"):
    sys.exit("error: out of luck")
run = Path(words.get("resume") or words["run.dir"])
for name in ("journal", "eval", "checkpoints"):
    (run / name).mkdir(parents=True, exist_ok=True)
lock = open(run / "run.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
if "resume" in words:
    config = json.loads((run / "config.yaml").read_text())
else:
    seed = int(words["seed"])
    config = {"seed": seed, "task": {"name": "hotpotqa"}, "eval": {"split": "dev"}, "model": {"path": "tiny"}}
    config["task"]["max_tokens"] = seed if os.environ.get("DRIFTS") else 0
    config |= {"policy": words["policy"]} if command == "eval" else {"algo": {"name": words.get("algo", "?")}}
    (run / "environment.json").write_text(json.dumps({"cpu": "abacus", "mmrl_git": {"commit": "0123456789abc"}}))
    (run / "config.yaml").write_text(json.dumps(config))

def evaluated(step, scores):
    modules = {"rewriter/sub_queries": 2.0}
    items = [
        {"id": f"d{n}", "metrics": {"em": score, "f1": score, "accuracy": score}, "modules": modules}
        for n, score in enumerate(scores)
    ]
    (run / "eval" / f"step-{step:06d}-dev.jsonl").write_text("".join(json.dumps(item) + "\\n" for item in items))

if command == "eval":
    # 0.2 untrained, 0.6 and 0.7 by algorithm; a tenth of the items differs between seeds
    policy = config["policy"]
    share = 0.2 if policy == "tiny" else 0.7 if "mhgpo_rr" in policy else 0.6
    evaluated(0, [float((n * 7 + config["seed"]) % 100 < 100 * share) for n in range(100)])
else:
    # 0 at first and 0.4 after two steps
    metrics = run / "metrics.jsonl"
    for step in range(len(metrics.read_text().splitlines()) if metrics.exists() else 0, 3):
        record = {"step": step, "reward/mean": 0.1 * step, "time/step": 1.0}
        if step != 1:
            evaluated(step, [float(n < 40 * step) for n in range(200)])
            record |= {"eval/dev/n": 200.0, "eval/dev/f1": step / 5}
        with metrics.open("a") as lines:
            lines.write(json.dumps(record) + "\\n")
        if step == 1 and os.environ.get("HANGS") in ("1", words.get("algo")) and "resume" not in words:
            time.sleep(60)
failed = float(os.environ.get("FAILS", 0))
scores = {"failed_share": failed} | ({} if failed > 0.5 else {"em_low": 0.1})
(run / "summary.json").write_text(json.dumps({"metrics": scores, "facts": {}, "main_metric": "f1"}))
(run / "report.html").write_text("page")
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Run in an empty folder with the stand-in; returns what it was called with since it was last asked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stand_in.py").write_text(textwrap.dedent(STAND_IN))
    monkeypatch.setattr(queue, "MMRL", [sys.executable, "-S", str(tmp_path / "stand_in.py")])
    monkeypatch.setattr(queue, "POLL_S", 0.01)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))

    def lines():
        path = tmp_path / "calls"
        text = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
        return text.splitlines()

    return lines
