"""`mmrl eval`: any policy on any task's split, item by item; a stopped one continues."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmrl.config import EvalRunConfig
from mmrl.engines import needs_model
from mmrl.engines.base import total_usage
from mmrl.errors import CheckpointError, StorageError, TooManyFailures, continue_with, failure_summary, located, storage
from mmrl.models.merged import require_undamaged
from mmrl.records import Example, Forest
from mmrl.report.console import show_run
from mmrl.run.build import build_task, check_policy, evaluated, evaluation_devices, fixed_engine, reward_set
from mmrl.run.check import Checked, check_all, served
from mmrl.run.inputs import inputs_of
from mmrl.run.launch import released
from mmrl.run.settle import Settled, refuse_edits, settle, stored_config
from mmrl.stages.evaluate import (
    drop_failed,
    evaluate,
    evaluation_metrics,
    failed_kinds,
    infrastructure_failures,
    read_items,
    too_many_failed,
    without_scores,
)
from mmrl.store.journal import read_step, write_step
from mmrl.store.policy import Policy, describe_weights, is_shipped, other_task
from mmrl.store.rundir import RunDir
from mmrl.system.files import JsonObject
from mmrl.system.notebook import global_state_kept
from mmrl.system.stop import stoppable
from mmrl.tasks.base import Task


def evaluate_policy(checked: Checked[EvalRunConfig]) -> Path:
    """Run `mmrl eval`: evaluate a policy on a task's split. Returns the directory with the results of each item."""
    settled = settle(checked.config)
    config = settled.config
    # Before a folder is made: a policy that cannot be had must leave none behind.
    if needs_model(config.engine.name) and (note := check_policy(served(config), config)):
        print(f"warning: {note}", file=sys.stderr)
    settled = settled.in_folder("eval")
    stored = settled.config.model_dump(mode="json")
    with RunDir.create(settled.folder, stored, config.typed.command, inputs_of(stored)) as rundir:
        _evaluate(settled, rundir)
    return settled.folder


def resume_evaluation(folder: Path) -> None:
    """Continue a stopped `mmrl eval`: items already evaluated stay, those with an infrastructure failure run again."""
    config = stored_config(folder, EvalRunConfig)
    refuse_edits(folder, config)
    with RunDir.open(folder, command=["mmrl", "eval", f"resume={folder}"]) as rundir:
        with located(f"{folder}/config.yaml: "):
            check_all([config.in_folder(None)])  # its own directory is full, which must not count
        _evaluate(settle(config), rundir)


@global_state_kept()
def _evaluate(settled: Settled[EvalRunConfig], rundir: RunDir) -> None:
    import torch

    config = settled.config
    torch.set_num_threads(config.hardware.threads or 1)
    task = build_task(config.task, config.seed)
    rundir.note_main_metric(task.main_metric)
    policy = served(config)
    require_undamaged(policy, config.model)
    examples, subset = evaluated(task, config, config.split)
    items, usage, requests = _items(config, rundir, task, policy, examples)
    # A summary of one split must not list the sizes of the others as if they counted.
    other_splits = {f"{split} items" for split in ("train", "dev", "test") if split != config.split}
    facts = {name: fact for name, fact in task.describe().items() if name not in other_splits}
    facts |= {**subset, **usage, **describe_weights(policy.modules), **other_task(config.policy, config.task.name)}
    facts |= unsuited(config.policy, facts)
    metrics, failure = evaluation_metrics(items, config.eval, config.seed), too_many_failed(items, config.eval)
    recorded = (without_scores(metrics) if failure else metrics) | requests
    rundir.write_summary(
        {"policy": config.policy, "task": task.name, "split": config.split, "metrics": recorded, "facts": facts}
    )
    print(f"{show_run(rundir.path)}\n\n{_failures_text(items, metrics, rundir.path)}")
    if failure:
        unstarted = len(examples[: config.eval.items]) - len(items)
        skipped = f"; {unstarted} items were not begun" if unstarted else ""
        raise TooManyFailures(f"{failure}{skipped}; once that is mended: {_resume(rundir.path)}")


def unsuited(policy: str, facts: Mapping[str, object]) -> dict[str, str]:
    """Return the note beside numbers of the tiny model on real data, which look like results and are none."""
    if not is_shipped(policy) or "mini world" in str(facts.get("data", "mini world")):
        return {}
    return {"note": "the tiny model is made for the mini world and cannot read real text"}


def _items(
    config: EvalRunConfig, rundir: RunDir, task: Task, policy: Policy, examples: Sequence[Example]
) -> tuple[list[JsonObject], dict[str, str], dict[str, float]]:
    """Return the results of each item, stored or new; and facts and metrics of the engine that made them."""
    from mmrl.rollout.environment import make_environment, sampling_settings

    settings = sampling_settings(config.eval, config.task)
    results = rundir.eval_path(policy.step or 0, config.split)
    rundir.note_examples(config.split, examples[: config.eval.items])
    _require_journals(rundir, config.split, results)
    # Journal lines of items with an infrastructure failure stay; the repeated items are added to them.
    repeated = drop_failed(results) > 0

    def write_journal(chunk: int | None, forest: Forest) -> None:
        # Evaluated again, items get files after the last one, since those of other items are never rewritten.
        number = len(rundir.journal_steps(config.split)) if chunk is None else chunk
        write_step(rundir, forest, evaluation=config.split, step=number)

    gpus = evaluation_devices(config.hardware)
    fixed = fixed_engine(config, policy, rundir.path, config.policy, devices=gpus)
    with stoppable(), released(task), fixed as (engine, tokenizer):
        try:
            with storage(rundir.path):
                items = evaluate(
                    lambda key: make_environment(task, engine, tokenizer, settings, key),
                    examples,
                    config.eval,
                    config.seed,
                    reward_set(task, config.task.reward),
                    results,
                    write_journal,
                    again=repeated,
                )
            return items, engine.describe(), total_usage([engine, task])
        except (KeyboardInterrupt, StorageError) as error:
            continue_with(error, _resume(rundir.path))
            raise


def _require_journals(rundir: RunDir, split: str, results: Path) -> None:
    """Refuse to continue an evaluation whose stored items are not all in a whole journal.

    Raises:
        CheckpointError: names the journal.
    """
    try:
        forests = (read_step(rundir, step, evaluation=split)[0] for step in rundir.journal_steps(split))
        journaled = {example for forest in forests for example in forest.examples}
        if lost := [item["id"] for item in read_items(results) if item["id"] not in journaled]:
            raise CheckpointError(f"{rundir.path}/journal: has no rollout of item {lost[0]}, which {results} has")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; restore it from a copy, or evaluate in a new folder") from None


def _resume(path: Path) -> str:
    return f"mmrl eval {shlex.quote(f'resume={path}')}"


def _failures_text(items: Sequence[JsonObject], metrics: Mapping[str, float], path: Path) -> str:
    """Say how many rollouts failed and why."""
    causes, by_model = failure_summary(failed_kinds(items)), f"{metrics['model_failed']:.0f} by the model's own doing"
    text = f"{metrics['failed_share']:.1%} of the rollouts failed {causes}, {by_model}"
    if caught := metrics.get("caught_parse"):
        text += f"; {caught:.0f} replies that do not parse were caught by the program"
    if metrics["failed_share"]:
        text += f"\n{causes.replace(' causes', '')}: {infrastructure_failures(items)}"
        text += f"\nrun again what failed: {_resume(path)}"
    return text
