"""What a program of the suite is, and how it is run: two rollouts with scripted replies, and forks of them.

A comment in each names where DSPy shows such a program: in its documentation (docs/docs) or its tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import dspy

from mmrl.engines.base import Completion, Request
from mmrl.records import Example, Forest
from mmrl.rollout import with_program
from tests.helpers.programs import FakeEngine, FakeTask, environment, forest_of, letters


class Answer(dspy.Module):
    """One predictor, called by `forward`."""

    signature = "text -> answer"

    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict(self.signature)

    def forward(self, text: str) -> Any:
        return self.answer(text=text)


Reply = str | Mapping[str, object]
"""A text as the model would write it, or output fields that the adapter writes."""


@dataclass(frozen=True, kw_only=True)
class Works:
    """A program that trains."""

    name: str
    make: Callable[[], dspy.Module]
    inputs: Mapping[str, Any]
    good: Sequence[Reply]
    """Replies of a rollout that solves its task, in the order of its calls."""
    bad: Sequence[Reply]
    """Of one that does not."""
    calls: Mapping[str, int]
    """Module -> calls of the good rollout."""
    solved: Callable[[Any], bool] | None = None
    """Of the prediction, which is DSPy's own object; None: it has the fields of the last of the good replies."""
    bad_calls: Mapping[str, int] = field(default_factory=dict)
    """Of the bad one, where they are others."""
    adapter: Any = None
    says: str = ""
    """For the table: what to know of it."""

    def score(self, prediction: Any) -> float:
        """The reward of a prediction."""
        if self.solved is not None:
            return float(self.solved(prediction))
        last = self.good[-1]
        assert isinstance(last, Mapping)
        return float(all(prediction[name] == value for name, value in last.items()))

    def play(self, plans: Sequence[Any]) -> tuple[Forest, Scripted]:
        """The forest of these trees: the first tree is told the good replies, all others the bad ones."""
        with dspy.context(adapter=self.adapter) if self.adapter else nullcontext():
            task = with_program(FakeTask(self.make(), reward=self.score))
            engine = Scripted(answer=lambda request: "", case=self, program=task.program)
            env = environment(task, engine)
            forest = forest_of(env, [Example(id="q", inputs=dict(self.inputs))], plans)
        return forest, engine


@dataclass
class Scripted(FakeEngine):
    """Call n of a rollout gets reply n: the same in a fork, so that a fork ends as the rollout that it is of."""

    case: Any = None
    program: Any = None
    sampled: dict[str, tuple[int, ...]] = field(default_factory=dict)

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(0)
        call_id = str(request.order[0])
        path, _, number = call_id.removeprefix("q/").rpartition("#")
        replies = self.case.good if path.split(".")[0] == "0" else self.case.bad
        reply = replies[int(number)]
        ids = letters(reply if isinstance(reply, str) else self.program.written(request.module, reply))
        self.sampled[call_id] = ids
        return Completion(ids=ids, logprobs=(-0.5,) * len(ids), finish="eos")


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A program that cannot be trained as it is: said before a model loads, or by its rollouts where a run shows it."""

    name: str
    make: Callable[[], dspy.Module]
    sentence: str
    """How what the user is told begins, after `task.program: `."""
    adapter: Any = None
    runs: bool = False
    """Whether it shows when the program runs: its rollouts fail in the program's own code, with the sentence in it."""


def table(works: Sequence[Works]) -> str:
    """What `docs/dspy.md` lists, as Markdown: the programs of which there is something to say."""
    rows = [f"| {case.name} | {case.says} |" for case in works if case.says]
    return "\n".join(["| works | |", "|---|---|", *rows])


def sentence(refused: Sequence[Refused]) -> str:
    """The programs that cannot be trained as they are, as one sentence of `docs/dspy.md`."""
    names = (case.name[0].lower() + case.name[1:] for case in refused)
    return f"Not as they are: {'; '.join(names)}."
