"""A planner and a worker of the OpenAI Agents SDK; changed: the marked lines."""

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)  # changed: traces would go to OpenAI


@function_tool
def search(query: str) -> str:
    """Find an article."""
    return f"Nothing is known of {query}."


async def run(example, base_url, api_key):  # changed: the address and the key are arguments
    """Answer a question: a plan, then the work."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:  # changed

        def model(module):
            return OpenAIChatCompletionsModel(model=f"policy/{module}", openai_client=client)  # changed: each a module

        planner = Agent(name="Planner", instructions="Say what to look for.", model=model("planner"))
        worker = Agent(name="Worker", instructions="Answer the question.", model=model("worker"), tools=[search])
        plan = await Runner.run(planner, example["question"])
        answer = await Runner.run(worker, f"{example['question']}\nPlan: {plan.final_output}")
    return answer.final_output
