r"""Reasoning with search in one context, results condensed by a second call: the task `search_o1`.

The baseline "Search-o1" of arXiv 2506.02718, Table 1 (training-free there; trainable here like any program). The
reasoner writes a query between markers; the condenser, the same model in a context of its own, sees the reasoning so
far, the query and the documents; only what it writes enters the reasoner's context. The answer stands in \boxed{}.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from typing_extensions import override

from mmrl.records import Call, Example
from mmrl.tasks.agents.tags import disarm_markers, final_query
from mmrl.tasks.agents.turns import Addition, ReasonerPrediction, ReasonerTask, TurnAgent, Turns, action_facts
from mmrl.tasks.base import Context, ModuleScore, Passage
from mmrl.tasks.prompts import QUESTION, Prompts, Template, Templates, document_template

REASONER, CONDENSER = "reasoner", "condenser"
QUERY = ("<|begin_search_query|>", "<|end_search_query|>")
RESULT = ("<|begin_search_result|>", "<|end_search_result|>")
BOX = "\\boxed{"
BRACE = re.compile(r"\\boxed\{|(?P<font>\\(?:text|textbf|textit|mathrm|mathbf)\{)|[{}]")

TEMPLATES: Templates = {
    REASONER: {
        "system": Template("", optional=QUESTION, instructions=True),
        "user": Template(
            "Reason step by step to answer the question. To look something up, write "
            f"{QUERY[0]} query {QUERY[1]}; what helps comes back in {RESULT[0]} {RESULT[1]}. "
            "You may search {searches} times. Write the answer alone as \\boxed{answer}.\nQuestion: {question}",
            required=QUESTION,
            optional=frozenset({"searches"}),
        ),
        "nothing": Template("Nothing helpful was found."),
        "limit": Template("No more searches are left. Answer now."),
    },
    CONDENSER: {
        "system": Template("", optional=frozenset({"query"}), instructions=True),
        "user": Template(
            "Reasoning so far: {reasoning}\nQuery: {query}\n{documents}\n"
            "Write only what in the documents helps with the query.",
            required=frozenset({"query", "documents"}),
            optional=frozenset({"reasoning"}),
        ),
        "document": document_template("Document{index}: {title} | {text}"),
    },
}
"""`nothing` stands for an empty result; `limit` answers a search beyond `task.max_turns`."""


def result(text: str) -> str:
    """Return the observation that holds a search result."""
    return f"\n{RESULT[0]} {text} {RESULT[1]}\n"


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{…} with balanced braces, without \text{…} and fonts; None without one."""
    # One pass with a stack instead of a regular expression: braces nest, and a long unbalanced text must not take
    # quadratic time.
    opened: list[re.Match[str]] = []
    span: tuple[int, int] | None = None
    fonts: list[re.Match[str]] = []
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened:
            start = opened.pop()
            if start["font"]:
                fonts += [start, brace]
            elif start[0] == BOX and (span is None or start.end() > span[0]):
                span = start.end(), brace.start()
    if span is None:
        return None
    parts, end = [], span[0]
    for mark in sorted((mark for mark in fonts if span[0] <= mark.start() < span[1]), key=re.Match.start):
        parts.append(text[end : mark.start()])
        end = mark.end()
    return "".join([*parts, text[end : span[1]]]).strip()


class SearchO1(TurnAgent):
    """Implements `mmrl.tasks.base.Program`."""

    modules = (REASONER, CONDENSER)

    def condense(self, reasoning: str, query: str, passages: Sequence[Passage]) -> list[dict[str, str]]:
        """Return the condenser's prompt."""
        listing = disarm_markers("\n".join(self.prompts.documents(CONDENSER, passages, self.snippet_words)))
        return self.prompts.messages(CONDENSER, reasoning=reasoning, query=query, documents=listing)

    def fixed(self, role: str) -> str:
        """Return the fixed text `nothing` or `limit`."""
        return self.prompts.text(REASONER, role)

    async def run(self, example: Example, ctx: Context) -> ReasonerPrediction:
        """Run the reasoner's turns until one ends without a query, or a limit."""
        queries: list[str] = []
        titles: list[str] = []
        beyond: list[str] = []

        async def act(turns: Turns) -> Addition | str:
            query = final_query(turns.replies[-1], QUERY)
            if query is None:
                return "answer"
            if beyond:
                return "searches"
            # Beyond the limit the model gets one notice and may still answer; a second such query ends the rollout.
            if len(queries) == self.searches:
                beyond.append(query)
                return Addition(self.fixed("limit"), "limit", result)
            queries.append(query)
            passages = await self.search(ctx, example, query)
            titles.extend(passage["title"] for passage in passages)
            text = ""
            if passages:
                reply = await ctx.call(CONDENSER, self.condense(turns.context, query, passages))
                # It enters the reasoner's context: it must not open or close a block there.
                text = disarm_markers(reply.text.strip())
            return self.found(text or self.fixed("nothing"), passages, result)

        turns = await self.play(ctx, self.question(example.inputs["question"]), (QUERY[1],), act)
        # The answer is looked for in what the reasoner wrote; the condenser also read what was inserted.
        return {"answer": extract_boxed(turns.sampled), "queries": queries, "titles": titles, "ended": turns.ended}


class SearchO1Task(ReasonerTask):
    """Implements `mmrl.tasks.base.Task`; see `OpenQaTask` for arguments and errors."""

    templates = TEMPLATES

    @override
    def make_program(self, prompts: Prompts) -> SearchO1:
        return SearchO1(prompts, self.config, self.config.max_turns)

    def score_call(self, call: Call) -> ModuleScore:
        """Return facts without penalty: the reasoner's action, and how much the condenser wrote."""
        if call.module == CONDENSER:
            return ModuleScore(facts={"words": float(len(call.text.split()))})
        if final_query(call.text, QUERY) is not None:
            return action_facts("search")
        return action_facts("none" if extract_boxed(call.text) is None else "answer")
