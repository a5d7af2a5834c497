"""Supervised training: what stands against a run, and its stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmrl.config import SftRunConfig
from mmrl.engines import build_engine
from mmrl.run.build import engine_setup, load_trainer, reward_set, split_problems, unscored_problems
from mmrl.run.settle import module_assignment
from mmrl.stages.sft_data import sft_problems
from mmrl.tasks.base import Task
from mmrl.trainer.settings import Settings

if TYPE_CHECKING:
    from mmrl.stages.sft import SftStage
    from mmrl.stages.step_log import StepLog


def problems(config: SftRunConfig, task: Task) -> list[str]:
    """Return what stands against a run, its data included."""
    assignment = module_assignment(config, task.program.modules)
    found = unscored_problems(config, task) + assignment.problems()
    found += sft_problems(config, task, tuple(assignment.untrained))
    if config.algo.source != "file":
        found += split_problems(config.task, task, "train", "task.data.train")
    return found


def build(config: SftRunConfig, task: Task, log: StepLog) -> SftStage:
    """Load the policy in its trainer, and what samples and evaluates it."""
    from mmrl.stages.sft import SftStage

    assignment = module_assignment(config, task.program.modules)
    settings = Settings.supervised(config.train, config.model, config.seed)
    trainer, tokenizer, serving = load_trainer(config, assignment, settings, log)
    setup = engine_setup(config, serving, log.rundir.path)
    return SftStage(
        config=config,
        task=task,
        tokenizer=tokenizer,
        # In this process, whatever engine the profile names: it samples from the very weights that are trained.
        engine=build_engine(config.engine.in_process, trainer.model, tokenizer, setup),
        reward_set=reward_set(task, config.task.reward),
        log=log,
        trainer=trainer,
        assignment=assignment,
    )
