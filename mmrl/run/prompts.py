"""Optimisation of prompts: what stands against a run, its trials, and its stage."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from mmrl.config import PromptRunConfig
from mmrl.config.rules import engine_name
from mmrl.engines.endpoint_engine import unreachable
from mmrl.run.build import (
    build_task,
    engine_problems,
    fixed_engine,
    reward_set,
    server_devices,
    split_problems,
    unscored_problems,
)
from mmrl.stages.prompts.split import prompt_problems, split
from mmrl.store.policy import Policy
from mmrl.tasks.base import Task

if TYPE_CHECKING:
    from mmrl.stages.prompts.stage import PromptStage
    from mmrl.stages.step_log import StepLog


def problems(config: PromptRunConfig, task: Task) -> list[str]:
    """Return what stands against a run, its data and the endpoint of its prompt model included."""
    found = split_problems(config.task, task, "train", "task.data.train") + engine_problems(config)
    model = getattr(config.algo, "prompt_model", None)
    found += unreachable({} if model is None else {"algo.prompt_model": model})
    if engine_name(config) == "openai":
        # `policy=` names it in an evaluation; a run of this kind has no such key
        found.append("engine: openai, whose model nothing names here; set engine.endpoints.MODULE.model=NAME")
    return found + unscored_problems(config, task) + prompt_problems(config, task)


def trials(config: PromptRunConfig, task: Task) -> int:
    """Return about as many trials as the optimiser makes; 0 where it does not say."""
    _, validation = split(config, task.examples("train"))
    return config.algo.expected_trials(len(task.program.modules), len(validation))


def build(config: PromptRunConfig, task: Task, log: StepLog) -> PromptStage:
    """Open the engine of the policy, whose weights stay."""
    from mmrl.stages.prompts.stage import PromptStage

    resources, start = ExitStack(), Policy(base=config.model.path)
    serving = fixed_engine(config, start, log.rundir.path, devices=server_devices(config.hardware))
    engine, tokenizer = resources.enter_context(serving)
    return PromptStage(
        config=config,
        task=task,
        engine=engine,
        tokenizer=tokenizer,
        reward_set=reward_set(task, config.task.reward),
        log=log,
        resources=resources,
        task_with=lambda prompts: build_task(config.task, config.seed, prompts),
    )
