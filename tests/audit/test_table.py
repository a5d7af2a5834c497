"""What stands below the table of an audit: budgets that are too small, with those that would do."""

from __future__ import annotations

from typing import Any

import pytest

from mmrl.audit.table import notes

FEW = "alignment: not measurable with reference=32 rollouts; it would take "
EQUAL = "alignment: not measurable, since outcomes of an example never differed; see mmrl doctor"
NOISE = "fidelity: D is mostly noise with continuations=8"


@pytest.mark.parametrize(
    ("squared", "error", "needed", "ceiling", "said"),
    [
        (9.0, 1.0, None, 0.8, []),
        # 4.1 times 32 rollouts, in 16 blocks.
        (1.0, 0.506, 4.1, 0.8, [FEW + "about reference=144"]),
        (1.0, 2.0, None, 0.8, [FEW + "more than reference=512"]),
        (0.0, 0.0, None, None, [EQUAL]),
        # Reliability 0.2: four times as many continuations have 4 * 0.2 / (1 + 3 * 0.2) = 0.5.
        (9.0, 1.0, None, 0.2**0.5, [NOISE + "; it would take about continuations=32"]),
        (9.0, 1.0, None, 0.0, [NOISE]),
    ],
)  # fmt: skip
def test_budgets_too_small_are_said_with_those_that_would_do(
    squared: float, error: float, needed: float | None, ceiling: float | None, said: list[str]
) -> None:
    result: dict[str, Any] = {
        "settings": {"truth": "outcome", "continuations": 8},
        "outcome": 0.5,
        "unit": 36,
        "reference": {
            "rollouts": 32, "measurable": squared > 2 * error, "squared": squared, "error": error, "needed": needed,
        },
        "ceiling": {"all": {"value": ceiling}},
        "rows": {},
        "dropped": 0,
        "failed": {"recorded paths": 0, "rollouts of the reference": 0},
    }  # fmt: skip
    assert notes(result)[1:] == said
    result["rows"] = {"grpo": {"failed": 3, "explained_variance": None, "critic": None}}
    result["failed"]["rollouts of the reference"] = 2
    said += ["grpo: 3 rollouts of its batches failed from outside causes"]
    assert notes(result)[1:] == [*said, "2 rollouts of the reference failed from outside causes"]
