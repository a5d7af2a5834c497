"""From a settled config to what runs: task, assignment of weights, trainer, engine, teachers, stages.

Called by `train`, `eval`, `plan` and the checks. torch and transformers load inside the functions that need them: a
config is checked without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.algorithms import ALGORITHMS
from mmrl.algorithms.checks import TURN_SETS
from mmrl.config import EvalCommandConfig, HardwareConfig, ModelConfig, RootConfig, TaskConfig, TrainCommandConfig
from mmrl.config.algo import MmgrpoConfig
from mmrl.config.engines import TransformersConfig
from mmrl.config.teacher import STUDENT, TeacherConfig
from mmrl.engines import EngineSetup, NullEngine, build_engine, engine_class, needs_model
from mmrl.engines.base import Engine
from mmrl.errors import ConfigError, unknown
from mmrl.models.assignment import ModuleAssignment
from mmrl.models.policy import Policy, resolve
from mmrl.report.rundir import RunDir
from mmrl.rollout.environment import make_environment, sampling_settings
from mmrl.rollout.programs import with_program
from mmrl.rollout.teachers import LoadedTeacher
from mmrl.stages import Stage
from mmrl.tasks import TASKS
from mmrl.tasks.base import Task

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mmrl.stages.evaluate import Evaluations
    from mmrl.stages.step_log import StepLog

_TASKS: dict[tuple[str, int], Task] = {}


def build_task(config: TaskConfig, seed: int) -> Task:
    """The task of a config; built once per process and config, since every run of a sweep needs it."""
    key = (config.model_dump_json(), seed)
    if key not in _TASKS:
        if config.name not in TASKS:
            raise ConfigError(unknown("task", config.name, TASKS))
        _TASKS[key] = with_program(TASKS[config.name](config, seed))
    return _TASKS[key]


def module_assignment(config: TrainCommandConfig, task: Task) -> ModuleAssignment:
    """Which module speaks with which weights in a training run."""
    answered = {module: endpoint.model for module, endpoint in (config.engine.endpoints or {}).items()}
    modules = tuple(task.program.modules)
    return ModuleAssignment(model=config.model, algo=config.algo, modules=modules, answered=answered)


def reward_set(config: RootConfig, task: Task) -> str:
    """The reward set of a run: the user's, else the algorithm's own kind."""
    if config.task.reward is not None:
        return config.task.reward
    if isinstance(config, TrainCommandConfig) and ALGORITHMS[config.algo.name].needs_turn_rewards:
        return next((name for name in TURN_SETS if name in task.reward_sets), task.reward_sets[0])
    return task.reward_sets[0]


def check_model(model: ModelConfig) -> None:
    """Find a model that cannot be had before a run directory is made: its tokenizer and its LoRA targets."""
    from mmrl.models.load import load_tokenizer, refuse_targets

    load_tokenizer(model)
    refuse_targets(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRun:
    """The parts of a training run."""

    stages: Sequence[Stage]
    """In the order in which a run goes through them."""
    evaluations: Evaluations
    engines: Sequence[Engine]
    """The policy's first, then those of teachers."""
    assignment: ModuleAssignment

    def describe(self) -> dict[str, str]:
        """Facts for the summary."""
        return {**self.assignment.describe(), **self.engines[0].describe()}

    def close(self) -> None:
        """End what the stages have begun, then free the engines; each is tried, whatever the others raise."""
        with ExitStack() as stack:
            for closing in (*self.engines, *self.stages):
                stack.callback(closing.close)


def build_run(config: TrainCommandConfig, task: Task, log: StepLog, checkpoint: Path | None) -> BuiltRun:
    """Load the policy and everything around it."""
    import torch

    from mmrl.models.load import load_model, load_tokenizer
    from mmrl.stages.collect import Collector
    from mmrl.stages.evaluate import Evaluations
    from mmrl.stages.weights import WeightStage
    from mmrl.trainer.adapters import make_adapters
    from mmrl.trainer.settings import Settings
    from mmrl.trainer.trl_trainer import MmrlTrainer

    torch.set_num_threads(config.hardware.threads or 1)
    tokenizer = load_tokenizer(config.model)
    assignment = module_assignment(config, task)
    trainer = MmrlTrainer(
        load_model(config.model, config.hardware.device),
        tokenizer,
        Settings(train=config.train, algo=config.algo, model=config.model, seed=config.seed),
        output_dir=log.rundir.checkpoints,
        # The stage needs the engine, which needs the trainer's model: so these two look the stage up when called.
        next_batch=lambda step: stage.next_batch(step),
        on_step_end=lambda step, update: stage.on_step_end(step, update),
        resume_from=checkpoint,
        extra=lambda step: assignment.record(),
        adapters=make_adapters(assignment),
    )
    engines, teachers = _build_engines(config, task, trainer.model, tokenizer, assignment, log)
    collector = Collector(
        config=config,
        task=task,
        engine=engines[0],
        tokenizer=tokenizer,
        trainer=trainer,
        examples=task.examples("train"),
        reward_set=reward_set(config, task),
        sync=lambda version: stage.sync(version),
        log=log,
        processes=log.processes,
        teachers=teachers,
    )
    settings = sampling_settings(config.eval, config.task)
    evaluations = Evaluations(
        config=config,
        examples=task.examples(config.eval.split),
        reward_set=collector.reward_set,
        environment=lambda key: make_environment(task, engines[0], tokenizer, settings, key),
        sync=collector.sync,
        log=log,
        processes=log.processes,
    )
    stage = WeightStage(
        algo=config.algo,
        seed=config.seed,
        frozen=assignment.frozen,
        trainer=trainer,
        engines=engines,
        collector=collector,
        evaluations=evaluations,
        log=log,
        processes=log.processes,
    )
    return BuiltRun(stages=[stage], evaluations=evaluations, engines=engines, assignment=assignment)


def _build_engines(
    config: TrainCommandConfig,
    task: Task,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    assignment: ModuleAssignment,
    log: StepLog,
) -> tuple[list[Engine], dict[str, LoadedTeacher]]:
    """The engine that samples the policy, then those of teachers; and the teachers by name."""
    from mmrl.models.load import load_model

    if log.processes.one_samples and not log.processes.main:
        return [NullEngine()], {}
    algo, hardware = config.algo, config.hardware
    setup = EngineSetup(
        max_context=config.task.max_context,
        threads=hardware.threads,
        adapters=assignment.served,
        initial=load_model(config.model, hardware.device) if assignment.copied else None,
        weights=config.model,
        device=hardware.device,
        devices=server_devices(hardware),
        folder=log.rundir.path,
        samplings=((algo.temperature, algo.top_p, algo.top_k),),
    )
    # In this process an engine samples from the very module that is trained (wrapped by peft where there is an
    # adapter), so no weights are copied between updates.
    engine = build_engine(config.engine, model, tokenizer, setup)
    try:
        teachers = _build_teachers(config, task, engine, tokenizer)
    except BaseException:
        engine.close()
        raise
    different = {id(e): e for e in (engine, *(teacher.engine for teacher in teachers.values()))}
    return list(different.values()), teachers


def server_devices(hardware: HardwareConfig) -> tuple[int, ...]:
    """GPUs of the managed server: those kept for it, else those that train too; empty on a CPU or with one process."""
    if hardware.device == "cpu" or (hardware.processes == 1 and not hardware.rollout_devices):
        return ()
    first = hardware.processes if hardware.rollout_devices else 0
    return tuple(range(first, first + (hardware.rollout_devices or hardware.processes)))


def teachers_apart(config: TrainCommandConfig) -> list[TeacherConfig]:
    """The teachers of mmGRPO that are not the student."""
    if not isinstance(config.algo, MmgrpoConfig):
        return []
    return [teacher for teacher in config.algo.teachers or () if teacher.name != STUDENT]


def teacher_policy(teacher: TeacherConfig) -> Policy | None:
    """A teacher's weights; None for the student's."""
    return None if teacher.policy is None else resolve(teacher.policy, teacher.prompts)


def teacher_task(config: TrainCommandConfig, teacher: TeacherConfig, policy: Policy | None) -> Task:
    """The task with the teacher's prompts."""
    prompts = teacher.prompts or (policy.prompts if policy is not None else None)
    task = config.task if prompts is None else config.task.model_copy(update={"prompts": prompts})
    return build_task(task, config.seed)


def _build_teachers(
    config: TrainCommandConfig, task: Task, engine: Engine, tokenizer: PreTrainedTokenizerBase
) -> dict[str, LoadedTeacher]:
    """Load the teachers' weights; teachers of the same weights share an engine, those without use the student's."""
    from mmrl.engines.endpoint_engine import EndpointEngine

    loaded: dict[str, tuple[Engine, PreTrainedTokenizerBase]] = {}
    teachers: dict[str, LoadedTeacher] = {}
    for teacher in teachers_apart(config):
        policy = teacher_policy(teacher)
        own_engine, own_tokenizer = engine, tokenizer
        if policy is not None:
            key = f"{policy.base} {policy.adapter} {policy.adapters}"
            if key not in loaded:
                loaded[key] = _teacher_engine(config, policy)
            own_engine, own_tokenizer = loaded[key]
        if teacher.endpoint is not None:
            own_engine = EndpointEngine(teacher.endpoint, tokenizer, f"algo.teachers.{teacher.name}.endpoint")
        teachers[teacher.name] = LoadedTeacher(
            task=teacher_task(config, teacher, policy),
            engine=own_engine,
            tokenizer=own_tokenizer,
            shares_vocabulary=own_tokenizer is tokenizer or own_tokenizer.get_vocab() == tokenizer.get_vocab(),
        )
    return teachers


def _teacher_engine(config: TrainCommandConfig, policy: Policy) -> tuple[Engine, PreTrainedTokenizerBase]:
    """A teacher's weights in this process, whatever engine serves the student; they are never trained."""
    from mmrl.models.load import load_policy

    model, tokenizer, serving = load_policy(policy, config)
    model.eval().requires_grad_(False)
    # The student's own engine may be another one, whose keys say nothing of this decode loop.
    decoding = config.engine if isinstance(config.engine, TransformersConfig) else TransformersConfig()
    engine = engine_class("transformers")(
        model,
        tokenizer,
        decoding,
        max_context=config.task.max_context,
        threads=config.hardware.threads,
        **serving,
    )
    return engine, tokenizer


@contextmanager
def evaluation_engine(
    config: EvalCommandConfig, policy: Policy, rundir: RunDir
) -> Iterator[tuple[Engine, PreTrainedTokenizerBase]]:
    """The engine that serves `policy`, and the tokenizer; closed at the end."""
    from mmrl.models.load import ServedWeights, load_policy, load_tokenizer

    weights = config.model.model_copy(update={"path": policy.base})
    model: PreTrainedModel | None = None
    serving: ServedWeights = {"adapters": policy.modules, "initial": None}
    if needs_model(config.engine.name):
        model, tokenizer, serving = load_policy(policy, config)
    else:
        tokenizer = load_tokenizer(weights)
    setup = EngineSetup(
        max_context=config.task.max_context,
        threads=config.hardware.threads,
        **serving,
        weights=weights,
        folders=policy.adapters or ({"default": policy.adapter} if policy.adapter is not None else {}),
        device=config.hardware.device,
        folder=rundir.path,
        served=config.policy,
    )
    engine = build_engine(config.engine, model, tokenizer, setup)
    try:
        engine.set_version(policy.step or 0)
        yield engine, tokenizer
    finally:
        engine.close()
