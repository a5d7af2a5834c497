"""Agents played again: forks, trees, counterfactuals, and what does not repeat its requests."""

import asyncio
import itertools
import re
from typing import Any

import httpx

from mmrl import rng
from mmrl.algorithms import ALGORITHMS, assign_credit
from mmrl.commands.credit import table
from mmrl.config import ALGO_SCHEMAS
from mmrl.rollout.plans import Exchange, Growth, Tree, fork_on, independent
from mmrl.rollout.scripted import play
from tests.helpers.gateway import Scripted, agent_task, one, post, rolled_out, tokenizer


async def said(url, key, module, text, **body):
    reply = await post(url, key, f"policy/{module}", text, **body)
    return reply.raise_for_status().json()["choices"][0]["message"]["content"]


async def planner_worker(example, base_url, api_key):
    plan = await said(base_url, api_key, "planner", f"Plan: {example['question']}")
    return await said(base_url, api_key, "worker", f"Work: {plan}")


class Draws(Scripted):
    """Replies that a request's seed decides."""

    def reply(self, request):
        return "abcdefgh"[rng.digest(request.sampling.seed) % 8]


def of_two(agent=planner_worker, **options):
    options = {"modules": ("planner", "worker"), "metric": lambda record, result: float(result < "e")} | options
    return agent_task(agent, **options)


def test_a_fork_at_the_worker_samples_the_planner_once():
    played = []

    async def counted(example, base_url, api_key):
        played.append(1)
        return await planner_worker(example, base_url, api_key)

    engine = Draws()
    forest = rolled_out(of_two(counted), engine, fork_on("worker", 4))
    assert len(played) == len(forest.rollouts) == 4
    assert [request.module for request in engine.requests] == ["planner", *["worker"] * 4]
    (planner,) = [call for call in forest.calls.values() if call.module == "planner"]
    assert all(forest.path(rollout)[0] == planner for rollout in forest.rollouts)
    assert len({call.text for call in forest.calls.values() if call.module == "worker"}) > 1, "draws of their own"
    assert engine.live == 0


def test_a_tree_grows_from_calls_of_an_agent():
    growth = Growth(rounds=1, nodes=2, keep=3, key=(0, 0))
    forest = rolled_out(of_two(), Draws(), (Tree(growth=growth),))
    assert len(forest.rollouts) == 3 and not any(rollout.error for rollout in forest.rollouts)
    assert len(forest.calls) < 6, "what they share is sampled once"


def test_a_counterfactual_is_the_outcome_of_the_same_agent_with_other_replies():
    # The worker says the planner's letter; without the planner it says x. Right is a letter before e.
    engine = Scripted(lambda prompt: "b" if "Plan:" in prompt else "b" if "Work: b" in prompt else "x")
    plan = (Tree(exchange=Exchange(("planner",), reply="none")),)
    forest = rolled_out(of_two(), engine, plan)
    (rollout,) = forest.rollouts
    assert (rollout.reward, rollout.counterfactuals, rollout.counterfactual_calls) == (1.0, {"planner": 0.0}, 2)


def test_a_reply_exchanged_for_nothing_is_read_as_an_empty_message_where_there_are_tools():
    async def with_tool(example, base_url, api_key):
        tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
        plan = await said(base_url, api_key, "planner", "Plan", tools=tools)
        return await said(base_url, api_key, "worker", f"Work: {plan!r}")

    engine = Scripted(lambda prompt: "b" if "Work: 'b'" in prompt or "Plan" in prompt else "x", tokenizer("qwen3"))
    (rollout,) = rolled_out(of_two(with_tool), engine, (Tree(exchange=Exchange(("planner",), reply="")),)).rollouts
    assert (rollout.error, rollout.reward, rollout.counterfactuals) == (None, 1.0, {"planner": 0.0})


class OfRollouts(Scripted):
    """The first rollout is right and the second wrong, with its planner or without."""

    def reply(self, request):
        return "b" if request.order[0].startswith("q0/0") else "x"


def test_the_credit_of_a_planner_and_its_worker_differs_and_is_that_of_a_hand_computation():
    """By difference: R - R without the planner is 1 - 1 and 0 - 0, so the planner did nothing; the worker has R."""
    algo = ALGO_SCHEMAS["ccpo"].model_validate({"name": "ccpo", "group_size": 2, "credit": "difference"})
    forest = rolled_out(of_two(), OfRollouts(), ALGORITHMS["ccpo"].plan(algo, ("planner", "worker"), (0, 0, "q0")))
    assert [rollout.reward for rollout in forest.rollouts] == [1.0, 0.0]
    assert [dict(rollout.counterfactuals) for rollout in forest.rollouts] == [{"planner": 1.0}, {"planner": 0.0}]
    credit = assign_credit(forest, algo, 0)
    advantages = {entry.call: set(entry.advantages) for entry in credit.entries}
    assert advantages == {"q0/0#0": {0.0}, "q0/1#0": {0.0}, "q0/0#1": {0.5}, "q0/1#1": {-0.5}}
    rows = [line.split() for line in table([algo], forest, [credit]).splitlines()]
    printed = {row[1]: row for row in rows if row[:1] == ["q0/0#0"] or row[:1] == ["q0/0#1"]}
    assert "0" in printed["planner"] and "0.5" in printed["worker"], rows


def test_an_agent_that_does_not_repeat_itself_ends_with_the_first_differing_message():
    clock = itertools.count()

    async def dated(example, base_url, api_key):
        plan = await said(base_url, api_key, "planner", f"It is {next(clock)} o'clock. Plan: {example['question']}")
        return await said(base_url, api_key, "worker", f"Work: {plan}")

    forest = rolled_out(of_two(dated), Draws(), fork_on("worker", 2))
    first, second = forest.rollouts
    assert first.error is None and (second.error, second.reward) == ("replay", None)
    assert re.search("message 0 is now.*It is 1 o.*it was.{9}", second.error_message, re.DOTALL)


def test_an_agent_whose_own_exception_hides_the_divergence_ends_by_it_all_the_same():
    clock = itertools.count()

    async def swallows(example, base_url, api_key):
        with_date = f"{next(clock)} {example['question']}"
        try:
            return await said(base_url, api_key, "planner", with_date) + await said(base_url, api_key, "worker", "x")
        except httpx.HTTPStatusError:
            return "a"

    forest = rolled_out(of_two(swallows), Draws(), fork_on("worker", 2))
    assert [rollout.error for rollout in forest.rollouts] == [None, "replay"]


def test_an_agent_that_idles_no_longer_holds_up_the_batch():
    """The schedule waits for who is live: with one program away, the other's request is all there is."""
    seen = []

    async def slow(example, base_url, api_key):
        first = await said(base_url, api_key, "planner", "Plan: 1")
        seen.append(engine.live)
        await asyncio.sleep(0.4)
        seen.append(engine.live)
        return first + await said(base_url, api_key, "worker", "Work: 2")

    engine = Draws()
    rollout, calls = one(of_two(slow, idle_s=0.1), engine)
    assert rollout.error is None and len(calls) == 2
    assert (seen, engine.live) == ([1, 0], 0)


def test_rollouts_of_an_agent_are_the_same_again_and_rewards_of_calls_reach_their_turns():
    async def scored(example, base_url, api_key):
        models = ("policy/planner", "policy/worker")
        ids = [(await post(base_url, api_key, model, example["question"])).json()["id"] for model in models]
        return {"score": 1.0, "rewards": {ids[0]: of_planner, ids[1]: 0.5}}

    task = of_two(scored, metric=None)
    of_planner: Any = 0.25
    forests = [rolled_out(task, Draws(), independent(2), reward_set="turn") for _ in range(2)]
    assert forests[0] == forests[1]
    for rollout in forests[0].rollouts:
        planner, worker = forests[0].path(rollout)
        assert (rollout.reward, planner.turn_reward, worker.turn_reward) == (1.5, 0.25, None)
    (rollout,) = rolled_out(task, Draws()).rollouts
    assert rollout.reward == 1.0, "the outcome alone"
    for of_planner in ("0.25", float("nan")):  # noqa: B007 (the agent reads it)
        (rollout,) = rolled_out(task, Draws(), reward_set="turn").rollouts
        assert (rollout.error, rollout.reward) == ("reward", None)
        assert "expected a finite number" in rollout.error_message


def test_an_agent_is_tested_without_a_model_by_scripted_replies():
    task = of_two(metric=lambda record, result: float(result == "done"))
    rollout = play(task, task.examples("train")[0], ["a plan", "done"])
    assert (rollout.reward, rollout.prediction) == (1.0, "done")
