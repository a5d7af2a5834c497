"""Answering from memory, in one call and without search: the task `qa_direct`, the "LLM" rows of arXiv 2506.02718.

Two prompts, plain and chain of thought (`task.chain_of_thought`). Trainable like any program; on the mini world
with a tiny model that was trained on single facts, what is learnt is to commit to one answer, and to think first.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from mmrl.config.tasks import DirectQaConfig
from mmrl.records import Call, Example
from mmrl.tasks.base import Context, ModuleScore
from mmrl.tasks.mini.examples import mini_questions
from mmrl.tasks.open_qa import OpenQaTask
from mmrl.tasks.prompts import QUESTION, Prompts, Template, Templates
from mmrl.tasks.search_program import parse_answer

MODULE = "solver"
TEMPLATES: Templates = {
    MODULE: {
        "system": Template(
            "Answer the question as briefly as possible. Write the answer alone.", optional=QUESTION, instructions=True
        ),
        "system_chain_of_thought": Template(
            "Think step by step, then write the answer as briefly as possible on a last line that begins with Answer:",
            optional=QUESTION,
            instructions=True,
        ),
        "user": Template("Question: {question}", required=QUESTION),
    }
}
"""`system_chain_of_thought` takes the place of `system` with `task.chain_of_thought`."""


def system_role(chain_of_thought: bool) -> str:
    """Return the role that is the system message."""
    return "system_chain_of_thought" if chain_of_thought else "system"


@dataclass(slots=True)
class DirectAnswer:
    """Implements `mmrl.tasks.base.Program`: reads `inputs["question"]`; the prediction is `{"answer"}`."""

    prompts: Prompts
    chain_of_thought: bool
    modules: tuple[str, ...] = (MODULE,)

    def question(self, question: str, chain_of_thought: bool) -> list[dict[str, str]]:
        """Return the prompt of the call."""
        return self.prompts.messages(MODULE, system=system_role(chain_of_thought), question=question)

    async def run(self, example: Example, ctx: Context) -> dict[str, str]:
        """Answer in one call."""
        reply = await ctx.call(MODULE, self.question(example.inputs["question"], self.chain_of_thought))
        return {"answer": parse_answer(reply.text)}


class DirectQaTask(OpenQaTask):
    """Implements `mmrl.tasks.base.Task`; see `OpenQaTask` for arguments and errors."""

    templates = TEMPLATES
    config: DirectQaConfig
    searches = False
    main_metric = "f1"
    absent_features = frozenset({"penalties", "parse_failures", "observations", "repeated_calls"})

    @override
    def make_program(self, prompts: Prompts) -> DirectAnswer:
        return DirectAnswer(prompts, self.config.chain_of_thought)

    @override
    def instruction_roles(self) -> dict[str, str]:
        """Return the role of the system text in use."""
        return {MODULE: system_role(self.config.chain_of_thought)}

    def mini_examples(self, split: str, corpus: str) -> list[Example]:
        """Return the questions that the search programs have to answer with the mini world's documents."""
        return mini_questions(self.dataset, split, corpus, stepwise=True)

    def score_call(self, call: Call) -> ModuleScore:
        """Return facts without penalty: how much was written."""
        return ModuleScore(facts={"answer_words": float(len(call.text.split()))})
