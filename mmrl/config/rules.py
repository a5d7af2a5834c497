"""The table of keys that have no effect beside the rest of the config: refused, never ignored.

Schemas refuse what an algorithm or a task does not have at all; this table refuses what another value switches off. A
rule needs nothing but config sections and `Facts`; what needs a program's modules or data is in `mmrl.run.check`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from mmrl.config.base import FETCHED, MINI, SHIPPED, SPLITS, Section, is_default, shown, value_at

SectionT = TypeVar("SectionT", bound=Section)
WITH_PROJECTS = ("wandb", "mlflow", "comet_ml", "trackio", "clearml", "swanlab")
"""Trackers that keep runs in projects; TensorBoard, Aim and DVCLive keep them in the run directory."""
At = Callable[[str], object]
"""The value at a path as it would be typed; None where the sections have no such key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a config alone does not say."""

    reward_set: str
    """The reward set in use."""
    absent_features: Collection[str] = ()
    """What the task's program never has (`tasks.base.FEATURES`)."""
    modules: int = 1
    """Modules of the program."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When some keys have no effect, and what to do instead."""

    keys: str
    """Their paths, with spaces between."""
    idle: str | Callable[[At], bool]
    """The value that switches them off (`key=value`, `key!=value`), or whether they are off."""
    why: str
    """Goes on after "has no effect with key=value", or after "has no effect" where `idle` is no text."""

    def reason(self, at: At) -> str | None:
        """What goes on after "has no effect"; None where the keys have one."""
        if callable(self.idle):
            return self.why if self.idle(at) else None
        key, _, value = self.idle.partition("=")
        path = key.removesuffix("!")
        now = at(path)
        if (now is None and key != path) or (shown(now) == value) != (key == path):
            return None
        return f"with {path}={shown(now)}{self.why}"


def _is(path: str, *values: object) -> Callable[[At], bool]:
    return lambda at: at(path) in values


def _given(path: str) -> Callable[[At], bool]:
    return lambda at: at(path) is not None


def _untracked(*trackers: str) -> Callable[[At], bool]:
    """Whether `run.report_to` has none of them."""
    return lambda at: not any(name in str(at("run.report_to")) for name in trackers)


def _absent(feature: str) -> Callable[[At], bool]:
    return _is(f"facts.absent.{feature}", True)


def _engine(at: At) -> object:
    """The engine in use."""
    name = at("engine.name")
    return at("hardware.engine") if name == "auto" else name


def _other_set(at: At) -> bool:
    return at("task.name") == "search_agent" and at("facts.reward_set") not in ("turn", "judge_turn")


def _updates(at: At) -> int:
    """Optimizer steps of one batch of rollouts."""
    if _SFT(at):
        return 1
    epochs, minibatches = at("algo.epochs"), at("algo.minibatches")
    return epochs * minibatches if isinstance(epochs, int) and isinstance(minibatches, int) else 0


def _one_update(at: At) -> bool:
    """Whether a batch is trained on once, by the very weights that its old numbers come from."""
    # Dropout of an adapter would make two forwards of the same weights differ.
    return _updates(at) == 1 and not at("model.lora.dropout")


def _no_schedule(at: At) -> bool:
    """Whether the learning rate is constant, though another schedule is named."""
    if at("train.schedule") == "constant_with_warmup":
        return at("train.warmup_steps") == 0
    return at("train.schedule") != "constant" and at("train.steps") == 1 and _updates(at) == 1


def _mini_alone(at: At) -> bool:
    return all(at(f"task.data.{split}") in (None, MINI) for split in SPLITS)


def _weights_elsewhere(at: At) -> bool:
    """Whether an evaluation takes its weights from `policy`, which no endpoint serves."""
    return _EVAL(at) and _engine(at) != "openai"


def _one_revision(at: At) -> bool:
    """Whether the weights are in a folder, which has no revisions."""
    source = Path(str(at("policy") if _weights_elsewhere(at) else at("model.path")))
    saved = (source / "config.json").is_file() or (not _EVAL(at) and source.is_dir())
    return saved or str(source) in (*SHIPPED, *FETCHED)


def _unsent(setting: str) -> Callable[[At], bool]:
    return lambda at: f"'{setting}'" in str(at("engine.endpoint.omit"))


def _greedy(at: At) -> bool:
    return at("eval.temperature") == 0 and not _unsent("temperature")(at)


def _other_products(at: At) -> bool:
    here = at("train.steps") is not None or _engine(at) == "transformers"
    return not here or at("hardware.device") == "cuda" or at("model.dtype") not in ("auto", "float32")


def _no_fork_above(at: At) -> bool:
    probs = at("algo.fork_probs")
    return at("facts.modules") == 1 or (isinstance(probs, tuple) and bool(probs) and probs[0] == 1)


_BOTH = "leave one of the two out"
_UNSENT = f"with its name in engine.endpoint.omit, so that the endpoint's own holds; {_BOTH}"
_PARSED = "with this task: nothing its modules write fails to parse"
_ONCE = "with this task, whose program calls each module at most once: there are no lists of unequal length"
_ONE = _is("facts.modules", 1)
_EVAL = _given("policy")  # a key that `mmrl eval` alone has
_SFT = _is("algo.name", "sft")
_OWN = "; set source=rollouts or leave it out"
_GIVEN = "with algo=sft, which trains on given texts in padded batches and compares with no other policy; leave it out"

# Within one section, which refuses them itself (`checked`), from Python too; the default in a file is no choice.
SECTIONS: Mapping[str, tuple[Rule, ...]] = {
    "algo": (
        Rule("loss_length", "loss_mean!=constant", "; set loss_mean=constant or leave it out"),
        Rule("refill_rounds", "zero_variance!=refill", "; set zero_variance=refill or leave it out"),
        Rule("std_over", "scale=false", "; set scale=true or leave it out"),
        Rule("penalty_scale", "penalties=false", f"; {_BOTH}"),
        Rule("filler fill_source", "padding_mode!=fill", "; set padding_mode=fill or leave it out"),
        Rule("filler", "fill_source=group", "; set fill_source=rollout or leave it out"),
        Rule("failing_index", "padding_mode!=ragged", "; set padding_mode=ragged or leave it out"),
        Rule("failing_index", "failing_traces=trajectory", f"; {_BOTH}"),
        Rule("overlong", "max_context=null", "; set max_context or leave it out"),
        # obs=skip leaves observation tokens out of the sequence, so nothing can be placed or averaged on them
        Rule("position", "obs=skip", ", which passes over observation tokens: turn_end needs obs=all"),
        Rule(
            "whiten",
            lambda at: at("obs") == "skip" and at("whiten") == "all",
            "with obs=skip, which passes over observation tokens: all needs obs=all",
        ),
        Rule("file", "source!=file", "; set source=file or leave it out"),
        Rule("rollouts min_reward per_example temperature top_p top_k parse_retries", "source!=rollouts", _OWN),
    ),
    "task.retriever": (
        Rule(
            "timeout_s retries concurrency cache_size",
            _is("process", "inline"),
            "with a retriever in process; it is an option of task.retriever.name=remote and "
            "task.retriever.process=child",
        ),
        # What an index folder was built with, so that nothing else can be chosen when it is used.
        Rule(
            "k1 b stemmer stopwords model encoder pooling normalise query_prompt passage_prompt faiss cache_dir",
            _given("index"),
            "with task.retriever.index, which was built with its own",
        ),
    ),
}
# Across sections, for any value but the default too.
RUNS = (
    Rule("train.warmup_steps", "train.schedule=constant", "; use train.schedule=constant_with_warmup"),
    Rule("train.old_logprobs", "algo.ratio_one=true", f"; {_BOTH}"),
    Rule("algo.clip_high", "algo.ratio_one=true", f": a ratio of 1 is never clipped; {_BOTH}"),
    Rule(
        "algo.frozen_serving",
        _given("model.modules"),
        "with model.modules, where a frozen module with an adapter of its own acts with the initial weights; "
        "leave it out",
    ),
    # These three say how a run trains: an evaluation may take the profile of a training run as it is.
    Rule(
        "hardware.sharding",
        lambda at: at("hardware.processes") == at("hardware.nodes") == 1 and not _EVAL(at),
        "with one process; use none",
    ),
    Rule(
        "hardware.cpu_offload",
        lambda at: at("hardware.sharding") == "none" and not _EVAL(at),
        "with hardware.sharding=none; use fsdp2, zero2 or zero3",
    ),
    Rule("hardware.rollout_devices", lambda at: not _EVAL(at) and _engine(at) != "vllm_server", "without vllm_server"),
    Rule(
        "engine.endpoints",
        lambda at: _engine(at) == "openai",
        "with engine=openai, which answers for all modules; leave it out",
    ),
    Rule("model.modules", _EVAL, "on mmrl eval, where a checkpoint says which module uses which weights"),
)
# Judged where the key is typed: a file may carry a paper's value that is not in use. Several rules may name one key.
TYPED = (
    # Greedy decoding draws nothing, so that what shapes the draw, and drawing again, change no completion.
    Rule("eval.top_p eval.top_k", _greedy, "with eval.temperature=0.0 (greedy); set eval.temperature, or leave it out"),
    Rule("eval.samples", _greedy, "with eval.temperature=0.0: all samples of an item are equal; set eval.temperature"),
    *(Rule(key, _unsent(key[5:]), _UNSENT) for key in ("eval.temperature", "eval.top_p", "task.max_tokens")),
    # These three are terms of the turn rewards; the other reward sets do not read them.
    Rule(
        "task.search_penalty task.final_penalty task.em_needs_format",
        _other_set,
        "with this reward set; use task.reward=turn",
    ),
    Rule("model.revision", _one_revision, "with weights in a folder; it picks a revision of a hub id"),
    Rule("hardware.engine", lambda at: at("engine.name") != "auto", f"with engine= given; {_BOTH}"),
    Rule(
        "engine.python engine.args engine.start_timeout_s engine.restarts engine.gpu_memory engine.kv_cache_gb",
        _given("engine.url"),
        "with engine.url: mmrl does not start that server",
    ),
    Rule("engine.gpu_memory", "hardware.device=cpu", "; it is for GPUs, and engine.kv_cache_gb for the CPU"),
    Rule("model.matmul", _other_products, "here; it is for float32 on a CPU, in this process"),
    Rule("engine.kv_cache_gb", "hardware.device=cuda", "; it is for the CPU, and engine.gpu_memory for GPUs"),
    Rule(
        "engine.sleep",
        lambda at: at("hardware.device") == "cpu" and at("engine.sleep") is False,
        "with hardware.device=cpu, where vLLM never sleeps",
    ),
    Rule("run.group run.tags", _untracked("wandb"), "without wandb; set run.report_to=[wandb]"),
    Rule(
        "run.wandb_project",
        _untracked(*WITH_PROJECTS),
        f"without a tracker that has projects; set run.report_to to one of {', '.join(WITH_PROJECTS)}",
    ),
    Rule(
        "run.report_calls",
        _untracked("wandb", "tensorboard"),
        "without a tracker that takes texts; set run.report_to=[wandb] or [tensorboard]",
    ),
    Rule("eval.split", _EVAL, "on mmrl eval; use split="),
    Rule("eval.every", _EVAL, "on mmrl eval; it is an option of mmrl train"),
    Rule("model.lora", _EVAL, "on mmrl eval: policy= says which adapter there is, if any"),
    Rule(
        "model.path",
        lambda at: _weights_elsewhere(at) and at("policy") != at("model.path"),
        "on mmrl eval; policy= names the weights",
    ),
    Rule("model.name", _EVAL, "on mmrl eval, which names its policy=; leave it out"),
    Rule("model.gradient_checkpointing", _EVAL, "on mmrl eval, which updates nothing"),
    # Typed, and not from a profile that was made for training.
    Rule(
        "hardware.sharding hardware.cpu_offload hardware.rollout_devices",
        _EVAL,
        "on mmrl eval, which runs in one process; it is an option of mmrl train",
    ),
    Rule(
        "run.name run.report_to run.report_calls run.wandb_project run.group run.tags run.progress run.doctor",
        _EVAL,
        "on mmrl eval, which has no steps to show or send; it is an option of mmrl train",
    ),
    Rule("algo.clip", "algo.ratio_one=true", ": nothing is clipped"),
    Rule(
        "algo.clip algo.clip_high",
        lambda at: at("train.old_logprobs") == "recompute" and _one_update(at),
        "with train.old_logprobs=recompute and one optimizer step per batch, whose ratio is 1; set algo.epochs or "
        "algo.minibatches",
    ),
    Rule(
        "algo.value_clip",
        _one_update,
        "with one optimizer step per batch: no value has moved from its old one; set algo.epochs or algo.minibatches",
    ),
    Rule(
        "train.schedule",
        _no_schedule,
        "where the learning rate is constant all the same; set train.warmup_steps for constant_with_warmup, more than "
        "one optimizer step for linear or cosine",
    ),
    *(Rule(f"task.data.{split}_items", f"task.data.{split}=null", ": there is no such split") for split in SPLITS),
    # Their questions of the mini world are of one kind.
    Rule(
        "task.dataset",
        lambda at: _mini_alone(at) and at("task.name") in ("search_agent", "tool_agent"),
        "on the mini world with this task; it is the layout of data files: set task.data",
    ),
    # What the papers drew from official files says nothing of the embedded world.
    Rule("task.sample", _mini_alone, "on the mini world; it chooses rows of data files: set task.data"),
    Rule("eval.parse_retries algo.parse_retries", _absent("parse_failures"), _PARSED),
    Rule("algo.format_failure_score algo.format_failure_best", _absent("parse_failures"), _PARSED),
    Rule("algo.failing_traces algo.failing_index", _absent("parse_failures"), _PARSED),
    Rule(
        "algo.penalties algo.penalty_scale algo.propagate",
        _absent("penalties"),
        "with this task: its modules have no penalties",
    ),
    Rule("algo.propagate task.caught_parse_penalty", "algo.penalties=false", f"; {_BOTH}"),
    Rule("task.caught_parse_penalty", _EVAL, "on mmrl eval, which gives no credit"),
    Rule(
        "task.caught_parse_penalty",
        lambda at: not _EVAL(at) and at("algo.penalties") is None,
        "with this algorithm, whose calls have no penalties; use algo=mappo or one of algo=mhgpo_*",
    ),
    # Eq. 4 of MHGPO aggregates over several successors, which no trained call of these samplers has.
    Rule(
        "algo.aggregate",
        _is("algo.name", "mhgpo_fof", "mhgpo_is"),
        "with this sampler: no trained call has several successors; use algo=mhgpo_rr or algo=mhgpo_fof_os",
    ),
    Rule(
        "algo.aggregate",
        # of the samplers, round robin alone regroups
        lambda at: at("algo.regroup") is not None and _no_fork_above(at),
        "where every tree forks at its first module: no call has several successors",
    ),
    Rule("algo.fork_probs", _ONE, "with a program of one module: every tree forks there"),
    Rule("algo.on_missing", _ONE, "with a program of one module: every rollout calls it"),
    Rule(
        "algo.failing_traces algo.overlong",
        lambda at: _ONE(at) and _absent("repeated_calls")(at),
        "with a program of one call, which is the whole trajectory",
    ),
    Rule("algo.filler algo.fill_source algo.failing_index", _absent("repeated_calls"), _ONCE),
    Rule(
        "algo.padding_mode", lambda at: _absent("repeated_calls")(at) and at("algo.padding_mode") == "truncate", _ONCE
    ),
    Rule("algo.obs", _absent("observations"), "with this task: its contexts have no observations"),
    Rule("algo.eps algo.ddof", "algo.scale=false", ": nothing is divided by a standard deviation"),
    Rule("algo.kl", "algo.beta=0.0", "; set algo.beta"),
    Rule("train.old_logprobs train.tis train.staleness", _SFT, _GIVEN),
    Rule("train.packing", "algo.prompt_weight!=0.0", ": prompts are trained too, so sequences are padded"),
    Rule(
        "engine hardware.engine",
        lambda at: _SFT(at) and _engine(at) != "transformers",
        "with algo=sft, which samples and evaluates from the very weights that it trains; use engine=transformers",
    ),
    Rule("run.doctor", _SFT, "with algo=sft, whose examples are checked before a model loads"),
    Rule("train.max_failed_share", _is("algo.source", "task", "file"), "without rollouts; set algo.source=rollouts"),
    Rule("algo.critic_warmup_steps algo.value_clip", "algo.critic_lr_factor=0.0", ": the critic is not trained"),
)


def checked(section: SectionT, path: str) -> SectionT:
    """A section in which every given key has an effect; what its validator returns.

    Args:
        path: where the section stands in a config.

    Raises:
        ValueError: the keys without effect, one sentence each.
    """
    if problems := _without_effect(SECTIONS[path], section):
        raise ValueError(*problems)
    return section


def across_sections(sections: Mapping[str, object] | BaseModel) -> list[str]:
    """One sentence for each key that a value of another section leaves without effect.

    Args:
        sections: a command's config, or the sections of it that there are.
    """
    return _without_effect(RUNS, sections)


def _without_effect(rules: Iterable[Rule], sections: Mapping[str, object] | BaseModel) -> list[str]:
    at = partial(value_at, sections)
    keys = [(rule, key) for rule in rules for key in rule.keys.split()]
    return [text for rule, key in keys if not is_default(sections, key) and (text := _sentence(key, rule, at))]


def without_effect(config: BaseModel, typed: Collection[str], facts: Facts) -> list[str]:
    """One sentence for each typed key that has no effect.

    Args:
        config: of a command.
        typed: keys as on the command line, without `+`.
    """
    absent = dict.fromkeys(facts.absent_features, True)
    known = {"reward_set": facts.reward_set, "modules": facts.modules, "absent": absent}
    at = partial(value_at, {**dict(config), "facts": known})
    # A key below the rule's (model.lora.r below model.lora) is switched off with it.
    keys = [(rule, f"{key}.", name) for rule in TYPED for key in rule.keys.split() for name in sorted(typed)]
    return [text for rule, key, name in keys if f"{name}.".startswith(key) and (text := _sentence(name, rule, at))]


def _sentence(key: str, rule: Rule, at: At) -> str | None:
    """None where the key has an effect."""
    value, reason = at(key), rule.reason(at)
    # a whole section would bury the sentence
    got = "" if isinstance(value, Mapping | BaseModel) else f"got {shown(value)}, which "
    return reason and f"{key}: {got}has no effect {reason}"


def engine_name(config: BaseModel) -> str:
    """The engine in use."""
    return str(_engine(partial(value_at, config)))
