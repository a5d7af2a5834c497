"""`mmrl train`, whatever the kind of stage; and runs of several stages, each from the policy of the one before.

A stage that optimises prompts, and a supervised one, run here in one process: evaluate, improve, evaluate again
(`run.train` is the same for weights by reinforcement learning). A run of several stages is a folder whose
`stages/1_NAME`, `stages/2_NAME` … are run directories of their own, gone through in turn by the code that runs a stage
alone. What it has of its own is a summary: the evaluations of all stages in one history, what each stage has cost and
gained, and `policy.json`, the policy of the last stage that has ended.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl import rng
from mmrl.config import (
    EvalCommandConfig,
    EvalConfig,
    PromptCommandConfig,
    RootConfig,
    SftCommandConfig,
    StageConfig,
    StagedCommandConfig,
    TrainCommandConfig,
)
from mmrl.config.engines import TransformersConfig
from mmrl.engines import EngineSetup, build_engine
from mmrl.engines.base import Engine
from mmrl.errors import CheckpointError, ConfigError, MmrlError, storage
from mmrl.models.policy import POLICY, STAGES, Policy, newest_checkpoint, prompts_of, write_policy
from mmrl.report.rundir import RunDir, holds_only_leftovers, step_of
from mmrl.report.stage_costs import gather
from mmrl.rollout.environment import Environment, make_environment, sampling_settings
from mmrl.run import train as weights
from mmrl.run.build import RECORD, build_task, check_model, evaluated, fixed_engine, reward_set, server_devices
from mmrl.run.check import check_all
from mmrl.run.launch import released
from mmrl.run.settle import (
    module_assignment,
    run_folder,
    schema_of,
    settle,
    stored_config,
)
from mmrl.run.start import restarted, started
from mmrl.stages.prompts.split import expected_trials, split
from mmrl.system.files import plain, read_jsonl
from mmrl.system.json_lines import stored_lines
from mmrl.system.stop import print_resume, stoppable
from mmrl.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mmrl.stages.evaluate import Evaluations
    from mmrl.stages.step_log import StepLog

Config = PromptCommandConfig | SftCommandConfig
"""Of the stages that run here."""


def begin(config: StageConfig | StagedCommandConfig, command: Sequence[str], resumed: bool = False) -> int:
    """Start a checked run, or continue the one in `run.dir`. Returns the exit code."""
    if isinstance(config, StagedCommandConfig):
        return _in_turn(config, command, resumed)
    if config.start is not None and not resumed:
        config = started(config, Path(config.start.run))
    if isinstance(config, TrainCommandConfig):
        return weights.train(config, command, resumed)
    return improve(config, command, resumed)


def resume(folder: Path) -> int:
    """Continue a stopped or killed run, to the numbers that it would have had."""
    schema = schema_of(RunDir.read(folder).config)
    # an evaluation is refused in words of its own
    config = stored_config(folder, TrainCommandConfig if schema is EvalCommandConfig else schema)
    assert isinstance(config, TrainCommandConfig | PromptCommandConfig | SftCommandConfig | StagedCommandConfig)
    if not isinstance(config, StagedCommandConfig):
        config = restarted(config, folder)
    return begin(config, ["mmrl", "train", f"resume={folder}"], resumed=True)


def _in_turn(config: StagedCommandConfig, command: Sequence[str], resumed: bool) -> int:
    """All stages of a run, from the first that has not ended."""
    folder = run_folder(config.run.dir, config.task.name, config.algo.name, suffix=f"_s{config.seed}")
    config = config.in_folder(folder)
    stored = plain(config.model_dump(mode="json"))
    opened = RunDir.open(folder, command) if resumed else RunDir.create(folder, stored, command)
    with opened as rundir:
        if rundir.finished:
            raise CheckpointError(f"{folder}: this run is finished; look at it with: mmrl show {folder}")
        stages: list[Path] = []
        for number, stage in enumerate(config.stages, start=1):
            assert isinstance(stage, TrainCommandConfig | PromptCommandConfig | SftCommandConfig)
            path = rundir.path / STAGES / f"{number}_{stage.algo.name}"
            print(f"-- stage {number} of {len(config.stages)}: {stage.algo.name}")
            if code := _one(stage, path, stages[-1] if stages else None, command):
                return code
            stages.append(path)
            with storage(rundir.path):
                # After every stage: a run that was killed between two can be evaluated and exported.
                write_policy(rundir.path, weights=str(path), prompts=prompts_of(str(path))[1], task=config.task.name)
                gather(rundir, stages)
        return _finish(config, rundir, stages)


def _one(stage: StageConfig, path: Path, before: Path | None, command: Sequence[str]) -> int:
    """One stage: started, continued, or left as it is where it has ended."""
    if (path / "config.yaml").is_file():
        if (run := RunDir.read(path)).finished:
            # Later stages begin with these files, so damage must not pass into them.
            if changed := run.ledger.changed(None):
                file, problem = next(iter(changed.items()))
                raise CheckpointError(f"{file} {problem}; restore it from a copy, or start a new run")
            print(f"ended before: {path}")
            return 0
        return resume(path)
    if path.is_dir():  # a kill came before its config was written
        if not holds_only_leftovers(path):
            raise CheckpointError(f"{path}: has no config.yaml; restore it from a copy, or move the folder away")
        shutil.rmtree(path)
    made = stage if before is None else started(stage, before)
    if before is not None:
        check_all([made.in_folder(None)])  # prompts and weights are there only now
    return begin(made.in_folder(str(path)), command)


def _finish(config: StagedCommandConfig, rundir: RunDir, stages: Sequence[Path]) -> int:
    """Summary and report of all stages."""
    from mmrl.report.console import finish

    last = max(step for file in (rundir.path / "eval").glob("step-*.jsonl") if (step := step_of(file)) is not None)
    split, metric = config.eval.split, str(RunDir.read(stages[-1]).summary.get("main_metric"))
    summaries = [RunDir.read(path).summary for path in stages]
    text = finish(
        rundir,
        {**dict(summaries[-1].get("facts") or {}), "stages": ", ".join(path.name for path in stages)},
        read_jsonl(rundir.eval_path(0, split)),
        read_jsonl(rundir.eval_path(last, split)),
        seed=config.seed,
        split=split,
        bootstrap=config.eval.bootstrap,
        seconds=sum(float(summary.get("seconds") or 0.0) for summary in summaries),
        main_metric=metric,
    )
    print(text)
    return 0 if rundir.finished else 1


def improve(config: Config, command: Sequence[str], resumed: bool = False) -> int:
    """Run a stage of prompts or a supervised one, or continue the one in `run.dir`. Returns the exit code."""
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
        weights.reread(plain(config.model_dump(mode="json")), config.train.steps, rundir)
    else:
        from mmrl.report.trials import FOLDER, STORED

        # Before a model loads; the stage would come to it later.
        for name, key in STORED.items():
            stored_lines(rundir.path / FOLDER / name, key)
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
    done = weights.step_number(newest_checkpoint(rundir.path)) if resumed else 0
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
            # A damaged file has its own way out, in the error.
            if not isinstance(error, CheckpointError) and (begun or not isinstance(error, ConfigError)):
                print_resume(error, f"mmrl train resume={rundir.resumed_as}", progress.note)
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
            # Known only now: the optimiser decides how many trials it makes.
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
