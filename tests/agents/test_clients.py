"""The agents of docs/agents, by the clients that they are written for (`make test-agents`), over scripted replies."""

import asyncio
import importlib
import json

import pytest

from mmrl.rollout.plans import independent
from tests.helpers.gateway import Scripted, agent_task, one, rolled_out, tokenizer

CALLED = '<tool_call>\n{"name": "search", "arguments": {"query": "Porto"}}\n</tool_call>'
FOUND = "Nothing is known of Porto."


STEPS, ROLLOUTS = 2, 24
"""Clients keep connections: a second step finds those of the first, and rollouts at once share them."""


def played(module, package, reply, wrapped=lambda agent: agent, **options):
    """The calls of each rollout of an agent of docs/agents, and the prompts."""
    pytest.importorskip(package)
    agent = wrapped(importlib.import_module(f"docs.agents.{module}").run)
    task = agent_task(agent, metric=lambda record, result: float(result == "Done."), **options)
    paths, prompts = [], []
    for _ in range(STEPS):
        engine = Scripted(reply, tokenizer("qwen3"), delay=0.01)
        forest = rolled_out(task, engine, independent(ROLLOUTS))
        for rollout in forest.rollouts:
            assert (rollout.error, rollout.reward) == (None, 1.0), rollout.error_message + rollout.error_traceback
        paths += [forest.path(rollout) for rollout in forest.rollouts]
        prompts += engine.prompts
    assert len(paths) == STEPS * ROLLOUTS
    return paths, prompts


def with_tool(prompt):
    return "Done." if FOUND in prompt else CALLED


def react(prompt):
    """What DSPy's ReAct reads: a search, then the end, then the answer."""
    fields = {"next_thought": "t", "next_tool_name": "finish", "next_tool_args": "{}"}
    if "next_tool_name" not in prompt.rpartition("Respond with")[2]:
        fields = {"reasoning": "r", "answer": "Done."}
    elif FOUND not in prompt:
        fields |= {"next_tool_name": "search", "next_tool_args": json.dumps({"query": "Porto"})}
    return "".join(f"[[ ## {name} ## ]]\n{value}\n" for name, value in {**fields, "completed": ""}.items())


@pytest.mark.parametrize(
    ("module", "package"),
    [("openai_client", "openai"), ("anthropic_client", "anthropic"), ("langgraph_agent", "langgraph")],
)
def test_an_agent_with_tools_goes_on_in_its_context(module, package):
    paths, prompts = played(module, package, with_tool)
    assert all('"name": "search"' in prompt for prompt in prompts)
    for calls in paths:
        assert [call.turn for call in calls] == [0, 1]
        before = calls[0].prompt_ids + calls[0].completion_ids
        assert calls[1].prompt_ids[: len(before)] == before
        assert [call.facts["rewritten_history"] for call in calls] == [0.0, 0.0]


def test_an_async_agent_may_be_run_by_a_plain_function():
    """In an event loop of each rollout's own, while LangChain keeps a client for each address."""

    def wrapped(agent):
        return lambda *given: asyncio.run(agent(*given))

    paths, _ = played("langgraph_agent", "langgraph", with_tool, wrapped)
    assert all([call.turn for call in calls] == [0, 1] for calls in paths)


def test_the_parts_of_an_agent_of_the_agents_sdk_are_modules():
    def reply(prompt):
        return "Look for Porto." if "Say what to look for" in prompt else with_tool(prompt)

    paths, _ = played("agents_sdk", "agents", reply, modules=("planner", "worker"))
    for calls in paths:
        assert [(call.module, call.turn) for call in calls] == [("planner", 0), ("worker", 0), ("worker", 1)]


def test_a_program_of_dspys_calls_by_its_own_lm():
    paths, _ = played("dspy_agent", "dspy", react)
    assert all([call.module for call in calls] == ["agent"] * 3 for calls in paths)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("model", [None, "gpt-4o"])
def test_an_agent_of_the_agents_sdk_runs_with_its_defaults(model, responses, streamed):
    """Its default model brings efforts and verbosity; its default protocol is `/v1/responses`."""
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    class Result(BaseModel):
        value: str

    def search(query: str) -> str:
        """Find an article."""
        return FOUND

    async def run(example, base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            provider = agents.OpenAIProvider(openai_client=client, use_responses=responses)
            config = agents.RunConfig(model_provider=provider, tracing_disabled=True)
            agent = agents.Agent(
                name="A", instructions="Answer.", model=model, tools=[agents.function_tool(search)], output_type=Result
            )
            if not streamed:
                return (await agents.Runner.run(agent, example["question"], run_config=config)).final_output.value
            running = agents.Runner.run_streamed(agent, example["question"], run_config=config)
            async for _ in running.stream_events():
                pass
            return running.final_output.value

    engine = Scripted(lambda prompt: '{"value": "0"}' if FOUND in prompt else CALLED, tokenizer("qwen3"))
    rollout, calls = one(agent_task(run), engine)
    assert (rollout.error, rollout.reward) == (None, 1.0), rollout.error_message + rollout.error_traceback
    assert [(call.turn, call.ok, call.facts["rewritten_history"]) for call in calls] == [(0, True, 0), (1, True, 0)]


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_an_agent_with_a_name_goes_on_in_its_context(responses):
    pytest.importorskip("langgraph")
    import httpx
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    def search(query: str) -> str:
        """Find an article."""
        return FOUND

    async def run(example, base_url, api_key):
        async with httpx.AsyncClient() as asking:
            options = {"base_url": base_url, "api_key": api_key, "http_async_client": asking}
            model = ChatOpenAI(model="gpt-5", use_responses_api=responses, **options)
            graph = create_react_agent(model, [search], prompt="Answer.", name="researcher")
            done = await graph.ainvoke({"messages": [("user", example["question"])]})
        return done["messages"][-1].text

    rollout, calls = one(agent_task(run, metric=lambda record, result: 1.0), Scripted(with_tool, tokenizer("qwen3")))
    assert rollout.error is None, rollout.error_message + rollout.error_traceback
    assert rollout.prediction == "Done."
    assert [(call.turn, call.facts["rewritten_history"]) for call in calls] == [(0, 0), (1, 0)]
