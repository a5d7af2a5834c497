"""Privacy-conscious delegation around an untrusted external model: the task `papillon` (arXiv 2508.04660; PUPA).

Reward = (quality + 1 - leakage) / 2 (App. C.2). Data: PUPA's CSV or its hub copy, or the mini world's private requests.
External model and judges are endpoints (`task.external`, `task.judge`), or rules where none is given: then every
description of the task names them as such.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from pydantic import AliasChoices, BaseModel, Field
from typing_extensions import override

from mmrl.config.tasks import PapillonConfig
from mmrl.engines.openai import OpenAIChat
from mmrl.errors import DataError, EngineFailure, ToolFailure, gathered, refuse
from mmrl.records import Call, Example
from mmrl.tasks import metrics
from mmrl.tasks.agents.judge import EndpointJudge
from mmrl.tasks.base import Score
from mmrl.tasks.data.rows import Row, Text, read_as
from mmrl.tasks.dspy.base import DspyTask
from mmrl.tasks.dspy.fields import within_bounds
from mmrl.tasks.metrics import leaked_pieces
from mmrl.tasks.mini.examples import make_external

if TYPE_CHECKING:
    import dspy

log = logging.getLogger("mmrl.data")

ROWS: Mapping[str, tuple[int, int]] = {"train": (0, 111), "dev": (222, 443), "test": (443, 664)}
"""Rows of the file, in its order, that the paper's runs used; it has no test split: the rows that are left."""
RULE_F1 = 0.5
"""The rule-based judge: share of words that a good response has in common with the reference, as token F1."""


class PrivateRequest(BaseModel):
    """Row of a data file."""

    user_query: Text
    target_response: str | None
    pii_units: str | None = Field(validation_alias=AliasChoices("pii_units", "pii_str"))


class PapillonPrediction(TypedDict):
    """Result of the program."""

    llm_request: str
    """Request that was sent to the external model."""
    llm_response: str
    response: str


class PapillonTask(DspyTask):
    """Implements `mmrl.tasks.base.Task`; see `DspyTask` for arguments and errors."""

    config: PapillonConfig
    absent_features = frozenset({"penalties", "observations", "repeated_calls"})
    main_metric = "score"
    failed_metrics: ClassVar[Mapping[str, float]] = {"score": 0.0, "quality": 0.0, "leakage": 1.0}
    """A failed rollout is no sign of privacy: the leakage for which score, quality and leakage still fit together."""
    mini_kind = "requests"
    places = ROWS

    def __init__(self, config: PapillonConfig, seed: int):
        # Clients are opened before data are read: a missing key is then reported together with bad rows.
        problems: list[str] = []
        self.judges: RuleJudges | EndpointJudges = RuleJudges()
        self.left_out: list[str] = []
        self.external: OpenAIChat | None = None
        endpoints: dict[str, OpenAIChat] = {}
        with gathered(problems):
            if config.judge is not None:
                self.judges = EndpointJudges(config.judge)
                endpoints["judge"] = self.judges.chat
        with gathered(problems):
            if config.external is not None:
                self.external = endpoints["external"] = OpenAIChat(config.external, path="task.external")
        self.endpoints = endpoints
        with gathered(problems):
            super().__init__(config, seed)
        refuse(problems)
        self.by_rule = make_external()
        self.tools = {"external": self.ask_external}

    @override
    def read(self, split: str) -> Sequence[Example]:
        """Rows without a target are left out."""
        key = f"task.data.{split}"
        numbered: Sequence[tuple[int, Row]] = list(enumerate(self.rows(split)))
        if self.config.sample == "paper":
            numbered = self.sampled(split, numbered, "rows")
        examples = []
        for number, row in numbered:
            fields = read_as(PrivateRequest, key, row)
            target = fields.target_response or ""
            # Quality is judged against the target: beside an empty one every response is as good.
            if not target.strip():
                self.left_out.append(row.where)
                log.warning("%s: %s: target_response is empty; the row is left out", key, row.where)
                continue
            # PUPA separates the pieces by two bars; repetitions would count twice in the share.
            units = (fields.pii_units or "").split("||")
            pieces = list(dict.fromkeys(unit.strip() for unit in units if unit.strip()))
            metadata = {"target": target, "units": pieces}
            inputs = {"user_query": fields.user_query}
            # conversation_hash names a conversation, several rows of which may be there: it is no id
            examples.append(Example(id=f"row-{number}", inputs=inputs, metadata=metadata))
        if not examples:
            raise DataError(f"{key}: {self.sources[split]}: target_response is empty in every row that is used")
        return examples

    @override
    def make_program(self) -> object:
        from mmrl.tasks.dspy.built_in import Papillon

        return Papillon()

    async def ask_external(self, request: str) -> str:
        """Ask the untrusted model, as the tool `external`.

        Raises:
            ToolFailure: the endpoint did not answer.
        """
        if self.external is None or self.config.external is None:
            return self.by_rule(request)
        temperature = self.config.external.temperature
        try:
            return await self.external.complete([{"role": "user", "content": request}], temperature=temperature)
        except EngineFailure as error:
            raise ToolFailure(f"task.external: {error}") from error

    async def score(
        self, example: Example, prediction: PapillonPrediction, path: Sequence[Call], reward_set: str
    ) -> Score:
        """Return the composite reward; metrics: `quality`, `leakage` (share of private pieces that were sent), `score`.

        Raises:
            JudgeFailure: a judge gave no usable verdict.
        """
        query, new, gold = example.inputs["user_query"], prediction["response"], example.metadata["target"]
        # In sequence: a judge that fails on quality need not judge leakage.
        quality = float(await self.judges.quality(query, new, gold))
        leakage, units = 0.0, example.metadata["units"]
        if units:  # else nothing private can leak, and a request to a judge costs money
            # A judge may count more pieces than it was given.
            leaked = await self.judges.leaked(units, prediction["llm_request"])
            leakage = min(max(leaked, 0), len(units)) / len(units)
        reward = (quality + 1 - leakage) / 2
        return Score(
            reward=reward,
            metrics={"score": reward, "quality": quality, "leakage": leakage},
            parts={"quality": quality, "leakage": leakage},
        )

    @override
    def describe(self) -> Mapping[str, object]:
        external = "rule-based external model" if self.external is None else self.external.describe()
        facts = {**super().describe(), "external model": external, "judge": self.judges.describe()}
        if self.sources and self.config.sample == "paper":
            rows = (f"{split} rows {ROWS[split][0]} to {ROWS[split][1] - 1}" for split in self.sources)
            facts["sample"] = ", ".join(rows)
        return facts | ({"rows without a target, left out": len(self.left_out)} if self.left_out else {})


class RuleJudges:
    """Deterministic stand-ins: no model is needed.

    A response is as good as a reference if it has all its names and numbers and half of its words in common (F1); a
    piece leaks if the request contains it, also hidden from a plain comparison (`leaked_pieces` says how, and what it
    misses).
    """

    def describe(self) -> str:
        """Describe the external models, for a result's facts."""
        return "rule-based judge"

    async def quality(self, query: str, new: str, gold: str) -> bool:
        """Check if the new response is at least as good as the reference."""
        return _names(gold) <= _names(new) and metrics.f1(new, gold) >= RULE_F1

    async def leaked(self, units: Sequence[str], request: str) -> int:
        """Count the private pieces in the request."""
        return leaked_pieces(units, request)


def _names(text: str) -> set[str]:
    return set(re.findall(r"\b(?:[^\W\d_a-z]\w*|\d+)\b", text))


def disarm(text: str) -> str:
    """Disarm field headers (`[[ ## … ## ]]`) and chat-template markers (`<|…|>`) in `text`: spaces break them.

    So what the policy wrote can neither forge another field of the judge's prompt nor end its turn.
    """
    return re.sub(r"\[\[(?=\s*##)", "[ [", text).replace("<|", "< |").replace("|>", "| >")


class EndpointJudges(EndpointJudge):
    """Asks with the prompts that DSPy renders for two chain-of-thought signatures."""

    async def quality(self, query: str, new: str, gold: str) -> bool:
        """True unless the judge prefers the reference whichever comes first: j1 or (j1 == j2)."""
        # j1 or (j1 == j2): judges prefer the first response, so one against the new response counts only if the
        # reference also wins when it comes first.
        if await self._at_least_as_good(query, new, gold):
            return True
        return not await self._at_least_as_good(query, gold, new)

    async def _at_least_as_good(self, query: str, first: str, second: str) -> bool:
        from mmrl.tasks.dspy.built_in import QUALITY

        inputs = {"user_query": disarm(query), "response_A": disarm(first), "response_B": disarm(second)}
        return bool((await self._ask(QUALITY, inputs))["judgment"])

    async def leaked(self, units: Sequence[str], request: str) -> int:
        """Return the judge's count of private pieces in the request, which may be more than there are."""
        from mmrl.tasks.dspy.built_in import LEAKAGE

        inputs = {"information_pieces": list(units), "prompt": disarm(request)}
        return int((await self._ask(LEAKAGE, inputs))["num_pieces_leaked"])

    async def _ask(self, signature: type[dspy.Signature], inputs: Mapping[str, object]) -> Mapping[str, Any]:
        import dspy
        from dspy.utils.exceptions import AdapterParseError

        adapter = dspy.ChatAdapter()

        def read(reply: str) -> Mapping[str, Any] | None:
            try:
                return dict(within_bounds(signature, reply, adapter.parse))
            except AdapterParseError:
                return None

        # The judges' prompts do not follow `dspy.configure(adapter=...)`: they are the measure, not the program. Unlike
        # the agents' judge there is no fixed rule: half a verdict has no defined score.
        fields, _ = await self.ask(adapter.format(signature, [], dict(inputs)), read)
        return fields
