"""Reasoning with search in one context, trained in two stages of outcome rewards: the task `r1_searcher`.

The baseline "R1-Searcher" of arXiv 2506.02718, Table 1. The prompt opens the reasoning, a single `</think>` ends it,
one `<answer>` pair follows; queries stand between markers, and results go on in the same turn, never trained.
Reward sets: `stage1` (search and format, with cover exact match), then `outcome` (stage 2: F1 less a format penalty).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from mmrl.records import Call, Example
from mmrl.tasks import metrics
from mmrl.tasks.agents.tags import disarm, disarm_markers, final_query, has_word, last_block
from mmrl.tasks.agents.turns import Addition, ReasonerPrediction, ReasonerTask, TurnAgent, Turns, action_facts
from mmrl.tasks.base import Context, ModuleScore, Passage, Score
from mmrl.tasks.prompts import QUESTION, Prompts, Template, Templates, document_template

MODULE = "searcher"
QUERY = ("<|begin_of_query|>", "<|end_of_query|>")
DOCUMENTS = ("<|begin_of_documents|>", "<|end_of_documents|>")
STOP = (QUERY[1], "</answer>")
CHINESE = re.compile(
    r"[\u2e80-\u2fdf\u3005\u3007\u3021-\u3029\u3038-\u303b\u3100-\u312f\u31a0-\u31bf\u31c0-\u31e3\u3220-\u3247"
    r"\u3280-\u32b0\u32c0-\u32cb\u3358-\u3370\u337b-\u337f\u33e0-\u33fe\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    r"\U00016ff0-\U00016ff6\U0001f210-\U0001f23b\U0001f240-\U0001f251\U00020000-\U0003fffd]"
)
"""Han characters of every block (radicals, extensions, compatibility and enclosed forms), and bopomofo."""
TAGS = ("think", "answer")

TEMPLATES: Templates = {
    MODULE: {
        "system": Template("", optional=QUESTION, instructions=True),
        "user": Template(
            "Think about the question, end your thoughts with </think>, then write the answer alone, such as "
            f"<answer> Beijing </answer>. While you think you may look things up: write {QUERY[0]} query {QUERY[1]} "
            f"and what is found comes back in {DOCUMENTS[0]} {DOCUMENTS[1]}.\n"
            "Question: {question}\n<think>",
            required=QUESTION,
        ),
        "document": document_template("({index}) {title} | {text}"),
        "nothing": Template("(1) Nothing was found."),
    }
}
"""`nothing` stands for an empty result."""


def result(text: str) -> str:
    """Return the observation that holds retrieved documents."""
    return f"\n{DOCUMENTS[0]}\n{text}\n{DOCUMENTS[1]}\n"


class R1Searcher(TurnAgent):
    """Implements `mmrl.tasks.base.Program`."""

    modules = (MODULE,)

    def documents(self, passages: Sequence[Passage]) -> str:
        """Format retrieved documents without anything that looks like a marker or tag of the searcher."""
        listing = "\n".join(self.prompts.documents(MODULE, passages, self.snippet_words))
        return disarm_markers(disarm(listing, TAGS)) or self.prompts.text(MODULE, "nothing")

    async def run(self, example: Example, ctx: Context) -> ReasonerPrediction:
        """Run turns until one ends without a query, or a limit; the answer is the last `<answer>` pair."""
        queries: list[str] = []
        titles: list[str] = []

        async def act(turns: Turns) -> Addition | str:
            query = final_query(turns.replies[-1], QUERY)
            if query is None:
                return "answer"
            # The turn that asks once more is still part of the rollout; only its search is not executed.
            if len(queries) == self.searches:
                return "searches"
            queries.append(query)
            passages = await self.search(ctx, example, query)
            titles.extend(passage["title"] for passage in passages)
            return self.found(self.documents(passages), passages, result)

        turns = await self.play(ctx, self.question(example.inputs["question"]), STOP, act)
        # of the sampled text alone: an `<answer>` pair in a document is not the policy's
        answer = last_block(turns.sampled, "<answer>", "</answer>")
        return {"answer": answer, "queries": queries, "titles": titles, "ended": turns.ended}


@dataclass(frozen=True, slots=True)
class Form:
    """Features of a rollout's sampled text that the rewards use (the program's documents are not part of that text)."""

    # The rewards read sampled text alone: what the program inserted can never earn or cost anything.
    balanced: bool
    """True if there are as many query openings as endings, and no document marker: only the program writes those."""
    framed: bool
    """Exactly one `</think>`, no `<think>` (the prompt has it), exactly one answer pair."""
    chinese: bool
    """Chinese characters outside of the documents."""

    @classmethod
    def parse(cls, sampled: str) -> Form:
        """Read it off a text."""
        counts = [sampled.count(marker) for marker in (*QUERY, *DOCUMENTS)]
        tags = [sampled.count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>")]
        return cls(counts[0] == counts[1] and not any(counts[2:]), tags == [0, 1, 1, 1], bool(CHINESE.search(sampled)))


def stage1(form: Form, covered: bool, searched: bool) -> dict[str, float]:
    """Score the first stage, -1 to 2: cover exact match +1 or -1, +0.5 for a search, +0.5 for the frame."""
    return {
        "cover_match": 1.0 if covered else -1.0,
        "retrieval": 0.5 * (form.balanced and searched),
        "format": 0.5 * form.framed,
    }


def stage2(form: Form, f1: float) -> dict[str, float]:
    """Score the second stage, -1 to 1: F1, and -1 if the form is wrong."""
    # one penalty, however many things are wrong
    wrong = not form.balanced or not form.framed or form.chinese
    return {"f1": f1, "format": -1.0 * wrong}


class R1SearcherTask(ReasonerTask):
    """Implements `mmrl.tasks.base.Task`; see `OpenQaTask` for arguments and errors."""

    templates = TEMPLATES
    reward_sets: tuple[str, ...] = ("outcome", "stage1")

    @override
    def make_program(self, prompts: Prompts) -> R1Searcher:
        return R1Searcher(prompts, self.config, self.config.max_turns)

    def score(self, example: Example, prediction: ReasonerPrediction, path: Sequence[Call], reward_set: str) -> Score:
        """Score by reward set: `outcome` (stage 2) or `stage1`. Both rewards' answer metrics have no yes/no rule."""
        answer = prediction["answer"] or ""
        form = Form.parse("".join(call.text for call in path))
        if reward_set == "stage1":
            covered = bool(answer) and self.best(metrics.accuracy, answer, example, closed=False) > 0
            parts = stage1(form, covered, any(map(has_word, prediction["queries"])))
        else:
            parts = stage2(form, self.best(metrics.f1, answer, example))
        scores = self.answer_metrics(answer, example) | {
            "format": float(form.balanced and form.framed and not form.chinese),
            **self.search_metrics(prediction, example),
        }
        return Score(reward=sum(parts.values()), metrics=scores, parts=parts)

    @override
    def score_call(self, call: Call) -> ModuleScore:
        if final_query(call.text, QUERY) is not None:
            return action_facts("search")
        return action_facts("none" if last_block(call.text, "<answer>", "</answer>") is None else "answer")
