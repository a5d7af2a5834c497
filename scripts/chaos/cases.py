"""Command lines that are disturbed, the smallest real ones, and how each is continued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmrl.system.conf import later_wins
from mmrl.tasks.mini.examples import FOLDER

RUN = "run"
"""Folder that every command makes, below the one that it runs in."""
SMALL = (
    *("seed=0", "hardware.threads=1", "run.progress=false", f"run.dir={RUN}", "eval.items=2", "eval.bootstrap=100"),
    *("eval.every=1", "train.batch_size=2", "train.save_every=1", "algo.group_size=2", "train.lr=0.001"),
)
RUNS = "outputs/sets/runs/banking77"
STEPS_MARKS = (
    *(f"{RUNS}/miprov2/*/config.yaml", f"{RUNS}/miprov2/*/prompts/trials.jsonl", f"{RUNS}/miprov2/*/policy.json"),
    *(f"{RUNS}/sft/*/config.yaml", f"{RUNS}/sft/*/checkpoints/.*", f"{RUNS}/sft/*/summary.json"),
    *(f"{RUNS}/mmgrpo/*/config.yaml", f"{RUNS}/mmgrpo/*/journal/*", f"{RUNS}/mmgrpo/*/checkpoints/c*"),
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
        ranks: processes that a fault may strike, by rank; None is the one that was started.
        marks: files at whose appearance it is struck from outside, as patterns below its folder (an empty one: any
            instant); with any, every process is started anew, and none is forked from one that has imported everything.
    """

    words: tuple[str, ...]
    again: tuple[str, ...]
    share: float
    stop: tuple[str, int] | None = None
    ranks: tuple[int | None, ...] = (None,)
    marks: tuple[str, ...] = ()


def _train(*words: str, **fields: Any) -> Case:
    fields = {"stop": ("collect", 3)} | fields
    return Case(words=("train", *later_wins([*SMALL, *words])), again=("train", f"resume={RUN}"), **fields)


BUILD = ("index", "build", f"corpus={FOLDER / 'documents.jsonl'}", f"index={RUN}")
EVAL = ("eval", "policy=tiny", "task=qa_direct", "eval.items=8", "seed=0", "hardware.threads=1", f"run.dir={RUN}")
STEPS = (
    *("compare", "algo=miprov2+sft+mmgrpo", "task=banking77", "hardware.threads=1", "run.progress=false"),
    *(f"out={RUN}", "eval.items=2", "eval.bootstrap=100", "eval.every=1", "task.data.train_items=12"),
    *("sft.train.steps=2", "sft.train.batch_size=2", "sft.train.save_every=1"),
    *("mmgrpo.train.steps=2", "mmgrpo.train.batch_size=2", "mmgrpo.train.save_every=1", "mmgrpo.algo.rollouts=2"),
    *("miprov2.algo.auto=null", "miprov2.algo.num_candidates=2", "miprov2.algo.num_trials=3"),
    "miprov2.algo.prompt_max_tokens=32",
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
    "steps": Case(words=STEPS, again=STEPS, share=2, marks=STEPS_MARKS),
    "eval": Case(words=EVAL, again=("eval", f"resume={RUN}"), share=2, stop=("summary", 1)),
    "index": Case(words=BUILD, again=BUILD, share=2, stop=("index finish", 1)),
}
