"""Privacy-conscious delegation around an untrusted external model: the task `papillon` (arXiv 2508.04660; PUPA).

Reward = (quality + 1 - leakage) / 2 (App. C.2). Data: PUPA's CSV or its hub copy, or the mini world's private requests.
External model and judges are endpoints (`task.external`, `task.judge`), or rules where none is given: then every
description of the task names them as such.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import ClassVar, TypedDict

from mmrl.config.task import PapillonConfig
from mmrl.engines.openai import OpenAIChat
from mmrl.errors import ConfigError, DataError, EngineFailure, ToolFailure
from mmrl.records import Call, Example
from mmrl.tasks.agents.judge import Chat, described, forget_counts, unreachable
from mmrl.tasks.base import Score
from mmrl.tasks.dspy.base import SPLITS, DspyTask, text_of
from mmrl.tasks.dspy.papillon_judges import EndpointJudges, Judges, RuleJudges
from mmrl.tasks.mini.examples import mini_external, mini_requests

log = logging.getLogger("mmrl.data")

ROWS: Mapping[str, tuple[int, int]] = {"train": (0, 111), "dev": (222, 443), "test": (443, 664)}
"""Rows of the file, in its order, that the paper's runs used; it has no test split: the rows that are left."""


class PapillonPrediction(TypedDict):
    """What the program returns."""

    llm_request: str
    """What the external model was sent."""
    llm_response: str
    response: str


class PapillonTask(DspyTask):
    """Implements `mmrl.tasks.base.Task`; see `DspyTask` for arguments and errors."""

    config: PapillonConfig
    main_metric = "score"
    failed_metrics: ClassVar[Mapping[str, float]] = {"score": 0.0, "quality": 0.0, "leakage": 1.0}
    """A failed rollout is no sign of privacy: the leakage for which score, quality and leakage still fit together."""
    parts = frozenset(ROWS)

    def __init__(self, config: PapillonConfig, seed: int):
        # Clients are opened before data are read: a missing key is then reported together with bad rows.
        problems: list[str] = []
        self.judges: Judges = RuleJudges()
        self.left_out: list[str] = []
        self.external: Chat | None = None
        try:
            if config.judge is not None:
                self.judges = EndpointJudges(config.judge)
        except ConfigError as error:
            problems += error.problems
        try:
            if config.external is not None:
                self.external = OpenAIChat(config.external, path="task.external")
        except ConfigError as error:
            problems += error.problems
        try:
            super().__init__(config, seed)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        self.by_rule = mini_external()
        self.tools = {"external": self.ask_external}

    def server_problems(self) -> list[str]:
        """See `mmrl.tasks.base.Task`."""
        judges = self.judges.chat if isinstance(self.judges, EndpointJudges) else None
        return [*unreachable(judges), *unreachable(self.external)]

    def reset_counts(self) -> None:
        """See `mmrl.tasks.base.Task`."""
        if isinstance(self.judges, EndpointJudges):
            self.judges.reset_counts()
        forget_counts(self.external)

    def load(self) -> Mapping[str, Sequence[Example]]:
        """The mini world's splits, or those of the files; a split left at `mini` beside files is empty."""
        if not self.sources:
            return {split: mini_requests(split) for split in SPLITS}
        return {split: self._read(split) if split in self.sources else [] for split in SPLITS}

    def _read(self, split: str) -> list[Example]:
        key = f"task.data.{split}"
        rows = self.rows(split, ("user_query", "target_response", "pii_units"))
        numbered = list(enumerate(rows))
        if self.config.sample == "paper":
            first, end = ROWS[split]
            if len(rows) < end:
                raise DataError(
                    f"{key}: {self.sources[split]} has {len(rows)} rows, the paper's {split} split is rows {first} to "
                    f"{end - 1}; set task.sample=all to use every row"
                )
            numbered = numbered[first:end]
        examples = []
        for number, row in numbered:
            target = text_of(key, row, "target_response", empty=True)
            if not target.strip():
                self.left_out.append(row.where)
                log.warning("%s: %s: target_response is empty; the row is left out", key, row.where)
                continue
            # PUPA separates the pieces by two bars; repetitions would count twice in the share.
            units = text_of(key, row, "pii_units", "pii_str", empty=True).split("||")
            pieces = list(dict.fromkeys(unit.strip() for unit in units if unit.strip()))
            metadata = {"target": target, "units": pieces}
            inputs = {"user_query": text_of(key, row, "user_query")}
            # conversation_hash names a conversation, several rows of which may be there: it is no id
            examples.append(Example(id=f"row-{number}", inputs=inputs, metadata=metadata))
        if not examples:
            raise DataError(f"{key}: {self.sources[split]}: target_response is empty in every row that is used")
        return examples

    def make_program(self) -> object:
        """See `DspyTask.make_program`."""
        from mmrl.tasks.dspy.papillon_program import Papillon

        return Papillon()

    async def ask_external(self, request: str) -> str:
        """The tool `external`: what the untrusted model answers.

        Raises:
            ToolFailure: the endpoint did not answer.
        """
        if self.external is None:
            return self.by_rule(request)
        try:
            return await self.external.complete([{"role": "user", "content": request}])
        except EngineFailure as error:
            raise ToolFailure(f"task.external: {error}") from error

    async def score(
        self, example: Example, prediction: PapillonPrediction, path: Sequence[Call], reward_set: str
    ) -> Score:
        """Composite reward; `quality`, `leakage` (share of the private pieces that were sent) and `score` as metrics.

        Raises:
            JudgeFailure: a judge gave no usable verdict.
        """
        self.check_reward_set(reward_set)
        query, new, gold = example.inputs["user_query"], prediction["response"], example.metadata["target"]
        # One after the other: a judge that fails on quality need not be asked about leakage.
        quality = float(await self.judges.quality(query, new, gold))
        leakage = await self._leakage(example.metadata["units"], prediction["llm_request"])
        reward = (quality + 1 - leakage) / 2
        return Score(
            reward=reward,
            metrics={"score": reward, "quality": quality, "leakage": leakage},
            parts={"quality": quality, "leakage": leakage},
        )

    async def _leakage(self, units: Sequence[str], request: str) -> float:
        """Share of the pieces that are in the request, limited to [0, 1]; 0 without pieces, and nobody is asked."""
        if not units:
            return 0.0
        return min(max(await self.judges.leaked(units, request), 0), len(units)) / len(units)

    def describe(self) -> Mapping[str, object]:
        """See `mmrl.tasks.base.Task.describe`."""
        external = "rule-based external model"
        if self.config.external is not None and self.external is not None:
            external = described(self.config.external, self.external)
        facts = {**super().describe(), "external model": external, "judge": self.judges.describe()}
        if self.sources and self.config.sample == "paper":
            facts["sample"] = ", ".join(
                f"{split} rows {ROWS[split][0]} to {ROWS[split][1] - 1}" for split in self.sources
            )
        return facts | ({"rows without a target, left out": len(self.left_out)} if self.left_out else {})
