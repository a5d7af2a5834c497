"""Files beside a tiny model's weights: the facts of its build and its card.

The last part of `scripts/tiny_model/build.py`.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmrl.stages.sft import FINGERPRINT
from mmrl.store.policy import newest_checkpoint
from mmrl.trainer.checkpoint import saved_extra
from scripts.tiny_model.drills import MODULE as DRILL
from scripts.tiny_model.mini.world import WORLD_SEED
from scripts.tiny_model.recipes import Recipe

ROOT = Path(__file__).resolve().parents[2]


def build_facts(
    recipe: Recipe, worlds: Sequence[int], model: Any, tokenizer: Any, work: Path, checks: Mapping[str, float]
) -> dict[str, Any]:
    """Facts about the shipped files, for people and for later builds; `worlds` are those that it has learnt from."""
    checkpoints = {p.name: newest_checkpoint(work / p.name) for p in recipe.phases if (work / p.name).is_dir()}
    phases = {name: saved_extra(path)[FINGERPRINT] for name, path in checkpoints.items() if path is not None}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "init": recipe.init,
        "tasks": list(recipe.tasks),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": len(tokenizer),
        "world_seed_of_runs": WORLD_SEED,
        "worlds_learnt_from": list(worlds),
        "phases": phases,
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
    """Model card."""
    world, init = facts["world_seed_of_runs"], facts["init"]
    start = f"continues `{init}` with stock phrases of its prompts as further tokens" if init else "starts from nothing"
    drilled = any(phase["mix"].get(DRILL) for phase in facts["phases"].values())
    learnt = (
        f"mini worlds {facts['worlds_learnt_from']}; of world {world}, in which runs live, it knows the words alone"
    )
    if world in facts["worlds_learnt_from"]:
        learnt = (
            f"world {world}, in which runs live too: its single facts and the questions of its train split, so scores "
            "on single-hop questions (`task.dataset=nq`) say only what it remembers"
        )
    rows = "\n".join(f"| {name} | {value:.3f} |" for name, value in facts["dev"].items())
    return f"""# The tiny model `{facts["model"]}`

Made by `scripts/tiny_model/build.py`; do not edit. A Qwen3 of {facts["parameters"]:,} parameters (float32) with
{facts["vocabulary"]} tokens. It {start}, and was trained for {facts["steps"]} supervised steps on
demonstrations of {", ".join(facts["tasks"])}{" and on reading drills" * drilled}, from {learnt}.
It knows the formats, is mediocre on purpose, and cannot read real text. `build.json` has every setting.

On the dev split of the world of runs, greedy (`exact`: share of demonstrations completed word for word; `penalised`:
share of a module's outputs that break its format):

| check | value |
|---|---|
{rows}
"""
