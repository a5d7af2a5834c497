"""A few examples of a run, played with its own engine, program, reward and trainer before anything is trained.

Called by `run.doctor`. The draws have a key of their own, so that what a run samples later stays as it would be.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from statistics import fmean

from mmrl.credit.entries import Credit
from mmrl.engines.base import total_usage
from mmrl.errors import MmrlError
from mmrl.records import Call, Forest
from mmrl.report.alarms import NEVER_FACTS
from mmrl.report.doctor import Probe
from mmrl.rollout.environment import Stopwatch
from mmrl.rollout.sample import sample
from mmrl.stages.collect import batch_of, train_calls
from mmrl.stages.rl import RlStage
from mmrl.stages.step_metrics import by_module, forest_metrics, never_metrics
from mmrl.tasks.base import Searching
from mmrl.trainer.selfcheck import check_tries
from mmrl.trainer.sharding import is_sharded

PHASE = "doctor"
"""Stand-in for the step in the key of every draw."""
COMPARED = 8
"""Calls of a module whose log-probabilities the trainer computes too."""


def examine(stage: RlStage, count: int) -> tuple[Probe, Forest]:
    """Play `count` training examples as a step would; a collective of all processes of the run.

    Returns:
        What they show, and their rollouts.

    Raises:
        SyncFailure: the engine did not take the weights.
    """
    config, task, processes = stage.config, stage.task, stage.log.processes
    # Those of a step and not the first rows, which a file may have sorted by label.
    examples = batch_of(stage.examples, min(count, len(stage.examples)), 1, config.seed)
    usage = total_usage(stage.engines)
    stage.sync(0)
    env, plans = stage.planned(examples, (config.seed, PHASE))
    started, busy = time.perf_counter(), stage.engine.busy_s
    forest = asyncio.run(sample(env, plans, stage.reward_set))
    seconds = time.perf_counter() - started
    idle = max(0.0, seconds - (stage.engine.busy_s - busy))
    # As between the phases of a step: the trainer needs the memory that an engine on its device holds.
    stage.engine.sleep()
    forest = processes.forest(forest, examples)
    metrics = forest_metrics(forest, never_metrics(task), task.failed_metrics)
    credit = _credit(stage, forest)
    rewards = [rollout.reward for rollout in forest.rollouts if rollout.reward is not None]
    # Without groups all rewards are compared.
    alike = {"credit/zero_variance_share": 1.0} if len(rewards) > 1 and len(set(rewards)) == 1 else {}
    metrics |= {**alike, **(credit.metrics if credit is not None else {}), **_lengths(forest), **_gaps(stage, forest)}
    for name, watch in [*sorted(env.tools.items()), ("reward", env.scoring)]:
        metrics |= {f"tool/{name}/{key}": value for key, value in _timed(watch, seconds, idle).items()}
    spent = {name: total - usage.get(name, 0.0) for name, total in total_usage(stage.engines).items()}
    if requests := spent.get("endpoint/requests"):
        metrics["endpoint/retried"] = spent["endpoint/retries"] / requests
    if isinstance(task, Searching) and "train" in task.gold_shares:
        metrics["corpus/coverage"] = task.gold_shares["train"]
    longest = stage.tokenizer.model_max_length
    return Probe(
        title=f"{config.algo.name} on {task.name} with {config.model.path} ({config.engine.name})",
        examples=len(examples),
        seconds=seconds,
        metrics=metrics,
        failed={r.error: r.error_message for r in reversed(forest.rollouts) if r.error is not None},
        unread=_unread(forest),
        copied=_copied(forest),
        first_reply=next((call.text for call in forest.calls.values()), ""),
        unpacked=_unpacked(stage, forest, credit),
        endpoints=bool(config.engine.endpoints),
        max_tokens=config.task.max_tokens,
        # A tokenizer that knows no limit has an absurd number.
        max_context=env.settings.max_context or (longest if longest < 1 << 24 else None),
        max_failed_share=config.train.max_failed_share,
    ), forest


def _timed(watch: Stopwatch, seconds: float, idle: float) -> dict[str, float]:
    """Compare a stopwatch with the rollouts' `seconds`, of which nothing was generated during `idle`."""
    if not watch.calls:
        return {}
    # Without the longest: the first use of a tool may open an index, which no later one has to.
    few = watch.calls < 2
    return {
        "calls": float(watch.calls),
        "seconds": watch.spent if few else (watch.spent - watch.longest) / (watch.calls - 1),
        "share": min(watch.seconds, idle) / seconds if seconds else 0.0,
        "empty": watch.empty / watch.calls,
    }


def _lengths(forest: Forest) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for module, calls in by_module(forest).items():
        prompts = [len(call.prompt_ids) for call in calls]
        lengths = {"prompt": fmean(prompts), "prompt_max": max(prompts)}
        lengths["length_max"] = max(call.completion_tokens for call in calls)
        metrics |= {f"module/{module}/{name}": float(value) for name, value in lengths.items()}
    return metrics


def _unread(forest: Forest) -> dict[str, str]:
    """Return module -> a reply that could not be parsed, or not be used."""
    useless = [call for call in forest.calls.values() if any(call.facts.get(fact) for fact in NEVER_FACTS)]
    unparsed = [call for call in forest.calls.values() if not call.ok]
    return {call.module: call.text for call in [*reversed(useless), *reversed(unparsed)]}


def _copied(forest: Forest) -> dict[str, tuple[str, float]]:
    """Return module -> the reply that it gives most often, and how often, where that stands in its prompts, too."""
    copied = {}
    for module, calls in by_module(forest).items():
        (reply, count), *_ = Counter(call.text.strip() for call in calls).most_common(1)
        # A word alone, such as a label, is what an instruction asks for; one example says nothing of others.
        prompts = {call.prompt_text for call in calls if call.text.strip() == reply and reply in call.prompt_text}
        if len(reply.split()) > 1 and len(prompts) > 2:
            copied[module] = (reply, count / len(calls))
    return copied


def _credit(stage: RlStage, forest: Forest) -> Credit | None:
    """Return the credit of the rollouts by the run's algorithm; None where there is nothing that it compares."""
    # A critic has no groups, and its values would cost a forward of all rollouts.
    if hasattr(stage.config.algo, "critic") or all(r.reward is None for r in forest.rollouts):
        return None
    return stage.credit(forest)


def _unpacked(stage: RlStage, forest: Forest, credit: Credit | None) -> str:
    """Return the reason why this model's updates cannot be packed, which would end the run; empty if they can."""
    forwards = stage.trainer.forwards
    if credit is None or not forwards.tries or is_sharded(forwards.accelerator):
        return ""
    try:
        check_tries(forwards, train_calls(forest, credit, dict.fromkeys(forest.examples, 0)))
    except MmrlError as error:
        return str(error)
    return ""


def _gaps(stage: RlStage, forest: Forest) -> dict[str, float]:
    """Compute the mean |trainer - sampler| log-probability per token of a few calls of each module."""
    forwards = stage.trainer.forwards
    # Weights are sharded when training starts, and until then no process holds what the others would forward with.
    if is_sharded(forwards.accelerator):
        return {}
    compared: dict[str, list[Call]] = {}
    for call in forest.calls.values():
        module_calls = compared.setdefault(call.module, [])
        if call.logprobs and call.completion_ids and call.teacher is None and len(module_calls) < COMPARED:
            module_calls.append(call)
    calls = [call for module_calls in compared.values() for call in module_calls]
    # Without what credit knows of them: the calls' ids and modules alone are forwarded.
    bare = [replace(call, ref_logprobs=None, values=None, observation_tokens=0) for call in calls]
    trained = forwards.policy_logprobs(bare) if bare else []
    gaps: dict[str, list[float]] = {}
    for call, recomputed in zip(calls, trained, strict=True):
        assert call.logprobs is not None
        gaps.setdefault(call.module, []).extend(abs(a - b) for a, b in zip(recomputed, call.logprobs, strict=True))
    metrics = {f"module/{module}/logprob_gap": fmean(values) for module, values in gaps.items()}
    return metrics | ({"train/logprob_gap_mean": max(metrics.values())} if metrics else {})
