"""What a critic costs: `python -m scripts.bench.critic [model=1M] [threads=1] [repeats=3]`.

One PPO update of a search agent's rollouts with each kind of critic. `separate` (a backbone of its own) is what the
others are compared with; under LoRA so is `adapter` (a second adapter on the policy's backbone, which saves memory but
forwards again, so it has no bar). Before anything is timed: the policy's gradient is the same with every kind, and
values of packed tries are those of padded rows.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from mmrl.config import LoraConfig
from mmrl.config.algo import PpoConfig
from mmrl.trainer.objective import TrainCall
from scripts.bench.common import MODELS, Bar, clock, cosine, finish, make_model, options, timed
from scripts.bench.sides import Ours
from scripts.bench.update_shapes import SHAPES, Dice, calls

BAR = 1.8
"""Least ratio of `separate` to `head`."""
FEW = 8
"""Calls that the check forwards."""
LORA = LoraConfig(r=16, alpha=64)
KINDS: dict[str, tuple[str, LoraConfig | None]] = {
    "head": ("head", None),
    "separate": ("separate", None),
    "adapter, LoRA": ("adapter", LORA),
    "separate, LoRA": ("separate", LORA),
}


def with_targets(batch: list[TrainCall]) -> list[TrainCall]:
    """The calls as PPO's credit leaves them: returns, and the critic's values before the step."""
    made = []
    for train in batch:
        zeros, ones = ((number,) * len(train.call.completion_ids) for number in (0.0, 1.0))
        entries = tuple(replace(entry, returns=ones) for entry in train.entries)
        made.append(replace(train, call=replace(train.call, values=zeros), entries=entries))
    return made


def check(sides: dict[str, Ours]) -> dict[str, float]:
    """Cosine of the policy's gradients between kinds, and the largest difference between packed and padded values.

    Raises:
        SystemExit: beyond the tolerances.
    """
    worst, least = 0.0, 1.0
    gradients = {}
    for name, side in sides.items():
        forwards = side.trainer.forwards
        whole, side.batch = side.batch, side.batch[:FEW]
        packed = forwards.values([train.call for train in side.batch])
        forwards.tries = False
        padded = forwards.values([train.call for train in side.batch])
        forwards.tries = True
        pairs = zip(packed, padded, strict=True)
        worst = max(worst, *(abs(x - y) for one, two in pairs for x, y in zip(one, two, strict=True)))
        found = {n: g.clone() for n, g in side.gradients().items() if ".critic." not in n}
        gradients[name], side.batch = found, whole
        if name.startswith("separate"):
            other = "head" if name == "separate" else "adapter, LoRA"
            least = min(least, cosine(gradients[other], found))
    result = {"max_value_difference": worst, "cosine_policy": least}
    if worst > 1e-4 or least < 0.9999:
        raise SystemExit(f"the kinds do not compute the same: {result}")
    return result


def run(side: Ours) -> None:
    """One update of policy and critic."""
    side.gradients()
    trainer = side.trainer
    assert trainer.critic is not None and trainer.optimizer is not None
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.critic.clip(1.0, trainer.accelerator)
    trainer.optimizer.step()


def main(arguments: list[str]) -> int:
    """Print the table, write the JSON; returns 1 when a bar is missed."""
    given = options(arguments, {"model": "1M", "repeats": "3", "quick": ""})
    size, threads = "test" if given["quick"] else given["model"], int(given["threads"])
    rows = SHAPES["search"](Dice(MODELS[size][-1], scale=32 if given["quick"] else 1))
    batch = with_targets(calls(rows))
    folder = Path(tempfile.mkdtemp())
    sides = {
        name: Ours(make_model(size), batch, folder / kind, lora=lora, algo=PpoConfig(name="ppo", beta=0.0, critic=kind))  # type: ignore[arg-type]
        for name, (kind, lora) in KINDS.items()
    }
    alone = Ours(make_model(size), batch, folder / "none")
    agreement = check(sides)
    runs = {name: (lambda side=side: run(side)) for name, side in sides.items()} | {"no critic": alone.run}
    counts = clock(threads)
    seconds = {name: min(one[counts] for one in found) for name, found in timed(runs, int(given["repeats"])).items()}
    for name, spent in seconds.items():
        print(f"{name:16}{spent:8.3f} s")
    tokens = {
        "padded": len(rows) * (max(len(r.prompt) for r in rows) + max(len(r.completion) for r in rows)),
        "real": sum(len(row.prompt) + len(row.completion) for row in rows),
        "unique": alone.tokens,
    }
    bars = [
        Bar(what="critic: separate / head", value=seconds["separate"] / seconds["head"], bar=BAR, **tokens),
        Bar(
            what="critic: separate / adapter, both LoRA",
            value=seconds["separate, LoRA"] / seconds["adapter, LoRA"],
            bar=None,
            **tokens,
        ),
        Bar(what="critic: head / no critic", value=seconds["head"] / seconds["no critic"], bar=None, **tokens),
    ]
    return finish("critic", bars, given["out"], model=size, seconds=seconds, **agreement)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
