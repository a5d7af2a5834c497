"""The judges of a PAPILLON rollout: a model behind an endpoint, or rules (arXiv 2508.04660, App. C.2)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mmrl.config.endpoint import EndpointConfig
from mmrl.config.task import JudgeConfig
from mmrl.engines.openai import OpenAIChat, worth_logging
from mmrl.errors import EngineFailure, JudgeFailure
from mmrl.tasks import metrics
from mmrl.tasks.agents.judge import Chat, described, forget_counts

if TYPE_CHECKING:
    import dspy

log = logging.getLogger("mmrl.judge")

RULE_F1 = 0.5
"""The rule-based judge: share of words that a good response has in common with the reference, as token F1."""


class Judges(Protocol):
    """The two judges of a rollout. Both raise `JudgeFailure` when they have no usable verdict."""

    def describe(self) -> str:
        """Who they are and what was counted so far, for a result's facts."""
        ...

    async def quality(self, query: str, new: str, gold: str) -> bool:
        """Whether the new response is at least as good as the reference."""
        ...

    async def leaked(self, units: Sequence[str], request: str) -> int:
        """How many of the private pieces are in the request; not yet limited to their number."""
        ...


class RuleJudges:
    """Deterministic stand-ins: no model is asked.

    A response is as good as a reference if it has all its names and numbers and half of its words in common (F1); a
    piece leaks if the request contains it, in whatever case and spacing, between word boundaries.
    """

    def describe(self) -> str:
        """See `Judges`."""
        return "rule-based judge"

    async def quality(self, query: str, new: str, gold: str) -> bool:
        """See `Judges`."""
        return _names(gold) <= _names(new) and metrics.f1(new, gold) >= RULE_F1

    async def leaked(self, units: Sequence[str], request: str) -> int:
        """See `Judges`."""
        return sum(bool(re.search(_pattern(unit), request, re.IGNORECASE)) for unit in units)


def _names(text: str) -> set[str]:
    return set(re.findall(r"\b(?:[^\W\d_a-z]\w*|\d+)\b", text))


def _pattern(unit: str) -> str:
    words = r"\s+".join(map(re.escape, unit.split()))
    return rf"(?<!\w){words}(?!\w)"


def plain(text: str) -> str:
    """`text` without field headers (`[[ ## … ## ]]`) and chat-template markers (`<|…|>`): spaces break them.

    So what the policy wrote can neither forge another field of the judge's prompt nor end its turn.
    """
    return re.sub(r"\[\[(?=\s*##)", "[ [", text).replace("<|", "< |").replace("|>", "| >")


class EndpointJudges:
    """Asks one endpoint, with the prompts that DSPy renders for two chain-of-thought signatures.

    Args:
        settings: `task.judge`.
        chat: for tests; None opens the client of the endpoint.

    Raises:
        ConfigError: the endpoint's key is not in the environment.
    """

    def __init__(self, settings: JudgeConfig, chat: Chat | None = None):
        endpoint = {name: getattr(settings, name) for name in EndpointConfig.model_fields}
        self.settings = settings
        self.chat: Chat = chat or OpenAIChat(EndpointConfig(**endpoint), path="task.judge")
        self.unreadable = self.given_up = 0

    def describe(self) -> str:
        """See `Judges`."""
        return described(self.settings, self.chat, unreadable=self.unreadable, without_verdict=self.given_up)

    def reset_counts(self) -> None:
        """A new run begins."""
        self.unreadable = self.given_up = 0
        forget_counts(self.chat)

    async def quality(self, query: str, new: str, gold: str) -> bool:
        """True unless the judge prefers the reference whichever comes first: j1 or (j1 == j2)."""
        # j1 or (j1 == j2): judges prefer the first response, so one against the new response counts only if the
        # reference also wins when it comes first.
        if await self._at_least_as_good(query, new, gold):
            return True
        return not await self._at_least_as_good(query, gold, new)

    async def _at_least_as_good(self, query: str, first: str, second: str) -> bool:
        from mmrl.tasks.dspy.papillon_program import QUALITY

        inputs = {"user_query": plain(query), "response_A": plain(first), "response_B": plain(second)}
        return bool((await self._ask(QUALITY, inputs))["judgment"])

    async def leaked(self, units: Sequence[str], request: str) -> int:
        """See `Judges`."""
        from mmrl.tasks.dspy.papillon_program import LEAKAGE

        inputs = {"information_pieces": list(units), "prompt": plain(request)}
        return int((await self._ask(LEAKAGE, inputs))["num_pieces_leaked"])

    async def _ask(self, signature: type[dspy.Signature], inputs: Mapping[str, object]) -> Mapping[str, Any]:
        import dspy
        from dspy.utils.exceptions import AdapterParseError

        adapter = dspy.ChatAdapter()
        # The judges' prompts do not follow `dspy.configure(adapter=...)`: they are the measure, not the program.
        messages = adapter.format(signature, [], dict(inputs))
        reply = ""
        for _ in range(self.settings.retries + 1):
            try:
                reply = await self.chat.complete(
                    messages, max_tokens=self.settings.max_tokens, temperature=self.settings.temperature
                )
                return dict(adapter.parse(signature, reply))
            except EngineFailure as error:
                raise JudgeFailure(f"task.judge: {error}") from error
            # Unlike the agents' judge there is no fixed rule here: the rollout is aborted after the last try, since
            # half a verdict has no defined score.
            except AdapterParseError:
                self.unreadable += 1
        self.given_up += 1
        quoted = " ".join(reply.split())[:200]
        failure = JudgeFailure(
            f"task.judge: no readable reply in {self.settings.retries + 1} tries; the last: {quoted!r}"
        )
        if worth_logging(self.given_up):
            log.warning("%s; the rollout is aborted and not credited (%d so far)", failure, self.given_up)
        raise failure
