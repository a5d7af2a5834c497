"""The documents that bear on a claim: DSPy's tutorial of multi-hop search, on the embedded mini world."""

import dspy

from mmrl.tasks.mini.examples import mini_corpus, mini_records

PASSAGES = {document.title: document.text for document in mini_corpus()}


def search(query):
    """The passage with the longest title that the query names."""
    title = max((title for title in PASSAGES if title in query), key=len, default=None)
    return [f"{title} | {PASSAGES[title]}"] if title else []


class Hops(dspy.Module):
    """Search, note what was learned, write the next query, and search again."""

    def __init__(self, hops=3):
        super().__init__()
        self.hops = hops
        self.query = dspy.ChainOfThought("claim, key_facts -> search_query1, search_query2, search_query3")
        self.notes = dspy.ChainOfThought("claim, key_facts, new_search_results -> new_key_facts")

    def forward(self, claim):
        """The titles of all that was retrieved."""
        facts, titles, query = [], [], claim
        for hop in range(self.hops):
            if hop:
                query = self.query(claim=claim, key_facts=facts).search_query1
            passages = search(query)
            titles += [passage.split(" | ")[0] for passage in passages]
            if hop < self.hops - 1:
                facts.append(self.notes(claim=claim, key_facts=facts, new_search_results=passages).new_key_facts)
        return dspy.Prediction(titles=titles)


def metric(example, prediction, trace=None):
    """The share of the documents behind the claim that were retrieved."""
    return sum(title in prediction.titles for title in example.titles) / len(example.titles)


def examples(split):
    """Sixty claims, each with the titles of its documents."""
    claims = mini_records(split, "claims")[:60]
    return [
        dspy.Example(claim=claim.inputs["claim"], titles=claim.metadata["titles"]).with_inputs("claim")
        for claim in claims
    ]


def trainset():
    """For optimising and training."""
    return examples("train")


def devset():
    """For evaluation."""
    return examples("dev")
