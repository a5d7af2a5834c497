"""Rollouts for the update's benchmarks: the shapes of calls that the papers' algorithms make, with random tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mmrl.credit.entries import Entry
from mmrl.records import Call
from mmrl.trainer.objective import TrainCall

GROUP = 4
"""Rows whose rewards are compared, in the order of the rows."""


@dataclass(frozen=True)
class Row:
    """A rollout as a peer gets it: a prompt, then completions and, between them, text that is not trained."""

    prompt: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...]
    """Completion, observation, completion, ..."""
    reward: float

    @property
    def completion(self) -> tuple[int, ...]:
        """Tokens that follow the prompt."""
        return tuple(token for turn in self.turns for token in turn)

    @property
    def mask(self) -> list[int]:
        """1 where a token of `completion` was sampled."""
        return [int(number % 2 == 0) for number, turn in enumerate(self.turns) for _ in turn]


class Dice:
    """Random tokens and lengths; `scale` divides the lengths, for quick tests."""

    def __init__(self, vocabulary: int, scale: int = 1):
        self.random = random.Random(0)
        self.vocabulary, self.scale = vocabulary, scale

    def ids(self, least: int, most: int) -> tuple[int, ...]:
        """Between `least` and `most` tokens."""
        least, most = (max(1, length // self.scale) for length in (least, most))
        return tuple(self.random.randrange(2, self.vocabulary) for _ in range(self.random.randint(least, most)))


Range = tuple[int, int]
PROMPT, COMPLETION = (260, 1020), (5, 60)
"""Least and largest number of tokens."""


def _rows(dice: Dice, prompts: list[tuple[int, ...]], completion: Range = COMPLETION) -> list[Row]:
    return [Row(prompt, (dice.ids(*completion),), dice.random.random()) for prompt in prompts]


def independent(dice: Dice, groups: int = 8, prompt: Range = PROMPT, completion: Range = COMPLETION) -> list[Row]:
    """MHGPO-IS: groups that share their prompt."""
    prompts = [dice.ids(*prompt) for _ in range(groups)]
    return _rows(dice, [shared for shared in prompts for _ in range(GROUP)], completion)


def forked_first(dice: Dice, groups: int = 8, prompt: Range = PROMPT, completion: Range = COMPLETION) -> list[Row]:
    """MHGPO-FoF: every branch has a different prompt."""
    return _rows(dice, [dice.ids(*prompt) for _ in range(groups * GROUP)], completion)


def converged(dice: Dice) -> list[Row]:
    """MHGPO-FoF once its branches agree: one prompt per group, and half of the completions repeat another."""
    rows = independent(dice)
    return [row if n % 2 == 0 else Row(row.prompt, rows[n - 1].turns, row.reward) for n, row in enumerate(rows)]


def forked_twice(dice: Dice) -> list[Row]:
    """MHGPO-FoF(os): branches with different prompts, and two samples in each."""
    return _rows(dice, [prompt for prompt in [dice.ids(*PROMPT) for _ in range(4 * GROUP)] for _ in range(2)])


def round_robin(dice: Dice) -> list[Row]:
    """MHGPO-RR: three groups of ten fork late enough to share their prompt, here two of eight."""
    shared = [prompt for prompt in [dice.ids(*PROMPT) for _ in range(2)] for _ in range(GROUP)]
    return _rows(dice, [*shared, *[dice.ids(*PROMPT) for _ in range(6 * GROUP)]])


def hover(dice: Dice) -> list[Row]:
    """mmGRPO on HoVer: 8 rollouts of 4 modules, each with its instructions before its inputs."""
    instructions = [dice.ids(80, 120) for _ in range(4)]
    return _rows(dice, [text + dice.ids(160, 900) for text in instructions for _ in range(8)], (20, 200))


def search(dice: Dice) -> list[Row]:
    """A search agent: 4 questions × 4 rollouts, three searches in one growing context, retrieved text masked."""
    rows = []
    for prompt in [dice.ids(80, 200) for _ in range(4)]:
        for _ in range(GROUP):
            turns = [dice.ids(20, 80) if n % 2 == 0 else dice.ids(100, 300) for n in range(7)]
            rows.append(Row(prompt, tuple(turns), dice.random.random()))
    return rows


def long(dice: Dice) -> list[Row]:
    """Short prompts, long completions: the shape where sharing has the least to give."""
    return independent(dice, 4, (64, 64), (512, 512))


def demonstrations(dice: Dice) -> list[Row]:
    """Optimised prompts: 77 demonstrations (one per intent of Banking77) before short queries, short completions."""
    shared = tuple(token for _ in range(77) for token in dice.ids(20, 26))
    prompts = [shared + dice.ids(30, 50) for _ in range(4)]
    return _rows(dice, [prompt for prompt in prompts for _ in range(GROUP)], (5, 30))


SHAPES: dict[str, Callable[[Dice], list[Row]]] = {
    "is": independent,
    "fof": forked_first,
    "fof_converged": converged,
    "fof_os": forked_twice,
    "rr": round_robin,
    "hover": hover,
    "search": search,
    "long": long,
    "demonstrations": demonstrations,
}


def advantages(rows: list[Row]) -> list[float]:
    """GRPO's, as TRL computes them."""
    rewards = torch.tensor([row.reward for row in rows], dtype=torch.float64).view(-1, GROUP)
    centred = rewards - rewards.mean(1, keepdim=True)
    found: list[float] = (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten().tolist()
    return found


def calls(rows: list[Row], logprobs: Sequence[tuple[float, ...]] = ()) -> list[TrainCall]:
    """The rows as the trainer gets them: one call per completion, each row with an equal share of the loss.

    Args:
        logprobs: of each row's one completion, as the engine recorded them.
    """
    found = []
    for number, (row, advantage) in enumerate(zip(rows, advantages(rows), strict=True)):
        context, weight = row.prompt, 1 / (len(rows) * sum(row.mask))
        for turn, ids in enumerate(row.turns):
            if turn % 2 == 0:
                entry = Entry(call="", reward=0.0, advantages=(advantage,) * len(ids), weights=(weight,) * len(ids))
                call = Call(
                    id=f"{number}.{turn}",
                    example="",
                    parent=None,
                    module="m",
                    prompt_ids=context,
                    completion_ids=ids,
                    completion_tokens=len(ids),
                    logprobs=logprobs[number] if logprobs else None,
                )
                found.append(TrainCall(call=call, entries=(entry,)))
            context = context + ids
    return found
