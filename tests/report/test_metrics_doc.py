"""docs/metrics.md explains what is logged and what the report reads, docs/alarms.md each alarm."""

import re
from pathlib import Path

import pytest

from mmrl.records import Call
from mmrl.report import alarms, html

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
ALARMS = (ROOT / "docs" / "alarms.md").read_text(encoding="utf-8")
FAMILIES = ("reward", "train", "credit", "critic", "refill", "rollouts", "time", "rate", "memory")
LOGGING = [path for room in ("stages", "trainer", "credit") for path in (ROOT / "mmrl" / room).glob("*.py")]


def keys_in_source():
    pattern = re.compile(rf'(?<!f)"((?:{"|".join(FAMILIES)})/[a-z0-9_]+)"')
    found = {key for path in LOGGING for key in pattern.findall(path.read_text(encoding="utf-8"))}
    assert len(found) > 10
    return found


READ = [*html.HEALTH, *alarms.MUST_BE_FINITE, *(f"time/{name}" for name in html.TIMES)]


@pytest.mark.parametrize("key", sorted({*keys_in_source(), *READ}))
def test_every_key_that_is_logged_or_read_by_the_report_is_explained(key):
    assert f"`{key}`" in DOC


def test_every_fact_that_all_modules_have_is_explained():
    from mmrl.stages.step_metrics import module_metrics

    call = Call(id="a", example="e", parent=None, module="m", completion_tokens=1, logprobs=(-0.5,))
    for fact in module_metrics([call]):
        assert f"`module/<m>/{fact}`" in DOC


def test_every_alarm_is_explained():
    keys = ["module/m/entropy", "module/m/ok", "module/m/invalid", "module/m/length", "similarity/m", "rollouts/count"]
    records = [{"step": step} | dict.fromkeys(keys, 1.0) for step in range(1, 9)]
    names = {rule.name for rule in alarms.rules(records)} | {"not_finite", "unlearned"}
    explained = set(re.findall(r"^\| `(\w+)` \|", ALARMS, flags=re.M))
    # of a run that optimises prompts, whose trials hold more than metrics
    assert names | {"trials_fail"} == explained and len(names) >= 8
