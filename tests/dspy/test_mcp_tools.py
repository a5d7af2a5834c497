"""Tools of an MCP server in DSPy programs: a session for each rollout, also where one goes on from another."""

import shlex
import sys

import dspy
import pytest

from mmrl.errors import ProgramFailure
from mmrl.rollout.plans import Fork, Tree, independent
from mmrl.tasks.dspy.mcp_tools import mcp_tools
from tests.dspy.agents import step
from tests.helpers import mcp_server
from tests.helpers.programs import filled, run_program

COMMAND = shlex.join([sys.executable, mcp_server.__file__])


@pytest.fixture(scope="module")
def tools():
    return mcp_tools(COMMAND)


def react(tools, awaits=False):
    agent = dspy.ReAct("text -> answer", tools=tools, max_iters=4)

    class Program(dspy.Module):
        def __init__(self):
            super().__init__()
            self.agent = agent

    async def aforward(self, text):
        return await self.agent.acall(text=text)

    def forward(self, text):
        return self.agent(text=text)

    method = aforward if awaits else forward
    return type("Program", (Program,), {method.__name__: method})()


def replying(*steps):
    """A model that takes these steps, and the prompts in which it has read what all of them brought."""
    read = []

    def answer(request):
        prompt = "".join(message["content"] for message in request.messages)
        if request.module == "agent.extract.predict":
            read.append(prompt)
            return filled(reasoning="so", answer="x")
        turn = next(n for n in range(len(steps) + 1) if f"observation_{n}" not in prompt)
        return filled(**(*steps, step("finish"))[turn])

    return answer, read


@pytest.mark.parametrize("awaits", [False, True], ids=["forward", "aforward"])
def test_a_rollout_has_a_session_of_its_own(tools, awaits):
    """Each counts from 0, and an error is shown to the model."""
    answer, read = replying(step("add", step=2), step("add", step="x"), step("add", step=3))
    forest, _ = run_program(react(tools, awaits), independent(2), answer)
    assert [rollout.error for rollout in forest.rollouts] == [None, None], forest.rollouts[0].error_message
    assert len(read) == 2 and all("[[ ## observation_2 ## ]]\n5" in prompt for prompt in read)
    assert all("valid integer" in prompt for prompt in read)


def test_a_fork_does_the_recorded_calls_again(tools):
    """The session of each branch has 2 before it adds 3."""
    answer, read = replying(step("add", step=2), step("add", step=3))
    forest, _ = run_program(react(tools), (Tree((Fork("agent.react", 3, invocation=1),)),), answer)
    assert [rollout.error for rollout in forest.rollouts] == [None] * 3
    assert len(read) == 3 and all("[[ ## observation_1 ## ]]\n5" in prompt for prompt in read)


def test_a_server_that_ends_fails_the_rollout(tools):
    answer, _ = replying(step("die"), step("add", step=2))
    forest, _ = run_program(react(tools), independent(1), answer)
    assert forest.rollouts[0].error == "tool" and "out of memory" in forest.rollouts[0].error_message


def test_outside_a_rollout_it_says_so(tools):
    with pytest.raises(ProgramFailure, match="tool 'add' was used outside a rollout"):
        tools[0](step=1)
