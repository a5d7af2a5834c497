"""Keys that a value of another section leaves without effect: refused, never ignored.

Schemas refuse what an algorithm or a task does not have at all, and their `idle` what another key of the same section
switches off. A rule needs nothing but config sections and a few facts of the task; what needs a program's modules or
data is in `mmrl.run.check`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from mmrl.config.base import MINI, SPLITS, Idle, idle_values, needs, value_at
from mmrl.config.schema import (
    EvalConfig,
    EvalRunConfig,
    HardwareConfig,
    ModelConfig,
    PromptRunConfig,
    RlRunConfig,
    RootConfig,
    RunConfig,
    SftRunConfig,
    TrainConfig,
)
from mmrl.config.tasks import PRIVILEGED, UNSCORED


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What rules judge by: the sections of a config, and facts of its command and task.

    A section that a config does not have is None; a rule is asked about keys that are there, and reads sections that
    are there with them.
    """

    train: TrainConfig
    model: ModelConfig
    hardware: HardwareConfig
    eval: EvalConfig
    run: RunConfig
    # Which keys these have depends on their names.
    algo: Any
    task: Any
    engine: Any
    kind: type[RootConfig]
    """The schema of the config."""
    sampler: str
    """The engine in use."""
    other_path: bool
    """`model.path` is another than `policy`."""
    reward_set: str = ""
    absent: Collection[str] = ()
    """Features that the task's program never has (`tasks.base.FEATURES`)."""
    modules: int = 0
    """Of the program; 0: not known."""

    @property
    def evaluates(self) -> bool:
        """True on `mmrl eval`."""
        return self.kind is EvalRunConfig

    @property
    def ratio_one(self) -> bool:
        """True under `algo.ratio_one`, which supervised training has no key for."""
        return self.kind is RlRunConfig and self.algo.ratio_one

    @property
    def one_update(self) -> bool:
        """True if a batch is trained on once, by the very weights that its old numbers come from."""
        lora = self.model.lora
        once = self.kind is RlRunConfig and self.algo.epochs == self.algo.minibatches == 1
        return once and (lora is None or lora.dropout == 0)

    @property
    def mini(self) -> bool:
        """True if all examples are the mini world's."""
        return all(self.task.data.source_of(split) in (None, MINI) for split in SPLITS)

    def omits(self, setting: str) -> bool:
        """True if the endpoint that samples is not sent this setting."""
        endpoint = getattr(self.engine, "endpoint", None)
        return endpoint is not None and setting in endpoint.omit

    def penalties(self) -> bool | None:
        """Return `algo.penalties`; None for an algorithm without."""
        return getattr(self.algo, "penalties", None)


_RATIO_ONE = "with algo.ratio_one=true"
_OLD = "with train.old_logprobs"
_ALONE = "; leave one of the two out"
_EVAL = "on mmrl eval"
_SFT = "with algo=sft"
_PARSED = "with this task: nothing its modules write fails to parse"
_ONCE = "with this task, whose program calls each module at most once: there are no lists of unequal length"
_MINI_DATA = "on the mini world: it is for task.data"


def _not_sent(key: str) -> Idle[Case]:
    """Return the rule of a setting that `engine.endpoint.omit` may name."""
    setting = key.partition(".")[2]
    why = f"with {setting} in engine.endpoint.omit, so that the endpoint's own holds{_ALONE}"
    return Idle(key, lambda c: c.omits(setting), why)


def _of_absent_split(split: str) -> Idle[Case]:
    """Return the rule of the number of a split's examples, where there is no such split."""
    why = f"with task.data.{split}=null: there is no such split"
    return Idle(f"task.data.{split}_items", lambda c: c.task.data.source_of(split) is None, why)


def _of_weights(keys: str, why: str) -> Idle[Case]:
    """Return the rule of keys about weights, which optimisers of prompts have no use for."""
    return Idle(keys, lambda c: c.kind is PromptRunConfig, lambda c: f"with algo={c.algo.name}, which {why}")


_OF_WEIGHTS: tuple[Idle[Case], ...] = (
    # 0 is what they do: sets give it to all their rows.
    Idle(
        "eval.every",
        lambda c: c.kind is PromptRunConfig and c.eval.every > 0,
        lambda c: f"with algo={c.algo.name}, which evaluates before and after, and trains no weights",
    ),
    _of_weights("run.doctor", "trains no weights"),
    _of_weights("model.lora model.modules model.gradient_checkpointing", "trains no weights"),
    _of_weights(
        "hardware.nodes hardware.ray hardware.sharding hardware.cpu_offload", "runs in one process of this machine"
    ),
)
OF_WEIGHTS = ("train", *(key for rule in _OF_WEIGHTS for key in rule.keys.split()))
"""Keys and sections of runs that train weights alone."""

# For any value but the default, set by the user or by a config file:
RUNS: tuple[Idle[Case], ...] = (
    Idle(
        "train.warmup_steps",
        lambda c: c.train.schedule == "constant",
        "with train.schedule=constant; use train.schedule=constant_with_warmup",
    ),
    Idle("train.old_logprobs algo.clip_high algo.loss", lambda c: c.ratio_one, f"{_RATIO_ONE}{_ALONE}"),
    Idle("train.tis", lambda c: c.ratio_one, f"{_RATIO_ONE}, which has no old policy to correct{_ALONE}"),
    Idle(
        "train.tis",
        lambda c: c.train.old_logprobs == "sampler",
        f"{_OLD}=sampler, whose ratio is against the sampler already; use recompute",
    ),
    Idle(
        "train.staleness",
        lambda c: c.ratio_one,
        f"{_RATIO_ONE}, which takes every batch as sampled from the weights in training",
    ),
    Idle(
        "train.staleness",
        lambda c: c.train.old_logprobs == "recompute" and c.train.tis is None,
        f"{_OLD}=recompute, which forgets the weights that sampled; use train.old_logprobs=sampler, or set train.tis",
    ),
    Idle(
        "algo.critic",
        lambda c: c.algo.critic == "adapter" and c.model.lora is None,
        "without an adapter of the policy: set model.lora",
    ),
    Idle(
        "algo.frozen_serving",
        lambda c: c.model.modules is not None,
        "with model.modules: a frozen adapter acts as it started",
    ),
    # These three say how a run trains: an evaluation may take the profile of a training run as it is.
    Idle(
        "hardware.sharding",
        lambda c: not c.evaluates and c.hardware.processes == c.hardware.nodes == 1,
        "with one process; use none",
    ),
    Idle(
        "hardware.cpu_offload",
        lambda c: not c.evaluates and c.hardware.sharding == "none",
        "with hardware.sharding=none; use fsdp2, zero2 or zero3",
    ),
    Idle("hardware.rollout_devices", lambda c: not c.evaluates and c.sampler != "vllm_server", "without vllm_server"),
    Idle(
        "hardware.ray",
        lambda c: c.evaluates,
        f"{_EVAL}, which runs in one process of this machine; take another profile",
    ),
    Idle("hardware.ray", lambda c: c.kind is SftRunConfig, f"{_SFT}, which trains in one process of this machine"),
    Idle(
        "engine.endpoints",
        lambda c: c.sampler == "openai",
        "with engine=openai, which answers for all modules; leave it out",
    ),
    Idle("model.modules", lambda c: c.evaluates, f"{_EVAL}, where a checkpoint says which module uses which weights"),
)
# Where the key is typed: a file may carry a paper's value that is not in use. Several rules may name one key.
TYPED: tuple[Idle[Case], ...] = (
    # Greedy decoding draws nothing, so that what shapes the draw, and drawing again, change no completion.
    Idle(
        "eval.top_p eval.top_k eval.samples",
        lambda c: c.eval.temperature == 0 and not c.omits("temperature"),
        "with eval.temperature=0.0 (greedy); set eval.temperature, or leave it out",
    ),
    *map(_not_sent, ("eval.temperature", "eval.top_p", "task.max_tokens")),
    # These three are terms of the turn rewards; the other reward sets do not read them.
    Idle(
        "task.search_penalty task.final_penalty task.em_needs_format",
        lambda c: c.task.name == "search_agent" and c.reward_set not in ("turn", "judge_turn"),
        "with this reward set; use task.reward=turn",
    ),
    Idle(
        "task.privileged",
        lambda c: c.task.reward != PRIVILEGED,
        "with this reward set; use task.reward=privileged",
    ),
    Idle("task.failure_score", lambda c: c.reward_set == UNSCORED, "where nothing is scored"),
    Idle("task.gain", lambda c: c.reward_set != "gain", "with this reward set; use task.reward=gain"),
    Idle("hardware.engine", lambda c: c.engine.name != "auto", f"with engine= given{_ALONE}"),
    Idle(
        "engine.python engine.args engine.gpu_memory engine.kv_cache_gb engine.replicas",
        lambda c: c.engine.servers,
        "with engine.urls: mmrl does not start those servers",
    ),
    Idle(
        "run.group run.tags run.wandb_project run.report_calls",
        lambda c: not c.run.report_to,
        "without a tracker: run.report_to",
    ),
    Idle("eval.split", lambda c: c.evaluates, f"{_EVAL}; use split="),
    Idle("model.name model.lora", lambda c: c.evaluates, f"{_EVAL}: policy= names the weights, and their adapter"),
    Idle(
        "model.path",
        lambda c: c.evaluates and c.sampler != "openai" and c.other_path,
        f"{_EVAL}; policy= names the weights",
    ),
    # Typed, and not from a profile that was made for training.
    Idle(
        "eval.every model.gradient_checkpointing hardware.sharding hardware.cpu_offload hardware.rollout_devices "
        "run.name run.report_to run.report_calls run.wandb_project run.group run.tags run.progress run.before "
        "run.doctor task.caught_parse_penalty",
        lambda c: c.evaluates,
        f"{_EVAL}; it is an option of mmrl train",
    ),
    Idle("algo.clip", lambda c: c.ratio_one, f"{_RATIO_ONE}{_ALONE}"),
    Idle(
        "algo.loss algo.clip algo.clip_high algo.ratio_one train.old_logprobs train.tis",
        lambda c: c.algo.name == "distill" and c.algo.distill_kl == "exact",
        "with algo=distill and algo.distill_kl=exact, which compare no sampled tokens",
    ),
    Idle(
        "algo.clip",
        lambda c: c.algo.loss == "cispo" and c.algo.clip_high is not None,
        f"with algo.loss=cispo, whose one bound is algo.clip_high{_ALONE}",
    ),
    Idle(
        "algo.loss algo.clip algo.clip_high",
        lambda c: c.train.old_logprobs == "recompute" and c.one_update,
        f"{_OLD}=recompute and one optimizer step per batch, whose ratio is 1; set algo.epochs or algo.minibatches",
    ),
    Idle(
        "algo.value_clip",
        lambda c: c.one_update,
        "with one optimizer step per batch; set algo.epochs or algo.minibatches",
    ),
    Idle(
        "train.schedule",
        lambda c: c.train.schedule == "constant_with_warmup" and c.train.warmup_steps == 0,
        "with train.schedule=constant_with_warmup; set train.warmup_steps",
    ),
    *map(_of_absent_split, SPLITS),
    # Their questions of the mini world are of one kind.
    Idle("task.dataset", lambda c: c.task.name in ("search_agent", "tool_agent") and c.mini, _MINI_DATA),
    # The papers' samples are from official files, and do not apply to the embedded world.
    Idle("task.sample", lambda c: c.mini, _MINI_DATA),
    Idle("task.claim_hops", lambda c: c.mini, "on the mini world, whose claims have 3 hops"),
    Idle(
        "eval.parse_retries algo.parse_retries algo.format_failure_score algo.format_failure_best algo.failing_traces "
        "algo.failing_index",
        lambda c: "parse_failures" in c.absent,
        _PARSED,
    ),
    Idle(
        "algo.penalties algo.penalty_scale algo.propagate",
        lambda c: "penalties" in c.absent,
        "with this task: its modules have no penalties",
    ),
    Idle(
        "algo.propagate task.caught_parse_penalty",
        lambda c: c.penalties() is False,
        f"with algo.penalties=false{_ALONE}",
    ),
    Idle(
        "task.caught_parse_penalty",
        lambda c: c.penalties() is None and not c.evaluates,
        "with this algorithm, whose calls have no penalties; use algo=mappo or one of algo=mhgpo_*",
    ),
    # Eq. 4 of MHGPO aggregates over several successors, which no trained call of these samplers has.
    Idle(
        "algo.aggregate",
        lambda c: c.algo.name in ("mhgpo_fof", "mhgpo_is"),
        "with this sampler: no trained call has several successors",
    ),
    Idle(
        "algo.aggregate",
        lambda c: c.algo.name == "mhgpo_rr" and c.modules == 1,
        "with one module: no call has several successors",
    ),
    Idle("algo.fork_probs algo.on_missing", lambda c: c.modules == 1, "with a program of one module"),
    Idle(
        "algo.failing_traces algo.overlong",
        lambda c: c.modules == 1 and "repeated_calls" in c.absent,
        "with a program of one call, which is the whole trajectory",
    ),
    Idle(
        "algo.siblings",
        lambda c: c.modules == 1 and "repeated_calls" in c.absent,
        "with a program of one call, whose samples are all compared",
    ),
    Idle("algo.filler algo.fill_source algo.failing_index", lambda c: "repeated_calls" in c.absent, _ONCE),
    Idle("algo.padding_mode", lambda c: c.algo.padding_mode == "truncate" and "repeated_calls" in c.absent, _ONCE),
    Idle(
        "algo.fanout",
        lambda c: (
            "repeated_calls" in c.absent and any(":" in key and int(key.partition(":")[2]) for key in c.algo.fanout)
        ),
        "at further calls of a module with this task, whose program calls each at most once",
    ),
    Idle("algo.obs", lambda c: "observations" in c.absent, "with this task: its contexts have no observations"),
    needs("algo.eps algo.ddof", "algo.scale", True),
    Idle("algo.kl", lambda c: c.algo.beta == 0, "with algo.beta=0.0; set algo.beta"),
    Idle(
        "train.old_logprobs train.tis train.staleness",
        lambda c: c.kind is SftRunConfig,
        f"{_SFT}, which has no old policy",
    ),
    Idle(
        "engine hardware.engine",
        lambda c: c.kind is SftRunConfig and c.sampler != "transformers",
        f"{_SFT}, which samples and evaluates from the very weights that it trains; use engine=transformers",
    ),
    Idle("run.doctor", lambda c: c.kind is SftRunConfig, f"{_SFT}, whose examples are checked before a model loads"),
    Idle(
        "train.max_failed_share",
        lambda c: c.kind is SftRunConfig and c.algo.source != "rollouts",
        "without rollouts; set algo.source=rollouts",
    ),
    *_OF_WEIGHTS,
    Idle(
        "hardware.processes",
        lambda c: c.kind is PromptRunConfig and c.sampler != "vllm_server",
        lambda c: (
            f"with algo={c.algo.name}, which runs in one process; with engine=vllm_server it says on how many "
            "GPUs servers run"
        ),
    ),
    Idle(
        "algo.critic_warmup_steps algo.value_clip",
        lambda c: c.algo.critic_lr_factor == 0,
        "with algo.critic_lr_factor=0.0: the critic is not trained",
    ),
)


def across_sections(sections: Mapping[str, object] | BaseModel) -> list[str]:
    """Return one sentence for each key that a value of another section leaves without effect.

    Args:
        sections: a command's config, or the sections of it that there are.
    """
    return idle_values(RUNS, _case(sections), sections)


def without_effect(
    config: BaseModel, user_keys: Collection[str], reward_set: str, absent: Collection[str] = (), modules: int = 1
) -> list[str]:
    """Return one sentence for each typed key that has no effect.

    Args:
        config: config of a command.
        user_keys: keys as on the command line, without `+`.
        reward_set: in use.
        absent: features that the task's program never has (`tasks.base.FEATURES`).
        modules: number of modules of the program.
    """
    case = _case(config, reward_set=reward_set, absent=absent, modules=modules)
    # A key below the rule's (model.lora.r below model.lora) is switched off with it.
    keys = [(rule, f"{key}.", name) for rule in TYPED for key in rule.keys.split() for name in sorted(user_keys)]
    return [
        text for rule, key, name in keys if f"{name}.".startswith(key) and (text := rule.problem(case, config, name))
    ]


def _case(sections: Mapping[str, object] | BaseModel, **facts: Any) -> Case:
    """Return what rules judge by."""
    names = ("train", "model", "hardware", "eval", "run", "algo", "task", "engine")
    found: dict[str, Any] = {name: value_at(sections, name) for name in names}
    kind = type(sections) if isinstance(sections, RootConfig) else RlRunConfig
    other_path = value_at(sections, "policy") != value_at(sections, "model.path")
    return Case(**found, kind=kind, sampler=engine_name(sections), other_path=other_path, **facts)


def engine_name(config: Mapping[str, object] | BaseModel) -> str:
    """Return the engine in use."""
    name = value_at(config, "engine.name")
    return str(value_at(config, "hardware.engine") if name == "auto" else name)
