"""Keys that the user typed and that have no effect beside the rest of the config: refused, never ignored.

Schemas refuse what an algorithm or a task does not have at all; this file refuses what another value switches off. Only
keys typed on the command line are judged: a config file may carry a paper's value of an option that is not in use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from mmrl.config.algo import CriticConfig, GroupConfig, MhgpoRrConfig
from mmrl.config.schema import SHIPPED, EvalCommandConfig, RootConfig, TrainCommandConfig


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
    """One key, when it has no effect, and what to do instead."""

    key: str
    idle: Callable[..., bool]
    """Whether it has none, given the config (of the command that has the key) and the facts."""
    why: str
    """Goes on after "which has no effect"."""


def _absent(feature: str) -> Callable[[RootConfig, Facts], bool]:
    return lambda config, facts: feature in facts.absent_features


def _greedy(config: RootConfig, facts: Facts) -> bool:
    return config.eval.temperature == 0


def _other_set(config: RootConfig, facts: Facts) -> bool:
    return config.task.name == "search_agent" and facts.reward_set not in ("turn", "judge_turn")


def _given_server(config: RootConfig, facts: Facts) -> bool:
    return config.engine.server is not None


def _one_module(config: TrainCommandConfig, facts: Facts) -> bool:
    return facts.modules == 1


def _no_fork_above(config: TrainCommandConfig, facts: Facts) -> bool:
    algo = config.algo
    assert isinstance(algo, MhgpoRrConfig)
    return facts.modules == 1 or bool(algo.fork_probs and algo.fork_probs[0] == 1)


def engine_name(config: RootConfig) -> str:
    """The engine in use."""
    return config.hardware.engine if config.engine.name == "auto" else str(config.engine.name)


# A key may stand in several rules: one for each of the values that switch it off.
COMMON = (
    # Greedy decoding draws nothing, so that what shapes the draw, and drawing again, change no completion.
    Rule("eval.top_p", _greedy, "with eval.temperature=0 (greedy); set eval.temperature, or leave it out"),
    Rule("eval.top_k", _greedy, "with eval.temperature=0 (greedy); set eval.temperature, or leave it out"),
    Rule("eval.samples", _greedy, "with eval.temperature=0: all samples of an item are equal; set eval.temperature"),
    Rule("eval.parse_retries", _absent("parse_failures"), "with this task: nothing its modules write fails to parse"),
    # These three are terms of the turn rewards; the other reward sets do not read them.
    Rule("task.search_penalty", _other_set, "with this reward set; use task.reward=turn"),
    Rule("task.final_penalty", _other_set, "with this reward set; use task.reward=turn"),
    Rule("task.em_needs_format", _other_set, "with this reward set; use task.reward=turn"),
    Rule(
        "model.revision",
        lambda config, facts: config.model.path in SHIPPED or Path(config.model.path).is_dir(),
        "with weights in a folder; it picks a revision of a hub id in model.path",
    ),
    Rule(
        "hardware.engine",
        # with a name given, the profile's engine is the one that is not used
        lambda config, facts: config.engine.name != "auto",
        "with engine= given; leave one of the two out",
    ),
    # All of them say how mmrl starts and looks after a server of its own.
    *(
        Rule(f"engine.{key}", _given_server, "with engine.url: mmrl does not start that server")
        for key in ("python", "args", "start_timeout_s", "restarts", "gpu_memory", "kv_cache_gb")
    ),
    Rule(
        "run.wandb_project",
        lambda config, facts: "wandb" not in config.run.report_to,
        "without wandb; set run.report_to=[wandb]",
    ),
)
EVAL = (
    Rule("eval.split", lambda config, facts: True, "on mmrl eval; use split="),
    Rule("eval.every", lambda config, facts: True, "on mmrl eval; it is an option of mmrl train"),
    Rule("model.lora", lambda config, facts: True, "on mmrl eval: policy= says which adapter there is, if any"),
)
_NO_PENALTIES = "with this task: its modules have no penalties"
TRAIN = (
    # The ratio is the constant 1, so that no bound on it is ever reached.
    Rule("algo.clip", lambda config, facts: config.algo.ratio_one, "with algo.ratio_one=true: nothing is clipped"),
    Rule("algo.parse_retries", _absent("parse_failures"), "with this task: nothing its modules write fails to parse"),
    Rule("algo.penalties", _absent("penalties"), _NO_PENALTIES),
    Rule("algo.penalty_scale", _absent("penalties"), _NO_PENALTIES),
    Rule("algo.propagate", _absent("penalties"), _NO_PENALTIES),
    Rule(
        "algo.propagate",
        lambda config, facts: not config.algo.penalties,
        "with algo.penalties=false; leave one of the two out",
    ),
    Rule(
        "algo.aggregate",
        # Eq. 4 aggregates over several successors, which no trained call of these samplers has
        lambda config, facts: config.algo.name in ("mhgpo_fof", "mhgpo_is"),
        "with this sampler: no trained call has several successors; use algo=mhgpo_rr or algo=mhgpo_fof_os",
    ),
    Rule(
        "algo.aggregate",
        lambda config, facts: isinstance(config.algo, MhgpoRrConfig) and _no_fork_above(config, facts),
        "where every tree forks at its first module: no call has several successors",
    ),
    # Round robin with all probability on the first module is fork-on-first: no call is left without siblings.
    Rule("algo.regroup", _no_fork_above, "where every tree forks at its first module: there are no single calls"),
    Rule("algo.fork_probs", _one_module, "with a program of one module: every tree forks there"),
    Rule("algo.on_missing", _one_module, "with a program of one module: every rollout calls it"),
    Rule("algo.obs", _absent("observations"), "with this task: its contexts have no observations"),
    *(
        Rule(f"algo.{key}", _absent("parse_failures"), "with this task: nothing its modules write fails to parse")
        for key in ("format_failure_score", "format_failure_best", "failing_traces", "failing_index")
    ),
    *(
        Rule(
            f"algo.{key}",
            lambda config, facts: isinstance(config.algo, GroupConfig) and not config.algo.scale,
            "with algo.scale=false: nothing is divided by a standard deviation",
        )
        for key in ("eps", "ddof")
    ),
    Rule(
        "algo.kl",
        lambda config, facts: isinstance(config.algo, CriticConfig) and config.algo.beta == 0,
        "with algo.beta=0; set algo.beta",
    ),
    *(
        Rule(
            f"algo.{key}",
            lambda config, facts: isinstance(config.algo, CriticConfig) and config.algo.critic_lr_factor == 0,
            "with algo.critic_lr_factor=0: the critic is not trained",
        )
        for key in ("critic_warmup_steps", "value_clip")
    ),
)


def without_effect(config: RootConfig, typed: Collection[str], facts: Facts) -> list[str]:
    """One sentence for each typed key that has no effect.

    Args:
        typed: keys as on the command line, without `+`.
    """
    # A key below the rule's (model.lora.r below model.lora) is switched off with it.
    rules = [*COMMON, *(EVAL if isinstance(config, EvalCommandConfig) else TRAIN)]
    return [
        f"{key}: got {_value(config, key)}, which has no effect {rule.why}"
        for rule in rules
        for key in sorted(typed)
        if (key == rule.key or key.startswith(f"{rule.key}.")) and rule.idle(config, facts)
    ]


def _value(config: RootConfig, key: str) -> str:
    """What stands at a key, as it would be typed."""
    # the dump of the schema in use, so that keys of subclasses are there
    value: object = config.model_dump()
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return str(value).lower() if isinstance(value, bool) else str(value)
