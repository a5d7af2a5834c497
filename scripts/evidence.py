"""Keeps what finished runs have shown: `python -m scripts.evidence RUN_DIR... [also=gold_retrieved,gold_selected]
[as=NAME]` writes docs/evidence/NAME-sSEED.json of each; NAME is task and algorithm where it is left out. `python -m
scripts.evidence table` writes the table that docs/real.md opens with, of the records.

A record has the command, machine and versions, SHA-256 of the data files, the comparison before and after, the main
metric (and those of `also=`) of each item before and after, and the digests of the run's files, so that whoever runs
the command again can compare.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from mmrl.store.rundir import RunDir
from mmrl.system.files import file_digest, read_jsonl
from scripts.docs import filled
from scripts.papers.values import student_t

FOLDER = Path(__file__).parents[1] / "docs" / "evidence"
PART = "real models, before and after"
HEAD = [
    "| task | metric, items | policy | trained by | before → after | difference, over seeds | made by |",
    "|---|---|---|---|---|---|---|",
]
SMALL, READS = "SmolLM2-135M", "Qwen2.5-Coder-0.5B"
PUZZLES = "[puzzles](#puzzles-without-any-file)"
LINES = {
    "puzzles-grpo": ("sums and differences", SMALL, "`grpo`", PUZZLES),
    "puzzles-mmgrpo": ("the same, two modules", SMALL, "`mmgrpo`", PUZZLES),
    "products-grpo": ("products", SMALL, "`grpo`", PUZZLES),
    "banking77-mmgrpo": (
        "Banking77",
        f"{SMALL}, supervised start",
        "`mmgrpo`",
        "`mmrl compare set=real columns=banking77 rows=sft+mmgrpo`",
    ),
    "banking77-miprov2_mmgrpo": (
        "Banking77",
        f"{SMALL}, the same, with prompts by MIPROv2",
        "`mmgrpo`",
        "`… rows=sft+miprov2+mmgrpo`",
    ),
    "hotpotqa-mhgpo_rr": (
        "HotpotQA, three agents",
        f"{SMALL}, supervised start",
        "`mhgpo_rr`",
        "`mmrl compare set=real columns=hotpotqa rows=short_sft+mhgpo_rr`",
    ),
    "coder-hotpotqa-mhgpo_fof": (
        "HotpotQA, three agents",
        READS,
        "`mhgpo_fof`",
        "`mmrl compare set=coder columns=hotpotqa rows=mhgpo_fof`",
    ),
    "coder-hotpotqa-mhgpo_fof_taught": (
        "HotpotQA, three agents",
        READS,
        "`mhgpo_fof`, answerer taught by the 1.5B",
        "`… rows=mhgpo_fof_taught eval.items=60`",
    ),
    "coder-search_agent-mt_grpo_variable": (
        "HotpotQA, a search agent",
        READS,
        "`mt_grpo_variable`",
        "`… columns=search_agent rows=mt_grpo_variable eval.items=60`",
    ),
    "coder-search_agent-mt_grpo_variable_taught": (
        "HotpotQA, a search agent",
        READS,
        "the same, and itself with the answer",
        "`… rows=mt_grpo_variable_taught eval.items=60`",
    ),
    "coder-search_agent-mt_ppo": (
        "HotpotQA, a search agent",
        READS,
        "`mt_ppo`",
        "`… rows=mt_ppo eval.items=60`",
    ),
    "coder-search_agent-ppo": (
        "HotpotQA, a search agent",
        READS,
        "`ppo`",
        "`… rows=ppo eval.items=60`",
    ),
    "coder-search_agent-grpo": (
        "HotpotQA, a search agent",
        READS,
        "`grpo`",
        "`… rows=grpo eval.items=60`",
    ),
}
"""Name of records -> task, policy before training, algorithm, and where its command stands."""
_PLACE = re.compile(r"(?<![\w.:/}-])/[\w.@+/-]+")
"""An absolute path: no part of a URL, of a hub id, of a relative path, or of one below an environment variable."""
VERSIONS = ("mmrl", "torch", "transformers", "peft", "trl", "numpy")


def record(folder: Path, also: Sequence[str] = ()) -> dict[str, Any]:
    """Return the record of a run.

    Args:
        also: further metrics of which each item's values are kept.

    Raises:
        SystemExit: the run is not finished.
    """
    summary = RunDir.read(folder).summary
    if "finished" not in summary:
        raise SystemExit(f"{folder}: the run is not finished")
    data = RunDir.read(folder).config["task"]["data"]
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    evaluations = [read_jsonl(path) for path in sorted((folder / "eval").glob("*.jsonl"))]
    after = {item["id"]: item["metrics"] for item in evaluations[-1]}

    if unknown := [metric for metric in also if metric not in evaluations[0][0]["metrics"]]:
        raise SystemExit(f"also: got {', '.join(unknown)}, expected some of {', '.join(evaluations[0][0]['metrics'])}")

    def items(metric: str) -> dict[str, list[float]]:
        # As in the run's own comparison, a metric counts 0 where all rollouts of an item failed.
        pairs = ((item, after[item["id"]]) for item in evaluations[0])
        return {item["id"]: [item["metrics"].get(metric, 0.0), later.get(metric, 0.0)] for item, later in pairs}

    written = [path for below in ("journal", "eval") for path in sorted((folder / below).iterdir())]
    return {
        "command": shlex.join(elsewhere(environment["command"])),
        "machine": {name: environment[name] for name in ("cpu", "cores", "python")},
        "versions": {name: environment["versions"].get(name) for name in VERSIONS},
        "git": environment.get("git"),
        # Not `facts` and `what`: they have paths of this machine; the command names the data.
        "data": {
            split: file_digest(Path(path))
            for split, path in data.items()
            if isinstance(path, str) and Path(path).is_file()
        },
        "summary": {name: value for name, value in summary.items() if name not in ("facts", "what", "name")},
        "items": items(summary["main_metric"]),
        **{f"items/{metric}": items(metric) for metric in also},
        "digests": {str(path.relative_to(folder)): file_digest(path) for path in written},
    }


def elsewhere(words: Sequence[str]) -> list[str]:
    """Return a command as it is typed on another machine: FOLDER for folders of this one, no evaluation of its runs."""
    return [_PLACE.sub("FOLDER", word) for word in words if not word.startswith("run.before=")]


def settings(record: Mapping[str, Any]) -> set[str]:
    """Return the words of a record's command, in any order, without the folder of the run."""
    return {word for word in shlex.split(record["command"]) if not word.startswith("run.dir=")}


def table() -> str:
    """Return the table of docs/real.md: a line for each of `LINES`, of all its seeds."""
    lines = []
    for name, (task, policy, algorithm, made) in LINES.items():
        records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob(f"{name}-s[0-9]*.json"))]
        if not records:  # not run yet
            continue
        # Of seeds that were evaluated on more items those that all have.
        shared = set[str].intersection(*(set(kept["items"]) for kept in records))
        pairs = [[kept["items"][item] for item in shared] for kept in records]
        before, after = ([fmean(pair[side] for pair in seed) for seed in pairs] for side in (0, 1))
        gains = [new - old for old, new in zip(before, after, strict=True)]
        if len(gains) > 1:
            half = student_t(len(gains) - 1) * stdev(gains) / len(gains) ** 0.5
            interval = f"{fmean(gains):+.3f} [{fmean(gains) - half:+.3f}, {fmean(gains) + half:+.3f}]"
        else:
            interval = f"{gains[0]:+.3f}, one seed"
        metric = records[0]["summary"]["main_metric"]
        cells = (task, f"{metric}, {len(pairs[0])}", policy, algorithm, f"{fmean(before):.3f} → {fmean(after):.3f}")
        lines.append(f"| {' | '.join((*cells, interval, made))} |")
    return "\n".join([*HEAD, *lines])


def main(words: Sequence[str]) -> int:
    """Write the records, or the table."""
    FOLDER.mkdir(exist_ok=True)
    if list(words) == ["table"]:
        page = FOLDER.parent / "real.md"
        page.write_text(filled(page.read_text(encoding="utf-8"), PART, table(), "evidence"), encoding="utf-8")
        return 0
    also = [name for word in words if word.startswith("also=") for name in word.partition("=")[2].split(",")]
    typed = next((word.partition("=")[2] for word in words if word.startswith("as=")), "")
    for folder in (word for word in words if not word.startswith(("also=", "as="))):
        kept = record(Path(folder), also)
        summary = kept["summary"]
        # Of a program of one's own its file: `dspy` or `agent` would be the name of all of them.
        line = shlex.split(kept["command"])
        words = [word for word in line if word.startswith(("task.program=", "task.agent="))]
        task = words[0].partition("=")[2].partition(":")[0].rpartition(".")[2] if words else summary["task"]
        # A set keeps the runs of an algorithm in a folder: `mmgrpo` after `miprov2`; a supervised start is no news.
        stages = [Path(word).parent.name for word in line if word.startswith("from=")] + [summary["algo"]]
        stages = [stage for stage in stages if stage != "sft"] or ["sft"]
        path = FOLDER / f"{typed or f'{task}-' + '_'.join(stages)}-s{summary['seed']}.json"
        if path.exists() and settings(json.loads(path.read_text(encoding="utf-8"))) != settings(kept):
            raise SystemExit(f"{path}: is the record of other settings; give this one a name, as=NAME, or delete that")
        path.write_text(json.dumps(kept, separators=(",", ":")) + "\n", encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
