"""Plans, forks by replay, failures as data."""

import asyncio
import random
import sys
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from mmrl.credit.scored import scored_rollouts
from mmrl.engines.base import Completion
from mmrl.engines.embedded.batcher import Batcher
from mmrl.errors import LimitFailure, ParseFailure, Stopped
from mmrl.records import Reply
from mmrl.rollout.branches import Branch
from mmrl.rollout.environment import Teacher
from mmrl.rollout.plans import (
    Exchange,
    Fork,
    Growth,
    Tree,
    fork_on,
    fork_on_first,
    independent,
    independent_sampling,
    round_robin,
)
from mmrl.rollout.sample import play, sample
from mmrl.stages.step_metrics import forest_metrics
from mmrl.tasks.base import ModuleScore, Score
from mmrl.tasks.dspy.own import FunctionProgram
from tests.engines.test_batcher import Counter
from tests.helpers.programs import (
    Chain,
    FakeEngine,
    FakeTask,
    environment,
    forest_of,
    run_program,
    seeded_letter,
    spelled,
)

MODULES = ("a", "b", "c")


@pytest.mark.parametrize(
    ("plan", "calls", "rollouts"),
    [
        (independent(4), 12, 4),
        (fork_on_first(MODULES, 4), 12, 4),
        (fork_on("b", 4), 1 + 8, 4),
        (fork_on("c", 4), 2 + 4, 4),
        (independent_sampling(MODULES, 4), 27, 12),
        (fork_on_first(MODULES, 4, last_width=4), 2 * 4 + 16, 16),
    ],
)
def test_calls_per_question_are_those_of_the_paper(plan, calls, rollouts):
    # MHGPO, n = 3 agents, G = 4: nG, sum over i of (i-1) + G(n-i+1), (n-1)G + G^2.
    forest, engine = run_program(Chain(), plan)
    assert len(forest.calls) == calls == len(engine.requests)
    assert len(forest.rollouts) == rollouts
    assert all(len(forest.path(r)) == 3 for r in forest.rollouts)


def test_a_fork_shares_its_prefix_and_samples_one_prompt():
    forest, _ = run_program(Chain(), fork_on("b", 3))
    forked = [c for c in forest.calls.values() if c.module == "b"]
    trunk = [c for c in forest.calls.values() if c.module == "a"]
    assert len(trunk) == 1
    assert {c.parent for c in forked} == {trunk[0].id}
    assert len({c.prompt_ids for c in forked}) == 1
    assert len({c.text for c in forked}) > 1, "branches must be sampled with their own seeds"
    assert {r.fork for r in forest.rollouts} == {"b"}


def test_parents_come_before_children_and_ids_are_unique():
    forest, _ = run_program(Chain(), independent_sampling(MODULES, 2), examples=3)
    seen = set()
    for call in forest.calls.values():
        assert call.parent is None or call.parent in seen
        seen.add(call.id)
    assert len({r.id for r in forest.rollouts}) == len(forest.rollouts)


def test_round_robin_draws_by_probability_and_key():
    drawn = [round_robin(MODULES, 4, (0.7, 0.1, 0.2), (0, 1, f"q{i}"))[0].fork_name for i in range(3000)]
    shares = [drawn.count(m) / len(drawn) for m in MODULES]
    assert shares == pytest.approx([0.7, 0.1, 0.2], abs=0.03)
    assert drawn[:50] == [round_robin(MODULES, 4, (0.7, 0.1, 0.2), (0, 1, f"q{i}"))[0].fork_name for i in range(50)]


async def walk(example, ctx):
    """Calls `a` two to four times, as its first answer says, and uses a tool after each."""
    text = ""
    for _ in range(4):
        reply = await ctx.call("a", [{"role": "user", "content": f"{example.id}:{text}"}])
        text += reply.text + await ctx.tool("echo", text="+")
        if len(text) >= 4 + ord(text[0]) % 3 * 2:
            break
    return text


def growing(keep=5, **options):
    plan = (Tree(growth=Growth(2, 3, keep, (0, 1, "q"))),) * 2
    return run_program(FunctionProgram(walk, ("a",)), plan, examples=3, **options)


def test_trees_grow_from_drawn_calls_and_keep_leaves():
    forest, engine = growing()
    for example in forest.examples:
        own = [rollout for rollout in forest.rollouts if rollout.example == example]
        trees = [rollout.id.split("/")[1].split(".")[0] for rollout in own]
        assert [trees.count("0"), trees.count("1")] == [5, 5], "5 of 1 + 2 · 3 leaves are kept of each"
    shared = [c for c in forest.calls.values() if sum(c in forest.path(r) for r in forest.rollouts) > 1]
    assert shared, "a branch keeps the calls before its node"
    assert any(len(forest.path(r)) > 0 and "." in forest.path(r)[0].id.split("#")[0] for r in forest.rollouts), (
        "the root is a node too"
    )
    everything, _ = growing(keep=7)
    assert len(everything.rollouts) == 3 * 2 * 7 and forest.calls.items() <= everything.calls.items()
    assert len(engine.requests) == len(everything.calls), "what is shared is sampled once"


def test_a_tree_of_one_call_grows_at_its_root_alone():
    forest, _ = run_program(Chain(("a",)), (Tree(growth=Growth(1, 3, 4, (0, 1, "q"))),))
    assert len(forest.rollouts) == len(forest.calls) == 4 and all(c.parent is None for c in forest.calls.values())


@pytest.mark.parametrize(
    "rolled", [growing, partial(run_program, Chain(), independent_sampling(MODULES, 2), examples=3)]
)
def test_timing_changes_nothing(rolled):
    jitter = random.Random(3)
    calm, shaken = rolled()[0], rolled(pause=lambda: jitter.random() / 50)[0]
    assert calm.calls == shaken.calls and list(calm.calls) == list(shaken.calls) and calm.rollouts == shaken.rollouts


def test_a_rollout_is_played_again_with_replies_exchanged():
    plain, before = run_program(Chain(), independent(3), examples=2)
    forest, engine = run_program(Chain(), (Tree(exchange=Exchange(("a", "b"), "z")),) * 3, examples=2)
    assert forest.calls == plain.calls, "what is played again is in no forest"
    bare = [replace(rollout, counterfactuals={}, counterfactual_calls=0) for rollout in forest.rollouts]
    assert bare == list(plain.rollouts)
    # `a` exchanged: `b` and `c` anew; `b` exchanged: `c` anew
    assert len(engine.requests) == len(before.requests) + 6 * (2 + 1)
    for rollout in forest.rollouts:
        assert rollout.counterfactuals.keys() == {"a", "b"}
        # the exchanged call is one of them
        assert rollout.counterfactual_calls == 3 + 2
    assert forest_metrics(forest)["rollouts/calls_again"] == 6 * 5
    prompts = [spelled(request.prompt_ids) for request in engine.requests]
    assert sum(prompt.startswith("c:") and prompt.count("z") for prompt in prompts) >= 6


def test_the_reward_without_a_module_is_that_of_its_exchanged_reply():
    plan = (Tree(exchange=Exchange(("a", "c"), "aa")),)
    forest, _ = run_program(Chain(), plan, answer=lambda request: "b", reward=lambda text: float(text.count("a")))
    (rollout,) = forest.rollouts
    first = rollout.reward
    assert rollout.counterfactuals == {"a": first + 2, "c": first + 2}


def test_a_module_may_be_exchanged_for_another_models():
    """Its prompts go to the teacher's engine, and what comes after it to the policy's."""
    policy, other = FakeEngine(lambda request: "b"), FakeEngine(lambda request: "a")
    task = FakeTask(Chain())
    env = environment(task, policy)
    env.teachers = {"other": Teacher(environment=environment(task, other), student_ids=lambda ids, *_: ids)}
    forest = forest_of(env, plans=(Tree(exchange=Exchange(("a",), teacher="other")),))
    (rollout,) = forest.rollouts
    assert [spelled(request.prompt_ids)[0] for request in other.requests] == ["a"]
    assert len(policy.requests) == 3 + 2 and rollout.counterfactual_calls == 3
    assert "a" not in "".join(call.text for call in forest.calls.values())


def test_a_second_play_may_be_another_programs(monkeypatch):
    monkeypatch.setattr("mmrl.rollout.counterfactuals.imported", lambda key, name: {"mine:alone": Chain(("c",))}[name])
    plan = (Tree(exchange=Exchange(("a",), program="mine:alone")),)
    forest, engine = run_program(Chain(), plan, examples=1)
    (rollout,) = forest.rollouts
    assert rollout.counterfactual_calls == 1 and rollout.counterfactuals.keys() == {"a"}
    assert spelled(engine.requests[-1].prompt_ids) == "c:train0"


def test_a_module_that_was_not_called_has_no_counterfactual():
    forest, _ = run_program(Chain(("a",)), (Tree(exchange=Exchange(("b",))),))
    assert forest.rollouts[0].counterfactuals == {}


def test_all_rollouts_of_a_step_run_at_once():
    class Gate(FakeEngine):
        """Answers none of the first calls before all 8 × 4 rollouts have asked."""

        async def generate(self, request):
            self.requests.append(request)
            if len(self.requests) == 32:
                opened.set()
            await asyncio.wait_for(opened.wait(), 60)
            return await super().generate(request)

    async def step():
        return await sample(environment(task, engine), [(e, independent(4)) for e in examples], "outcome")

    task, opened = FakeTask(Chain()), asyncio.Event()
    engine, examples = Gate(seeded_letter), task.examples("train")[:8]
    forest = asyncio.run(step())
    assert len(forest.rollouts) == 32 and not any(rollout.error for rollout in forest.rollouts)


def test_invocations_count_per_module_and_forks_are_at_the_first():
    async def loop(example, ctx):
        for module in "aaab":
            await ctx.call(module, [{"role": "user", "content": "x"}])

    forest, _ = run_program(FunctionProgram(loop, ("a", "b")), fork_on("a", 2))
    path = forest.path(forest.rollouts[1])
    assert [(c.module, c.invocation) for c in path] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert len(forest.calls) == 8


@pytest.mark.parametrize("left_out", [(), (0,), (1,), (0, 2)])
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("invocation", range(4))
def test_a_recorded_path_forks_where_a_live_one_does(left_out, at_end, invocation):
    """What a fork counts as a module's calls: with replies that the program leaves out, at once or at its end."""

    async def leaving(example, ctx):
        replies = []
        for number, module in enumerate("aaba"):
            replies.append(await ctx.call(module, [{"role": "user", "content": f"{number}"}]))
            if number in left_out and not at_end:
                ctx.leave_out(replies[-1])
        for number in left_out if at_end else ():
            ctx.leave_out(replies[number])

    def played(tape):
        engine = FakeEngine(seeded_letter)
        root = Branch(example=task.examples("train")[0], path="0", plan=Tree((Fork("a", 3, invocation),)), tape=tape)
        (leaves,) = asyncio.run(play(environment(task, engine), [root], "outcome", keeps_tapes=True))
        return leaves, len(engine.requests)

    task = FakeTask(FunctionProgram(leaving, ("a", "b")))
    live, generated = played(())
    again, more = played(live[0].events)
    assert [leaf.path for leaf in again] == [leaf.path for leaf in live]
    assert more == generated - 4


async def picky(example, ctx):
    """Its only module must say 'a'; anything else cannot be parsed."""

    def parse(text):
        if text != "a":
            raise ParseFailure("expected a", present=1, expected=2)
        return text

    return (await ctx.call("a", [{"role": "user", "content": "x"}], parse=parse)).parsed


PICKY = FunctionProgram(picky, ("a",))


def test_a_parse_failure_is_a_typed_rollout_with_the_failure_score():
    forest, engine = run_program(PICKY, answer=lambda r: "z", settings={"parse_retries": 2}, failure_score=-0.25)
    (rollout,) = forest.rollouts
    (call,) = forest.calls.values()
    assert (rollout.error, rollout.reward) == ("parse", -0.25)
    assert (call.ok, call.present_fields, call.expected_fields, call.attempts) == (False, 1, 2, 3)
    assert len(engine.requests) == 3
    assert len({r.sampling.seed for r in engine.requests}) == 3, "each attempt is a fresh sample"


@pytest.mark.parametrize(("temperature", "repeats", "attempts"), [(0.0, True, 1), (0.0, False, 3), (0.5, True, 3)])
def test_a_reply_that_would_be_the_same_again_is_sampled_once(temperature, repeats, attempts):
    engine = FakeEngine(answer=lambda r: "z")
    engine.repeats_greedy = repeats
    env = environment(FakeTask(PICKY), engine, retries=2)
    env.settings = replace(env.settings, temperature=temperature)
    forest = forest_of(env)
    assert [call.attempts for call in forest.calls.values()] == [len(engine.requests)] == [attempts]


def test_only_the_attempt_that_parsed_is_recorded():
    texts = iter(["z", "a"])
    forest, _ = run_program(PICKY, answer=lambda r: next(texts), settings={"parse_retries": 2})
    (call,) = forest.calls.values()
    assert (call.text, call.ok, call.attempts) == ("a", True, 2)
    assert forest.rollouts[0].error is None


def nested(depth):
    value: Any = ()
    for _ in range(depth):
        value = [value]
    return value


UNWRITABLE: dict[str, Any] = {
    "object": object(),
    "deep": nested(500),
    "itself": [],
}
UNWRITABLE["itself"].append(UNWRITABLE["itself"])


@dataclass
class Faulty:
    """Fails in a chosen way after its first call."""

    how: str
    modules: tuple[str, ...] = ("a",)

    async def run(self, example, ctx):
        await ctx.call("a", [{"role": "user", "content": "x"}])
        if self.how == "program":
            raise KeyError("boom")
        if self.how == "limit":
            raise LimitFailure("no answer in time")
        if self.how == "timeout":
            await asyncio.sleep(30)
        if self.how == "module":
            await ctx.call("nobody", [])
        if self.how in ("exit", "stop"):
            sys.exit(Stopped.exit_code if self.how == "stop" else 0)
        if self.how == "cancelled":  # a task of its own
            task = asyncio.create_task(asyncio.sleep(9))
            task.cancel()
            await task
        if self.how in UNWRITABLE:
            return UNWRITABLE[self.how]
        return await ctx.tool("broken" if self.how == "tool" else "missing")


@pytest.mark.parametrize(
    ("how", "kind", "reward"),
    [
        ("program", "program", None),
        ("limit", "limit", 0.0),
        ("timeout", "timeout", None),
        ("tool", "tool", None),
        ("missing", "program", None),
        ("module", "program", None),
        ("exit", "program", None),
        ("cancelled", "program", None),
        *((how, "program", None) for how in UNWRITABLE),
    ],
)
def test_each_failure_has_its_type_and_only_the_models_own_are_credited(how, kind, reward):
    def broken():
        raise OSError("retriever down")

    forest, _ = run_program(Faulty(how), independent(2), tools={"broken": broken}, settings={"timeout_s": 0.2})
    assert [(r.error, r.reward) for r in forest.rollouts] == [(kind, reward)] * 2
    assert len(forest.calls) == 2, "calls made before the failure stay in the forest"


def test_sigterm_inside_a_program_ends_the_process():
    with pytest.raises(SystemExit, match=str(Stopped.exit_code)):
        run_program(Faulty("stop"), independent(2))


def test_a_prediction_is_recorded_as_json_values():
    async def dated(example, ctx):
        return {"day": date(2026, 11, 28), "found": {1}, "score": np.float32(0.5), "lone": "\ud800"}

    forest, _ = run_program(FunctionProgram(dated, ()))
    assert forest.rollouts[0].prediction == {"day": "2026-11-28", "found": [1], "score": 0.5, "lone": "\ud800"}


def test_an_engine_error_is_typed():
    def explode(request):
        raise RuntimeError("out of memory")

    forest, _ = run_program(Chain(), answer=explode)
    assert (forest.rollouts[0].error, forest.rollouts[0].leaf) == ("engine", None)
    assert "out of memory" in forest.rollouts[0].error_message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e101, -1.7e308, 10**400, "0.5", 1j])
def test_a_reward_that_is_no_finite_number_of_bounded_size_is_a_failure_of_the_reward(value):
    forest, _ = run_program(Chain(), independent(2), reward=lambda prediction: value)
    assert [(r.error, r.reward) for r in forest.rollouts] == [("reward", None)] * 2
    assert "for reward, expected a finite number of at most 1e+100 in size" in forest.rollouts[0].error_message
    assert scored_rollouts(forest) == [], "credit goes on without them"


NAMES, NUMBERS = ("n", "", "f1_low", "model_failed", "module/a"), (float("nan"), float("inf"), 1e200, "text")


@pytest.mark.parametrize(
    ("scored", "says"),
    [
        *(({"metrics": {name: 7.0}}, f"names '{name}' are mmrl's own") for name in NAMES),
        *(({field: {"x": value}}, "for x") for field in ("metrics", "parts", "turn_rewards") for value in NUMBERS),
    ],
)
def test_every_other_number_of_a_score_is_held_to_the_same(scored, says, monkeypatch):
    monkeypatch.setattr(FakeTask, "score", lambda *_: Score(reward=1.0, **scored))
    (rollout,) = run_program(Chain())[0].rollouts
    assert (rollout.error, rollout.reward, dict(rollout.metrics)) == ("reward", None, {})
    assert says in rollout.error_message


@pytest.mark.parametrize("score", [ModuleScore(penalty=-1e101), ModuleScore(facts={"words": float("nan")})])
def test_numbers_of_a_call_are_held_to_the_same(score, monkeypatch):
    monkeypatch.setattr(FakeTask, "score_call", lambda *_: score)
    forest, _ = run_program(Chain())
    assert [(r.error, r.reward) for r in forest.rollouts] == [("reward", None)]


def test_numbers_of_arrays_become_plain_ones():
    forest, _ = run_program(Chain(), reward=lambda prediction: np.float32(0.5))
    (rollout,) = forest.rollouts
    assert (rollout.reward, rollout.metrics["score"]) == (0.5, 0.5)
    assert (type(rollout.reward), type(rollout.metrics["score"])) == (float, float)


@pytest.mark.parametrize(
    ("ends", "says"),
    [(False, "made call 'a' with other input as its request 1;"), (True, "ended without call 'a', its request 1;")],
)
def test_a_program_that_diverges_from_its_tape_is_an_error_that_says_where(ends, says):
    runs = count(1)

    async def fickle(example, ctx):
        """Asks for something else, or for less, when it is run again."""
        run = next(runs)
        if not ends or run == 1:
            await ctx.call("a", [{"role": "user", "content": f"run {run}"}])
            await ctx.call("b", [{"role": "user", "content": "x"}])

    forest, _ = run_program(FunctionProgram(fickle, ("a", "b")), fork_on("b", 2))
    (diverged,) = [r for r in forest.rollouts if r.error]
    assert (diverged.error, diverged.reward) == ("replay", None) and says in diverged.error_message


async def parallel(example, ctx):
    """Two calls at once, then one that sees both."""
    left, right = await asyncio.gather(*(ctx.call(module, [{"role": "user", "content": module}]) for module in "ab"))
    return (await ctx.call("c", [{"role": "user", "content": left.text + right.text}])).text


@pytest.mark.parametrize("module", MODULES)
def test_programs_with_concurrent_calls_fork_too(module):
    jitter = random.Random(1)
    program = FunctionProgram(parallel, MODULES)
    forest, _ = run_program(program, fork_on(module, 3), pause=lambda: jitter.random() / 50)
    assert len(forest.rollouts) == 3
    assert not [r.error for r in forest.rollouts if r.error]
    for rollout in forest.rollouts:
        path = forest.path(rollout)
        assert [c.module for c in path] == ["a", "b", "c"]
        assert spelled(path[2].prompt_ids) == path[0].text + path[1].text


@dataclass
class Uneven:
    """Two calls at once, of different lengths."""

    lengths: tuple[int, int]
    modules: tuple[str, ...] = ("elsewhere", "a", "b")
    first: str = "a"

    async def run(self, example, ctx):
        asked = zip((self.first, "b"), self.lengths, strict=True)
        calls = [ctx.call(m, [{"role": "user", "content": m}], max_tokens=n) for m, n in asked]
        return "".join(reply.text for reply in await asyncio.gather(*calls))


class Waiting(Batcher):
    """The batcher of the embedded engine, and one module that is answered elsewhere, as an endpoint does."""

    async def generate(self, request):
        if request.module != "elsewhere":
            return await super().generate(request)
        await asyncio.sleep(0.05)
        return Completion(ids=(1,), logprobs=None, finish="eos")


@pytest.mark.parametrize("first", ["a", "elsewhere"])
@pytest.mark.parametrize("lengths", [(2, 6), (6, 2), (3, 3)])
def test_of_concurrent_calls_either_may_end_first(lengths, first):
    """A deterministic batch must not wait for a strand that has its reply and waits for the other one."""
    engine = Waiting(Counter())
    env = environment(FakeTask(Uneven(lengths, first=first)), engine, timeout_s=5.0)
    forest = forest_of(env, plans=independent(3))
    assert [r.error for r in forest.rollouts] == [None] * 3
    assert engine.live == 0


@pytest.mark.parametrize("plans", [independent(1), fork_on("agent", 2)])
def test_a_turn_goes_on_token_for_token_after_the_one_before(plans):
    async def turns(example, ctx):
        first = await ctx.call("agent", [{"role": "user", "content": "go"}])
        found = await ctx.tool("echo", text="[seen]")
        await ctx.call("agent", found, after=first, max_observation=4)
        await ctx.call("agent", [{"role": "user", "content": "new"}])

    forest, _ = run_program(FunctionProgram(turns, ("agent",)), plans)
    for rollout in forest.rollouts:
        first, second, own = forest.path(rollout)
        assert spelled(second.prompt_ids) == "go" + first.text + "[see"
        assert (first.turn, second.turn, own.turn) == (0, 1, 0)
        assert (first.observation_tokens, second.observation_tokens) == (4, 0)
        assert [first.invocation, second.invocation, own.invocation] == [0, 1, 2]


def test_only_a_reply_of_this_rollout_can_be_continued():
    async def impostor(example, ctx):
        await ctx.call("agent", "text", after=Reply(text="", parsed=None, finish="eos", context=(1, 2)))

    forest, _ = run_program(FunctionProgram(impostor, ("agent",)))
    assert forest.rollouts[0].error == "program"
    assert "after=" in forest.rollouts[0].error_message


def test_penalties_and_facts_come_from_the_task():
    forest, _ = run_program(Chain(), answer=lambda r: "z")
    assert [c.penalty for c in forest.calls.values()] == [-0.5] * 3
    assert all(c.facts == {"words": 1} for c in forest.calls.values())


@pytest.mark.parametrize(
    ("names", "share"), [(("two", "two"), None), (("none", "two"), 0.5), (("none", "none"), 1.0), (("text",), None)]
)
def test_searches_that_find_nothing_are_counted(names, share):
    async def searching(example, ctx):
        """Each search finds as many documents as its name says."""
        for name in names:
            await ctx.tool(name)

    tools = {"two": lambda: ["d1", "d2"], "none": list, "text": str}
    (rollout,) = run_program(FunctionProgram(searching, ()), tools=tools)[0].rollouts
    assert rollout.metrics.get("empty_searches") == share and rollout.error is None


def test_examples_do_not_share_seeds():
    forest, _ = run_program(Chain(("a",)), answer=lambda r: chr(97 + r.sampling.seed % 26), examples=8)
    assert len({c.text for c in forest.calls.values()}) > 3
    assert forest.examples == tuple(f"q{i}" for i in range(8))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("n", float("nan"), "facts: got nan for 'n', expected a finite number"),
        ("n", 10**400, "facts: got 1000"),
        ("format_rate", 0.5, "facts: 'format_rate' is a metric of mmrl's own"),
    ],
)
def test_facts_that_no_metric_can_take_are_a_failure_of_the_program(name, value, says):
    async def program(example, ctx):
        await ctx.call("a", [{"role": "user", "content": "x"}], facts={name: value})

    (rollout,) = run_program(FunctionProgram(program, ("a",)))[0].rollouts
    assert rollout.error == "program" and says in rollout.error_message
