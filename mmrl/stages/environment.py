"""From config, task, engine and tokenizer to the environment that rollouts of one step or evaluation share.

Apart from `stages.weights`, so that an evaluation does not have to load the trainer.
"""

from __future__ import annotations

from typing import Any

from mmrl import rng
from mmrl.config import EvalConfig, RootConfig
from mmrl.engines.base import Engine
from mmrl.models.chat import decode_text, render_observation, render_prompt
from mmrl.rollout.context import Environment, SamplingSettings
from mmrl.tasks.base import Task


def make_environment(
    config: RootConfig, task: Task, engine: Engine, tokenizer: Any, settings: SamplingSettings, key: rng.Key
) -> Environment:
    """The environment that rollouts of one step or evaluation share."""
    return Environment(
        task=task,
        engine=engine,
        render=lambda messages: render_prompt(tokenizer, messages),
        extend=lambda context, observation: render_observation(tokenizer, context, observation),
        decode=lambda ids: decode_text(tokenizer, ids),
        settings=settings,
        key=key,
        timeout_s=config.task.timeout_s,
    )


def eval_settings(config: RootConfig, settings: EvalConfig) -> SamplingSettings:
    """Sampling in evaluation."""
    return SamplingSettings(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        parse_retries=settings.parse_retries,
        max_tokens=config.task.max_tokens,
        max_context=config.task.max_context,
    )
