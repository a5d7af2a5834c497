"""The program of `banking77` (arXiv 2508.04660, C.1): one chain of thought from a text to one of the labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import dspy


class Banking77(dspy.Module):
    """text -> label; a label outside the list is a parse failure."""

    def __init__(self, labels: Sequence[str]):
        super().__init__()
        # The classes are the type of the field: DSPy's adapter then lists them in the prompt and rejects any other
        # text.
        label: object = Literal[tuple(labels)]
        self.classify = dspy.ChainOfThought(
            dspy.Signature({"text": (str, dspy.InputField()), "label": (label, dspy.OutputField())})
        )

    async def aforward(self, text: str) -> dspy.Prediction:
        """Returns reasoning and label."""
        prediction: dspy.Prediction = await self.classify.acall(text=text)
        return prediction
