"""The task `agent`: any agent that calls a model by HTTP, a reward by a metric or by its own result, and data files.

The agent is a function or a command; each rollout gets the address of the gateway and a key of its own. What it asks of
the model are the calls of the rollout (`tasks.gateway.recorder`); forks play it again with the recorded replies.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from mmrl.config.tasks import UNSCORED, AnyAgentConfig
from mmrl.errors import ConfigError, LengthFailure, ProgramFailure, RewardFailure, gathered, refuse, unknown
from mmrl.records import Call, Example
from mmrl.retrieval.select import server_problems
from mmrl.serve.gateway import Session, gateway, json_value
from mmrl.serve.protocol import Refused
from mmrl.system.command import CommandError, run_command
from mmrl.system.objects import display_name, imported
from mmrl.system.user_code import call_scorer, finite_numbers, in_thread, on_agent_loop
from mmrl.tasks.base import Context, Score
from mmrl.tasks.dspy.own import (
    FINISHED,
    OwnTask,
    RecordTask,
    as_one,
    imported_metrics,
    paths_of,
    refusing_signature,
    scored,
    unscored,
)
from mmrl.tasks.gateway.recorder import Recorder, reply_id

CLIENTS = ("OPENAI_", "ANTHROPIC_")
"""Variables by which clients find a server: a command never inherits the user's own."""
REWARDS = "rewards"
"""Field of a score that has rewards of single calls, by the ids of their replies."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an agent, and how many of its requests a rule answered."""

    result: object
    answered: int


Play = Callable[[Mapping[str, Any], str, str, str, Sequence[object]], Awaitable[object]]
"""Run of an agent: its example, address and key, the key by which it may post a result, and what it has posted."""


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """Implements `mmrl.tasks.base.Program`: the agent's requests are its calls."""

    play: Play
    config: AnyAgentConfig

    @property
    def modules(self) -> tuple[str, ...]:
        """See `mmrl.tasks.base.Program`."""
        return self.config.modules

    @property
    def continues(self) -> tuple[str, ...]:
        """Names all modules: what an agent asks next is its own affair."""
        return self.config.modules

    async def run(self, example: Example, ctx: Context) -> Outcome:
        """Play the agent.

        Raises:
            RolloutError: a call failed, also one whose failure the agent swallowed; or it made none.
        """
        recorder, posted, server = Recorder(ctx, self.config), list[object](), gateway()

        def post(result: object) -> None:
            if posted:
                raise Refused(409, "the result of this rollout was posted already")
            posted.append(result)

        session = Session(recorder.chat, post, asyncio.get_running_loop(), self.modules)
        url, key, credential = server.open(session)
        play = asyncio.ensure_future(self.play(dict(example.inputs), url, key, credential, posted))
        failed = asyncio.ensure_future(recorder.ended.wait())
        try:
            # An agent that takes a failure for a passing one would ask on until its time is over.
            await asyncio.wait({play, failed}, return_when=asyncio.FIRST_COMPLETED)
            if not play.done():
                assert recorder.failure is not None
                raise recorder.failure
            result = await play
        except Exception as error:
            if recorder.failure is not None:
                raise recorder.failure from error
            raise
        finally:
            failed.cancel()
            play.cancel()
            await asyncio.gather(play, return_exceptions=True)
            server.close(key, credential)
            await recorder.close()
            recorder.leave_out(session.unread())
        # Whatever the agent made of a failed call; but it may shorten what was too long, or make do with what it has.
        if recorder.failure is not None and not (isinstance(recorder.failure, LengthFailure) and recorder.replied):
            raise recorder.failure
        if not recorder.replied:
            made = "read no reply of the model" if recorder.calls else "made no call"
            raise ProgramFailure(
                f"the agent {made}; its base_url is {url}; or its client answered from a cache of its own"
            )
        result = posted[0] if posted else result
        try:
            json.dumps(result)
        except (TypeError, ValueError, RecursionError) as error:
            raise ProgramFailure(f"the agent's result is not JSON: {error}: {result!r:.100}") from None
        return Outcome(result, recorder.answered)

    def description(self, prediction: Outcome) -> object:
        """See `mmrl.tasks.base.Described`."""
        return prediction.result


def _result(record: object, result: object) -> object:
    """Return the score that an agent gave itself; the metric where there is none."""
    return result


class AgentTask(RecordTask):
    """The task `agent`. Implements `mmrl.tasks.base.Task`."""

    config: AnyAgentConfig
    reward_sets: tuple[str, ...] = ("outcome", "turn")

    def __init__(self, config: AnyAgentConfig, seed: int):
        problems = server_problems("task=agent")
        if (config.agent is None) == (config.command is None):
            problems.append("task.agent: expected package.module:name of a function, or task.command, and not both")
        if not config.inputs:
            problems.append("task.inputs: missing; expected the fields of a record that the agent gets")
        if len(set(config.modules)) < len(config.modules) or not config.modules:
            names = ", ".join(config.modules) or "[]"
            problems.append(f"task.modules: got {names}, expected at least one name, and each once")
        if config.client_env and config.command is None:
            problems.append("task.client_env: has no effect without task.command; leave it out")
        if config.prompts is not None:
            problems.append("task.prompts: has no effect with an agent, whose prompts are its own code")
        named = {f"task.rules.{number}.module": rule.module for number, rule in enumerate(config.rules)}
        named |= {"task.frozen": next((name for name in config.frozen if name not in config.modules), None)}
        problems += [
            unknown(key, name, config.modules) for key, name in named.items() if name and name not in config.modules
        ]
        play: Any = _result
        metrics: Mapping[str, Callable[..., Any]] = {}
        with gathered(problems):
            play = _function(config.agent) if config.agent is not None else play
            play = _command(config.command, config.client_env) if config.command is not None else play
        with gathered(problems):
            metrics = imported_metrics(config)
        refuse(problems)
        if isinstance(config.metric, tuple):
            self.reward_sets = ("outcome",)  # rewards of single calls come from one metric
        metric: Callable[..., Any] = _result if config.metric is None else as_one(metrics, config)
        if config.metric is None:
            self.reward_sets = (*self.reward_sets, UNSCORED)  # of an agent whose result is no score
        main = FINISHED if config.reward == UNSCORED else "score"
        parts = OwnTask(AgentProgram(play, config), metric, config.inputs, main_metric=main)
        name = config.agent or str(config.command)
        super().__init__(parts, config, seed, key="task.{}".format, name=name, rewards=metrics, extra_arguments=False)

    async def score(self, example: Example, prediction: Outcome, path: Sequence[Call], reward_set: str) -> Score:
        """Return the metric's number, or its `score` beside other numbers, which are reported.

        The set `turn` adds the `rewards` of single calls, by the ids of their replies; that of the last call belongs to
        the outcome.

        Raises:
            RewardFailure: there is no `score`, a number is not finite, or a reward is of no call.
        """
        if reward_set == UNSCORED:
            return unscored(example.metadata, prediction.result)
        record = dict(example.metadata)
        result = await call_scorer(self.parts_given.reward, record, prediction.result, beside_agent=True)
        score = scored(result, "task.metric" if self.config.metric else "the agent")
        answers = any(rule.reply is not None for rule in self.config.rules)
        metrics = {**score.metrics, **({"answered_by_rule": float(prediction.answered)} if answers else {})}
        rewards = result.get(REWARDS) if isinstance(result, Mapping) and reward_set == "turn" else None
        reward: float = score.reward
        turns: dict[str, float] = {}
        if rewards is not None:
            reward, turns = _turn_rewards(rewards, path, reward)
        return Score(reward=reward, metrics=metrics, parts=score.parts, turn_rewards=turns)

    @override
    def describe(self) -> Mapping[str, object]:
        own = UNSCORED if self.config.reward == UNSCORED else "its own result"
        metric = ", ".join(paths_of(self.config)) or own
        paths = {"agent": self.config.agent or str(self.config.command), "metric": metric}
        return {**super().describe(), **{name: display_name(path) for name, path in paths.items()}}


def _turn_rewards(rewards: object, path: Sequence[Call], reward: float) -> tuple[float, dict[str, float]]:
    """Return the outcome with the reward of the last call in it, and those of the others by call id."""
    if not isinstance(rewards, Mapping):
        raise RewardFailure(f"rewards: got {rewards!r:.100}, expected an object: id of a reply -> number")
    contexts: Counter[tuple[int, ...]] = Counter()
    calls: dict[object, Call] = {}
    for call in path:
        context = call.prompt_ids + (call.sampled_ids or call.completion_ids)
        contexts[context] += 1
        name = reply_id(context, contexts[context])
        # as the dialects name it
        calls |= {f"{kind}{name}": call for kind in ("chatcmpl-", "resp_", "msg_")}
    if strange := [name for name in rewards if name not in calls]:
        raise RewardFailure(f"rewards: got {strange[0]!r:.60}, which is the id of no reply of this rollout")
    turns: dict[str, float] = {}
    for name, value in finite_numbers(rewards).items():
        call = calls[name]
        if call is path[-1]:
            reward += value
        else:
            turns[call.id] = turns.get(call.id, 0.0) + value
    return reward, turns


def _function(path: str) -> Play:
    function = imported("task.agent", path)
    if not callable(function):
        raise ConfigError(f"task.agent: {path} is a {type(function).__name__}, expected a function")
    if (takes := refusing_signature(function, None, None, None)) is not None:
        raise ConfigError(f"task.agent: {path} takes {takes}, expected a function (example, base_url, api_key)")

    async def play(example: Mapping[str, Any], url: str, key: str, credential: str, posted: Sequence[object]) -> object:
        # On by default, also from one run to the next: another rollout's replies, and calls that nobody records.
        if (dspy := sys.modules.get("dspy")) is not None:
            dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)
        result = await in_thread(function, example, url, key)
        return await on_agent_loop(result) if inspect.isawaitable(result) else result

    return play


def _command(line: str, client_env: bool) -> Play:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"task.command: got '{line}', which is no command line: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"task.command: got '{line}', and there is no executable program '{(words or [''])[0]}'")

    async def play(example: Mapping[str, Any], url: str, key: str, credential: str, posted: Sequence[object]) -> object:
        env = {name: value for name, value in os.environ.items() if not name.startswith(CLIENTS)}
        env |= {"MMRL_BASE_URL": url, "MMRL_API_KEY": key, "MMRL_RESULT_KEY": credential}
        if client_env:
            env |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
            env |= {"ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
        command = [word.replace("{base_url}", url) for word in words]
        output = await run_command(command, json.dumps(example, ensure_ascii=False, default=str), env, key)
        if posted:
            return posted[0]
        lines = output.strip().splitlines()
        if not lines:
            raise CommandError("it ended without a result on stdout")
        try:
            return json_value(lines[-1])
        except Refused as refused:
            raise CommandError(refused.message) from None

    return play
