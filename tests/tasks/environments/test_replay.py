"""Forks in environments that have state: a session of its own, in which the recorded actions are done again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from mmrl.engines.base import Request
from mmrl.records import Forest
from mmrl.rollout.plans import Fork, Tree
from mmrl.system.objects import register
from tests.helpers.gateway import Scripted, rolled_out, tokenizer
from tests.helpers.worlds import Counter, Random, Stepwise, environment_task, tool_call

FORKED = (Tree((Fork("agent", 3, invocation=2),)),)
"""Three rollouts that share two turns."""


@dataclass
class Pathwise(Scripted):
    """Adds 2 in the shared turns, then a number of its path's own, then stops."""

    tokenizer: Any = field(default_factory=lambda: tokenizer("qwen3"))
    tool: str = "add"

    def reply(self, request: Request) -> str:
        assert request.order is not None
        path, _, turn = str(request.order[0]).rpartition("#")
        branch = int(path.rpartition(".")[2]) if "." in path else 0
        own = 2 if int(turn) < 2 else 3 + branch
        return tool_call(self.tool, step=own) if int(turn) < 4 else "Done."


def forked(task: Any, engine: Scripted | None = None, **options: Any) -> Forest:
    example = [task.examples("train")[5]]
    return rolled_out(task, engine or Pathwise(), FORKED, examples=example, **options)


def test_a_fork_does_the_recorded_actions_again_in_its_own_environment() -> None:
    """4 is reached by all; then 3, 4 or 5 twice: counters of 10, 12 and 14, and nobody counts in another's."""
    Counter.made.clear()
    forest = forked(environment_task())
    assert [rollout.error for rollout in forest.rollouts] == [None] * 3
    played = [made.actions for made in Counter.made if made.actions]
    assert sorted(played) == [["add 2"] * 2 + [f"add {n}"] * 2 for n in (3, 4, 5)]
    assert all(made.closed == 1 for made in Counter.made)
    shared = {forest.path(rollout)[1].id for rollout in forest.rollouts}
    assert len(shared) == 1 and len(forest.calls) == 2 + 3 * 3


def test_rewards_of_turns_are_those_of_each_path() -> None:
    """Stops at 8 or more: of 3, 4, 5 after 4 the paths end with 7 → 10, 8 and 9."""
    forest = forked(environment_task(Stepwise), reward_set="turn")
    assert [len(forest.path(rollout)) for rollout in forest.rollouts] == [4, 3, 3]
    assert [rollout.reward for rollout in forest.rollouts] == pytest.approx([0.3, 0.4, 0.5])
    assert [call.turn_reward for call in forest.path(forest.rollouts[0])[:-1]] == [0.2, 0.2, 0.3]


def test_an_environment_that_does_not_repeat_itself_fails_the_fork() -> None:
    forest = forked(environment_task(Random))
    errors = [rollout.error for rollout in forest.rollouts]
    assert errors == [None, "replay", "replay"]
    message = forest.rollouts[1].error_message
    assert "for add(step=2): text was '2 0." in message and "task.deterministic=false" in message


def test_arguments_that_are_none_are_no_action_of_the_environment() -> None:
    """A model writes a list in place of names: no fork stumbles over it."""

    class Listing(Pathwise):
        def reply(self, request: Request) -> str:
            text = super().reply(request)
            return text.replace('{"step": 2}', "[2]")

    forest = forked(environment_task(), Listing())
    assert [rollout.error for rollout in forest.rollouts] == [None] * 3
    assert [rollout.metrics["tool_errors"] for rollout in forest.rollouts] == [2.0] * 3


class Forgetful(Counter):
    """Begins each episode of a record somewhere else."""

    begun = 0

    def reset(self, target: int = 4, **columns: Any) -> str:
        type(self).begun += 1
        return f"{super().reset(target, **columns)} Episode {self.begun}."


def test_a_reset_that_says_something_else_fails_the_fork() -> None:
    errors = [(r.error, "for reset()" in r.error_message) for r in forked(environment_task(Forgetful)).rollouts]
    assert errors == [(None, False), ("replay", True), ("replay", True)]


used: list[int] = []


def doubled(step: int) -> int:
    """
    Doubles a number.

    Args:
        step: the number
    """
    used.append(step)
    return 2 * step


@pytest.mark.parametrize(("stateless", "times"), [((), 4 * 3), (("doubled",), 2 + 2 * 3), ("all", 2 + 2 * 3)])
def test_tools_without_state_are_not_used_again(stateless: Any, times: int) -> None:
    used.clear()
    task = environment_task(tools=(register("doubled", doubled),), tools_stateless=stateless)
    forest = forked(task, Pathwise(tool="doubled"))
    assert [rollout.error for rollout in forest.rollouts] == [None] * 3 and len(used) == times


def test_a_branch_that_is_all_on_the_tape_asks_an_environment_that_has_done_it() -> None:
    """Forked at the last call, after which nothing acts: the reward is that of 2 + 2 + 3 + 3."""
    task = environment_task(rows=[{"prompt": "Count.", "target": 10}])
    plan = (Tree((Fork("agent", 2, invocation=4),)),)
    forest = rolled_out(task, Pathwise(), plan, examples=task.examples("train"))
    assert [rollout.reward for rollout in forest.rollouts] == [1.0, 1.0]


class Cart:
    """A cart whose tool empties the list that it is handed."""

    def reset(self, **columns: Any) -> None:
        self.items: list[str] = []

    def put(self, things: list[str]) -> str:
        """
        Puts things in.

        Args:
            things: their names
        """
        while things:
            self.items.append(things.pop(0))
        return "ok"

    def get_reward(self) -> float:
        return float(len(self.items))


def test_a_tool_that_uses_its_argument_up_is_replayed_with_the_whole_of_it() -> None:
    class Shopper(Pathwise):
        def reply(self, request: Request) -> str:
            assert request.order is not None
            turn = int(str(request.order[0]).rpartition("#")[2])
            return tool_call("put", things=["a", "b"]) if turn < 2 else "Done."

    task = environment_task(Cart)
    plans = (Tree((Fork("agent", 3, invocation=1),)),)
    forest = rolled_out(task, Shopper(), plans, examples=[task.examples("train")[0]])
    assert [(rollout.reward, rollout.error) for rollout in forest.rollouts] == [(4.0, None)] * 3
