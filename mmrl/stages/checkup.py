"""A few examples of a run, played with its own engine, program, reward and trainer before anything is trained.

Called by `run.doctor`. The draws have a key of their own, so that what a run samples later stays as it would be.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from mmrl.credit.entries import Credit
from mmrl.engines.base import total_usage
from mmrl.errors import MmrlError
from mmrl.records import Call, Forest
from mmrl.report.alarms import NEVER_FACTS, VALIDITY_FACTS
from mmrl.report.findings import ModuleFacts, RunFacts, Timed
from mmrl.rollout.environment import Environment, Stopwatch
from mmrl.rollout.sample import sample
from mmrl.stages.collect import batch_of, train_calls
from mmrl.stages.step_metrics import by_module, module_metrics, never, rollout_metrics
from mmrl.stages.weights import WeightStage
from mmrl.tasks.base import Searching
from mmrl.trainer.selfcheck import check_tries
from mmrl.trainer.sharding import is_sharded

PHASE = "doctor"
"""In the place of a step in the key of every draw."""
COMPARED = 8
"""Calls of a module whose log-probabilities the trainer computes too."""


def examine(stage: WeightStage, count: int) -> tuple[RunFacts, Forest]:
    """Play `count` training examples as a step would; a collective of all processes of the run.

    Returns:
        What they show, and their rollouts.

    Raises:
        SyncFailure: the engine did not take the weights.
    """
    collector = stage.collector
    config, task, processes = collector.config, collector.task, stage.log.processes
    # Those of a step and not the first rows, which a file may have sorted by label.
    examples = batch_of(collector.examples, min(count, len(collector.examples)), 1, config.seed)
    usage = total_usage(stage.engines)
    stage.sync(0)
    env, plans = collector.planned(examples, (config.seed, PHASE))
    started, busy = time.perf_counter(), collector.engine.busy_s
    forest = asyncio.run(sample(env, plans, collector.reward_set))
    seconds = time.perf_counter() - started
    idle = max(0.0, seconds - (collector.engine.busy_s - busy))
    # As between the phases of a step: the trainer needs the memory that an engine on its device holds.
    collector.engine.sleep()
    forest = processes.forest(forest, examples)
    gaps = _gaps(stage, forest)
    metrics = rollout_metrics(forest.rollouts)
    credit = _credit(stage, forest)
    credited = credit.metrics if credit is not None else {}
    spent = {name: total - usage.get(name, 0.0) for name, total in total_usage(stage.engines).items()}
    measured = list(gaps.values())
    facts = RunFacts(
        title=f"{config.algo.name} on {task.name} with {config.model.path} ({config.engine.name})",
        examples=len(examples),
        rollouts=len(forest.rollouts),
        seconds=seconds,
        modules=_modules(forest, gaps, never(task)),
        rewards=[rollout.reward for rollout in forest.rollouts if rollout.reward is not None],
        groups=int(credited.get("credit/groups", 0)),
        equal=credited.get("credit/zero_variance_share", 0.0),
        unpacked=_unpacked(stage, forest, credit),
        failed=_failed(forest),
        caught=len(forest.caught),
        tools={name: _timed(watch, seconds, idle) for name, watch in sorted(env.tools.items())},
        reward=_timed(env.scoring, seconds, idle),
        gap=max(measured) if measured else None,
        coverage=task.gold_shares.get("train") if isinstance(task, Searching) else None,
        gold_found=metrics.get("task/gold_retrieved"),
        judge_fallback=metrics.get("task/judge_fallback", 0.0),
        requests=spent.get("endpoint/requests", 0.0),
        retries=spent.get("endpoint/retries", 0.0),
        endpoints=bool(config.engine.endpoints),
        max_tokens=config.task.max_tokens,
        max_context=_context(env, collector.tokenizer.model_max_length),
        max_failed_share=config.train.max_failed_share,
    )
    return facts, forest


def _context(env: Environment, longest: int) -> int | None:
    """Prompt + completion limit; a tokenizer that knows none has an absurd number."""
    return env.settings.max_context or (longest if longest < 1 << 24 else None)


def _timed(watch: Stopwatch, seconds: float, idle: float) -> Timed:
    """A stopwatch against the rollouts' `seconds`, of which nothing was generated during `idle`."""
    # Without the longest: the first use of a tool may open an index, which no later one has to.
    few = watch.calls < 2
    return Timed(
        calls=watch.calls,
        seconds=watch.spent if few else (watch.spent - watch.longest) / (watch.calls - 1),
        share=min(watch.seconds, idle) / seconds if seconds else 0.0,
        empty=watch.empty / watch.calls if watch.calls else 0.0,
    )


def _failed(forest: Forest) -> dict[str, tuple[int, str]]:
    failed: dict[str, tuple[int, str]] = {}
    for rollout in forest.rollouts:
        if rollout.error is not None:
            count, first = failed.get(rollout.error, (0, rollout.error_message))
            failed[rollout.error] = (count + 1, first)
    return failed


def _credit(stage: WeightStage, forest: Forest) -> Credit | None:
    """What the run's algorithm makes of the rollouts; None where there is nothing that it compares."""
    # A critic has no groups, and its values would cost a forward of all rollouts.
    if hasattr(stage.collector.config.algo, "critic") or all(r.reward is None for r in forest.rollouts):
        return None
    return stage.credit(forest)


def _unpacked(stage: WeightStage, forest: Forest, credit: Credit | None) -> str:
    """Why this model's updates cannot be packed, which would end the run at its first step; empty where they can."""
    forwards = stage.collector.trainer.forwards
    if credit is None or not forwards.tries or is_sharded(forwards.accelerator):
        return ""
    try:
        check_tries(forwards, train_calls(forest, credit, dict.fromkeys(forest.examples, 0)))
    except MmrlError as error:
        return str(error)
    return ""


def _gaps(stage: WeightStage, forest: Forest) -> dict[str, float]:
    """Module -> mean |trainer - sampler| log-probability per token of a few calls, by a forward of the trainer."""
    forwards = stage.collector.trainer.forwards
    # Weights are sharded when training starts, and until then no process holds what the others would forward with.
    if is_sharded(forwards.accelerator):
        return {}
    chosen: dict[str, list[Call]] = {}
    for call in forest.calls.values():
        own = chosen.setdefault(call.module, [])
        if call.logprobs and call.completion_ids and call.teacher is None and len(own) < COMPARED:
            own.append(call)
    calls = [call for own in chosen.values() for call in own]
    # Without what credit knows of them: the calls' ids and modules alone are forwarded.
    bare = [replace(call, ref_logprobs=None, values=None, observation_tokens=0) for call in calls]
    trained = forwards.policy_logprobs(bare) if bare else []
    gaps: dict[str, list[float]] = {}
    for call, ours in zip(calls, trained, strict=True):
        assert call.logprobs is not None
        gaps.setdefault(call.module, []).extend(abs(a - b) for a, b in zip(ours, call.logprobs, strict=True))
    return {module: fmean(values) for module, values in gaps.items()}


def _modules(forest: Forest, gaps: Mapping[str, float], without: frozenset[str]) -> list[ModuleFacts]:
    return [_module(name, calls, gaps.get(name), without) for name, calls in by_module(forest).items()]


def _module(name: str, calls: Sequence[Call], gap: float | None, without: frozenset[str]) -> ModuleFacts:
    metrics, prompts = module_metrics(calls, without), [len(call.prompt_ids) for call in calls]
    unread = next((call.text for call in calls if not call.ok), None)
    if unread is None:
        unread = next((c.text for c in calls if any(c.facts.get(fact) for fact in NEVER_FACTS)), "")
    return ModuleFacts(
        module=name,
        calls=len(calls),
        prompt_mean=fmean(prompts),
        prompt_max=max(prompts),
        completion_mean=metrics["length"],
        completion_max=max(call.completion_tokens for call in calls),
        cut=metrics["finish_length_share"],
        parsed=metrics.get("format_rate"),
        shares={fact: metrics[fact] for fact in (*VALIDITY_FACTS, *NEVER_FACTS) if fact in metrics},
        gap=gap,
        unread=unread,
    )
