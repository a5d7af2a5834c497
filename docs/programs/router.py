"""Sorting messages by their subject: DSPy's tutorial of classification, on messages of the embedded mini world."""

from typing import Literal

import dspy

from mmrl.tasks.mini.examples import mini_records

LABELS = tuple(sorted({message.metadata["label"] for message in mini_records("train", "support")}))


class Route(dspy.Signature):
    """Say what a message is about."""

    text: str = dspy.InputField()
    label: Literal[LABELS] = dspy.OutputField()


class Router(dspy.Module):
    """One predictor, one label."""

    def __init__(self):
        super().__init__()
        self.classify = dspy.ChainOfThought(Route)

    def forward(self, text):
        """The label, after a reason."""
        return self.classify(text=text)


def metric(example, prediction, trace=None):
    """Whether the label is right."""
    return float(example.label == prediction.label)


def examples(split):
    """Sixty messages, each with its label."""
    messages = mini_records(split, "support")[:60]
    return [
        dspy.Example(text=message.inputs["text"], label=message.metadata["label"]).with_inputs("text")
        for message in messages
    ]


def trainset():
    """For optimising and training."""
    return examples("train")


def devset():
    """For evaluation."""
    return examples("dev")
