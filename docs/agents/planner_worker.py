"""A planner that hands over to a worker who searches: the OpenAI Agents SDK on the mini world; changed: the marked lines.

The shipped model `tiny_agent` plays it (docs/agents.md).
"""

from agents import (
    Agent,
    AgentsException,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from mmrl.retrieval.bm25 import Bm25Retriever
from mmrl.tasks.metrics import f1
from mmrl.tasks.mini.examples import mini_corpus, mini_multihop

set_tracing_disabled(True)  # changed: traces would go to OpenAI
retriever = Bm25Retriever(mini_corpus())


def records(split):
    """Questions of the mini world, and their answers."""
    return [{"id": e.id, **e.inputs, "answers": e.metadata["answers"]} for e in mini_multihop(split)]


TRAIN, DEV = records("train"), records("dev")


class Plan(BaseModel):
    """What the planner passes on."""

    plan: str


@function_tool
def search(query: str) -> str:
    """Find an article."""
    (found,) = retriever.search([query], [1])
    return "\n".join(f"{document.title} | {document.text}" for document in found)


def team(model):
    """The planner and the worker, by `model`: the model of each by its name."""
    worker = Agent(
        name="Worker", instructions="Search by the plan, then answer.", model=model("worker"), tools=[search]
    )
    to_worker = handoff(worker, on_handoff=lambda context, plan: None, input_type=Plan)
    planner = Agent(name="Planner", instructions="Plan the searches.", model=model("planner"), handoffs=[to_worker])
    return planner, worker


async def run(example, base_url, api_key):  # changed: the address and the key are arguments
    """Answer a question: a plan, then searches, then the answer."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:  # changed

        def model(module):
            return OpenAIChatCompletionsModel(model=f"policy/{module}", openai_client=client)  # changed: each a module

        planner, worker = team(model)
        try:
            result = await Runner.run(planner, example["question"], max_turns=6)
            if result.last_agent is planner:  # no plan: the worker goes on alone
                result = await Runner.run(worker, example["question"], max_turns=5)
        except AgentsException:  # a call of no tool, or no end: the model's doing, and no answer
            return ""
    return result.final_output


def metric(record, result):
    """F1 of the answer with the best of the right ones."""
    return max(f1(result, answer) for answer in record["answers"])
