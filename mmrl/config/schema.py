"""The whole config of a command, and its sections with one schema each: model, hardware, training, evaluation, run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, SerializeAsAny, ValidationInfo, field_validator

from mmrl.config.algo import ALGO_SCHEMAS, AlgoConfig
from mmrl.config.base import MethodConfig, PathText, Section, Temperature, by_name, value_at
from mmrl.config.engines import ENGINE_SCHEMAS, EngineConfig
from mmrl.config.prompts import PROMPT_SCHEMAS, PromptConfig
from mmrl.config.sft import SFT, SftConfig
from mmrl.config.tasks import TASK_SCHEMAS, PluginTaskConfig, TaskConfig

LARGEST_SEED = 2**32 - 1
"""Limit of numpy's generator, which transformers seeds too."""
ALL_LINEAR = "all-linear"
"""Peft's word for all linear layers, instead of names."""


class LoraConfig(Section):
    """A LoRA adapter (peft)."""

    r: int = Field(16, ge=1, description="rank")
    alpha: int = Field(64, ge=1, description="the adapter is scaled by alpha / r")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout before the adapter, in the update alone")
    targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"),
        min_length=1,
        description="linear layers and experts that get an adapter; [all-linear]: all but head and routers",
    )

    @field_validator("targets")
    @classmethod
    def _alone(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if ALL_LINEAR in targets and len(targets) > 1:
            raise ValueError(f"got {', '.join(targets)}, expected {ALL_LINEAR} alone or names of layers")
        return targets

    @property
    def everywhere(self) -> bool:
        """True if every linear layer and expert but the head and routers gets an adapter."""
        return self.targets == (ALL_LINEAR,)


class ModuleWeights(Section):
    """LoRA adapter of one module."""

    adapter: str | None = Field(
        None, description="name of the adapter; modules with one name share it; null: a separate one"
    )
    lr: float | None = Field(None, ge=0, description="learning rate of the adapter; null: train.lr")
    frozen: bool = Field(False, description="out of the loss; the adapter stays as it starts: the base replies")


def _iso_date(value: object) -> object:
    """Convert a date, which YAML makes of one that has no quotes."""
    try:
        return None if value is None else date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError(f"got {str(value)!r:.60}, expected a date such as 2026-11-28") from None


class ModelConfig(Section):
    """The policy's weights."""

    name: str = Field(description="set by model=; shown in reports")
    path: str = Field(description="`tiny` (the shipped model that plays the task), a folder, or a hub id")
    revision: str | None = Field(None, description="branch, tag or commit of a hub id; null: its newest")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: bfloat16 where the device computes in it, else float32"
    )
    matmul: Literal["torch", "onednn"] = Field(
        "torch", description="products of float32 on a CPU; onednn: about twice as fast on AMD's, other last digits"
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = Field(
        "auto", description="auto: sdpa; eager where the model has none, or caps its attention's logits"
    )
    lora: LoraConfig | None = Field(None, description="null: all parameters are trained")
    modules: dict[str, ModuleWeights] | None = Field(
        None,
        description="null: all modules share the weights; else an adapter for each module ({}: nothing more to say)",
    )
    gradient_checkpointing: bool = Field(False, description="the update forwards twice and keeps less in memory")
    chat_template: str | None = Field(
        None, description="a Jinja file, or `plain` (base models); null: the tokenizer's own"
    )
    thinking: bool = Field(False, description="the chat template's thinking mode, where it has one")
    date: Annotated[str | None, BeforeValidator(_iso_date)] = Field(
        None, description="the day that chat templates write into prompts; null: that of the start, stored in the run"
    )
    selfcheck: bool = Field(
        True, description="compare the ways in which the run computes log-probabilities with the model's plain forward"
    )


class RayConfig(Section):
    """The Ray cluster that a run's processes are placed on."""

    address: str = Field(
        "auto", pattern=r"^(auto|[^:/\s]+:[0-9]+)$", description="HOST:PORT; auto: RAY_ADDRESS, else this machine's"
    )
    max_failures: int = Field(3, ge=0, description="new starts of all processes together after one was lost")


class HardwareConfig(Section):
    """Devices and processes."""

    name: str = Field(description="set by hardware=")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is a CUDA device")
    processes: int = Field(1, ge=1, description="training processes on each node; more than one start by themselves")
    nodes: int = Field(1, ge=1, description="machines; more than one need a launcher (torchrun, SLURM) or Ray")
    rollout_devices: int = Field(0, ge=0, description="GPUs reserved for the managed engine, after those that train")
    sharding: Literal["none", "fsdp2", "zero2", "zero3"] = Field(
        "none", description="how processes share weights: whole copies (DDP), FSDP2, or DeepSpeed ZeRO"
    )
    cpu_offload: bool = Field(False, description="sharded states wait in host memory")
    engine: str = Field("transformers", description="engine used when engine=auto")
    # sums of floats depend on the number of threads, so a resume has to repeat it
    threads: int | None = Field(None, ge=1, description="torch threads; null: all cores, stored in the run")
    ray: RayConfig | None = Field(None, description="{}: processes and vLLM servers are placed on a Ray cluster")


class TrainConfig(Section):
    """Optimization: how long, how much at once, how fast."""

    steps: int = Field(100, ge=1, description="batches of rollouts")
    batch_size: int = Field(32, ge=1, description="examples per step")
    lr: float = Field(1e-6, ge=0, description="learning rate of AdamW")
    schedule: Literal["constant", "constant_with_warmup", "linear", "cosine"] = Field(
        "constant", description="schedule of the learning rate over all optimizer steps"
    )
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient; policy, critic, adapters each")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first moment")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's second moment")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay")
    microbatch_tokens: int | None = Field(
        None, ge=64, description="tokens of a forward in the update; null: by the device's memory"
    )
    packing: Literal["auto", "trie", "trie_varlen", "padded"] = Field(
        "auto",
        description="trie forwards each distinct prefix once; auto: trie where the model's layers allow it; "
        "trie_varlen: by torch's varlen attention, on CUDA in 16 bits, instead of FlexAttention",
    )
    old_logprobs: Literal["sampler", "recompute"] = Field(
        "sampler", description="the ratio's denominator: the sampler's record, or a forward of the trainer's own"
    )
    # at least 1: a cap below the weight of equal policies would scale every token
    tis: float | None = Field(
        None, ge=1, description="truncated importance sampling: cap of a token's weight trainer / sampler; null: off"
    )
    staleness: int = Field(
        0, ge=0, le=8, description="batches that are sampled ahead while one trains, by weights as many steps older"
    )
    max_failed_share: float = Field(0.5, ge=0, le=1, description="stop when more of a step failed from outside causes")
    save_every: int = Field(20, ge=1, description="steps between checkpoints; the last step is always saved")
    keep: int = Field(2, ge=1, description="newest checkpoints that stay")

    def saves_after(self, step: int) -> bool:
        """True if a checkpoint is due after `step` steps."""
        return step % self.save_every == 0 or step == self.steps


class EvalConfig(Section):
    """Evaluation before, during and after training."""

    split: Literal["train", "dev", "test"] = Field("dev", description="split of training runs; mmrl eval has split=")
    every: int = Field(20, ge=0, description="steps between evaluations; 0: only before and after")
    items: int | None = Field(
        None, ge=1, description="so many of the split; of data files drawn, the same in every run; null: all"
    )
    samples: int = Field(1, ge=1, description="rollouts per item, each with its own seed")
    temperature: Temperature = Field(0.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; 1: off")
    top_k: int = Field(0, ge=0, description="sample among the k likeliest tokens; 0: off")
    parse_retries: int = Field(
        3,
        ge=0,
        le=10,
        description="extra attempts after a parse failure; none on a CPU in process at temperature 0",
    )
    bootstrap: int = Field(1000, ge=100, description="resamples of the 95 % interval")
    max_failed_share: float = Field(0.5, ge=0, le=1, description="no scores when more failed from outside causes")


TrackerName = Literal["wandb", "tensorboard", "mlflow", "comet_ml", "trackio", "aim", "clearml", "dvclive", "swanlab"]
"""The trackers of `accelerate.tracking`."""
WITH_PROJECTS = ("wandb", "mlflow", "comet_ml", "trackio", "clearml", "swanlab")
"""Trackers that keep runs in projects; TensorBoard, Aim and DVCLive keep them in the run directory."""


class RunConfig(Section):
    """Storage of a run, and the trackers that get its metrics."""

    dir: PathText | None = Field(None, description="null: outputs/<task>/<algo>/<date_time>_s<seed>")
    name: str | None = Field(None, description="shown in reports; null: <algo>-<task>-s<seed>")
    report_to: tuple[TrackerName, ...] = Field((), description="trackers that get the metrics too")
    report_calls: int = Field(
        16,
        ge=0,
        le=1000,
        description="wandb, tensorboard: calls of each step that they get as text (prompt, completion, reward, "
        "advantage); 0: none",
    )
    wandb_project: str | None = Field(
        None,
        min_length=1,
        description=f"{', '.join(WITH_PROJECTS)}: the project (mlflow: the experiment); null: mmrl, or for wandb "
        "WANDB_PROJECT",
    )
    group: str | None = Field(
        None, min_length=1, description="wandb: runs that belong together; null: WANDB_RUN_GROUP, or <algo>-<task>"
    )
    tags: tuple[str, ...] = Field((), description="wandb: labels of the run; []: WANDB_TAGS")
    progress: bool | None = Field(None, description="live display; false: plain lines; null: live in a terminal")
    before: PathText | None = Field(
        None,
        description="a run whose evaluation before training is this one's too; where anything is not or may not "
        "be the same, a line says so and it is evaluated",
    )
    doctor: Literal["auto"] | bool = Field(
        "auto", description="play a few examples before training and say what is wrong; auto: before runs on GPUs"
    )


@dataclass(frozen=True, slots=True)
class Typed:
    """What a user typed for a config."""

    keys: tuple[str, ...] = ()
    """Keys and groups that were set; those without effect are refused."""
    command: tuple[str, ...] = ()
    """The words of the command, or those that say the same as a call from Python; kept in the run directory."""


class RootConfig(Section):
    """Sections of `train` and `eval`."""

    refusal: ClassVar[str] = ""
    """Why a command that takes other kinds of runs cannot use this one; `{folder}` is the run's."""
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="seed of all draws: data order, sampling, new weights")
    # SerializeAsAny: config.yaml has the keys of the schema in use, not those of the annotated base class
    task: Annotated[SerializeAsAny[TaskConfig], BeforeValidator(by_name(TASK_SCHEMAS, PluginTaskConfig))]
    model: ModelConfig
    hardware: HardwareConfig
    engine: SerializeAsAny[EngineConfig]
    eval: EvalConfig
    run: RunConfig
    plugins: tuple[str, ...] = Field((), description="packages imported first; they may add tasks and algorithms")

    _typed: Typed = PrivateAttr(Typed())

    @property
    def typed(self) -> Typed:
        """What was typed for it; no part of its content, but of every copy."""
        return self._typed

    def as_typed(self, typed: Typed) -> Self:
        """Return a copy that says what was typed for it."""
        copy = self.model_copy()
        copy._typed = typed
        return copy

    def in_folder(self, folder: str | None) -> Self:
        """Return a copy with this run directory; None: without one, as if left out."""
        return self.model_copy(update={"run": self.run.model_copy(update={"dir": folder})})

    # Not `by_name` as for the task: what `auto` stands for is in another section, validated before this one.
    @field_validator("engine", mode="before")
    @classmethod
    def _engine(cls, raw: object, info: ValidationInfo) -> object:
        if not isinstance(raw, Mapping):
            return raw
        # pydantic validates fields in the order of their declaration, so `hardware` stands above `engine`
        hardware = info.data.get("hardware")  # absent where it has errors of its own
        fallback = hardware.engine if isinstance(hardware, HardwareConfig) else None
        name = raw.get("name", "auto")
        schema = ENGINE_SCHEMAS.get(str(fallback if name == "auto" else name), EngineConfig)
        return schema.model_validate(dict(raw))


class StartConfig(Section):
    """The policy that a run has started from (`from=RUN`), by its content."""

    run: PathText = Field(description="run directory as on the command line")
    weights: str | None = Field(None, description="SHA-256 of its checkpoint's list of files; null: none were trained")
    prompts: str | None = Field(None, description="SHA-256 of its prompts; null: the task's own")


class StageConfig(RootConfig):
    """`mmrl train`, whatever improves the policy."""

    start: StartConfig | None = Field(None, description="written by from=RUN")
    algo: SerializeAsAny[MethodConfig]


class WeightRunConfig(StageConfig):
    """Sections of stages that train weights, in steps with checkpoints."""

    train: TrainConfig


# no schema for other names: a plugin that adds an algorithm adds its schema too
Algo = Annotated[SerializeAsAny[AlgoConfig], BeforeValidator(by_name(ALGO_SCHEMAS))]


class RlRunConfig(WeightRunConfig):
    """`mmrl train` of a stage of reinforcement learning, whose calls get credit and whose work processes share."""

    refusal: ClassVar[str] = "this is a run of mmrl train; continue it with: mmrl train resume={folder}"
    algo: Algo


class PromptRunConfig(StageConfig):
    """`mmrl train` of a stage that optimises prompts."""

    refusal: ClassVar[str] = "this run has optimised prompts and trained no weights"
    algo: Annotated[SerializeAsAny[PromptConfig], BeforeValidator(by_name(PROMPT_SCHEMAS))]


class SftRunConfig(WeightRunConfig):
    """`mmrl train` of a supervised stage."""

    refusal: ClassVar[str] = "this run is supervised (algo=sft), so its calls have no credit"
    algo: SftConfig


def stage_schema(name: object) -> type[StageConfig]:
    """Return the schema of `mmrl train algo=name`; for unknown names that of the algorithms, which refuses them."""
    # a damaged file may hold anything
    if isinstance(name, str) and name in PROMPT_SCHEMAS:
        return PromptRunConfig
    return SftRunConfig if name == SFT else RlRunConfig


class EvalRunConfig(RootConfig):
    """`mmrl eval`."""

    refusal: ClassVar[str] = "this is a run of mmrl eval; continue it with: mmrl eval resume={folder}"
    policy: PathText = Field(
        description="a run directory, a checkpoint, an adapter, a model folder, `tiny`, or a hub id"
    )
    split: Literal["train", "dev", "test"] = Field("dev", description="whose examples are evaluated")


def schema_of(config: Mapping[str, object]) -> type[RootConfig]:
    """Return the schema of a command's config, as composed or as a run has stored it."""
    return EvalRunConfig if "policy" in config else stage_schema(value_at(config, "algo.name"))
