"""Teachers of mmGRPO: from `algo.teachers` to programs, engines and tokenizers, and to what one step needs of them.

Part of the weight stage. A teacher is the task's program under another policy: prompts of its own, weights of its own
(then with an engine of its own, in process) or a model behind an endpoint, or both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmrl.config import TaskConfig, TrainCommandConfig
from mmrl.config.algo import MmgrpoConfig
from mmrl.config.endpoint import EndpointConfig
from mmrl.config.engine import TransformersConfig
from mmrl.config.teachers import STUDENT, TeacherConfig
from mmrl.errors import ConfigError
from mmrl.models.policy import Policy, resolve
from mmrl.rollout.teachers import LoadedTeacher
from mmrl.tasks.base import Task, continuing_modules

BuildTask = Callable[[TaskConfig, int], Task]


def others(config: TrainCommandConfig) -> list[TeacherConfig]:
    """The teachers that are not the student."""
    if not isinstance(config.algo, MmgrpoConfig):
        return []
    return [teacher for teacher in config.algo.teachers or () if teacher.name != STUDENT]


def teacher_problems(config: TrainCommandConfig, task: Task, build: BuildTask) -> list[str]:
    """Policies that do not exist, prompts that cannot be read, modules that the student's program does not have."""
    problems = []
    for teacher in others(config):
        where = f"algo.teachers: {teacher.name}"
        try:
            policy = policy_of(teacher)
            modules = task_of(teacher, policy, config, build).program.modules
        except ConfigError as error:
            problems += [f"{where}: {problem}" for problem in error.problems]
            continue
        if teacher.endpoint is not None:
            problems += _endpoint_problems(teacher, teacher.endpoint, config, task)
        strange = [name for name in modules if name not in task.program.modules]
        if strange:
            problems.append(
                f"{where}: its program has the modules {', '.join(strange)}, which the student's has not; modules are "
                f"matched by name (the student's: {', '.join(task.program.modules)})"
            )
    return problems


def _endpoint_problems(
    teacher: TeacherConfig, endpoint: EndpointConfig, config: TrainCommandConfig, task: Task
) -> list[str]:
    from mmrl.engines.endpoint import unreachable

    where = f"algo.teachers: {teacher.name}"
    problems = []
    if config.algo.top_k > 0:
        problems.append(f"algo.top_k: got {config.algo.top_k}, and an endpoint ({where}) takes no top_k; use 0")
    if continuing := continuing_modules(task.program):
        problems.append(
            f"{where}: module '{continuing[0]}' of task={task.name} goes on in the context of an earlier reply, which "
            "an endpoint that takes messages cannot; give the teacher a policy instead"
        )
    return problems + unreachable({f"{where}.endpoint": endpoint})


def policy_of(teacher: TeacherConfig) -> Policy | None:
    """Its weights; None for the student's."""
    return None if teacher.policy is None else resolve(teacher.policy, teacher.prompts)


def task_of(teacher: TeacherConfig, policy: Policy | None, config: TrainCommandConfig, build: BuildTask) -> Task:
    """The task with the teacher's prompts."""
    prompts = teacher.prompts or (policy.prompts if policy is not None else None)
    if prompts is None:
        return build(config.task, config.seed)
    return build(config.task.model_copy(update={"prompts": prompts}), config.seed)


def build_teachers(
    config: TrainCommandConfig,
    task: Task,
    engine: Any,
    tokenizer: Any,
    build: BuildTask,
    load: Callable[[Policy, TrainCommandConfig], tuple[Any, Any, Mapping[str, Any]]],
) -> dict[str, LoadedTeacher]:
    """Load the teachers' weights; teachers of the same weights share an engine.

    Args:
        engine: the student's, for teachers that differ by their prompts alone.
        load: policy and config to model, tokenizer, and the engine's arguments for weights per module.
    """
    from mmrl.engines import engine_class
    from mmrl.engines.endpoint import EndpointEngine

    loaded: dict[str, tuple[Any, Any]] = {}
    found = {}
    for teacher in others(config):
        policy = policy_of(teacher)
        own_engine, own_tokenizer = engine, tokenizer
        if policy is not None:
            key = f"{policy.base} {policy.adapter} {policy.adapters}"
            if key not in loaded:
                model, other, serving = load(policy, config)
                model.eval().requires_grad_(False)
                kind = engine_class("transformers")
                settings = {"max_context": config.task.max_context, "threads": config.hardware.threads, **serving}
                # the student's own engine may be another one, whose keys say nothing of this decode loop
                decoding = config.engine if isinstance(config.engine, TransformersConfig) else TransformersConfig()
                loaded[key] = (kind(model, other, decoding, **settings), other)
            own_engine, own_tokenizer = loaded[key]
        if teacher.endpoint is not None:
            own_engine = EndpointEngine(teacher.endpoint, tokenizer, f"algo.teachers.{teacher.name}.endpoint")
        found[teacher.name] = LoadedTeacher(
            task=task_of(teacher, policy, config, build),
            engine=own_engine,
            tokenizer=own_tokenizer,
            shares_vocabulary=own_tokenizer is tokenizer or own_tokenizer.get_vocab() == tokenizer.get_vocab(),
        )
    return found
