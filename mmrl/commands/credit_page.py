"""Page and picture that compare algorithms on the same rollouts (`mmrl credit page=FILE`).

Rows are calls, in the order and with the indentation of their tree; columns are algorithms. A cell's number is the
call's advantage, its colour what the loss does with it: advantage times weight over all its tokens and entries, as a
share of the largest of that algorithm. So colours compare within a column, and signs across columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from mmrl.credit.entries import Credit
from mmrl.records import Forest
from mmrl.report.charts import INK, drawing, standalone
from mmrl.report.html import rendered
from mmrl.report.trees import depth_first
from mmrl.system.files import atomic_write

UP, DOWN = "#168c48", "#cd3228"


def write_page(path: Path, forest: Forest, credits: Sequence[Credit], tables: Sequence[str]) -> None:
    """Write the picture alone (`.svg`), or a page with the picture, the rollouts and a table of each algorithm."""
    title = f"The same rollouts under {len(credits)} algorithms"
    figure = _picture(forest, credits, title)
    if path.suffix == ".svg":
        atomic_write(path, standalone(figure).encode())
        return
    rollouts = [
        [
            rollout.id,
            " → ".join(call.id for call in forest.path(rollout)),
            "-" if rollout.reward is None else f"{rollout.reward:g}",
            ", ".join(f"{module}: {outcome:g}" for module, outcome in rollout.counterfactuals.items()),
        ]
        for rollout in forest.rollouts
    ]
    atomic_write(path, rendered("credit.html", title=title, figure=figure, rollouts=rollouts, tables=tables))


def _picture(forest: Forest, credits: Sequence[Credit], title: str) -> str:
    """Draw the SVG: the calls' trees at the left, a cell for each call and algorithm."""
    calls = list(depth_first(forest))
    rewards = {rollout.leaf: rollout.reward for rollout in forest.rollouts}
    columns = [_shares(credit) for credit in credits]
    with drawing((3.2 + 1.02 * len(credits), 1.1 + 0.3 * len(calls))) as (axes, svg):
        axes.set(xlim=(-3.2, len(credits)), ylim=(len(calls), 0))
        axes.set_xticks([i + 0.5 for i in range(len(credits))], [c.algo.replace("_", "\n") for c in credits])
        axes.tick_params(
            length=0, top=True, labeltop=True, bottom=False, labelbottom=False, left=False, labelleft=False
        )
        axes.grid(False)
        axes.spines[:].set_visible(False)
        for row, (call, depth) in enumerate(calls):
            reward = f"  R = {rewards[call.id]:g}" if rewards.get(call.id) is not None else ""
            name = f"{'└ ' if depth else ''}{call.id} {call.module}{reward}"
            axes.text(-3.2 + 0.22 * depth, row + 0.5, name, va="center")
            for column, shares in enumerate(columns):
                share, advantage = shares.get(call.id, (0.0, None))
                text = "·" if advantage is None else "0" if abs(advantage) < 0.005 else f"{advantage:+.2f}"
                axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=INK)
                ends, color = [column + 0.03, column + 0.97], UP if share > 0 else DOWN
                axes.fill_between(ends, row + 0.06, row + 0.94, color=color, alpha=0.6 * abs(share))
        return svg(title)


def _shares(credit: Credit) -> Mapping[str, tuple[float, float]]:
    """Return the share of the algorithm's largest push, and mean advantage, of each call with an entry."""
    pushes = {call: sum(tokens) for call, tokens in pushes_of(credit).items()}
    largest = max(map(abs, pushes.values()), default=0.0) or 1.0
    advantages: defaultdict[str, list[float]] = defaultdict(list)
    for entry in credit.entries:
        advantages[entry.call] += entry.advantages
    return {call: (push / largest, fmean(advantages[call] or [0.0])) for call, push in pushes.items()}


def pushes_of(credit: Credit) -> dict[str, list[float]]:
    """Return call -> per token, advantage × weight over all its entries: what a gradient is multiplied by."""
    pushes: dict[str, list[float]] = {}
    for entry in credit.entries:
        tokens = [a * w for a, w in zip(entry.advantages, entry.weights, strict=True)]
        before = pushes.get(entry.call)
        pushes[entry.call] = tokens if before is None else [a + b for a, b in zip(before, tokens, strict=True)]
    return pushes
