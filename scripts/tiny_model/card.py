"""What is written beside a tiny model's weights: the facts of its build and its card.

The last part of `scripts/tiny_model/build.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmrl.models.policy import newest_checkpoint
from mmrl.stages.sft import FINGERPRINT
from mmrl.trainer.checkpoint import saved_extra
from scripts.tiny_model.drills import MODULE as DRILL
from scripts.tiny_model.mini.world import WORLD_SEED
from scripts.tiny_model.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]


def build_facts(
    args: argparse.Namespace,
    worlds: Sequence[int],
    model: Any,
    tokenizer: Any,
    checks: Mapping[str, float],
    started: float,
) -> dict[str, Any]:
    """What the shipped files are, for people and for later builds; `worlds` are those that it has learnt from."""
    done = [p.name for p, steps in zip(RECIPES[args.model].phases, args.steps, strict=True) if steps]
    checkpoints = {name: newest_checkpoint(Path(args.work) / name) for name in done}
    phases = {name: saved_extra(path)[FINGERPRINT] for name, path in checkpoints.items() if path is not None}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "model": args.model,
        "init": RECIPES[args.model].init,
        "tasks": list(args.tasks),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": len(tokenizer),
        "world_seed_of_runs": WORLD_SEED,
        "worlds_learnt_from": list(worlds),
        "note": args.note,
        "phases": phases,
        "steps": sum(args.steps),
        "seed": args.seed,
        "minutes_of_this_process": round((time.monotonic() - started) / 60, 1),
        "threads": args.threads,
        "commit": commit.stdout.strip() or None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dev": {name: round(value, 4) for name, value in checks.items()},
    }


def ship(model: Any, tokenizer: Any, facts: dict[str, Any], out: Path) -> None:
    """Write the files in one go: a build that is killed leaves the old ones."""
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    (fresh / "build.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (fresh / "README.md").write_text(readme(facts), encoding="utf-8")
    for path in fresh.iterdir():
        path.chmod(0o644)
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)


def readme(facts: dict[str, Any]) -> str:
    """The model card."""
    tokenizer = "own byte-level BPE tokenizer"
    if facts["init"]:
        tokenizer = f"continues `{facts['init']}`, whose tokenizer has grown by the stock phrases of its prompts, now"
    drilled = any(phase["mix"].get(DRILL) for phase in facts["phases"].values())
    rows = "\n".join(f"| {name} | {value:.3f} |" for name, value in facts["dev"].items())
    return (
        f"# The tiny model{' `' + facts['model'] + '`' if facts['init'] else ''}\n\n"
        f"Made by `scripts/tiny_model/build.py`, not by hand; do not edit. {facts['parameters']:,} parameters (Qwen3 "
        f"architecture, float32), {tokenizer} with {facts['vocabulary']} tokens, warmed up by "
        f"supervised learning ({facts['steps']} steps) on demonstrations of {', '.join(facts['tasks'])}"
        f"{' and on reading drills' * drilled}, {_learnt_from(facts)} It knows the formats, is mediocre on purpose, "
        "and cannot read real text.\n\n"
        f"{facts['note'] + ' ' if facts.get('note') else ''}"
        "`build.json` has every setting. On the dev split of the runs' world, greedy (`exact`: share of "
        "demonstrations completed word for word; `penalised`: share of a module's outputs that break its format):\n\n"
        f"| check | value |\n|---|---|\n{rows}\n"
    )


def _learnt_from(facts: dict[str, Any]) -> str:
    """Which worlds it has seen, and what of the runs' own."""
    own = facts["world_seed_of_runs"]
    if own in facts["worlds_learnt_from"]:
        return (
            f"from world {own}, in which runs live too: it has been told its single facts, since a task that is "
            "answered from memory needs one, and has seen the multi-hop questions of its train split, none of dev and "
            "test. So its scores on single-hop questions (`task.dataset=nq`) say only what it remembers."
        )
    return (
        f"from mini worlds {facts['worlds_learnt_from']}. Runs use world {own}, whose words it knows (worlds share "
        "them) and none of whose facts, documents and questions it has seen."
    )
