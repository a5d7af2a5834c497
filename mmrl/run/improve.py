"""A stage that optimises prompts, or a supervised one, as a run of its own: evaluate, improve, evaluate again.

What `mmrl train algo=miprov2` and `algo=sft` do, called through `run.stages`; `run.train` is the same for weights by
reinforcement learning. One process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmrl import rng
from mmrl.config import EvalConfig, PromptCommandConfig, RootConfig, SftCommandConfig
from mmrl.config.engines import TransformersConfig
from mmrl.engines import EngineSetup, build_engine
from mmrl.engines.base import Engine
from mmrl.errors import CheckpointError, ConfigError, MmrlError, storage
from mmrl.models.policy import POLICY, Policy, newest_checkpoint, write_policy
from mmrl.report.rundir import RunDir
from mmrl.rollout.environment import Environment, make_environment, sampling_settings
from mmrl.run.build import RECORD, build_task, check_model, evaluated, fixed_engine, reward_set, server_devices
from mmrl.run.check import check_all
from mmrl.run.launch import released
from mmrl.run.settle import module_assignment, run_folder, settle
from mmrl.run.train import reread, step_number
from mmrl.stages.prompts.split import expected_trials, split
from mmrl.system.files import plain
from mmrl.system.stop import stoppable
from mmrl.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mmrl.stages.evaluate import Evaluations
    from mmrl.stages.step_log import StepLog

Config = PromptCommandConfig | SftCommandConfig


def improve(config: Config, command: Sequence[str], resumed: bool = False) -> int:
    """Run one stage, or continue the one in `run.dir`. Returns the exit code."""
    config = settle(config)
    if not resumed:
        check_model(config.model)  # before a folder is made
    folder = run_folder(config.run.dir, config.task.name, config.algo.name, suffix=f"_s{config.seed}")
    config = config.in_folder(folder)
    if not resumed:
        with RunDir.create(folder, plain(config.model_dump(mode="json")), command) as rundir:
            return _run(config, rundir, resumed=False)
    with RunDir.open(folder, command=["mmrl", "train", f"resume={folder}"]) as rundir:
        if rundir.finished:
            raise CheckpointError(f"{folder}: this run is finished; look at it with: mmrl show {folder}")
        # Data and servers may have changed since; its own folder is full by now, which must not count.
        check_all([config.in_folder(None)])
        with storage(rundir.path):
            _cut(config, rundir)
        return _run(config, rundir, resumed=True)


def _cut(config: Config, rundir: RunDir) -> None:
    """Take the run's files back to where it goes on from.

    Prompts have no checkpoint: their optimiser runs again from its seed, a store answers what it has had before, and
    the trials that are in the history stay there.
    """
    if isinstance(config, SftCommandConfig):
        reread(plain(config.model_dump(mode="json")), config.train.steps, rundir)
    else:
        (rundir.path / "summary.json").unlink(missing_ok=True)


@dataclass(kw_only=True)
class StagePlayer:
    """Plays the rollouts of a stage's evaluations. Implements `mmrl.stages.evaluate.Player`."""

    config: RootConfig
    task: Task
    """With the prompts of now."""
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    reward_set: str
    log: StepLog
    trains: bool
    """Whether the stage changes the weights that the engine serves."""

    def environment(self, phase: EvalConfig, key: rng.Key, /) -> Environment:
        """See `Player.environment`."""
        settings = sampling_settings(phase, self.config.task)
        return make_environment(self.task, self.engine, self.tokenizer, settings, key)

    def sync(self, version: int, /) -> None:
        """The engine samples from the very weights that are trained, if any are: only their number is new."""
        if self.trains:
            self.engine.set_version(version)


def _run(config: Config, rundir: RunDir, *, resumed: bool) -> int:
    # Here, since they import numpy and rich, which a refused config need not wait for.
    import torch

    from mmrl.report.console import finish
    from mmrl.report.progress import Progress
    from mmrl.report.trackers import trackers
    from mmrl.stages.evaluate import Evaluations
    from mmrl.stages.step_log import StepLog

    started = time.perf_counter()
    torch.set_num_threads(config.hardware.threads or 1)
    task = build_task(config.task, config.seed)
    steps = _steps(config, task)
    name = config.run.name or f"{config.algo.name}-{task.name}-s{config.seed}"
    sent = {"name": name, "group": f"{config.algo.name}-{task.name}", "device": config.hardware.device}
    done = step_number(newest_checkpoint(rundir.path)) if resumed else 0
    live, metric = config.run.progress, task.main_metric
    with (
        Progress(total=steps, title=name, live=live, main_metric=metric, first_step=done) as progress,
        stoppable() as stop,
        released(task),
        trackers(config.run, rundir, **sent, warn=progress.note) as opened,
    ):
        verb = "continuing" if resumed else "starting"
        facts = ", ".join(f"{key} {value}" for key, value in task.describe().items())
        progress.note(f"{verb}: {config.algo.name} on {task.name} with {config.model.name}\n{facts}")
        progress.note(f"run directory: {rundir.path}")
        log = StepLog(rundir=rundir, progress=progress, trackers=opened, stop=stop)
        begun = False
        try:
            with storage(rundir.path), _built(config, task, log) as work:
                begun = True
                examples, drawn = evaluated(task, config, config.eval.split)
                evaluations = Evaluations(examples=examples, facts=drawn, last_step=steps, collector=work.player)
                before = evaluations.baseline()
                facts_of_stage = work.run(evaluations, resumed)
                after = evaluations.final()
                described = {**task.describe(), **evaluations.facts, **facts_of_stage}
                text = finish(
                    rundir,
                    {**described, **work.player.engine.describe()},
                    before,
                    after,
                    seed=config.seed,
                    split=config.eval.split,
                    bootstrap=config.eval.bootstrap,
                    seconds=time.perf_counter() - started,
                    main_metric=task.main_metric,
                )
        except (MmrlError, KeyboardInterrupt) as error:
            if begun or not isinstance(error, ConfigError):
                progress.note(f"stopped; continue with: mmrl train resume={rundir.resumed_as}")
            raise
    print(text)
    return 0 if rundir.finished else 1


def _steps(config: Config, task: Task) -> int:
    """Steps of a supervised stage; about as many trials as an optimiser of prompts makes, 0 where it does not say."""
    if isinstance(config, SftCommandConfig):
        return config.train.steps
    _, validation = split(config.algo, task.examples("train"), config.seed)
    return expected_trials(config.algo, len(task.program.modules), len(validation))


@dataclass(kw_only=True)
class _Work:
    """A stage, ready to run."""

    player: StagePlayer
    run: Callable[[Evaluations, bool], Mapping[str, str]]
    """Improves the policy; the facts of the stage for the summary. (evaluations, resumed)"""


@contextmanager
def _built(config: Config, task: Task, log: StepLog) -> Iterator[_Work]:
    """The parts of a stage; its engine is closed at the end."""
    with _prompts(config, task, log) if isinstance(config, PromptCommandConfig) else _sft(config, task, log) as work:
        yield work


@contextmanager
def _prompts(config: PromptCommandConfig, task: Task, log: StepLog) -> Iterator[_Work]:
    from mmrl.stages.prompts.stage import PromptStage

    rewards, devices = reward_set(task, config.task.reward), server_devices(config.hardware)
    start = Policy(base=config.model.path)
    with fixed_engine(config, start, log.rundir.path, devices=devices) as (engine, tokenizer):
        player = StagePlayer(
            config=config, task=task, engine=engine, tokenizer=tokenizer, reward_set=rewards, log=log, trains=False
        )

        def run(evaluations: Evaluations, resumed: bool) -> Mapping[str, str]:
            result = PromptStage(
                config=config,
                task=task,
                engine=engine,
                tokenizer=tokenizer,
                reward_set=rewards,
                rundir=log.rundir,
                log=log,
            ).run()
            evaluations.last_step = max(1, result.trials)
            if result.improved:
                player.task = build_task(config.task, config.seed, str(result.prompts))
            kept = str(result.prompts) if result.improved else config.task.prompts
            write_policy(log.rundir.path, weights=config.model.path, prompts=kept, task=task.name)
            # A further stage begins with these files, perhaps days later.
            log.rundir.ledger.note(log.rundir.path / POLICY)
            log.rundir.ledger.note(result.prompts)
            return result.describe()

        yield _Work(player=player, run=run)


@contextmanager
def _sft(config: SftCommandConfig, task: Task, log: StepLog) -> Iterator[_Work]:
    from mmrl.models.load import load_policy
    from mmrl.stages.sft import SftStage, trainable

    hardware, model = config.hardware, config.model
    assignment = module_assignment(model, config.algo, task.program.modules, config.engine.endpoints)
    loaded, tokenizer, serving = load_policy(Policy(base=model.path, modules=assignment.served), model, hardware.device)
    policy = trainable(loaded, config, assignment)
    # In this process, whatever engine the profile names: it samples from the very weights that are trained.
    decoding = config.engine if isinstance(config.engine, TransformersConfig) else TransformersConfig()
    setup = EngineSetup(
        max_context=config.task.max_context,
        threads=hardware.threads,
        **serving,
        weights=model,
        device=hardware.device,
        folder=log.rundir.path,
    )
    engine = build_engine(decoding, policy, tokenizer, setup)
    stored = plain(config.model_dump(mode="json"))
    try:
        rewards = reward_set(task, config.task.reward)
        player = StagePlayer(
            config=config, task=task, engine=engine, tokenizer=tokenizer, reward_set=rewards, log=log, trains=True
        )

        def run(evaluations: Evaluations, resumed: bool) -> Mapping[str, str]:
            def evaluate(step: int) -> Mapping[str, float]:
                return evaluations.metrics(step) if evaluations.due(step) and step < config.train.steps else {}

            stage = SftStage(
                config=config,
                task=task,
                tokenizer=tokenizer,
                engine=engine,
                reward_set=rewards,
                log=log,
                model=policy,
                assignment=assignment,
                extra=lambda step: {RECORD: {"config": stored, **log.rundir.recorded()}},
                evaluate=evaluate,
            )
            stage.run(resumed)
            return {**stage.describe(), **assignment.describe()}

        yield _Work(player=player, run=run)
    finally:
        engine.close()
