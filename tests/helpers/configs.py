"""Configs with some values changed, and the weight stage of one whose task and engine are fakes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any
from unittest.mock import MagicMock

from mmrl.cli.hydra import composed
from mmrl.config import EvalRunConfig, RlRunConfig, RootConfig, validate
from mmrl.models.assignment import ModuleAssignment
from mmrl.rollout.environment import sampling_settings
from mmrl.stages.rl import RlStage
from mmrl.stages.step_log import StepLog
from tests.helpers.programs import Chain, FakeEngine, FakeTask, environment

Options = dict[str, Any]


def nested(options: Mapping[str, Any]) -> Options:
    """`{"data.train": x}` as `{"data": {"train": x}}`."""
    made: Options = {}
    for path, value in options.items():
        *above, key = path.split(".")
        at = made
        for part in above:
            at = at.setdefault(part, {})
        at[key] = value
    return made


@cache
def _composed(command: str) -> dict[str, Any]:
    return composed(command, ["policy=tiny"] if command == "eval" else ["algo=grpo"])


def _merged(base: dict[str, Any], changes: Options) -> dict[str, Any]:
    for key, value in changes.items():
        if key == "algo" and "name" in value:  # another algorithm has other keys
            base[key] = value
            continue
        base[key] = _merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return base


def config_of(options: Options, command: str = "train") -> Any:
    """The composed config of a command with some values."""
    schema: type[RootConfig] = RlRunConfig if command == "train" else EvalRunConfig
    return validate(schema, _merged(deepcopy(_composed(command)), nested(options)))


def rl_stage_of(config: Any, engine: FakeEngine) -> RlStage:
    """The weight stage of a run whose task and engine are fakes."""

    class OfFakes(RlStage):
        def environment(self, phase: Any, key: Any) -> Any:
            env = environment(self.task, self.engine, key=key)
            env.settings = sampling_settings(phase, self.config.task)
            return env

        def sync(self, version: int) -> None:
            engine.policy_version = version

    log = StepLog(rundir=MagicMock(), progress=MagicMock(), trackers=MagicMock())
    task = FakeTask(Chain(("a",)))
    sampling: Any = {"task": task, "examples": task.examples("train"), "reward_set": "outcome"}
    engines: Any = {"engine": engine, "engines": [engine], "tokenizer": MagicMock(), "trainer": MagicMock()}
    engines["scorers"] = MagicMock()
    assignment = ModuleAssignment(model=config.model, algo=config.algo, modules=tuple(task.program.modules))
    return OfFakes(config=config, log=log, assignment=assignment, **sampling, **engines)
