"""The tape of programs with several strands: the same rollouts whichever tool is faster, live and in forks."""

import asyncio
import random
import time
from dataclasses import dataclass

import pytest

from mmrl.engines.embedded.batcher import Batcher
from mmrl.rollout.plans import fork_on, fork_on_first, independent
from mmrl.system.user_code import as_async
from tests.engines.test_batcher import Counter
from tests.helpers.programs import FakeTask, environment, forest_of


@dataclass
class Strands:
    """Two strands of tools and calls at once, of different lengths; then a call that sees both."""

    modules: tuple[str, ...] = ("a", "b", "c")

    async def strand(self, ctx, module, turns):
        text = module
        for turn in range(turns):
            text += await ctx.tool("slow", text=f"{module}{turn}")
            text += (await ctx.call(module, [{"role": "user", "content": text}], max_tokens=3 + turn)).text
        return text

    async def run(self, example, ctx):
        left, right = await asyncio.gather(self.strand(ctx, "a", 3), self.strand(ctx, "b", 2))
        return (await ctx.call("c", [{"role": "user", "content": left + right}])).text


def sampled(plans, seed):
    jitter = random.Random(seed)

    def slow(text):
        time.sleep(jitter.random() * 0.004)
        return "+"

    engine = Batcher(Counter())
    env = environment(FakeTask(Strands(), tools={"slow": as_async(slow)}), engine, timeout_s=20)
    forest = forest_of(env, env.task.examples("train")[:4], plans)
    assert not [rollout.error_message for rollout in forest.rollouts if rollout.error] and engine.live == 0
    return forest


@pytest.mark.parametrize(
    "plans", [independent(3), fork_on("a", 3), fork_on("b", 3), fork_on("c", 2), fork_on_first(("a",), 3)]
)
def test_strands_give_the_same_rollouts_whichever_tool_is_faster(plans):
    first = sampled(plans, 0)
    for seed in range(1, 5):
        other = sampled(plans, seed)
        assert other.calls == first.calls and other.rollouts == first.rollouts


@dataclass
class Consumes:
    """Takes the first document out of what its tool has found, before it asks the module where the tree forks."""

    modules: tuple[str, ...] = ("a", "b")

    async def run(self, example, ctx):
        first = await ctx.call("a", [{"role": "user", "content": "q"}], parse=lambda text: {"words": [text]})
        asked = {"words": ["one", "two"]}
        documents = await ctx.tool("search", **asked)
        text = f"{documents.pop(0)} {documents} {first.parsed['words'].pop()} {asked['words']}"
        return (await ctx.call("b", [{"role": "user", "content": text}])).text


def test_each_branch_has_its_own_copy_of_what_was_returned():
    """A tool may use up its argument, and a program what it was given: other branches begin with the whole of it."""

    def search(words):
        words.clear()
        return ["d1", "d2", "d3"]

    env = environment(FakeTask(Consumes(), tools={"search": as_async(search)}), Batcher(Counter()), timeout_s=20)
    forest = forest_of(env, env.task.examples("train")[:1], fork_on("b", 3))
    assert [rollout.error_message for rollout in forest.rollouts if rollout.error] == []
    prompts = {call.prompt_ids for call in forest.calls.values() if call.module == "b"}
    assert len([call for call in forest.calls.values() if call.module == "b"]) == 3 and len(prompts) == 1
