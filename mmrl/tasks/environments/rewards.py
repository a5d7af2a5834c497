"""Reward functions of an episode: `(record, prediction)` as in other tasks, with `environment`, or in TRL's form."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mmrl.errors import RewardFailure, RolloutError
from mmrl.system.user_code import as_number, call_scorer, user_failure
from mmrl.tasks.base import Score
from mmrl.tasks.dspy.own import refusing_signature, scored
from mmrl.tasks.environments.classes import ObjectSession
from mmrl.tasks.environments.program import Played

BATCH = frozenset({"prompts", "completions", "completion_ids", "environments"})
"""Arguments by which a reward function of TRL is known: lists, here of one episode each."""


_UNUSED: Mapping[str, object] = {"trainer_state": None, "log_extra": lambda column, values: None}
"""What TRL gives too, and no episode has."""


@dataclass(frozen=True, slots=True)
class EpisodeMetric:
    """A user's metric, called for one episode.

    Args:
        source: its name, for messages.
    """

    source: str
    function: Callable[..., Any]

    async def __call__(self, record: Mapping[str, Any], played: Played) -> Score:
        """Score an episode, in the thread of its environment where the metric looks into that.

        Raises:
            RewardFailure: it raised, or gave no number.
        """
        try:
            return await self._called(record, played)
        except RolloutError:
            raise
        except Exception as error:
            raise user_failure(RewardFailure, error, f"{self.source} raised ") from error

    async def _called(self, record: Mapping[str, Any], played: Played) -> Score:
        names, extra = _parameters(self.function)
        run: Callable[..., Awaitable[Any]] = call_scorer
        if isinstance(played.session, ObjectSession) and ({"environment", "environments"} & names):
            run = played.session.call
        if not self.of_batches:
            about = {"environment": played.instance} if "environment" in names else {}
            prediction = {"text": played.text, "messages": played.messages, "ended": played.ended}
            bound = _bound(self.function, dict(record), prediction, **about) if about else self.function
            result = await (run(bound) if about else run(self.function, dict(record), prediction))
            played.rewarded = True
            return scored(result, self.source)
        logged: dict[str, float] = {}
        given = (
            self.batch(record, played, logged)
            if extra
            else {name: value for name, value in self.batch(record, played, logged).items() if name in names}
        )
        return self._first(await run(_bound(self.function, **given)), played, logged)

    @property
    def of_batches(self) -> bool:
        """True in TRL's form."""
        names, extra = _parameters(self.function)
        return bool(names & BATCH) or (extra and refusing_signature(self.function, None, None) is not None)

    def problem(self) -> str | None:
        """Return a sentence if it cannot be called."""
        if self.of_batches:
            return None
        about = {"environment": None} if "environment" in _parameters(self.function)[0] else {}
        if (takes := refusing_signature(self.function, None, None, **about)) is None:
            return None
        return (
            f"{self.source} takes {takes}, expected (record, prediction), with environment or without, or a reward "
            "function of TRL (completions, **kwargs)"
        )

    def row_problem(self, row: Mapping[str, Any], in_process: bool) -> str:
        """Return the reason why an episode of a record cannot be scored; empty where it can.

        Args:
            in_process: the environment is an object in this process.
        """
        if not self.of_batches:
            return ""
        parameters = inspect.signature(self.function).parameters.values()
        needed = [
            p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        known = {*row, *BATCH, *_UNUSED, "log_metric"} - {"prompt"} - (set() if in_process else {"environments"})
        if not (missing := [name for name in needed if name not in known]):
            return ""
        return f"{self.source} asks for {', '.join(missing)}, and records have {', '.join(row) or 'no columns'}"

    def batch(self, record: Mapping[str, Any], played: Played, logged: dict[str, float]) -> dict[str, Any]:
        """Return the arguments that TRL gives: a batch of one, each column a list."""
        columns = {name: [value] for name, value in record.items() if name != "prompt"}
        batch = {"prompts": [played.prompt], "completions": [played.messages], "completion_ids": [list(played.ids)]}
        environments = {} if played.instance is None else {"environments": [played.instance]}

        def log_metric(name: str, value: float) -> None:
            logged[name] = value

        return {**columns, **batch, **environments, **_UNUSED, "log_metric": log_metric}

    def _first(self, result: Any, played: Played, logged: Mapping[str, float]) -> Score:
        values = list(result) if isinstance(result, list | tuple) or hasattr(result, "tolist") else None
        if values is None or len(values) != 1:
            raise RewardFailure(f"{self.source} gave {result!r:.100} for one episode, expected a list of one number")
        if values[0] is None:  # this episode is none of its kind, as in TRL
            return Score(reward=0.0, metrics={"score": 0.0, **logged})
        if (number := as_number(values[0])) is None:
            raise RewardFailure(f"{self.source} gave {values[0]!r:.100}, expected a number")
        played.rewarded = True
        return Score(reward=number, metrics={"score": number, **logged})


def _parameters(function: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the names of a function's parameters, and whether it takes any others."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of compiled code, which does not say
        return set(), False
    extra = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}, extra


def _bound(function: Callable[..., Any], /, *args: Any, **named: Any) -> Callable[[], Any]:
    """Return a function without arguments, async where the function is."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

        async def call() -> Any:
            return await function(*args, **named)

        return call
    return lambda: function(*args, **named)
