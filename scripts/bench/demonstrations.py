"""Demonstrations before short queries: `python -m scripts.bench.demonstrations [model=1M] [threads=1] [repeats=3]`.

The shape of weights trained on optimised prompts: 77 demonstrations (one per intent of Banking77), a query of some 40
tokens, 12 rollouts of each of 4 queries, short completions. Two things are timed, each against plain padding: the
update (a padded loop in micro-batches of `micro` rows) and the prefill (Hugging Face `generate` of one token). Nothing
is taken from one run to the next. `part=4` times plain padding on four rows and counts them for all: its micro-batches
are alike, and of a real model they take half an hour. `budget=8192` is `train.microbatch_tokens`: packs of little more
than the shared prefix would repeat it for every few calls. Beside each ratio stands what counting allows: all tokens
over unique ones. Before anything is timed, log-probabilities and gradients of the two sides must agree.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import EngineSetup, Request, Sampling
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from mmrl.plan.workload import unique_tokens
from scripts.bench.common import MODELS, Bar, clock, finish, make_model, once, options
from scripts.bench.rollout import NoTokenizer, run_engine, run_generate
from scripts.bench.rollout import check as difference
from scripts.bench.sides import Ours, Plain, check
from scripts.bench.update_shapes import GROUP, Dice, Row, calls

DEMONSTRATIONS, QUERIES, ROLLOUTS = 77, 4, 12
BAR = 16.0
"""Half of what counting allows for the update (some 32): not all of the work shrinks with the tokens."""
UPDATE_BARS = {"smollm2_135m": 30.0}
"""Of the update at a real size: nearly all of its work does."""


def rows_of(dice: Dice) -> list[Row]:
    """Rollouts whose prompts are the demonstrations, 1,500 to 2,000 tokens in all, and a query."""
    shared = tuple(token for _ in range(DEMONSTRATIONS) for token in dice.ids(20, 26))
    prompts = [shared + dice.ids(30, 50) for _ in range(QUERIES)]
    return [Row(prompt, (dice.ids(5, 30),), dice.random.random()) for prompt in prompts for _ in range(ROLLOUTS)]


def seconds_of(
    sides: Mapping[str, Callable[[], object]], counts: int, repeats: int, plain_times: float = 1.0
) -> dict[str, float]:
    """The best of `repeats` runs of each, alternating; `plain` ran a part, and counts `plain_times`."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            found[name].append(once(run)[counts])
    return {name: min(several) * (plain_times if name == "plain" else 1.0) for name, several in found.items()}


@dataclass(frozen=True)
class Timed:
    """One of the two comparisons."""

    what: str
    sequences: list[tuple[int, ...]]
    """What plain padding forwards."""
    unique: int
    """Tokens left when every shared prefix counts once."""
    seconds: dict[str, float]
    """By side, `plain` and `ours`."""
    bar: float

    @property
    def real(self) -> int:
        """Tokens of all sequences."""
        return sum(map(len, self.sequences))

    @property
    def bars(self) -> list[Bar]:
        """The measured ratio, and the counted one."""
        padded = len(self.sequences) * max(map(len, self.sequences))
        ratio = self.seconds["plain"] / self.seconds["ours"]
        return [
            Bar(
                what=f"demonstrations, {self.what}: {what}",
                value=value,
                bar=bar,
                padded=padded,
                real=self.real,
                unique=self.unique,
            )
            for what, value, bar in (("plain / mmrl", ratio, self.bar), ("counted", self.real / self.unique, None))
        ]


def updates(
    rows: list[Row], size: str, micro: int, counts: int, repeats: int, part: int, budget: int | None
) -> tuple[Timed, dict[str, float]]:
    """One update of all rows, in plain padding of the first `part`; and how far the sides agree on two queries."""
    folder = Path(tempfile.mkdtemp())
    # The check also runs every code path once.
    some = rows[:GROUP] + rows[ROLLOUTS : ROLLOUTS + GROUP] if part == len(rows) else rows[:GROUP]
    checked = Ours(make_model(size), calls(some), folder / "check", "auto", budget)
    agreement = check(checked, Plain(make_model(size), some, micro))
    ours = Ours(make_model(size), calls(rows), folder / "ours", "auto", budget)
    plain = Plain(make_model(size), rows[:part], micro)
    seconds = seconds_of({"plain": plain.run, "ours": ours.run}, counts, repeats, len(rows) / part)
    sequences = [row.prompt + row.completion for row in rows]
    return Timed("update", sequences, ours.tokens, seconds, UPDATE_BARS.get(size, BAR)), agreement


def prefills(rows: list[Row], size: str, threads: int, counts: int, repeats: int, part: int) -> tuple[Timed, float]:
    """All prompts (`generate`: the first `part`) and one token of each; and the largest difference of a log-probability
    from a plain forward's.
    """
    model = make_model(size)
    asked = [
        Request(prompt_ids=row.prompt, sampling=Sampling(max_tokens=1, seed=number), order=(number,))
        for number, row in enumerate(rows)
    ]

    def engine() -> TransformersEngine:
        # Another one each time: it has not seen the demonstrations before.
        return TransformersEngine(model, NoTokenizer(), TransformersConfig(loop="own"), EngineSetup(threads=threads))  # type: ignore[arg-type]

    worst = difference(model, engine(), asked)
    if worst > 1e-4:
        raise SystemExit(f"prefill: log-probabilities differ by {worst:.2g}, expected at most 1e-4")
    sides = {"plain": lambda: run_generate(model, asked[:part]), "ours": lambda: run_engine(engine(), asked)}
    prompts, seconds = [row.prompt for row in rows], seconds_of(sides, counts, repeats, len(rows) / part)
    return Timed("prefill", prompts, unique_tokens(set(prompts)), seconds, BAR), worst


def main(arguments: list[str]) -> int:
    """Print the table, write the JSON; returns 1 when a bar is missed."""
    given = options(arguments, {"model": "1M", "repeats": "3", "micro": "4", "part": "", "budget": "", "quick": ""})
    size, threads = "test" if given["quick"] else given["model"], int(given["threads"])
    counts, repeats = clock(threads), int(given["repeats"])
    rows = rows_of(Dice(MODELS[size][-1], scale=8 if given["quick"] else 1))
    print(f"{size}, {threads} threads, load {os.getloadavg()}")
    part = int(given["part"] or len(rows))
    budget = int(given["budget"]) if given["budget"] else None
    update, agreement = updates(rows, size, int(given["micro"]), counts, repeats, part, budget)
    prefill, worst = prefills(rows, size, threads, counts, repeats, part)
    lines = []
    for timed in (update, prefill):
        s = timed.seconds
        print(f"{timed.what:8} plain {s['plain']:8.3f} s, mmrl {s['ours']:8.3f} s", flush=True)
        lines.append({"what": timed.what, "seconds": s, "clock": ("cpu", "wall")[counts]})
    bars = update.bars + prefill.bars
    return finish("demonstrations", bars, given["out"], model=size, lines=lines, prefill_difference=worst, **agreement)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
