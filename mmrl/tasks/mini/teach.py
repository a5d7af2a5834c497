"""Completions of good modules on the mini world: supervised examples for `algo=sft` and the shipped tiny models.

One function for each task that has mini-world data, since a demonstration needs the prompts of the task's own program.
Of data files there are those of `banking77`, whose labels they hold, and those of search programs and agents where the
examples name their gold articles (`_hops`). What is varied is drawn by the example's id, so the same example always
gives the same demonstrations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from html import unescape
from itertools import zip_longest
from typing import TypedDict

from mmrl.records import Example
from mmrl.tasks.agents import qa_direct, r1_searcher, search_agent, search_o1, tool_agent
from mmrl.tasks.base import Demonstration, Message, Passage
from mmrl.tasks.dspy.banking77 import Banking77Task
from mmrl.tasks.dspy.base import DspyTask
from mmrl.tasks.dspy.hover import HoverTask
from mmrl.tasks.dspy.papillon import PapillonTask
from mmrl.tasks.mini.draws import Draws
from mmrl.tasks.open_qa import OpenQaTask
from mmrl.tasks.search_program import MultihopQaTask

History = tuple[tuple[str, str | Sequence[Message]], ...]


class Hop(TypedDict):
    """Search on the way to an answer."""

    query: str
    title: str
    """Article that it must find."""
    answer: str | None
    """Answer in that article; None: not known, as in data files."""


def _hops(example: Example, limit: int | None = None) -> list[Hop]:
    """The mini world's hops; of data files one for each gold article, searched by its title; none where none is named,
    or more than `limit`, the searches that a rollout may make.

    In the order of the data. A title that nobody could know before reading another is searched for all the same: this
    is a start, which reinforcement learning goes on from.
    """
    titles = example.metadata.get("titles", ())
    hops: list[Hop] = example.metadata.get("hops") or [
        Hop(query=unescape(title), title=title, answer=None)  # HotpotQA writes "Will &amp; Grace"
        for title in titles
    ]
    return hops if limit is None or len(hops) <= limit else []


def _thought_after(hop: Hop) -> str:
    """Return the thought after a search."""
    return f"it is {hop['answer']}" if hop["answer"] is not None else f"now I have read {hop['title']}"


@singledispatch
def demonstrations(task: object, example: Example) -> list[Demonstration]:
    """Return supervised examples from one example of a task, by the task's class.

    Empty for a task that is not listed here, for data that does not hold what they are made of, and where the retriever
    misses a document that the reasoning needs: what a module says it read must be true.
    """
    return []


@demonstrations.register
def _search_program(task: MultihopQaTask, example: Example) -> list[Demonstration]:
    """The rewriter's own two sub-questions; then two rerankers, one after those sub-questions and one after a poorer
    rewriter; then two answerers, one with exactly the gold documents and one with others among them.

    What is poorer or added is drawn, so that a policy meets in training what it will meet in a run.
    """
    hops = _hops(example)
    if not hops:
        return []
    question, answer, program = example.inputs["question"], example.metadata["answers"][0], task.program
    draws = Draws("demonstration", example.id)
    queries = [hop["query"].replace(";", ",") for hop in hops]  # a semicolon ends a query
    calls = [_single("rewriter", program.rewriter(question), f"### {'; '.join(queries)} ###")]
    poorer = draws.pick([[question], [queries[0], question], [question, queries[:2][-1]], queries[::-1], queries[:1]])
    titles = [hop["title"] for hop in hops]
    for searched in (queries, poorer):
        candidates = task.search(searched, example.inputs["corpus"])
        names = [candidate["title"] for candidate in candidates]
        # A reranker can only choose what was retrieved; none is shown where nothing gold was.
        gold = [names.index(title) for title in titles if title in names]
        if gold:
            indices = ", ".join(str(index) for index in gold)
            calls.append(_single("reranker", program.reranker(question, candidates), indices))
        if len(gold) == len(titles):
            selected = [candidates[index] for index in gold]
            if searched is poorer:
                distractors = [other for other in candidates if other["title"] not in titles]
                draws.shuffle(distractors)
                selected += distractors[: draws.below(3)]
                draws.shuffle(selected)
            calls.append(_single("answerer", program.answerer(question, selected), answer))
    return calls


def _turns(
    task: OpenQaTask,
    example: Example,
    hops: Sequence[Hop],
    search: Callable[[str, str], str],
    added: Callable[[Hop, list[Passage]], str | Sequence[Message]],
    answer: Callable[[str, str], str],
) -> list[Demonstration]:
    """Return one search per hop and the answer, as turns of one context of the program's first module.

    Args:
        search: thought and query -> the turn that searches.
        added: hop and what its search brought -> what goes on in the context.
        answer: thought and answer -> the last turn.
    """
    if not hops:
        return []
    module, first = task.program.modules[0], task.program.question(example.inputs["question"])
    thought = Draws(task.name, example.id).pick(["look it up", "search first"])
    history: History = ()
    calls = []
    for hop in hops:
        turn = search(thought, hop["query"])
        calls.append(Demonstration(module=module, messages=first, history=history, completion=turn))
        documents = task.search([hop["query"]], example.inputs["corpus"])
        if hop["title"] not in [document["title"] for document in documents]:
            return []
        history = (*history, (turn, added(hop, documents)))
        thought = _thought_after(hop)
    right = example.metadata["answers"][0]
    last = answer(f"it is {hops[-1]['answer'] or right}", right)
    return [*calls, Demonstration(module=module, messages=first, history=history, completion=last)]


@demonstrations.register
def _search_agent(task: search_agent.SearchAgentTask, example: Example) -> list[Demonstration]:
    return _turns(
        task,
        example,
        _hops(example, task.program.searches),
        lambda thought, query: f"<think> {thought} </think>\n<search> {query} </search>",
        lambda hop, documents: search_agent.information(task.program.documents(documents)),
        lambda thought, answer: f"<think> {thought} </think>\n<answer> {answer} </answer>",
    )


@demonstrations.register
def _tool_agent(task: tool_agent.ToolAgentTask, example: Example) -> list[Demonstration]:
    """Return a tool call and the answer."""

    def call(thought: str, query: str) -> str:
        command = json.dumps({"name": tool_agent.TOOL, "args": {"query": query}})
        return f"<reasoning> {thought} </reasoning>\n<tool> {command} </tool>"

    return _turns(
        task,
        example,
        example.metadata.get("hops", ()),
        call,
        lambda hop, articles: tool_agent.result(task.program.articles(articles)),
        lambda thought, answer: f"<reasoning> {thought} </reasoning>\n<answer> {answer} </answer>",
    )


@demonstrations.register
def _search_o1(task: search_o1.SearchO1Task, example: Example) -> list[Demonstration]:
    """Condense each search in a context of its own."""
    reasoning: list[str] = []
    condensed: list[Demonstration] = []

    def search(thought: str, query: str) -> str:
        reasoning.append(f"{thought} {search_o1.QUERY[0]} {query} {search_o1.QUERY[1]}")
        return reasoning[-1]

    def added(hop: Hop, documents: list[Passage]) -> str:
        prompt = task.program.condense("".join(reasoning), hop["query"], documents)
        condensed.append(_single(search_o1.CONDENSER, prompt, _thought_after(hop)))
        reasoning.append(search_o1.result(_thought_after(hop)))
        return reasoning[-1]

    hops = example.metadata.get("hops", ())
    turns = _turns(task, example, hops, search, added, lambda thought, answer: f"{thought} {search_o1.BOX}{answer}}}")
    return [call for pair in zip_longest(turns, condensed) for call in pair if call] if turns else []


@demonstrations.register
def _r1_searcher(task: r1_searcher.R1SearcherTask, example: Example) -> list[Demonstration]:
    return _turns(
        task,
        example,
        _hops(example, task.program.searches),
        lambda thought, query: f"{thought} {r1_searcher.QUERY[0]} {query} {r1_searcher.QUERY[1]}",
        lambda hop, documents: r1_searcher.result(task.program.documents(documents)),
        lambda thought, answer: f"{thought} </think>\n<answer> {answer} </answer>",
    )


@demonstrations.register
def _qa_direct(task: qa_direct.DirectQaTask, example: Example) -> list[Demonstration]:
    """Answer directly and after the steps, whatever the config: one warm start serves both prompts."""
    hops = example.metadata.get("hops")
    if not hops:
        return []
    question, answer = example.inputs["question"], example.metadata["answers"][0]
    thought = " ".join(f"{hop['query']}: {hop['answer']}." for hop in hops)
    return [
        _single(qa_direct.MODULE, task.program.question(question, False), answer),
        _single(qa_direct.MODULE, task.program.question(question, True), f"{thought}\nAnswer: {answer}"),
    ]


@dataclass(frozen=True, slots=True)
class Filled:
    """The fields of one call of a DSPy predictor."""

    module: str
    inputs: Mapping[str, object]
    outputs: Mapping[str, str]


@demonstrations.register
def _dspy(task: DspyTask, example: Example) -> list[Demonstration]:
    """Return the current prompts of the program's predictors, with outputs in the form that their adapter parses."""
    return [task.program.demonstration(call.module, call.inputs, call.outputs) for call in module_calls(task, example)]


@singledispatch
def module_calls(task: object, example: Example) -> list[Filled]:
    """Return inputs and outputs of a DSPy task's modules on an example, in call order; empty as in `demonstrations`."""
    return []


@module_calls.register
def _banking77(task: Banking77Task, example: Example) -> list[Filled]:
    """Return a short reason and the label; of data files, which hold labels alone, the label after no reason."""
    reason, label = example.metadata.get("reason", ""), example.metadata["label"]
    return [Filled("classify.predict", example.inputs, {"reasoning": reason, "label": label})]


@module_calls.register
def _papillon(task: PapillonTask, example: Example) -> list[Filled]:
    """Return a request without the private pieces, and the external model's text with the asker's name."""
    ask = example.metadata.get("ask")
    if ask is None:
        return []
    query, private = example.inputs["user_query"], ", ".join(example.metadata["units"])
    related = {"related_llm_request": ask, "related_llm_response": task.by_rule(ask), "user_query": query}
    craft, respond = "craft_redacted_request.predict", "respond_to_query"
    return [
        Filled(craft, {"user_query": query}, {"reasoning": f"Private: {private}", "llm_request": ask}),
        Filled(respond, related, {"response": example.metadata["target"]}),
    ]


@module_calls.register
def _hover(task: HoverTask, example: Example) -> list[Filled]:
    """Note in each hop what its document says and ask for what that names."""
    notes, titles = example.metadata.get("notes"), example.metadata["titles"]
    if notes is None:
        return []
    claim, calls = example.inputs["claim"], []
    for hop in range(task.config.search_hops):
        # the claim finds the subject; the names in its document find the next ones; after the city nothing is missing
        query = titles[hop] if 0 < hop < len(titles) else "None"
        inputs = {"claim": claim, "key_facts": list(notes[:hop])}
        if hop:
            queries = {"search_query1": query, "search_query2": "None", "search_query3": "None"}
            reasoning = f"{query} is next" if hop < len(titles) else "all is found"
            calls.append(Filled("generate_query.predict", inputs, {"reasoning": reasoning, **queries}))
        if hop < min(task.config.search_hops - 1, len(titles)):
            passages = task.passages_now([query if hop else claim], task.top_k[0])
            if any(passage.startswith(f"{titles[hop]} | ") for passage in passages):
                outputs = {"reasoning": f"{titles[hop]} tells", "new_key_facts": notes[hop]}
                inputs = {**inputs, "new_search_results": passages}
                calls.append(Filled("append_notes.predict", inputs, outputs))
    return calls


def _single(module: str, messages: Sequence[Message], completion: str) -> Demonstration:
    """Return a call in a context of its own."""
    return Demonstration(module=module, messages=messages, completion=completion)
