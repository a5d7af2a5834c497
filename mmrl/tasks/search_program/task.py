"""Multi-hop question answering with the three-agent search program: the tasks `hotpotqa`, `2wiki`, `musique`.

Data come from the mini world, official files or the hub; retrieval is BM25; the reward is token F1, penalties and
behaviour metrics are those of MHGPO (arXiv 2506.02718, App. B.4; docs/algorithms.md has the readings).
"""

from __future__ import annotations

from collections.abc import Mapping

from mmrl.records import Call, Example
from mmrl.tasks.base import ModuleScore
from mmrl.tasks.mini.examples import mini_multihop
from mmrl.tasks.open_qa import OpenQaTask, gold_share
from mmrl.tasks.prompts import Prompts
from mmrl.tasks.search_program.program import (
    TEMPLATES,
    USED_QUERIES,
    SearchProgram,
    SearchProgramPrediction,
    parse_queries,
    parse_selection,
)

LONG_ANSWER_WORDS = 30
"""An answerer's output of more whitespace words is penalised."""
PENALTIES: Mapping[str, float] = {"rewriter": -0.5, "reranker": -0.5, "answerer": -1.0}


class MultihopQaTask(OpenQaTask):
    """Implements `mmrl.tasks.base.Task`; see `OpenQaTask` for arguments and errors."""

    templates = TEMPLATES
    main_metric = "f1"
    absent_features = frozenset({"observations", "parse_failures", "repeated_calls"})

    def make_program(self, prompts: Prompts) -> SearchProgram:
        """See `OpenQaTask.make_program`."""
        return SearchProgram(prompts, self.retriever.snippet_words)

    def mini_examples(self, split: str, corpus: str) -> list[Example]:
        """Return bridge and comparison questions, mixed as the data set has them."""
        return mini_multihop(split, corpus, self.dataset)

    def search_metrics(self, prediction: SearchProgramPrediction, example: Example) -> dict[str, float]:
        """See `OpenQaTask.search_metrics`."""
        retrieved = gold_share("gold_retrieved", prediction["candidates"], example)
        return retrieved | gold_share("gold_selected", prediction["selected"], example)

    def score_call(self, call: Call) -> ModuleScore:
        """Format penalty of one call and its behaviour facts."""
        if call.module == "rewriter":
            queries = parse_queries(call.text)
            # The paper calls this penalty proportional and then gives one number, which is what is done.
            faulty = not queries or len(queries) > USED_QUERIES
            facts = {"sub_queries": float(len(queries)), "unparsable": float(not queries)}
        elif call.module == "reranker":
            selection = parse_selection(call.text, call.facts["candidates"])
            faulty = selection.invalid
            facts = {"selected_documents": float(len(selection.indices)), "invalid_selection": float(faulty)}
        else:
            words = len(call.text.split())
            faulty = words > LONG_ANSWER_WORDS
            facts = {"answer_words": float(words)}
        return ModuleScore(penalty=PENALTIES[call.module] if faulty else 0.0, facts=facts)
