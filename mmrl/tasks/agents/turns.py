"""The turns of an agent in one growing context: it writes, the program adds what was asked for, it writes on.

`search_agent`, `r1_searcher` and `search_o1` differ in what they read off a turn and in what they add; the loop, its
limits and the state that each turn begins in are the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import TypedDict

from typing_extensions import override

from mmrl.config.tasks import ReasonerConfig
from mmrl.records import Example
from mmrl.tasks.agents.tags import fit_observation
from mmrl.tasks.base import Context, Message, ModuleScore, Passage, Program
from mmrl.tasks.open_qa import OpenQaTask, gold_share
from mmrl.tasks.prompts import Prompts

CONTEXT = 4096
"""Tokens of a whole rollout where `task.max_context` says nothing."""


@dataclass(frozen=True, slots=True)
class Addition:
    """Text or messages added to the context after a turn."""

    text: str
    state: str
    """State in which the next turn begins, for algorithms that compare turns of one state."""
    frame: Callable[[str], str] | None = None
    """Stands around the text, which is cut where there is no room; None: the text is added whole or not at all."""


@dataclass(slots=True)
class Turns:
    """The texts of a rollout so far."""

    replies: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    """After each reply but the last."""
    ended: str = ""

    @property
    def sampled(self) -> str:
        """Text that the model sampled."""
        return "".join(self.replies)

    @property
    def context(self) -> str:
        """The same with what was added."""
        return "".join(chain.from_iterable(zip_longest(self.replies, self.added, fillvalue="")))


class TurnAgent(Program):
    """Base of the three programs, which read `inputs["question"]` and `inputs["corpus"]`.

    Args:
        config: its limits on tokens and on the words of a document.
        searches: turns whose search is executed.
    """

    modules: tuple[str, ...]

    def __init__(self, prompts: Prompts, config: ReasonerConfig, searches: int):
        self.prompts = prompts
        self.continues = self.modules[:1]
        self.searches = searches
        self.snippet_words = config.retriever.snippet_words
        self.max_observation = config.max_observation
        self.max_context = config.max_context or CONTEXT

    def question(self, question: str) -> list[dict[str, str]]:
        """Return the first prompt."""
        return self.prompts.messages(self.modules[0], question=question, searches=self.searches)

    async def search(self, ctx: Context, example: Example, query: str) -> list[Passage]:
        """Search through `ctx`, so that a fork or a replay has the same documents again."""
        passages: list[Passage] = await ctx.tool("search", queries=[query], corpus=example.inputs["corpus"])
        return passages

    def found(self, text: str, passages: Sequence[Passage], frame: Callable[[str], str]) -> Addition:
        """Return what is added after a search; the titles found are the state in which the next turn begins."""
        return Addition(text, "; ".join(passage["title"] for passage in passages), frame)

    async def play(
        self,
        ctx: Context,
        prompt: Sequence[Message],
        stop: Sequence[str],
        act: Callable[[Turns], Awaitable[Addition | str]],
    ) -> Turns:
        """Run the first module's turns until `act`, which reads the newest reply, ends them, or no room is left.

        Args:
            act: returns what is added, or a word for `Turns.ended` (`context` is that of no room).
        """
        module = self.modules[0]
        reply = await ctx.call(module, prompt, stop=stop)
        turns = Turns([reply.text])
        while not isinstance(step := await act(turns), str):
            # One token must be left for the next turn.
            room = min(self.max_observation, self.max_context - len(reply.context) - 1)
            if step.frame is None:
                observation, fits = step.text, ctx.measure(step.text, after=reply) <= room
            else:
                observation, fits = fit_observation(ctx, reply, step.text, step.frame, room)
            if not fits:
                step = "context"
                break
            reply = await ctx.call(module, observation, after=reply, stop=stop, facts={"state": step.state})
            turns.replies.append(reply.text)
            turns.added.append(observation)
        turns.ended = step
        return turns


class ReasonerPrediction(TypedDict):
    """Result of `r1_searcher` and `search_o1`."""

    answer: str | None
    queries: list[str]
    """Executed queries."""
    titles: list[str]
    """Titles of all documents that the searches returned."""
    ended: str
    """`answer`: a turn without a query; `searches`: a query after the last one allowed; `context`: no room left."""


class ReasonerTask(OpenQaTask):
    """Base of the tasks `r1_searcher` and `search_o1`; see `OpenQaTask` for arguments and errors."""

    config: ReasonerConfig
    main_metric = "f1"

    @override
    def search_metrics(self, prediction: ReasonerPrediction, example: Example) -> dict[str, float]:
        searches = float(len(prediction["queries"]))
        return {"searches": searches, **gold_share("gold_retrieved", prediction["titles"], example)}


def action_facts(action: str) -> ModuleScore:
    """Return facts without penalty: whether a turn searched, answered or did neither (`none`)."""
    return ModuleScore(facts={f"action_{name}": float(action == name) for name in ("search", "answer", "none")})
