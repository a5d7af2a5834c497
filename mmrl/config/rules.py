"""Keys that a value of another section leaves without effect: refused, never ignored.

Schemas refuse what an algorithm or a task does not have at all, and their `idle` what another key of the same section
switches off. A rule needs nothing but config sections and a few facts of the task; what needs a program's modules or
data is in `mmrl.run.check`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pydantic import BaseModel

from mmrl.config.base import SPLITS, Idle, idle_values, value_at

_EVAL, _TRAIN = "policy!=null", "policy=null"  # a key that `mmrl eval` alone has
_PROMPTS = "algo.name=miprov2|bootstrap_fewshot|gepa"
_ONE_UPDATE = "algo.epochs=1 algo.minibatches=1 model.lora.dropout=null|0.0"
"""A batch is trained on once, by the very weights that its old numbers come from."""
_MINI = " ".join(f"task.data.{split}=null|mini" for split in SPLITS)
_GREEDY = "eval.temperature=0.0 engine.endpoint.omit!~temperature"
_PARSED = "with this task: nothing its modules write fails to parse"
_ONCE = "with this task, whose program calls each module at most once: there are no lists of unequal length"

# `facts.*` are those of `_with_facts`. For any value but the default, set by the user or by a config file:
RUNS = (
    Idle("train.warmup_steps", "train.schedule=constant", "; use train.schedule=constant_with_warmup"),
    Idle("train.old_logprobs algo.clip_high algo.loss", "algo.ratio_one=true"),
    Idle("train.tis", "algo.ratio_one=true", ", which has no old policy to correct; leave one of the two out"),
    Idle("train.tis", "train.old_logprobs=sampler", ", whose ratio is against the sampler already; use recompute"),
    Idle("train.staleness", "algo.ratio_one=true", ", which takes every batch as sampled from the weights in training"),
    Idle(
        "train.staleness",
        "train.old_logprobs=recompute train.tis=null",
        ", which forgets the weights that sampled; use train.old_logprobs=sampler, or set train.tis",
    ),
    Idle("algo.critic", "algo.critic=adapter model.lora=null", "without an adapter of the policy: set model.lora"),
    Idle("algo.frozen_serving", "model.modules!=null", "with model.modules: a frozen adapter acts as it started"),
    # These three say how a run trains: an evaluation may take the profile of a training run as it is.
    Idle("hardware.sharding", f"hardware.processes=1 hardware.nodes=1 {_TRAIN}", "with one process; use none"),
    Idle("hardware.cpu_offload", f"hardware.sharding=none {_TRAIN}", "; use fsdp2, zero2 or zero3"),
    Idle("hardware.rollout_devices", f"facts.engine!=vllm_server {_TRAIN}", "without vllm_server"),
    Idle("hardware.ray", _EVAL, "on mmrl eval, which runs in one process of this machine; take another profile"),
    Idle("hardware.ray", "algo.name=sft", "with algo=sft, which trains in one process of this machine"),
    Idle("engine.endpoints", "facts.engine=openai", "with engine=openai, which answers for all modules; leave it out"),
    Idle("model.modules", _EVAL, "on mmrl eval, where a checkpoint says which module uses which weights"),
)
# Where the key is typed: a file may carry a paper's value that is not in use. Several rules may name one key.
TYPED = (
    # Greedy decoding draws nothing, so that what shapes the draw, and drawing again, change no completion.
    Idle("eval.top_p eval.top_k eval.samples", _GREEDY, " (greedy); set eval.temperature, or leave it out"),
    *(
        Idle(key, f"engine.endpoint.omit~{key[5:]}", ", so that the endpoint's own holds; leave one of the two out")
        for key in ("eval.temperature", "eval.top_p", "task.max_tokens")
    ),
    # These three are terms of the turn rewards; the other reward sets do not read them.
    Idle(
        "task.search_penalty task.final_penalty task.em_needs_format",
        "task.name=search_agent facts.reward_set!=turn|judge_turn",
        "with this reward set; use task.reward=turn",
    ),
    Idle("task.gain", "facts.reward_set!=gain", "with this reward set; use task.reward=gain"),
    Idle("hardware.engine", "engine.name!=auto", "with engine= given; leave one of the two out"),
    Idle(
        "engine.python engine.args engine.start_timeout_s engine.restarts engine.gpu_memory engine.kv_cache_gb "
        "engine.replicas",
        "engine.urls!=[]",
        "with engine.urls: mmrl does not start those servers",
    ),
    Idle(
        "run.group run.tags run.wandb_project run.report_calls", "run.report_to=[]", "without a tracker: run.report_to"
    ),
    Idle("eval.split", _EVAL, "on mmrl eval; use split="),
    Idle("model.name model.lora", _EVAL, "on mmrl eval: policy= names the weights, and their adapter"),
    Idle(
        "model.path", f"{_EVAL} facts.engine!=openai facts.other_path=true", "on mmrl eval; policy= names the weights"
    ),
    # Typed, and not from a profile that was made for training.
    Idle(
        "eval.every model.gradient_checkpointing hardware.sharding hardware.cpu_offload hardware.rollout_devices "
        "run.name run.report_to run.report_calls run.wandb_project run.group run.tags run.progress run.doctor "
        "task.caught_parse_penalty",
        _EVAL,
        "on mmrl eval; it is an option of mmrl train",
    ),
    Idle("algo.clip", "algo.ratio_one=true"),
    Idle(
        "algo.clip",
        "algo.loss=cispo algo.clip_high!=null",
        ", whose one bound is algo.clip_high; leave one of the two out",
    ),
    Idle(
        "algo.loss algo.clip algo.clip_high",
        f"train.old_logprobs=recompute {_ONE_UPDATE}",
        " and one optimizer step per batch, whose ratio is 1; set algo.epochs or algo.minibatches",
    ),
    Idle("algo.value_clip", _ONE_UPDATE, "with one optimizer step per batch; set algo.epochs or algo.minibatches"),
    Idle("train.schedule", "train.schedule=constant_with_warmup train.warmup_steps=0", "; set train.warmup_steps"),
    *(Idle(f"task.data.{split}_items", f"task.data.{split}=null", ": there is no such split") for split in SPLITS),
    # Their questions of the mini world are of one kind.
    Idle("task.dataset", f"task.name=search_agent|tool_agent {_MINI}", "on the mini world: it is for task.data"),
    # The papers' samples are from official files, and do not apply to the embedded world.
    Idle("task.sample", _MINI, "on the mini world: it is for task.data"),
    Idle("task.claim_hops", _MINI, "on the mini world, whose claims have 3 hops"),
    Idle(
        "eval.parse_retries algo.parse_retries algo.format_failure_score algo.format_failure_best algo.failing_traces "
        "algo.failing_index",
        "facts.absent~parse_failures",
        _PARSED,
    ),
    Idle(
        "algo.penalties algo.penalty_scale algo.propagate",
        "facts.absent~penalties",
        "with this task: its modules have no penalties",
    ),
    Idle("algo.propagate task.caught_parse_penalty", "algo.penalties=false"),
    Idle(
        "task.caught_parse_penalty",
        f"algo.penalties=null {_TRAIN}",
        "with this algorithm, whose calls have no penalties; use algo=mappo or one of algo=mhgpo_*",
    ),
    # Eq. 4 of MHGPO aggregates over several successors, which no trained call of these samplers has.
    Idle("algo.aggregate", "algo.name=mhgpo_fof|mhgpo_is", "with this sampler: no trained call has several successors"),
    Idle("algo.aggregate", "algo.name=mhgpo_rr facts.modules=1", "with one module: no call has several successors"),
    Idle("algo.fork_probs algo.on_missing", "facts.modules=1", "with a program of one module"),
    Idle(
        "algo.failing_traces algo.overlong",
        "facts.modules=1 facts.absent~repeated_calls",
        "with a program of one call, which is the whole trajectory",
    ),
    Idle("algo.filler algo.fill_source algo.failing_index", "facts.absent~repeated_calls", _ONCE),
    Idle("algo.padding_mode", "algo.padding_mode=truncate facts.absent~repeated_calls", _ONCE),
    Idle("algo.obs", "facts.absent~observations", "with this task: its contexts have no observations"),
    Idle("algo.eps algo.ddof", "algo.scale!=true"),
    Idle("algo.kl", "algo.beta=0.0", "; set algo.beta"),
    Idle("train.old_logprobs train.tis train.staleness", "algo.name=sft", "with algo=sft, which has no old policy"),
    Idle(
        "engine hardware.engine",
        "algo.name=sft facts.engine!=transformers",
        "with algo=sft, which samples and evaluates from the very weights that it trains; use engine=transformers",
    ),
    Idle("eval.every run.doctor", _PROMPTS, ", which evaluates before and after, and trains no weights"),
    Idle("model.lora model.modules model.gradient_checkpointing", _PROMPTS, ", which trains no weights"),
    Idle(
        "hardware.nodes hardware.ray hardware.sharding hardware.cpu_offload",
        _PROMPTS,
        ", which runs in one process of this machine",
    ),
    Idle(
        "hardware.processes",
        f"{_PROMPTS} facts.engine!=vllm_server",
        ", which runs in one process; with engine=vllm_server it says on how many GPUs servers run",
    ),
    Idle("run.doctor", "algo.name=sft", "with algo=sft, whose examples are checked before a model loads"),
    Idle("train.max_failed_share", "algo.source=task|file", "without rollouts; set algo.source=rollouts"),
    Idle("algo.critic_warmup_steps algo.value_clip", "algo.critic_lr_factor=0.0", ": the critic is not trained"),
)


def across_sections(sections: Mapping[str, object] | BaseModel) -> list[str]:
    """Return one sentence for each key that a value of another section leaves without effect.

    Args:
        sections: a command's config, or the sections of it that there are.
    """
    return idle_values(RUNS, _with_facts(sections))


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
    extended = _with_facts(config, reward_set=reward_set, absent=absent, modules=modules)
    # A key below the rule's (model.lora.r below model.lora) is switched off with it.
    keys = [(rule, f"{key}.", name) for rule in TYPED for key in rule.keys.split() for name in sorted(user_keys)]
    return [text for rule, key, name in keys if f"{name}.".startswith(key) and (text := rule.problem(extended, name))]


def _with_facts(sections: Mapping[str, object] | BaseModel, **facts: object) -> dict[str, object]:
    """Return the sections and, as `facts`, the other values that rules read."""
    other_path = value_at(sections, "policy") != value_at(sections, "model.path")
    return {**dict(sections), "facts": {"engine": engine_name(sections), "other_path": other_path, **facts}}


def engine_name(config: Mapping[str, object] | BaseModel) -> str:
    """Return the engine in use."""
    name = value_at(config, "engine.name")
    return str(value_at(config, "hardware.engine") if name == "auto" else name)
