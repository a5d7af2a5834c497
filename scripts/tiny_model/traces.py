"""Traces of the planner and worker of `docs/agents/planner_worker.py`, for a tiny model that calls tools.

The messages are those of the OpenAI Agents SDK as the chat template writes them, tools and calls as text, so that the
token ids are those of a run (tests/agents compares them). Needs the SDK: `.venv-agents`, by `make test-agents`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, count
from typing import Any

from agents.models.chatcmpl_converter import Converter
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import qwen3_instruct_2507_chat_template as CHAT_TEMPLATE

from docs.agents import planner_worker
from mmrl.config import DataConfig
from mmrl.config.tasks import AnyAgentConfig
from mmrl.records import Example
from mmrl.retrieval.bm25 import Bm25Retriever
from mmrl.system.objects import register
from mmrl.tasks.base import Demonstration, Message
from mmrl.tasks.gateway.task import AgentTask
from mmrl.tasks.mini.draws import Draws
from mmrl.tasks.mini.examples import mini_corpus, mini_multihop
from mmrl.tasks.mini.teach import demonstrations

PLANS = ("queries", "queries", "question", "none")
"""What the worker gets, drawn for each example: good plans, poor ones, none at all."""
_NUMBERS = count()


def agent_task() -> AgentTask:
    """Build the task in the mini world whose files are in place; each example has its trace."""
    retriever = Bm25Retriever(mini_corpus())
    number = next(_NUMBERS)
    rows: dict[str, Any] = {
        split: register(f"traced_{number}_{split}", traced(split, retriever)) for split in ("train", "dev", "test")
    }
    names = {name: f"{planner_worker.__name__}:{name}" for name in ("run", "metric")}
    config = AnyAgentConfig(
        name="agent",
        agent=names["run"],
        metric=names["metric"],
        inputs=("question",),
        modules=("planner", "worker"),
        max_tokens=100,
        data=DataConfig(**rows),
    )
    return AgentTask(config, 0)


def traced(split: str, retriever: Bm25Retriever) -> list[dict[str, Any]]:
    """Questions of a split with a plan, the plan that the worker gets, and its searches with what they find.

    What the worker does is true: it has no searches where one of them misses its article.
    """
    rows = []
    for example, stepwise in zip(mini_multihop(split), mini_multihop(split, stepwise=True), strict=True):
        question, meta = example.inputs["question"], example.metadata
        plan = "; ".join(hop["query"] for hop in meta["hops"])
        kind = Draws("trace", example.id).pick(PLANS)
        queries = [hop["query"] for hop in stepwise.metadata["hops"]]
        queries = queries if kind == "queries" else [question, *queries[1:]]
        found = [documents[0] for documents in retriever.search(queries, [1] * len(queries))]
        true = [document.title for document in found] == [hop["title"] for hop in meta["hops"]]
        searches = [(query, f"{d.title} | {d.text}") for query, d in zip(queries, found, strict=True)] if true else []
        passed = {"queries": plan, "question": question, "none": None}[kind]
        row = {"id": example.id, "question": question, "answers": meta["answers"], "titles": meta["titles"]}
        rows.append({**row, "plan": plan, "passed": passed, "searches": searches})
    return rows


@demonstrations.register
def _planner_worker(task: AgentTask, example: Example) -> list[Demonstration]:
    planner, worker = system_messages()
    trace, user = example.metadata, {"role": "user", "content": example.inputs["question"]}
    plan, passed = (call("transfer_to_worker", plan=trace[name] or "") for name in ("plan", "passed"))
    handed = ({"role": "assistant", "content": passed}, result('{"assistant": "Worker"}'))
    first = (worker, user, *(handed if trace["passed"] is not None else ()))
    turns = [(call("search", query=query), (result(text),)) for query, text in trace["searches"]]
    none: tuple[Any, ...] = ()
    histories = accumulate(turns, lambda before, turn: (*before, turn), initial=none)
    completions = [*(turn for turn, _ in turns), trace["answers"][0]] if turns else []
    return [Demonstration(module="planner", messages=(planner, user), completion=plan)] + [
        Demonstration(module="worker", messages=first, completion=completion, history=history)
        for completion, history in zip(completions, histories, strict=False)
    ]


def call(name: str, **arguments: str) -> str:
    """Return a tool call as the chat template writes it."""
    function = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{function}\n</tool_call>"


def result(text: str) -> Message:
    """Return a tool's result as the chat template writes it."""
    return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}


@cache
def system_messages() -> Sequence[Message]:
    """Return the system messages of planner and worker, with their tools."""
    planner, worker = planner_worker.team(lambda module: None)
    (handoff,), (tool,) = planner.handoffs, worker.tools
    tools = [Converter.convert_handoff_tool(handoff), Converter.tool_to_openai(tool)]
    return [_with_tool(agent.instructions, tool) for agent, tool in zip((planner, worker), tools, strict=True)]


def _with_tool(instructions: str, tool: dict[str, Any]) -> Message:
    asked = [[{"role": "system", "content": instructions}]]
    rendered: Any = render_jinja_template(asked, tools=[tool], chat_template=CHAT_TEMPLATE)
    (text,), _ = rendered
    return {"role": "system", "content": text.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")}
