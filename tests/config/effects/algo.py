"""Effects of `algo.*`: plans, credit, the loss and its gradients, the critic, sampling, weights of modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mmrl.algorithms import ALGORITHMS, assign_credit, minibatches
from mmrl.config import ALGO_SCHEMAS, AlgoConfig, EvalConfig, LoraConfig, ModelConfig, TaskConfig
from mmrl.config.algo import CriticConfig
from mmrl.errors import ParseFailure
from mmrl.models.assignment import ModuleAssignment
from mmrl.records import Example, Forest
from mmrl.report.forest import parse_forest
from mmrl.rollout.environment import sampling_settings
from mmrl.run.build import separate_teachers, teacher_policy, teacher_prompts
from mmrl.tasks.dspy.own import FunctionProgram
from tests.config.effects import Options, acts, refused
from tests.helpers import TOP
from tests.helpers.forests import Grow
from tests.helpers.programs import FakeEngine, FakeTask, environment, forest_of
from tests.helpers.trainer_cases import (
    LORA,
    gradients,
    make_calls,
    make_trainer,
    with_changes,
    with_targets,
)

AGENTS = ("writer", "ranker", "answerer")
FORESTS = TOP / "docs" / "forests"
NEWER = "algo.dr_mas;algo.gigpo;algo.igpo;algo.tree_grpo;algo.ccpo"
GROUPS = f"algo.grpo;algo.grpo_mr;algo.mhgpo_*;algo.mmgrpo;algo.mt_grpo*;{NEWER}"
CRITICS = "algo.ppo;algo.mt_ppo;algo.mappo"


def section(name: str, options: Options) -> AlgoConfig:
    return ALGO_SCHEMAS[name].model_validate({"name": name, **options})


# --- forests in which every rule of credit has something to do


def of_one_module() -> Forest:
    """Rollouts that call it unequally often; one of four fails to parse at the second call."""
    grow = Grow(("writer",))
    for index, length in enumerate((3, 3, 2, 6)):
        parent = None
        for position in range(length):
            broken = length == 2 and position == 1
            parent = grow.call(f"q/{index}#{position}", parent, "writer", 2, ok=not broken, expected_fields=2)
        grow.end(parent, 0.2 * index, id=f"q/{index}", example="q", error="parse" if length == 2 else None)
    return grow.forest


def played_again() -> Forest:
    """Rollouts with their outcomes without a module; those of the last example are all alike."""
    grow = Grow(AGENTS)
    for example, rewards in (("q0", (1.0, 0.0, 1.0, 0.2)), ("q1", (1.0, 1.0, 0.0, 0.0)), ("q2", (1.0, 1.0, 1.0, 1.0))):
        for index, reward in enumerate(rewards):
            without = {"writer": float(example == "q1" or index == 2), "ranker": 0.5 * (index % 2)}
            path = AGENTS if index else (*AGENTS[:2], *AGENTS[1:])
            grow.chain(f"{example}/{index}", path, reward, tokens=1 + index, counterfactuals=without)
    return grow.forest


TREES = {"mhgpo_is": "trees_is", "mhgpo_rr": "trees_rr", "mhgpo_fof": "trees_os", "mhgpo_fof_os": "trees_os"}


def forest_for(name: str, options: Options) -> Forest:
    if name == "ccpo":
        return played_again()
    if "failing_index" in options or "filler" in options:
        return of_one_module()
    file = TREES.get(name, "mixed_observed" if options.get("obs") == "all" else "mixed")
    return with_every_case(parse_forest((FORESTS / f"{file}.json").read_text(encoding="utf-8"), file))


def with_every_case(forest: Forest) -> Forest:
    """States that repeat; a first rollout that ends after an observation, if any; a last example whose rollouts are
    all alike."""
    last, first = forest.examples[-1], forest.rollouts[0]
    calls = {key: replace(call, facts={"state": f"turn {call.turn}"}) for key, call in forest.calls.items()}
    for key, call in calls.items():
        if call.example == last:
            calls[key] = replace(call, penalty=0.0, turn_reward=None)
    rollouts = [
        replace(rollout, reward=1.0) if rollout.example == last and rollout.error is None else rollout
        for rollout in forest.rollouts
        if rollout.example != last or rollout.error is None
    ]
    before = calls[first.leaf].parent if first.leaf else None
    if first.leaf and before and calls[before].observation_tokens:
        del calls[first.leaf]
        rollouts[0] = replace(first, leaf=before)
    return replace(forest, calls=calls, rollouts=tuple(rollouts))


def credit(name: str, options: Options, folder: Path) -> object:
    """Every entry's advantages, weights and targets."""
    algo = section(name, options)
    forest = forest_for(name, options)
    made = assign_credit(forest, algo, 0, minibatches(forest.examples, algo.minibatches))
    return [(entry.call, entry.advantages, entry.weights, entry.returns) for entry in made.entries]


def plan(name: str, options: Options, folder: Path) -> object:
    """Trees of twenty examples."""
    algo = section(name, options)
    return [ALGORITHMS[name].plan(algo, AGENTS, (0, 1, f"q{n}")) for n in range(20)]


# --- the loss


def _calls(algo: AlgoConfig) -> list[Any]:
    calls = make_calls(minibatches=algo.minibatches, noise=0.6)
    if not isinstance(algo, CriticConfig):
        return calls
    values = [(0.3,) * len(call.call.completion_ids) for call in calls]
    return with_targets(calls, values)


def loss_gradients(name: str, options: Options, folder: Path) -> object:
    """Gradients of the policy; the reference is another policy, so that the KL term has one."""
    algo = section(name, options)
    calls = [with_changes(call, ref_logprobs=tuple(-3.0 for _ in call.call.completion_ids)) for call in _calls(algo)]
    loss, found = gradients(make_trainer(folder, algo=algo, calls=calls), calls)
    return loss, {key: value.tolist() for key, value in sorted(found.items())[:2]}


def updates(name: str, options: Options, folder: Path) -> object:
    """The optimizer steps of a run of one step: how many, and of which calls."""
    algo = section(name, options)
    trainer = make_trainer(folder, algo=algo, calls=_calls(algo))
    made = [item["update"] for item in trainer.updates()]
    return [(u.first, sorted(c.call.id for pack in u.packs for c in pack.calls)) for u in made]


def critic_gradients(name: str, options: Options, folder: Path) -> object:
    """Gradients of the critic's own parameters."""
    algo = section(name, options)
    lora = LoraConfig(r=4, alpha=8) if options.get("critic") == "adapter" else None
    trainer = make_trainer(folder, algo=algo, calls=_calls(algo), lora=lora)
    gradients(trainer, _calls(algo))
    assert trainer.critic is not None
    own = trainer.critic.named_parameters()
    return {key: None if p.grad is None else float(p.grad.abs().sum()) for key, p in sorted(own.items())}


def critic_rates(name: str, options: Options, folder: Path) -> object:
    """Learning rates of the critic's optimizer groups in its first steps."""
    algo = section(name, options)
    trainer = make_trainer(folder, algo=algo, calls=_calls(algo), steps=4)
    trainer.create_optimizer_and_scheduler(4)
    seen = []
    for _ in range(3):
        seen.append(trainer.optimizer.param_groups[-1]["lr"])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    return seen


# --- sampling


async def stubborn(example: Example, ctx: Any) -> None:
    """A program whose replies never parse, and that says so to the context."""

    def parse(text: str) -> object:
        raise ParseFailure("never")

    await ctx.call("a", [{"role": "user", "content": "?"}], parse=parse)


def requests(phase: AlgoConfig | EvalConfig) -> object:
    """What an engine is asked for in one rollout: sampling settings and number of attempts."""
    engine = FakeEngine(lambda request: "no")
    env = environment(FakeTask(FunctionProgram(stubborn, ("a",))), engine)
    env.settings = sampling_settings(phase, TaskConfig(name="fake"))
    forest_of(env)
    return [request.sampling for request in engine.requests]


def sampled(name: str, options: Options, folder: Path) -> object:
    """Requests of training rollouts."""
    return requests(section(name, options))


# --- weights of modules, teachers, what is trained on


def serving(name: str, options: Options, folder: Path) -> object:
    """Which weights each module acts with."""
    model = ModelConfig(name="m", path="tiny", lora=LORA)
    return ModuleAssignment(model=model, algo=section(name, options), modules=tuple(AGENTS)).served


def teaching(name: str, options: Options, folder: Path) -> object:
    """The plan of an example with a teacher beside the student, and the policy and prompts that the teacher has."""
    given = {key.removeprefix("teachers."): value for key, value in options.items()}
    base = {"name": "t", "prompts": "mine.yaml"}
    if "rollouts" in given:
        number = given["rollouts"]
        student = {"name": "student", "rollouts": None if number is None else 12 - number}
    else:
        student = {"name": "student"}
    algo = section(name, {"teachers": (student, {**base, **given})})
    (teacher,) = separate_teachers(algo)
    policy = teacher_policy(teacher)
    trees = ALGORITHMS[name].plan(algo, AGENTS, (0, 1, "q"))
    return trees, policy and policy.base, teacher_prompts(teacher, policy)


def standing_in(name: str, options: Options, folder: Path) -> object:
    """The exchange of an example's plan, and the policy of the model that replies in it."""
    teacher = {"policy": "tiny", **{key.removeprefix("teachers."): value for key, value in options.items()}}
    algo = section(name, {"teachers": ({"name": "t", **teacher},)})
    policy = teacher_policy(separate_teachers(algo)[0])
    return ALGORITHMS[name].plan(algo, AGENTS, (0, 1, "q")), policy and policy.base


# the trainer and the sampler know an algorithm by these keys alone
acts("algo.*", "minibatches epochs", updates, 1, 2, shared=True)
acts("algo.*", "loss", loss_gradients, "clip", "cispo", shared=True)
acts("algo.*", "clip", loss_gradients, 0.2, 0.01, shared=True)
acts("algo.*", "clip_high", loss_gradients, None, 0.01, shared=True)
acts("algo.*", "ratio_one", loss_gradients, False, True, shared=True)
acts(GROUPS, "beta", loss_gradients, 0.0, 0.5, shared=True)
acts(CRITICS, "beta", credit, 0.0, 0.5)
acts("algo.*", "loss_mean", credit, "seq", "token")
acts("algo.*", "loss_length", credit, None, 7, loss_mean="constant")
acts("algo.*", "temperature top_p", sampled, 1.0, 0.5, shared=True)
acts("algo.*", "top_k parse_retries", sampled, 0, 2, shared=True)
acts("algo.*", "advantage_scale penalty_scale", credit, None, {"answerer": 2.0})
# group-relative
acts(f"algo.grpo;algo.grpo_mr;algo.mhgpo_*;algo.mt_grpo*;{NEWER}", "group_size", plan, 2, 3)
acts("algo.tree_grpo", "trees nodes rounds", plan, 2, 3)
acts("algo.ccpo", "exchanged", plan, None, ("ranker",))
acts("algo.ccpo", "reply", plan, "", "none")
acts("algo.ccpo", "program", plan, None, "mine:Alone")
acts("algo.ccpo", "teachers.name", standing_in, "t", "other")
acts("algo.ccpo", "teachers.policy", standing_in, "tiny", "tiny_qa")
for key in ("prompts", "rollouts"):
    teachers = "[{name: t, policy: tiny, prompts: p.yaml, rollouts: 2}]"
    refused("algo.ccpo", f"teachers.{key}", teachers, key, typed="algo.teachers", starts="algo.teachers: got")
acts("algo.ccpo", "credit", credit, "bonus", "difference")
acts("algo.ccpo", "bonus_coef", credit, 0.2, 0.5)
acts("algo.ccpo", "success", credit, 0.5, 2.0)
acts("algo.gigpo;algo.igpo", "gamma step_coef", credit, 1.0, 0.5)
acts("algo.gigpo", "count", credit, "rollout", "call")
acts("algo.gigpo", "similarity", credit, None, 0.5)
acts("algo.igpo", "normalise", credit, "joint", "separate")
acts("algo.mmgrpo", "group_size", credit, None, 2)
acts(GROUPS, "eps", credit, 1e-6, 0.5, scale=True)
acts(GROUPS, "ddof", credit, 1, 0, scale=True)
acts(GROUPS, "scale", credit, True, False)
acts(GROUPS, "std_over", credit, "group", "batch", scale=True)
acts(GROUPS, "baseline", credit, "mean", "leave_one_out")
acts(GROUPS, "zero_variance", credit, "keep", "drop")
# MHGPO
acts("algo.mhgpo_*;algo.mappo", "penalties", credit, True, False)
acts("algo.mhgpo_rr;algo.mhgpo_fof_os", "aggregate", credit, "mean", "max")
acts("algo.mhgpo_*", "propagate", credit, "shared", "full")
acts("algo.mhgpo_*", "train_modules", credit, None, ("rewriter",))
acts("algo.mhgpo_*", "freeze_modules", credit, (), ("rewriter",))
acts("algo.mhgpo_*", "frozen_serving", serving, False, True, freeze_modules=("writer",))
acts("algo.mhgpo_rr", "fork_probs", plan, None, (0.0, 0.5, 0.5))
acts("algo.mhgpo_rr", "regroup", credit, "by_agent_fork", "alg3")
acts("algo.mhgpo_fof_os", "os_group", credit, "example", "parent")
refused("algo.mhgpo_fof;algo.mhgpo_is", "aggregate", "max", "no trained call has several successors")
# turns
acts("algo.mt_grpo*", "alpha turn_coef", credit, 1.0, 0.5)
acts("algo.mt_grpo", "no_tool", credit, "combined", "outcome")
acts("algo.mt_grpo", "missing_turn", credit, "zero", "exclude")
acts("algo.mt_grpo_variable", "missing_turn", credit, "absorb", "exclude")
# critics
acts(CRITICS, "gamma gae_lambda", credit, 1.0, 0.5)
acts(CRITICS, "kl", credit, "reward", "loss", beta=0.5)
acts(CRITICS, "whiten", credit, "trained", "none")
acts("algo.mt_ppo", "whiten_within", credit, "batch", "turn")
acts("algo.ppo;algo.mt_ppo", "obs", credit, "skip", "all")
acts("algo.ppo;algo.mt_ppo", "position", credit, "last_generated", "turn_end", obs="all", gamma=0.5)
acts(CRITICS, "critic", critic_gradients, "separate", "head", shared=True)
acts(CRITICS, "critic_lr_factor", critic_rates, 10.0, 2.0, shared=True)
acts(CRITICS, "critic_warmup_steps", critic_rates, 0, 2, shared=True)
acts(CRITICS, "critic_init", critic_gradients, "random", "zero", shared=True)
acts(CRITICS, "value_clip", critic_gradients, 0.5, 0.001, shared=True)
# mmGRPO
acts("algo.mmgrpo", "rollouts", plan, 12, 4)
acts("algo.mmgrpo", "padding_mode", credit, "fill", "truncate")
acts("algo.mmgrpo", "filler", credit, "randint", "max")
acts("algo.mmgrpo", "fill_source", credit, "rollout", "group")
acts("algo.mmgrpo", "on_missing", credit, "drop_rollout", "skip_example")
acts("algo.mmgrpo", "failing_traces", credit, "failing_only", "trajectory")
acts("algo.mmgrpo", "failing_index", credit, "zero", "true", padding_mode="ragged")
acts("algo.mmgrpo", "format_failure_score", credit, -1.0, -2.0)
acts("algo.mmgrpo", "format_failure_best", credit, 0.0, 1.0)
acts("algo.mmgrpo", "max_context", credit, 8192, 20)
acts("algo.mmgrpo", "overlong", credit, "datapoint", "trajectory", max_context=20)
acts("algo.mmgrpo", "teachers.name", teaching, "t", "other")
acts("algo.mmgrpo", "teachers.policy", teaching, None, "tiny")
acts("algo.mmgrpo", "teachers.prompts", teaching, "one.yaml", "other.yaml")
acts("algo.mmgrpo", "teachers.rollouts", teaching, None, 2)
