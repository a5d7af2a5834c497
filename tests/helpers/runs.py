"""Runs for tests: made-up histories and forests for reports, and small real ones through the command line."""

import json
import math
import random
import zlib
from pathlib import Path
from typing import Any

import yaml

from mmrl.records import Call, Forest, Rollout
from mmrl.store.journal import write_step
from mmrl.store.rundir import RunDir
from mmrl.system.conf import later_wins
from mmrl.system.files import append_jsonl, file_digest
from mmrl.tasks.base import Score
from scripts.chaos.compare import comparable

MODULES = {"rewriter": 21, "reranker": 9, "answerer": 6}
CONFIG: dict[str, Any] = {
    "seed": 0,
    "algo": {"name": "mhgpo_rr", "group_size": 4},
    "task": {"name": "hotpotqa", "data": {"train": "mini", "dev": "mini", "test": "mini"}},
    "model": {"name": "tiny", "path": "tiny"},
    "train": {"steps": 40, "batch_size": 3},
    "eval": {"split": "dev", "bootstrap": 200},
    "run": {"dir": None, "name": None},
}


def metrics(step):
    noise = random.Random(step)
    progress = 1 - math.exp(-step / 15)
    reward = 0.37 + 0.5 * progress + noise.gauss(0, 0.03)
    found = {
        "reward/mean": reward,
        "credit/zero_variance_share": 0.3 + 0.4 * progress,
        "rollouts/count": 96.0,
        "rollouts/failed_share": 0.01,
        "task/em": reward - 0.05,
        "train/loss": -0.01,
        "train/grad_norm": 0.8,
        "train/kl": 0.1 * progress,
        "time/step": 1.2,
        "time/generate": 0.6,
        "rate/tokens_per_s": 12345.0,
        "memory/rss_mb": 1234.0,
        "module/reranker/invalid": 0.58 - 0.5 * progress,
    }
    for index, (name, length) in enumerate(MODULES.items()):
        found |= {
            f"module/{name}/calls": 96.0,
            f"module/{name}/reward": reward - 0.02 * index,
            f"module/{name}/penalty": -0.1 * (1 - progress),
            f"module/{name}/format_rate": 0.9 + 0.1 * progress,
            f"module/{name}/length": length + noise.random(),
            f"module/{name}/entropy": 0.5 - 0.3 * progress,
        }
    return found


def items(step, count=60):
    noise = random.Random(7)
    level = 0.35 + 0.5 * (1 - math.exp(-step / 15))
    drawn = [noise.random() for _ in range(count)]
    return [
        {"id": f"d{n}", "metrics": {"em": float(u < level), "f1": min(1.0, level + u / 5), "reward": float(u < level)}}
        for n, u in enumerate(drawn)
    ]


def evaluation(step):
    found = items(step)
    result = {"eval/dev/n": float(len(found)), "eval/dev/failed_share": 0.0}
    for name in ("em", "f1", "reward"):
        mean = sum(item["metrics"][name] for item in found) / len(found)
        result |= {f"eval/dev/{name}": mean, f"eval/dev/{name}_low": mean - 0.06, f"eval/dev/{name}_high": mean + 0.06}
    return result


def forest(step):
    calls, rollouts, entries = {}, [], []

    def call(call_id, example, parent, module, text, prompt, **more):
        calls[call_id] = Call(
            id=call_id,
            example=example,
            parent=parent,
            module=module,
            completion_tokens=3,
            prompt_tokens=5,
            prompt_ids=(1, 2, len(prompt)),
            completion_ids=(3, 4, 5),
            text=text,
            prompt_text=prompt,
            **more,
        )
        entries.append(
            {
                "call": call_id,
                "reward": 0.75,
                "parts": {"shared": 0.8, "penalty": -0.05},
                "group": f"{example}|{module}",
                "group_size": 2,
                "mean": 0.5,
                "std": 0.3,
                "advantages": (0.83, 0.83, 0.83) if module != "answerer" else (-0.5, 0.1, 0.1),
                "weights": (0.1, 0.1, 0.1),
            }
        )

    for number in range(3):
        q = f"q{number}"
        question = "system: You rewrite questions.\n" + "Some context. " * 40 + f"\nuser: Who made film {number}?"
        call(
            f"{q}/0#0",
            q,
            None,
            "rewriter",
            "### who made it; <script>alert(1)</script> ###",
            question,
            facts={"queries": 2},
        )
        call(f"{q}/0#1", q, f"{q}/0#0", "reranker", "1, 99", "docs", penalty=-0.5, ok=number != 1, facts={"invalid": 1})
        if number == 1:
            rollouts.append(
                Rollout(id=f"{q}/0", example=q, leaf=f"{q}/0#1", reward=0.0, error="parse", error_message="no <ids>")
            )
            continue
        for branch, answer in enumerate(("Lísbon \x1b[31m& Co", "Porto")):
            leaf = f"{q}/{branch}#2"
            call(leaf, q, f"{q}/0#1", "answerer", answer, "answer this", finish="eos")
            rollouts.append(
                Rollout(
                    id=f"{q}/{branch}",
                    example=q,
                    leaf=leaf,
                    reward=1.0 - branch,
                    fork="answerer",
                    prediction=answer,
                    metrics={"em": 1.0 - branch, "f1": 0.5},
                    parts={"answer": 1.0 - branch},
                )
            )
    rollouts.append(
        Rollout(id="q2/9", example="q2", leaf=None, reward=None, error="tool", error_message="retriever down")
    )
    return Forest(calls=calls, rollouts=tuple(rollouts), modules=tuple(MODULES), step=step), entries


def fake_run(path: Path, steps: int = 40, config=None, evaluate=True) -> RunDir:
    """A run directory with `steps` steps, journals of the last three, evaluations every 10."""
    run = RunDir.create(path, config or CONFIG, ["mmrl", "train", "algo=mhgpo_rr", "task=hotpotqa"])
    for step in range(steps + 1):
        found = metrics(step) if step else {}
        if evaluate and step % 10 == 0:
            found |= evaluation(step)
            append_jsonl(run.eval_path(step, "dev"), items(step))
        if found:
            run.append_metrics(step, found)
        if step > max(steps - 3, 0):
            write_step(run, *forest(step))
    run.close()
    return run


# a small random model trains all its parameters, as the tiny one does
SMALL = [
    "model=hf",
    "model.lora=null",
    "model.gradient_checkpointing=false",
    "hardware=cpu",
    "train.schedule=constant",
    "train.warmup_steps=0",
    "train.grad_clip=1.0",
    "hardware.threads=1",
    "train.batch_size=2",
    "algo.group_size=2",
    "task.max_tokens=6",
    "task.retriever.top_k=2",
    "eval.items=4",
    "eval.bootstrap=100",
    "eval.every=2",
    "train.save_every=2",
    "train.lr=0.01",
    "algo.beta=0.001",  # so that every call is trained, also where all rewards of a group are equal
]


EVAL = ["eval.items=4", "task.max_tokens=6", "task.retriever.top_k=2", "hardware=cpu", "hardware.threads=1"]
"""The same of an evaluation."""


def score_of_texts(task, example, prediction, path, reward_set):
    """A reward that a random model's texts differ in, in the place of a task's `score`."""
    reward = (zlib.crc32("".join(call.text for call in path).encode()) % 97) / 97
    return Score(reward=reward, metrics={"f1": reward, "em": 0.0, "accuracy": 0.0})


def command(random_model, run_dir, *overrides):
    return [
        "train",
        *later_wins([f"model.path={random_model}", f"run.dir={run_dir}", "train.steps=60", *SMALL, *overrides]),
    ]


def change_config(run_dir, **sections):
    """Change keys of the sections of a run's stored config: `hardware={"threads": 2}`, or `seed=7`."""
    path = run_dir / "config.yaml"
    stored = yaml.safe_load(path.read_text())
    for name, value in sections.items():
        stored[name] = {**stored[name], **value} if isinstance(value, dict) else value
    path.write_text(yaml.safe_dump(stored))


def flip(path, at=-100):
    """Change a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def forge(checkpoint):
    """Make the list of a checkpoint's files agree with what is there, as whoever can write them can."""
    marker = checkpoint / "complete.json"
    stored = json.loads(marker.read_text())
    for name in stored["files"]:
        stored["files"][name] = (checkpoint / name).stat().st_size
        stored["sha256"][name] = file_digest(checkpoint / name)
    marker.write_text(json.dumps(stored))


def numbers(run_dir):
    return [comparable(record) for record in RunDir.read(run_dir).history()]


def saved_each_step(random_model, folder):
    """A run of three steps, each saved, evaluated before and after, and after the second."""
    return command(random_model, folder, "train.steps=3", "train.save_every=1", "eval.every=2")


def contents(run):
    """What an interrupted run shares with an uninterrupted one, bit for bit."""
    summary = json.loads((run / "summary.json").read_text())
    kept = {name: value for name, value in summary.items() if name not in ("seconds", "finished")}
    same = [path for part in ("journal", "eval", "checkpoints") for path in sorted((run / part).rglob("*"))]
    skipped = ("complete.json", "training_args.bin", "trainer_state.json")
    data = {
        str(path.relative_to(run)): path.read_bytes() for path in same if path.is_file() and path.name not in skipped
    }
    folders = sorted(path.name for path in (run / "checkpoints").iterdir())
    return numbers(run), kept, data, folders, (run / "report.html").is_file(), sorted(p.name for p in run.iterdir())
