"""A program of DSPy's through its own LM; changed: the marked lines. (`task=dspy` trains it without a server.)"""

import dspy


def search(query: str) -> str:
    """Find an article."""
    return f"Nothing is known of {query}."


def run(example, base_url, api_key):  # changed: the address and the key are arguments
    """Answer a question, with tools."""
    lm = dspy.LM("openai/policy/agent", api_base=base_url, api_key=api_key, cache=False)  # changed: no cache
    program = dspy.ReAct("question -> answer", tools=[search], max_iters=3)
    with dspy.context(lm=lm):
        return program(question=example["question"]).answer
