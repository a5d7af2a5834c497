"""`mmrl audit`: what each call of a program was worth, and how far each algorithm's credit and gradient are from it."""

from __future__ import annotations

import math
import shlex
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mmrl import rng
from mmrl.algorithms import ALGORITHMS
from mmrl.audit.settings import AuditKeys
from mmrl.config import RlRunConfig
from mmrl.config.algo import CriticConfig
from mmrl.config.base import value_at
from mmrl.config.tasks import UNSCORED
from mmrl.errors import ConfigError, MmrlError, continue_with, refuse, storage
from mmrl.run.build import build_task, check_model, reward_set, separate_teachers
from mmrl.run.check import check_all
from mmrl.run.launch import released
from mmrl.run.rl import unrepeatable
from mmrl.run.settle import module_assignment, settle
from mmrl.run.start import started
from mmrl.store.policy import resolve, run_config, source_of
from mmrl.system.bar import progress
from mmrl.system.files import JsonObject, atomic_write, dumps, plain
from mmrl.tasks.base import Task

if TYPE_CHECKING:
    from mmrl.audit.ledger import Ledger
    from mmrl.rollout.branches import Leaf
    from mmrl.stages.rl import RlStage

TOP = Path("outputs/audits")
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "parse_retries": 0}
"""How all rows sample unless it is typed: the policy itself, of which there is one."""
AT_RATIO_ONE = ("epochs", "minibatches", "clip", "clip_high", "beta", "ratio_one")
"""Keys of `algo` about updates, of which an audit makes none."""
TRAIN_KEYS = ("microbatch_tokens", "packing", "max_failed_share")
OF_FIT = ("critic_lr_factor", "critic_warmup_steps", "value_clip", "critic_init")
"""Keys of `algo` about a critic's training."""
FIT_KEYS = ("lr", "grad_clip", "adam_beta1", "adam_beta2", "weight_decay")
"""Keys of `train` that a critic is fitted by."""


def audit(rows: Sequence[RlRunConfig], keys: AuditKeys, command: Sequence[str]) -> Path:
    """Run `mmrl audit`; the same command goes on with one that was stopped. Returns the folder.

    Args:
        rows: config of a training run by each algorithm.
        command: as typed.

    Raises:
        ConfigError: every problem, before anything is played.
    """
    refuse(dict.fromkeys(problems(rows, keys)))
    rows = [_alone(_as_audited(row)) for row in rows]
    check_all([row.in_folder(None) for row in rows])
    first = settle(started(rows[0])).config
    task = build_task(first.task, first.seed)
    refuse(dict.fromkeys(_of_task(rows, keys, task)))
    check_model(first)
    shared = {section: getattr(first, section) for section in ("model", "hardware", "engine", "start")}
    prompts = {"prompts": first.task.prompts}
    settled = {
        row.algo.name: row.model_copy(update={**shared, "task": row.task.model_copy(update=prompts)}) for row in rows
    }
    settings = _settings(settled, keys)
    digest = f"{rng.digest(dumps(settings)):032x}"[:12]
    out = TOP / f"{task.name}-{digest}" if keys.out is None else Path(keys.out)
    # torch and TRL load for an audit that nothing stands against.
    from mmrl.audit.gradients import length_unit
    from mmrl.audit.ledger import Ledger
    from mmrl.audit.page import page
    from mmrl.audit.results import result_of
    from mmrl.audit.table import table

    ledger = Ledger(out, settings)
    try:
        if "done" not in ledger:
            with storage(out):
                _measure(settled, keys, task, ledger, out)
            ledger.piece("done", lambda: True)
        units = {name: length_unit(row.algo) for name, row in settled.items()}
        result = result_of(ledger, keys, _told(settled, keys), units, first.seed)
    except (MmrlError, KeyboardInterrupt) as error:
        if not isinstance(error, ConfigError):  # which the same command would meet again
            continue_with(error, shlex.join(command))
        raise
    finally:
        ledger.close()
    atomic_write(out / "audit.json", dumps(result, indent=1) + "\n")
    atomic_write(out / "audit.html", page(result))
    print(f"{table(result)}\n\npage    {out / 'audit.html'}")
    return out


def problems(rows: Sequence[RlRunConfig], keys: AuditKeys) -> list[str]:
    """Return what stands against an audit, before any data is read."""
    found = []
    for row in rows:
        name, algo = row.algo.name, row.algo
        found += [
            f"{name}.{section}: is another than that of {rows[0].algo.name}, and an audit is of one policy; "
            f"expected settings of {section} for all rows"
            for section in ("task", "model", "engine", "hardware", "seed", "plugins")
            if _shared(row, section) != _shared(rows[0], section)
        ]
        fits = _fits(row, keys.policy)
        if fits and isinstance(algo, CriticConfig) and not (row.train.lr and algo.critic_lr_factor):
            found.append(
                f"algo.critic_lr_factor: got {algo.critic_lr_factor} with train.lr={row.train.lr}, and mmrl audit fits "
                f"a critic of this policy for {name}; expected both above 0, or policy=RUN of a run with algo={name}"
            )
        if separate_teachers(algo):
            found.append(f"algo.teachers: mmrl audit plays the policy alone; leave {name}, or its teachers, out")
        if algo.distill_kl == "exact":
            found.append(
                f"algo.distill_kl: got exact for {name}, and mmrl audit compares gradients of samples; use sampled"
            )
        if keys.truth == "reward" and algo.exchanged_modules(("", "")):
            found.append(f"truth: got reward, and the reward of {name} is made of second plays; expected outcome")
        for key in row.typed.keys:
            section, _, rest = key.partition(".")
            idle = section in ("eval", "run") or (
                section == "train" and rest not in TRAIN_KEYS and not (fits and rest in FIT_KEYS)
            )
            if idle or (section == "algo" and (rest in AT_RATIO_ONE or (rest in OF_FIT and not fits))):
                found.append(f"{key}: has no effect on mmrl audit, which updates and evaluates nothing")
    for key, value in SAMPLING.items():
        values = {row.algo.name: getattr(row.algo, key) for row in map(_as_audited, rows)}
        if len(set(values.values())) > 1:
            got = ", ".join(f"{value} ({name})" for name, value in values.items())
            found.append(
                f"algo.{key}: got {got}, and an audit is of one policy; expected one value for all, as {value}"
            )
    return found


def _shared(row: RlRunConfig, section: str) -> object:
    """Return a section of what all rows share."""
    return row.task.model_copy(update={"reward": None}) if section == "task" else getattr(row, section)


def _fits(row: RlRunConfig, policy: str | None) -> bool:
    """Return True for a row whose critic is fitted here: it has one, and it did not train the policy."""
    if not isinstance(row.algo, CriticConfig):
        return False
    return policy is None or value_at(run_config(policy), "algo.name") != row.algo.name


def _of_task(rows: Sequence[RlRunConfig], keys: AuditKeys, task: Task) -> list[str]:
    """Return what stands against an audit of this task."""
    found = []
    if (available := len(task.examples("train"))) < keys.examples:
        found.append(f"examples: got {keys.examples}, the train split has {available}")
    found += [
        f"{setting}, and an audit plays an agent again with the replies of a rollout; expected an agent, or an "
        "environment, in which all is the same then"
        for setting in unrepeatable(rows[0].task, task)
    ]
    answered = rows[0].engine.endpoints or {}
    if answered:
        found.append(
            f"engine.endpoints: {', '.join(answered)} answered by another model, whose log-probabilities are not here; "
            "expected the policy for all modules"
        )
    if reward_set(task, rows[0].task.reward) == UNSCORED:
        found.append("task.reward: nothing scores this task, and an audit compares rewards; expected task.metric")
    if keys.truth == "reward":
        sets = {row.algo.name: reward_set(task, row.task.reward, row.algo.name) for row in rows}
        kinds = {row.algo.name: f"{sets[row.algo.name]} set, {_optimised(row)}" for row in rows}
        if len({repr((sets[row.algo.name], _optimised(row))) for row in rows}) > 1:
            said = "; ".join(f"{name}: {kind}" for name, kind in kinds.items())
            found.append(f"truth: got reward, and the rows optimise different ones ({said}); expected outcome")
        elif "gain" in sets.values():
            found.append("truth: got reward, and information gain is no reward of the task's; expected outcome")
    frozen = {row.algo.name: module_assignment(row, task.program.modules).untrained for row in rows}
    if len(set(frozen.values())) > 1:
        said = "; ".join(f"{name}: {', '.join(sorted(modules)) or 'none'}" for name, modules in frozen.items())
        found.append(f"algo: the rows leave different modules out of the loss ({said}); expected the same ones")
    return found


def _as_audited(row: RlRunConfig) -> RlRunConfig:
    """Return a row's config without what belongs to updates, and with the sampling that all rows share."""
    typed = {key.removeprefix("algo.") for key in row.typed.keys if key.startswith("algo.")}
    changed: dict[str, object] = {key: value for key, value in SAMPLING.items() if key not in typed}
    changed |= {"beta": 0.0, "epochs": 1, "minibatches": 1}
    train = row.train.model_copy(update={"batch_size": 1, "staleness": 0, "tis": None, "old_logprobs": "sampler"})
    return row.model_copy(update={"algo": row.algo.model_copy(update=changed), "train": train})


def _alone(row: RlRunConfig) -> RlRunConfig:
    single = {"processes": 1, "nodes": 1, "sharding": "none", "cpu_offload": False, "ray": None}
    return row.model_copy(update={"hardware": row.hardware.model_copy(update=single)})


def _optimised(row: RlRunConfig) -> Optimised:
    """Return what a row's reward has besides the outcome."""
    algo, algorithm = row.algo, ALGORITHMS[row.algo.name]
    turns = algorithm.needs_turn_rewards or getattr(algorithm, "merge", False)
    return Optimised(
        turns, dict(getattr(algo, "penalty_scale", None) or {}) if getattr(algo, "penalties", False) else None
    )


@dataclass(frozen=True)
class Optimised:
    """The reward of a rollout that credit is made of."""

    turns: bool = False
    """With the rewards of turns."""
    penalties: Mapping[str, float] | None = None
    """With the penalties of modules, by these factors (else 1); None: without."""

    def __str__(self) -> str:
        parts = ["outcome", *["turn rewards"] * self.turns, *["penalties"] * (self.penalties is not None)]
        return " + ".join(parts)

    def of(self, leaf: Leaf) -> float | None:
        """Return it; None where the rollout failed from an outside cause."""
        if leaf.rollout.reward is None:
            return None
        turns = math.fsum(call.turn_reward or 0.0 for call in leaf.calls) if self.turns else 0.0
        factors = self.penalties
        penalties = [] if factors is None else [factors.get(call.module, 1.0) * call.penalty for call in leaf.calls]
        return leaf.rollout.reward + turns + math.fsum(penalties)


def _measure(rows: Mapping[str, RlRunConfig], keys: AuditKeys, task: Task, ledger: Ledger, out: Path) -> None:
    """Play and measure what the ledger does not have."""
    from mmrl.audit.measure import Measurement
    from mmrl.audit.plays import Plays
    from mmrl.stages.collect import batch_of

    config = next(iter(rows.values()))
    fitted = [name for name, row in rows.items() if _fits(row, keys.policy)]
    with _stages(rows, task, keys.policy, fitted) as stages:
        stage = next(iter(stages.values()))
        named = reward_set(task, config.task.reward, config.algo.name if keys.truth == "reward" else "")
        value = (_optimised(config) if keys.truth == "reward" else Optimised()).of
        examples = batch_of(stage.examples, keys.examples, 1, config.seed)
        plays = Plays(keys=keys, stage=stage, examples=examples, reward_set=named, value=value)
        work = Measurement(plays=plays, rows=stages, fitted=fitted, ledger=ledger, folder=out)
        places = work.record()
        expected = work.expected_calls(places)
        total = sum(expected.values())
        parts = ", ".join(f"{part} {calls:,}" for part, calls in expected.items())
        print(f"about {total:,} calls: {parts}; {len(places)} decisions", file=sys.stderr, flush=True)
        with progress("audit", total=total, unit="calls") as advance:
            plays.advance = advance
            work.measure(places)


@contextmanager
def _stages(
    rows: Mapping[str, RlRunConfig], task: Task, policy: str | None, fitted: Collection[str]
) -> Iterator[dict[str, RlStage]]:
    """Build the policy, and a stage of each row around it; a row with a critic or teachers has a trainer of its own."""
    from mmrl.report.progress import Progress
    from mmrl.report.trackers import Trackers
    from mmrl.run.rl import build
    from mmrl.stages.step_log import StepLog
    from mmrl.store.rundir import RunDir
    from mmrl.system.stop import stoppable

    config = next(iter(rows.values()))
    with (
        tempfile.TemporaryDirectory(prefix="mmrl-audit-", ignore_cleanup_errors=True) as folder,
        RunDir.create(Path(folder) / "run", plain(config.model_dump(mode="json")), ["mmrl", "audit"]) as rundir,
        Progress(total=1, title="audit", live=False, console=Console(quiet=True)) as quiet,
        stoppable() as stop,
        released(task),
        ExitStack() as stack,
    ):
        log = StepLog(rundir=rundir, progress=quiet, trackers=Trackers({}), stop=stop)

        def built(row: RlRunConfig) -> RlStage:
            stage = build(row, task, log)
            stack.callback(stage.close)
            stage.sync(0)
            if stage.trainer.critic is not None and row.algo.name not in fitted:
                assert policy is not None  # or it is fitted
                stage.trainer.critic.load(_checkpoint(policy))
            return stage

        shared: RlStage | None = None
        stages = {}
        for name, row in rows.items():
            if isinstance(row.algo, CriticConfig) or row.algo.distill is not None or row.algo.privileged is not None:
                stages[name] = built(row)
                continue
            shared = built(row) if shared is None else shared
            named, assignment = reward_set(task, row.task.reward, name), module_assignment(row, task.program.modules)
            stages[name] = replace(shared, config=row, reward_set=named, assignment=assignment)
        yield stages


def _checkpoint(run: str) -> Path:
    """Return the checkpoint of a run's policy."""
    policy = resolve(run)
    found = source_of(policy.adapter or policy.base)
    if found is None:
        raise ConfigError(f"policy: {run} has no checkpoint with a critic")
    return found


def _told(rows: Mapping[str, RlRunConfig], keys: AuditKeys) -> JsonObject:
    """Return the settings that a result shows: no folder, no path."""
    first = next(iter(rows.values()))
    shown = keys.model_dump(mode="json", exclude={"out", "policy"})
    return {
        **shown,
        "seed": first.seed,
        "task": first.task.name,
        "model": first.model.name,
        "temperature": first.algo.temperature,
    }


def _settings(rows: Mapping[str, RlRunConfig], keys: AuditKeys) -> JsonObject:
    """Return all that the numbers depend on."""
    configs = {name: row.model_dump(mode="json", exclude={"run", "eval", "train"}) for name, row in rows.items()}
    for name, row in rows.items():
        if _fits(row, keys.policy):
            configs[name]["train"] = row.train.model_dump(mode="json", include=set(FIT_KEYS))
    settings: JsonObject = plain({"keys": keys.model_dump(mode="json", exclude={"out"}), "rows": configs})
    return settings
