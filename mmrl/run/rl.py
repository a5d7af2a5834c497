"""Reinforcement learning: what stands against a run, and its stage with engines and teachers."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING

from mmrl import engines
from mmrl.algorithms import ALGORITHMS
from mmrl.algorithms import problems as algorithm_problems
from mmrl.config import RlRunConfig, TaskConfig
from mmrl.config.algo import CriticConfig
from mmrl.config.rules import across_sections, engine_name
from mmrl.config.tasks import PRIVILEGED
from mmrl.engines import EngineSetup, build_engine, engine_class
from mmrl.engines.base import Engine
from mmrl.engines.endpoint_engine import unreachable
from mmrl.errors import ConfigError, gathered
from mmrl.models.chat import opens_thoughts
from mmrl.rollout.teachers import LoadedTeacher
from mmrl.run.build import (
    build_task,
    endpoint_problems,
    engine_problems,
    engine_setup,
    load_trainer,
    model_of_teacher,
    reward_set,
    separate_teachers,
    server_devices,
    split_problems,
    teacher_policy,
    teacher_prompts,
    turns_missing,
    unscored_problems,
)
from mmrl.run.distill import load_scorers, module_problems
from mmrl.run.distill import problems as distillation_problems
from mmrl.run.launch import hardware_problems, replica_problems
from mmrl.run.settle import module_assignment
from mmrl.stages.information_gain import gold_problems
from mmrl.system.objects import imported
from mmrl.system.ray_cluster import server_resources
from mmrl.tasks.base import Canonical, Task, continuing_modules
from mmrl.trainer.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mmrl.stages.rl import RlStage
    from mmrl.stages.step_log import StepLog


def plan_problems(config: RlRunConfig, task: Task) -> list[str]:
    """Return problems of a training run wherever it runs: no data is read, no server called, no package looked for."""
    return across_sections(config) + endpoint_problems(config, task) + _rl_problems(config, task)


def _rl_problems(config: RlRunConfig, task: Task) -> list[str]:
    # From cheap to expensive; nothing here leaves this process.
    modules, critic = config.model.modules is not None, getattr(config.algo, "critic", None)
    problems = hardware_problems(config.hardware, engine_name(config), modules, critic)
    problems += replica_problems(config.hardware, getattr(config.engine, "replicas", 1))
    problems += Settings(train=config.train, algo=config.algo, model=config.model, seed=config.seed).problems()
    sets = (*task.reward_sets, *([PRIVILEGED] if config.task.reward == PRIVILEGED else ()))
    problems += unscored_problems(config, task) + negative_rewards(config, task)
    problems += algorithm_problems(config.algo, task.program.modules, sets)
    assignment = module_assignment(config, task.program.modules)
    problems += assignment.problems() + module_problems(config, task.program.modules, assignment.untrained)
    if engine_name(config) == "openai":
        problems += engines.problems(config.engine, "openai", training=True)
    problems += staleness_problems(config) + kl_problems(config)
    if getattr(config.algo, "reserialise", False) and not isinstance(task.program, Canonical):
        problems.append(
            f"algo.reserialise: task {task.name} has no canonical text of what its modules write; leave it out, or "
            "give its program a method canonical(call) (mmrl.tasks.base.Canonical)"
        )
    # What does not fit the modules has its sentence already, and may have no plan.
    problems += [] if problems else replay_problems(config, task)
    return problems + turns_missing(config.task.reward, config.algo.name, task)


def problems(config: RlRunConfig, task: Task) -> list[str]:
    """Return what stands against a run: problems of a plan, teachers that are not there, splits that are too small."""
    rank = config.model.lora.r if config.model.lora is not None else 0
    copied = module_assignment(config, task.program.modules).copied
    found = _rl_problems(config, task) + engine_problems(config, training=True, copied=copied, rank=rank)
    found += teacher_problems(config, task) + split_problems(config.task, task, "train", "task.data.train")
    available, size = len(task.examples("train")), config.train.batch_size
    if size > available > 0:
        found.append(f"train.batch_size: got {size}, the train split has {available} examples")
    if config.algo.refills and size == available:
        batch = f"train.batch_size={available}, all of the train split; use algo.zero_variance=drop"
        found.append(f"algo.zero_variance: got refill, which has no effect with {batch}, or a smaller batch")
    if reward_set(task, config.task.reward, config.algo.name) == "gain":
        found += gold_problems(task, task.examples("train"))
    # What does not fit the modules has its sentence already.
    found += [] if found else distillation_problems(config, task)
    if config.algo.minibatches > size:
        found.append(f"algo.minibatches: got {config.algo.minibatches}, expected at most train.batch_size={size}")
    return found


def kl_problems(config: RlRunConfig) -> list[str]:
    """Return the problem of a KL term in the reward, part of credit, where the engine records no log-probabilities."""
    algo = config.algo
    if not isinstance(algo, CriticConfig) or algo.kl != "reward" or algo.beta == 0:
        return []
    unrecorded = engines.unrecorded_logprobs(config.engine, (algo.temperature, algo.top_p, algo.top_k))
    kept = "algo.kl: got reward, which takes the log-probabilities that the engine records, and"
    return [f"{kept} {unrecorded}, algo.kl=loss or algo.beta=0"] if unrecorded else []


def staleness_problems(config: RlRunConfig) -> list[str]:
    """Return the problems of sampling the next batch while this one trains."""
    if not (staleness := config.train.staleness):
        return []
    algo, problems = config.algo, []
    if algo.refills:
        late = "algo.zero_variance=refill, which samples after credit; use algo.zero_variance=drop"
        problems.append(f"train.staleness: got {staleness} with {late}")
    sampling = (algo.temperature, algo.top_p, algo.top_k)
    if staleness > 1 and config.hardware.device == "cpu" and not config.engine.servers:
        # Seen with vLLM 0.31: the probe of a new version and calls in one batch ("einsum(): subscript b has size …").
        problems.append(
            f"train.staleness: got {staleness} with vLLM on a CPU, which ends where new weights are checked beside "
            "calls of an adapter; use train.staleness=1"
        )
    adapters = config.model.lora is not None
    return problems + engines.staleness_problems(config.engine, engine_name(config), staleness, adapters, sampling)


def replay_problems(config: RlRunConfig, task: Task) -> list[str]:
    """Return the sentences for an algorithm that plays rollouts again, which here do not repeat themselves."""
    if not (settings := unrepeatable(config.task, task)):
        return []
    trees = ALGORITHMS[config.algo.name].plan(config.algo, task.program.modules, (config.seed, 0, ""))
    if not any(tree.forks or tree.growth or tree.exchange or tree.teacher for tree in trees):
        return []
    return [
        f"{setting}, and algo={config.algo.name} plays an agent again with the replies of an "
        "earlier rollout, in which all must be the same then; use an algorithm without forks, such as grpo or mmgrpo, "
        "or an agent, or an environment, that depends only on its example and on what it is told"
        for setting in settings
    ]


def unrepeatable(config: TaskConfig, task: Task) -> list[str]:
    """Return the settings by which a rollout cannot be played again."""
    stated = [] if getattr(config, "deterministic", True) else ["task.deterministic: got false"]
    return [*stated, *task.unrepeatable]


def negative_rewards(config: RlRunConfig, task: Task) -> list[str]:
    """Return the settings that make rewards negative, where `algo.scale=mean` divides by their mean."""
    algo, absent = config.algo, task.absent_features
    if getattr(algo, "scale", True) != "mean":
        return []
    format_score = 0.0 if "parse_failures" in absent else getattr(algo, "format_failure_score", 0.0)
    penalties = "penalties" not in absent and getattr(algo, "penalties", False)
    causes = [
        ("task.failure_score", task.failure_score, task.failure_score < 0, "0 or more"),
        ("algo.format_failure_score", format_score, format_score < 0, "0 or more"),
        ("algo.penalties", "true", penalties, "false"),
    ]
    why = "which makes rewards negative, and algo.scale=mean divides by their mean"
    return [f"{key}: got {value}, {why}; expected {expected}" for key, value, negative, expected in causes if negative]


def teacher_problems(config: RlRunConfig, task: Task) -> list[str]:
    """Return problems of teachers: missing policies, unreadable prompts, modules that the student does not have."""
    problems: list[str] = []
    if (program := getattr(config.algo, "program", None)) is not None:
        with gathered(problems):
            if not callable(getattr(imported("algo.program", program), "run", None)):
                problems.append(f"algo.program: '{program}' has no `run(example, ctx)`; expected a program")
    exchanged = config.algo.exchanged_modules(task.program.modules)
    for teacher in separate_teachers(config.algo):
        where, endpoint = f"algo.teachers: {teacher.name}", teacher.endpoint
        if endpoint is not None:
            problems += unreachable({f"{where}.endpoint": endpoint})
            if config.algo.top_k > 0:
                problems.append(f"algo.top_k: got {config.algo.top_k}, and an endpoint ({where}) takes no top_k; use 0")
        problems += [
            f"{where}: module '{module}' of task={task.name} goes on in the context of an earlier reply, which another "
            "model has not read; use algo.reply, or exchange other modules"
            for module in continuing_modules(task.program)
            if module in exchanged or endpoint is not None
        ]
        with gathered(problems, f"{where}: "):
            prompts = teacher_prompts(teacher, teacher_policy(teacher))
            modules = build_task(config.task, config.seed, prompts).program.modules
            # A module that the student lacks has no call whose place the teacher's output could take.
            if absent := [name for name in modules if name not in task.program.modules]:
                problems.append(
                    f"{where}: its program has the modules {', '.join(absent)}, which the student's has not; modules "
                    f"are matched by name (the student's: {', '.join(task.program.modules)})"
                )
    return problems


def build(config: RlRunConfig, task: Task, log: StepLog) -> RlStage:
    """Load the policy in its trainer, the engine that samples it, and teachers."""
    import torch

    from mmrl.stages.distillation import Teachers
    from mmrl.stages.rl import RlStage

    log.prefetched = bool(config.train.staleness)
    assignment = module_assignment(config, task.program.modules)
    initial = config.model.path if assignment.copied else None
    settings = Settings(train=config.train, algo=config.algo, model=config.model, seed=config.seed)
    trainer, tokenizer, serving = load_trainer(config, assignment, settings, log, initial)
    algo, hardware = config.algo, config.hardware
    samplings = ((algo.temperature, algo.top_p, algo.top_k),)
    facts = {"devices": server_devices(hardware), "samplings": samplings, "processes": log.processes}
    setup = engine_setup(config, serving, log.rundir.path, versions=1 + max(1, config.train.staleness), **facts)
    if hardware.ray is not None:
        setup = replace(setup, bundle=server_resources(hardware, getattr(config.engine, "replicas", 1)))
    # A server on the same GPUs measures what is free there, so no process may still load, or keep what loading took.
    if hardware.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    log.processes.barrier()
    # In this process an engine samples from the very module that is trained (wrapped by peft where there is an
    # adapter), so no weights are copied between updates.
    engine = build_engine(config.engine, trainer.model, tokenizer, setup)
    student = LoadedTeacher(task=task, engine=engine, tokenizer=tokenizer, shares_vocabulary=True)
    try:
        teachers = _load_teachers(config, student)
    except BaseException:
        engine.close()
        raise
    scorers, limits = load_scorers(config, trainer.forwards)
    different = {id(e): e for e in (engine, *(teacher.engine for teacher in teachers.values()))}
    return RlStage(
        config=config,
        task=task,
        engine=engine,
        tokenizer=tokenizer,
        trainer=trainer,
        examples=task.examples("train"),
        reward_set=reward_set(task, config.task.reward, config.algo.name),
        log=log,
        teachers=teachers,
        scorers=Teachers(algo=algo, forwards=trainer.forwards, tokenizer=tokenizer, others=scorers, limits=limits),
        engines=list(different.values()),
        assignment=assignment,
    )


def _load_teachers(config: RlRunConfig, student: LoadedTeacher) -> dict[str, LoadedTeacher]:
    """Load the teachers by name; those of the same weights share an engine, those without use the student's.

    Raises:
        ConfigError: one cannot be loaded, or writes no thoughts where replies have to begin with some.
    """
    from mmrl.engines.endpoint_engine import EndpointEngine
    from mmrl.models.load import load_policy

    loaded: dict[str, tuple[Engine, PreTrainedTokenizerBase]] = {}
    result: dict[str, LoadedTeacher] = {}
    # Weights are loaded once for all teachers that name them: a second copy would cost as much memory again.
    for teacher in separate_teachers(config.algo):
        policy = teacher_policy(teacher)
        engine, tokenizer = student.engine, student.tokenizer
        # A teacher with prompts alone speaks with the weights in training, so it learns along with them.
        if policy is not None:
            key = f"{policy.base} {policy.adapter} {policy.adapters}"
            if key not in loaded:
                # In this process, whatever engine serves the student.
                section = model_of_teacher(config.model, str(teacher.policy), policy)
                model, its_own, serving = load_policy(policy, section, config.hardware.device)
                model.eval().requires_grad_(False)
                limit, threads = config.task.max_context, config.hardware.threads
                setup = EngineSetup(max_context=limit, threads=threads, weights=config.model, **serving)
                loaded[key] = engine_class("transformers")(model, its_own, config.engine.in_process, setup), its_own
            engine, tokenizer = loaded[key]
        if teacher.endpoint is not None:
            if teacher.endpoint.reasoning != "keep" and config.algo.name == "mmgrpo" and opens_thoughts(tokenizer):
                raise ConfigError(
                    f"algo.teachers: {teacher.name}: endpoint.reasoning: got {teacher.endpoint.reasoning}, and prompts "
                    "of the model's chat template end inside of thoughts, which such replies do not end; use keep, or "
                    "model.thinking=false"
                )
            # An endpoint answers in text, which the student's tokenizer encodes.
            engine = EndpointEngine(teacher.endpoint, student.tokenizer, f"algo.teachers.{teacher.name}.endpoint")
        result[teacher.name] = LoadedTeacher(
            task=build_task(config.task, config.seed, teacher_prompts(teacher, policy)),
            engine=engine,
            tokenizer=tokenizer,
            shares_vocabulary=teacher.endpoint is None
            and (tokenizer is student.tokenizer or tokenizer.get_vocab() == student.tokenizer.get_vocab()),
        )
    return result
