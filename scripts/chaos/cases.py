"""Command lines that are disturbed, the smallest real ones, and how each is continued."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mmrl.system.conf import later_wins

RUN = "run"
"""Folder that every command makes, below the one that it runs in."""
PASSAGES = "passages.jsonl"
SMALL = (
    *("seed=0", "hardware.threads=1", "run.progress=false", f"run.dir={RUN}", "eval.items=2", "eval.bootstrap=100"),
    *("eval.every=1", "train.batch_size=2", "train.save_every=1", "algo.group_size=2", "train.lr=0.001"),
)
CHAIN = (
    *(f"{RUN}/set.yaml", f"{RUN}/1_miprov2/config.yaml", f"{RUN}/1_miprov2/prompts/trials.jsonl", f"{RUN}/policy.json"),
    *(f"{RUN}/2_sft/config.yaml", f"{RUN}/2_sft/checkpoints/.*", f"{RUN}/2_sft/summary.json"),
    *(f"{RUN}/3_mmgrpo/config.yaml", f"{RUN}/3_mmgrpo/journal/*", f"{RUN}/3_mmgrpo/checkpoints/c*"),
    *(f"{RUN}/set.html", ""),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command line.

    Attributes:
        words: what follows `mmrl`.
        again: what continues it.
        share: how often it is drawn, relative to the others.
        stop: phase and call before which the run is killed whose folder is then damaged; None: it is not.
        files: what lies in its folder before it starts, by name.
        ranks: processes that a fault may strike, by rank; None is the one that was started.
        marks: files at whose appearance it is struck from outside, as patterns below its folder (an empty one: any
            instant); with any, every process is started anew, and none is forked from one that has imported everything.
    """

    words: tuple[str, ...]
    again: tuple[str, ...]
    share: float
    stop: tuple[str, int] | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[int | None, ...] = (None,)
    marks: tuple[str, ...] = ()


def _train(*words: str, share: float, stop: tuple[str, int] | None = ("collect", 3), **more: object) -> Case:
    return Case(
        words=("train", *later_wins([*SMALL, *words])), again=("train", f"resume={RUN}"), share=share, stop=stop, **more
    )  # type: ignore[arg-type]


def _passages() -> str:
    """A corpus whose index takes about half a second."""
    noise = random.Random(0)
    words = ["".join(noise.choices("abcdefghijklmnopqrstuvwxyz", k=noise.randint(3, 9))) for _ in range(2000)]
    lines = (
        {"id": str(n), "title": words[n % 2000], "text": " ".join(noise.choices(words, k=60))} for n in range(3000)
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


BUILD = ("index", "build", f"corpus={PASSAGES}", f"index={RUN}")
EVAL = ("eval", "policy=tiny", "task=qa_direct", "eval.items=8", "seed=0", "hardware.threads=1", f"run.dir={RUN}")
STAGES = (
    *("train", "stages=[miprov2,sft,mmgrpo]", "task=banking77", "seed=0", "hardware.threads=1", "run.progress=false"),
    *(f"run.dir={RUN}", "eval.items=2", "eval.bootstrap=100", "eval.every=1", "task.data.train_items=12"),
    *("train.steps=2", "train.batch_size=2", "train.save_every=1", "stage.mmgrpo.algo.rollouts=2"),
    *("stage.miprov2.algo.auto=null", "stage.miprov2.algo.num_candidates=2", "stage.miprov2.algo.num_trials=3"),
    "stage.miprov2.algo.prompt_max_tokens=32",
)
CASES: dict[str, Case] = {
    "grpo": _train("task=qa_direct", "algo=grpo", "train.steps=3", "train.keep=1", share=4),
    "mhgpo_rr": _train("algo=mhgpo_rr", "train.steps=3", "train.keep=2", share=4),
    "ppo": _train("task=tool_agent", "algo=ppo", "train.steps=3", "train.keep=1", "~algo.group_size", share=3),
    "adapters": _train(
        *("task=qa_direct", "algo=mmgrpo", "train.steps=3", "train.keep=1", "model.modules={}", "model.lora={r:4}"),
        *("~algo.group_size", "algo.rollouts=2"),
        share=2,
    ),
    "two": _train(
        *("task=qa_direct", "algo=grpo", "hardware=cpu2", "train.steps=3", "train.keep=1"),
        share=2,
        stop=None,
        ranks=(0, 1, None),
    ),
    # Each of its runs is a process, so it is struck from outside.
    "stages": Case(words=STAGES, again=("train", f"resume={RUN}"), share=2, marks=CHAIN),
    "eval": Case(words=EVAL, again=("eval", f"resume={RUN}"), share=2, stop=("summary", 1)),
    "index": Case(words=BUILD, again=BUILD, share=2, stop=("index finish", 1), files={PASSAGES: _passages()}),
}


def make_folder(case: Case, folder: Path) -> None:
    """A folder to run the case in."""
    (folder / "tmp").mkdir(parents=True)
    for name, text in case.files.items():
        (folder / name).write_text(text, encoding="utf-8")
