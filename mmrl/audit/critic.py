"""Fitting the critic of a row to the audited policy, which does not move: the trainer's own critic, loss and optimizer.

Part of `audit`. A base batch of the row is an optimizer step, as in training; batches are of their own, on which
nothing else is measured, and some of them are held out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pvariance
from typing import cast

from safetensors.torch import save

from mmrl.algorithms import assign_credit
from mmrl.audit.gradients import without_noise
from mmrl.config.algo import CriticConfig
from mmrl.records import Forest
from mmrl.stages.collect import train_calls
from mmrl.stages.rl import RlStage
from mmrl.system.files import atomic_write
from mmrl.trainer.critic import FILE
from mmrl.trainer.forwards import annotate, module_names
from mmrl.trainer.totals import finite

HELD_OUT, ROUND = 8, 8
"""Base batches that say when a critic is fitted, and those of a round, on which it is fitted once."""
RISE, PATIENCE, ROUNDS = 0.01, 3, 40
"""Rounds at a rate end when what is explained has not risen by `RISE` in `PATIENCE` of them, all at `ROUNDS`."""
RATES = (1.0, 0.1)
"""Shares of the row's learning rate, each from the best round on: values swing at a rate that learns fast."""


def fit(row: RlStage, batch: Callable[[int], Forest], folder: Path) -> list[float]:
    """Fit the critic of a row by its own value loss; write its weights to `folder/critic.safetensors`.

    Optimizer, learning rate with warm-up, clipping: those of the row's training. The policy's weights stay.

    Args:
        batch: number -> a base batch of the row, with the values of the critic as it is.

    Returns:
        What it explained of the held-out returns at first and after each round; the best one's weights are written.

    Raises:
        MmrlError: loss or gradient are not finite.
    """
    trainer, train = row.trainer, row.config.train
    critic, forwards = trainer.critic, trainer.forwards
    assert critic is not None  # a row with a critic
    held_out = [batch(number) for number in range(HELD_OUT)]
    kind, settings = trainer.get_optimizer_cls_and_kwargs(trainer.args)
    optimizer = kind(critic.groups(train.weight_decay), **settings)
    explained, steps, warm_up = [_explained(row, held_out)], 0, critic.config.critic_warmup_steps
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / FILE, save(critic.state()))
    for share in RATES:
        critic.load(folder)
        since = [max(explained)]
        while len(explained) <= ROUNDS and not (steps >= warm_up and _settled(since)):
            # All before the first step: old values, which `algo.value_clip` bounds new ones by, are those of the round.
            for forest in [batch(HELD_OUT + steps + number) for number in range(ROUND)]:
                calls = train_calls(forest, row.credit(forest), dict.fromkeys(forest.examples, 0))
                optimizer.zero_grad()
                without_noise(forwards)
                for pack in forwards.make_packs(calls, module_names([one.call for one in calls])):
                    pack.to(forwards.device)
                    forwards.use_adapter(pack)
                    critic.train_on(pack, None, trainer.accelerator, forwards.autocast())
                forwards.policy.eval()
                finite(critic.clip(train.grad_clip, trainer.accelerator), "gradient norm of the critic", steps + 1)
                for group in optimizer.param_groups:
                    group["lr"] = critic.lr * critic.factor(steps) * share
                optimizer.step()
                steps += 1
            since.append(_explained(row, held_out))
            explained.append(since[-1])
            if since[-1] >= max(explained):
                atomic_write(folder / FILE, save(critic.state()))
    optimizer.zero_grad()
    return explained


def _settled(explained: Sequence[float]) -> bool:
    """Return True where the last rounds have not risen above the best before them."""
    return len(explained) > PATIENCE and max(explained[-PATIENCE:]) < max(explained[:-PATIENCE]) + RISE


def _explained(row: RlStage, forests: Sequence[Forest]) -> float:
    """Return 1 - E[(G - V)²] / Var G over trained tokens, G the return to the end: the critic has no part in it.

    A level that is wrong counts too. Of returns that are all alike nothing can be explained: 1 - E[(G - V)²].
    """
    algo = cast("CriticConfig", row.config.algo).model_copy(update={"gae_lambda": 1.0})
    errors, returns = list[float](), list[float]()
    for forest in forests:
        valued = annotate(row.trainer.forwards, forest)
        for entry in assign_credit(valued, algo, row.config.seed, None, row.assignment.frozen).entries:
            if any(entry.weights):
                errors += entry.raw_advantages or ()
                returns += entry.returns or ()
    spread = pvariance(returns) if returns else 0.0
    return 1 - fmean(error**2 for error in errors) / (spread if spread > 1e-12 else 1.0) if errors else 0.0
