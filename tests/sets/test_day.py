"""The day that chat templates write: one for all runs of a set, whenever they begin."""

from datetime import date
from pathlib import Path

import pytest

from mmrl.cli.configs import configured
from mmrl.run.settle import config_changes, settle
from mmrl.sets.queue import day_of
from tests.helpers.runs import fake_run


def run_of(folder: Path, day: str | None) -> Path:
    config = {"model": {"name": "tiny", "path": "tiny", "date": day}}
    return fake_run(folder, steps=1, config=config, evaluate=False).path


def test_the_runs_of_a_set_have_the_day_of_the_first_that_has_begun(tmp_path: Path) -> None:
    assert day_of([tmp_path / "none"]) == date.today().isoformat()
    folders = [run_of(tmp_path / name, day) for name, day in {"a": "2026-11-29", "b": "2026-11-28", "c": None}.items()]
    assert day_of([tmp_path / "none", *folders]) == "2026-11-28"


@pytest.mark.parametrize(
    ("stored", "asked", "differ"),
    [("2026-11-28", None, False), (None, "2026-11-28", False), ("2026-11-28", "2026-11-29", True)],
)
def test_no_day_is_whichever_a_run_began_on(stored: str | None, asked: str | None, differ: bool) -> None:
    def config(day: str | None) -> dict[str, object]:
        return configured(["task=hotpotqa", f"model.date={day or 'null'}"]).model_dump(mode="json")

    assert bool(config_changes(config(stored), config(asked))) == differ


def test_a_run_stores_the_day_of_its_start_and_keeps_it() -> None:
    settled = settle(configured(["task=hotpotqa"])).config
    assert settled.model.date == date.today().isoformat()
    kept = settled.model_copy(update={"model": settled.model.model_copy(update={"date": "2024-02-29"})})
    assert settle(kept).config.model.date == "2024-02-29"
