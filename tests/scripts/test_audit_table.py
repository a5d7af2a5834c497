"""The table of audits in the docs: what it reads of docs/comparison.md, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import audit_table

COMPARISON = """
## The papers'

| after training | `hotpotqa`, F1 (before: 0.1) | `search_agent`, EM |
|---|---|---|
| `grpo` | 0.289 | 0.371 |
| `mmgrpo` | 0.285 | |
| `mhgpo_fof` | 0.326 | |

| pair | difference |
|---|---|
| `grpo` | 0.5 |

## Newer

| row | `search_agent`, EM after 40 steps | `hotpotqa`, F1 |
|---|---|---|
| `gigpo` | 0.310, +0.158 to +0.208 | 0.247, +0.082 to +0.123 |
"""


def measured(value: float | None) -> dict[str, Any]:
    return {
        "value": value,
        "low": None if value is None else value - 0.1,
        "high": None if value is None else value + 0.1,
    }


def audit(cosines: dict[str, float | None]) -> dict[str, Any]:
    def row(cosine: float | None) -> dict[str, Any]:
        found = None if cosine is None else {"mean": cosine, "low": cosine - 0.1, "high": cosine + 0.1}
        return {
            "fidelity": {"all": measured(0.25)},
            **{key: measured(0.5) for key in ("right_sign", "signal")},
            "zero": 0.1,
            "not_credited": 0.0,
            "calls": 288.0,
            "explained_variance": None,
            "alignment": {"1": {"cosine": found}, "2": {"cosine": found}},
        }

    settings = {"examples": 2, "decisions": 4, "continuations": 4, "batches": 3, "reference": 16, "budgets": [1, 2]}
    return {
        "settings": settings,
        "rows": {name: row(cosine) for name, cosine in cosines.items()},
        "ceiling": {"all": measured(0.7)},
        "modules": {"answerer": {"influence": measured(0.9)}},
        "clear_share": 0.5,
        "decisions": [{}, {}],
    }


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tables" / "figures").mkdir(parents=True)
    (tmp_path / "comparison.md").write_text(COMPARISON, encoding="utf-8")
    monkeypatch.setattr(audit_table, "DOCS", tmp_path)
    return tmp_path


def test_each_part_of_the_comparison_is_read_by_its_column(docs: Path) -> None:
    found = audit_table.reached("hotpotqa")
    assert found == {
        "The papers'": [("grpo", 0.289), ("mmgrpo", 0.285), ("mhgpo_fof", 0.326)],
        "Newer": [("gigpo", 0.247)],
    }
    assert audit_table.reached("search_agent") == {"The papers'": [("grpo", 0.371)], "Newer": [("gigpo", 0.31)]}


def test_the_page_has_each_audit_and_the_rank_correlation(docs: Path, tmp_path: Path) -> None:
    """F1 of 0.289, 0.285, 0.326 ranks as 2, 1, 3; alignments of 0.2, 0.3, 0.4 as 1, 2, 3: 1 - 6 · 2 / 24 = 0.5."""
    for state in ("start", "after"):
        (tmp_path / f"hotpotqa-{state}").mkdir()
        found = audit({"grpo": 0.2, "mmgrpo": 0.3, "mhgpo_fof": 0.4, "gigpo": None})
        (tmp_path / f"hotpotqa-{state}" / "audit.json").write_text(json.dumps(found))
    assert audit_table.main([str(tmp_path)]) == 0
    page = (docs / "tables" / "audit.md").read_text(encoding="utf-8")
    assert "| hotpotqa | The papers' | 3 | 0.50 |" in page
    assert "| `gigpo` | 0.25 [0.15, 0.35] | 50% | 50% | 10% | 0% | not measurable | not measurable | 288 |  |" in page
    assert page.count("| `mhgpo_fof` |") == 2 and "Ceiling of fidelity 0.70 [0.60, 0.80]; 50% of 2 decisions" in page
    for name in ("fidelity", "alignment", "foretold"):
        assert (docs / "tables" / "figures" / f"audit-{name}.svg").read_text(encoding="utf-8").count("<svg") == 1
