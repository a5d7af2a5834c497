"""Parts of a run, built from a settled config: task, trainer, engine. The stage of each kind: `rl`, `sft`, `prompts`.

Called by `train`, `eval`, `plan` and the checks. torch and transformers load inside the functions that need them: a
config is checked without.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl import engines
from mmrl.algorithms import ALGORITHMS
from mmrl.algorithms.checks import TURN_SETS
from mmrl.algorithms.distill import Distill
from mmrl.config import HardwareConfig, ModelConfig, RlRunConfig, RootConfig, StageConfig, TaskConfig, WeightRunConfig
from mmrl.config.algo import CriticConfig
from mmrl.config.base import MINI, MethodConfig, value_at
from mmrl.config.rules import engine_name
from mmrl.config.tasks import PRIVILEGED, UNSCORED, EnvironmentConfig
from mmrl.config.teacher import STUDENT, TeacherConfig
from mmrl.engines import EngineSetup, build_engine, needs_model
from mmrl.engines.base import Engine
from mmrl.errors import ConfigError, nearest, refuse, unknown
from mmrl.models.assignment import ModuleAssignment
from mmrl.records import Example
from mmrl.rollout import with_program
from mmrl.store.policy import Policy, resolve, run_config
from mmrl.tasks import TASKS
from mmrl.tasks.base import Task, continuing_modules
from mmrl.tasks.data.layouts import subset
from mmrl.tasks.environments.program import EnvironmentProgram

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mmrl.models.load import ServedWeights
    from mmrl.stages.step_log import StepLog
    from mmrl.trainer.settings import Settings
    from mmrl.trainer.trl_trainer import MmrlTrainer

_TASKS: dict[tuple[str, int], Task] = {}


def build_task(config: TaskConfig, seed: int, prompts: str | None = None) -> Task:
    """Build the task of a config; once per process and config, since every run of a sweep needs it.

    Args:
        prompts: a file of prompts (a teacher's) in place of the config's.
    """
    config = config if prompts is None else config.model_copy(update={"prompts": prompts})
    # Compared by value: the runs of a sweep have separate configs with equal task sections.
    key = (config.model_dump_json(), seed)
    if key not in _TASKS:
        if config.name not in TASKS:
            raise ConfigError(_unknown_task(config.name))
        task: Any = with_program(TASKS[config.name](config, seed))
        if getattr(config, "caught_parse_penalty", 0.0):
            task.absent_features = frozenset(task.absent_features) - {"penalties"}
        _TASKS[key] = task
    return _TASKS[key]


def _unknown_task(name: str) -> str:
    """Return the sentence for a name that no task has; a file of the user's that sets it is named."""
    setting = re.compile(rf"^\s*name:\s*['\"]?{re.escape(name)}['\"]?\s*(#.*)?$", re.MULTILINE)
    for file in sorted(Path("conf", "task").glob("*.yaml")):
        if setting.search(file.read_text(encoding="utf-8", errors="replace")):
            return (
                f"task.name: got '{name}' ({file}), and no task of that name was added; expected plugins: [PACKAGE] in "
                f"that file, or the name of a built-in task{nearest(name, [*TASKS])}"
            )
    return unknown("task", name, TASKS)


def forget_task(config: TaskConfig, seed: int) -> None:
    """Build the task of a config anew next time: the objects that its names stand for are others now."""
    _TASKS.pop((config.model_dump_json(), seed), None)


def reward_set(task: Task, name: str | None, algo: str = "") -> str:
    """Return the reward set of a run.

    Args:
        name: the user's (`task.reward`).
        algo: name of the algorithm, whose own kind it is where the user chose none; empty in an evaluation.
    """
    if name == PRIVILEGED:
        return task.reward_sets[0]
    if name is not None:
        return name
    if algo and ALGORITHMS[algo].needs_turn_rewards:
        sets = (*getattr(ALGORITHMS[algo], "turn_sets", ()), *TURN_SETS)
        return next((name for name in sets if name in task.reward_sets), task.reward_sets[0])
    return task.reward_sets[0]


def unscored_problems(config: StageConfig, task: Task) -> list[str]:
    """Return the sentence for a run that takes rewards, of a task without; distillation takes none."""
    if config.algo.name == Distill.name or reward_set(task, config.task.reward) != UNSCORED:
        return []
    key, got = ("reward", "got none") if config.task.reward == UNSCORED else ("metric", "missing")
    return [
        f"task.{key}: {got}, and algo={config.algo.name} needs rewards, as all but algo=distill do; expected "
        "task.metric=package.module:name of a function (record, prediction) -> number"
    ]


def evaluated(task: Task, config: RootConfig, split: str) -> tuple[Sequence[Example], dict[str, str]]:
    """Return the examples of a split, in the order of `eval.items`, and the summary's words for it.

    Of data files, which may be sorted by label, they are drawn: the same ones in every run, so that runs can be
    compared item by item, and those of a smaller number are among those of a larger one. The mini world's are in random
    order, and of those nothing is said.
    """
    examples, items = task.examples(split), config.eval.items
    if config.task.data.source_of(split) == MINI:
        return examples, {}
    selected = subset(examples, items, "eval", split)
    if items is None or items >= len(examples):
        return selected, {}
    return selected, {"evaluated": f"{items} of the {len(examples)} {split} items, drawn; the same ones in every run"}


def engine_problems(
    config: RootConfig, *, training: bool = False, copied: bool = False, rank: int = 0, adapters: Collection[str] = ()
) -> list[str]:
    """Return the problems of the engine that samples, and of its settings; see `engines.problems`."""
    name, device = engine_name(config), config.hardware.device
    return engines.problems(
        config.engine, name, training=training, copied=copied, device=device, rank=rank, adapters=adapters
    )


def split_problems(config: TaskConfig, task: Task, split: str, key: str) -> list[str]:
    """Return the one sentence for a split that is to be evaluated and is absent or empty."""
    if config.data.source_of(split) is None:
        splits = [f"{key}={name}" for name in config.data.files]
        return [
            f"{key}: got {split}, and there is no such split (task.data.{split}=null); set task.data.{split}, or "
            f"{' or '.join(splits)}"
        ]
    return [] if task.examples(split) else [f"{key}: the {split} split has no examples; set task.data.{split}"]


def endpoint_problems(config: RootConfig, task: Task) -> list[str]:
    """Return problems of the endpoints that answer for modules, without a request."""
    every, endpoints = engine_name(config) == "openai", config.engine.endpoints or {}
    if not every and not endpoints:
        return []
    key = "engine" if every else "engine.endpoints"
    problems = []
    training = isinstance(config, RlRunConfig)
    if not training:  # in training `ModuleAssignment.problems` lists them
        problems = [unknown(key, name, task.program.modules) for name in endpoints if name not in task.program.modules]
    for path in ("eval.top_k", "algo.top_k") if training else ("eval.top_k",):
        if top_k := value_at(config, path):
            problems.append(f"{path}: got {top_k}, and an endpoint takes no top_k; use 0")
    return problems + [
        f"{key}: module '{module}' of task={task.name} goes on in the context of an earlier reply, which an "
        "endpoint that takes messages cannot; use engine=transformers or engine=vllm_server for it"
        for module in continuing_modules(task.program)
        if every or module in endpoints
    ]


def turns_missing(reward: str | None, algo: str, task: Task) -> list[str]:
    """Return the sentence for a reward set without the turn rewards of the algorithm; `algo` empty: none does."""
    # An unknown reward set has its own sentence in `check`; a second one would only distract.
    if reward not in task.reward_sets or reward in TURN_SETS or not algo or not ALGORITHMS[algo].needs_turn_rewards:
        return []
    offered = [name for name in TURN_SETS if name in task.reward_sets]
    instead = f"use task.reward={offered[0]}, or leave it out" if offered else "use an algorithm without turn rewards"
    return [f"task.reward: got {reward}, which has no turn rewards, and algo={algo} needs them; {instead}"]


def check_model(config: StageConfig) -> None:
    """Find models that cannot be had before a run directory is made, the teachers' too; say what is left out of one.

    Raises:
        ConfigError: a tokenizer, weights or an adapter that cannot be used, or LoRA targets that are not there.
    """
    from mmrl.models.adapter import check_new_adapter
    from mmrl.models.load import load_tokenizer, skeleton

    model, warnings = config.model, []
    tokenizer = load_tokenizer(model)
    _refuse_tools(tokenizer, config)
    if isinstance(config, WeightRunConfig) and config.train.packing == "trie_varlen":
        # Of the model's layers the trainer says the rest.
        refuse(
            f"train.packing: got 'trie_varlen', whose kernel {fault}; use auto, trie or padded"
            for fault in (
                *(["is for CUDA, and the device is the CPU"] if config.hardware.device == "cpu" else ()),
                *(["computes in 16 bits alone, and model.dtype=float32"] if model.dtype == "float32" else ()),
            )
        )
    if isinstance(config, WeightRunConfig) or needs_model(config.engine.name):
        warnings.append(_slow_products(model.dtype, config.hardware.device))
        empty, note = skeleton(model)
        _refuse_context(tokenizer, empty, config)
        warnings += [note, _tokens_without_weights(tokenizer, empty, model.path)]
        if model.lora is not None and (left_out := check_new_adapter(empty, model.lora)):
            warnings.append(f"model.lora.targets: {left_out}")
    for teacher in separate_teachers(config.algo):
        if (policy := teacher_policy(teacher)) is not None:
            own = config.model_copy(update={"model": model_of_teacher(config.model, str(teacher.policy), policy)})
            warnings.append(check_policy(policy, own, f"algo.teachers.{teacher.name}.policy"))
    if isinstance(config, RlRunConfig):
        from mmrl.run.distill import check

        warnings.append(_long_warmup(config))

        warnings += check(config, tokenizer)
    for warning in filter(None, warnings):
        print(f"warning: {warning}", file=sys.stderr)


def _long_warmup(config: RlRunConfig) -> str:
    """Return a line about a critic that is warming up all through a run; empty where it is not."""
    algo, steps = config.algo, config.train.steps * config.algo.epochs * config.algo.minibatches
    warmup = algo.critic_warmup_steps if isinstance(algo, CriticConfig) else 0
    if not warmup or warmup < steps:
        return ""
    return (
        f"algo.critic_warmup_steps: got {warmup}, and the run has {steps} optimizer steps: its critic never comes to "
        "the rate of algo.critic_lr_factor"
    )


def _slow_products(dtype: str, device: str) -> str:
    """Return a line about products that a CPU has no instructions for; empty where it has."""
    import torch

    known = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    if device != "cpu" or dtype != "bfloat16" or platform.machine() != "x86_64" or None in known:
        return ""
    if any(supported() for supported in known if supported is not None):
        return ""
    return (
        "model.dtype: got bfloat16, for whose products this CPU has no instructions: 9 GFLOP/s against 65 of float32 "
        "on a core of an EPYC with AVX2; model.dtype=float32 takes twice the memory"
    )


def check_policy(
    policy: Policy, config: RootConfig, key: str = "policy", reads: PreTrainedTokenizerBase | None = None
) -> str:
    """Find a policy whose weights or adapters cannot be had. Returns what is left out of its files, in words.

    Args:
        config: with the `model` section of `load_policy`.
        key: what the user typed it after.
        reads: the tokenizer of the prompts that it reads, where it writes none itself; None: its own.

    Raises:
        ConfigError: it cannot be used.
    """
    from mmrl.models.adapter import with_adapters
    from mmrl.models.load import load_tokenizer, skeleton, tokenizer_section, weights_section

    own, model = re.compile(r"(model\.path|policy)(?=: )"), weights_section(policy, config.model)
    try:
        empty, note = skeleton(model)
        tokenizer = reads or load_tokenizer(tokenizer_section(policy, config.model))
        if reads is None:
            _refuse_tools(tokenizer, config)
            _refuse_context(tokenizer, empty, config)
        note = "; ".join(filter(None, [note, _tokens_without_weights(tokenizer, empty, model.path)]))
        if policy.folders:
            with_adapters(empty, policy.folders)
    except ConfigError as error:
        raise ConfigError(own.sub(key, problem, count=1) for problem in error.problems) from None
    return own.sub(key, note, count=1)


def _refuse_tools(tokenizer: PreTrainedTokenizerBase, config: RootConfig) -> None:
    """Refuse an environment's tools where the model's chat template has no way to call them."""
    from mmrl.models.replies import tools_problem

    if not isinstance(config.task, EnvironmentConfig) or not (problem := tools_problem(tokenizer)):
        return
    program = build_task(config.task, config.seed).program
    if isinstance(program, EnvironmentProgram) and program.shows_tools:
        raise ConfigError(f"model.path: the environment has tools, and {problem} ('{config.model.path}')")


def _refuse_context(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, config: RootConfig) -> None:
    """Refuse a context in which no prompt fits: every rollout would fail, and score 0."""
    from mmrl.engines.embedded.batch_rows import context_limit
    from mmrl.models.chat import render_prompt

    least = len(render_prompt(tokenizer, [{"role": "user", "content": "?"}]))
    own = context_limit(model.config.get_text_config())
    limit = context_limit(model.config.get_text_config(), config.task.max_context)
    if limit is not None and least >= limit:
        key = "task.max_context" if limit != own else f"model.path: max_position_embeddings of '{config.model.path}'"
        raise ConfigError(
            f"{key}: got {limit}, in which no prompt fits: the chat template writes {least} tokens around a single "
            "character"
        )


def _tokens_without_weights(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, path: str) -> str:
    """Return in words which tokens are none of the model's; empty where all are.

    Raises:
        ConfigError: one of them is in every prompt, or ends a turn.
    """
    from mmrl.models.chat import render_prompt, template_ends

    size = model.config.get_text_config().vocab_size
    beyond = {number: token for token, number in tokenizer.get_vocab().items() if number >= size}
    if not beyond:
        return ""
    prompt = render_prompt(tokenizer, [{"role": "user", "content": "?"}])
    used = [number for number in (*prompt, tokenizer.eos_token_id, *template_ends(tokenizer)) if number in beyond]
    if used:
        raise ConfigError(
            f"model.path: prompts of '{path}' have the token {beyond[used[0]]} ({used[0]}), and the model has {size} "
            "tokens; expected the tokenizer that it was trained with, or a model whose embeddings were resized for it"
        )
    first = ", ".join(beyond[number] for number in sorted(beyond)[:3])
    return (
        f"model.path: {len(beyond)} tokens of the tokenizer are none of the model's ({first}): a prompt with one of "
        f"them fails ('{path}')"
    )


def load_trainer(
    config: WeightRunConfig, assignment: ModuleAssignment, settings: Settings, log: StepLog, initial: str | None = None
) -> tuple[MmrlTrainer, PreTrainedTokenizerBase, ServedWeights]:
    """Load the policy in its trainer, its tokenizer, and what an engine serves it with.

    Args:
        initial: weights that stay as they start, for frozen modules.
    """
    from mmrl.models.load import load_policy
    from mmrl.trainer.adapters import make_adapters
    from mmrl.trainer.sharding import loaded_once
    from mmrl.trainer.trl_trainer import MmrlTrainer

    policy = Policy(base=config.model.path, modules=assignment.served, initial=initial)
    with loaded_once():
        model, tokenizer, serving = load_policy(policy, config.model, config.hardware.device)
        adapters = make_adapters(assignment)
        trainer = MmrlTrainer(model, tokenizer, settings, output_dir=log.rundir.checkpoints, adapters=adapters)
    return trainer, tokenizer, serving


def engine_setup(config: RootConfig, serving: ServedWeights, folder: Path, **overrides: Any) -> EngineSetup:
    """Return the settings of an engine beside its section: of the config, unless `overrides` says otherwise."""
    shared = {"max_context": config.task.max_context, "threads": config.hardware.threads, "folder": folder, **serving}
    return EngineSetup(**{**shared, "weights": config.model, "device": config.hardware.device, **overrides})


def server_devices(hardware: HardwareConfig) -> tuple[int, ...]:
    """Return the GPUs of the managed server: its own, else those that train too; empty on a CPU or with one process."""
    if hardware.device == "cpu" or (hardware.processes == 1 and not hardware.rollout_devices):
        return ()
    first = hardware.processes if hardware.rollout_devices else 0
    return tuple(range(first, first + (hardware.rollout_devices or hardware.processes)))


def evaluation_devices(hardware: HardwareConfig) -> tuple[int, ...]:
    """Return GPUs of the managed server of an evaluation: all of the profile, since nothing trains."""
    return tuple(range(hardware.processes + hardware.rollout_devices)) if server_devices(hardware) else ()


def separate_teachers(algo: MethodConfig) -> list[TeacherConfig]:
    """Return the teachers of mmGRPO that are not the student."""
    return [teacher for teacher in getattr(algo, "teachers", None) or () if teacher.name != STUDENT]


def teacher_policy(teacher: TeacherConfig) -> Policy | None:
    """Return a teacher's weights; None for the student's."""
    return None if teacher.policy is None else resolve(teacher.policy, teacher.prompts)


def model_of_teacher(model: ModelConfig, teacher: str, policy: Policy) -> ModelConfig:
    """Return a run's `model` section for the weights of a teacher: with their own revision, not the student's."""
    if run := run_config(teacher):
        revision = value_at(run, "model.revision")
    else:
        revision = model.revision if policy.base == model.path else None
    return model.model_copy(update={"path": policy.base, "revision": revision})


def teacher_prompts(teacher: TeacherConfig, policy: Policy | None) -> str | None:
    """Return the file of a teacher's prompts; None for the task's own."""
    return teacher.prompts or (policy.prompts if policy is not None else None)


@contextmanager
def fixed_engine(
    config: RootConfig, policy: Policy, folder: Path, served: str = "", devices: tuple[int, ...] = ()
) -> Iterator[tuple[Engine, PreTrainedTokenizerBase]]:
    """Open the engine of a policy whose weights stay, with its tokenizer; closed at the end.

    Args:
        folder: logs of a server go there.
        served: the policy's name at an endpoint.
        devices: GPUs of a managed server; empty: all of them.
    """
    from mmrl.models.load import load_policy, load_tokenizer, tokenizer_section, weights_section

    # The tokenizer and the server's weights are the policy's, whatever model.path says.
    weights = weights_section(policy, config.model)
    model: PreTrainedModel | None = None
    serving: ServedWeights = {"adapters": policy.modules, "initial": None}
    if needs_model(config.engine.name):
        model, tokenizer, serving = load_policy(policy, config.model, config.hardware.device)
    else:
        tokenizer = load_tokenizer(tokenizer_section(policy, config.model))
    setup = engine_setup(
        config, serving, folder, weights=weights, folders=policy.folders, devices=devices, served=served
    )
    engine = build_engine(config.engine, model, tokenizer, setup)
    try:
        # Every completion carries the version of the policy that sampled it.
        engine.set_version(policy.step or 0)
        yield engine, tokenizer
    finally:
        engine.close()
