"""Trackers: lazy, offline without a key, no secrets, and never the end of a run."""

import re
import subprocess
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from accelerate.tracking import GeneralTracker

from mmrl.cli.hydra import configs, read_line
from mmrl.config import TrainCommandConfig
from mmrl.config.schema import TrackerName
from mmrl.errors import ConfigError
from mmrl.report.trackers import Trackers, missing_trackers, open_trackers, trackers, without_secrets
from mmrl.run.check import check_all


class FakeConfig(dict):
    """`wandb.config`."""

    def update(self, values, allow_val_change):
        super().update(values)


class FakeWandb:
    """Stands where the package would behind accelerate's tracker; remembers what it was called with."""

    __spec__ = ModuleSpec("wandb", None)  # found where packages are looked for

    def __init__(self):
        self.inits, self.logged, self.config, self.summary, self.finished = [], [], FakeConfig(), {}, 0

    def init(self, **arguments):
        self.inits.append(arguments)
        return self

    def log(self, metrics, step):
        self.logged.append((step, metrics))

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    return fake


NAMED = {"name": "run", "project": "p", "device": "cpu"}


def opened(tmp_path, *names, config=None, next_step=0, warn=print):
    return open_trackers(names, run_at(tmp_path, next_step, config), **NAMED, warn=warn)


def run_at(tmp_path, next_step=0, config=None):
    return SimpleNamespace(
        path=tmp_path,
        summary={},
        config=config or {"seed": 1},
        history=lambda: [{"step": step} for step in range(next_step)],
    )


def test_wandb_is_offline_without_a_key(tmp_path, wandb, monkeypatch):
    opened(tmp_path, "wandb")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    opened(tmp_path, "wandb")
    assert [arguments["mode"] for arguments in wandb.inits] == ["offline", None]
    assert "x" * 40 not in str(wandb.inits)


def test_a_resumed_run_keeps_its_wandb_id(tmp_path, wandb):
    opened(tmp_path, "wandb", config={"secret": "hush", "seed": 7})
    assert wandb.config == {"secret": "(hidden)", "seed": 7}
    opened(tmp_path, "wandb")
    assert "hush" not in str(wandb.inits)
    first, second = wandb.inits
    assert first["id"] == second["id"] and second["resume"] == "allow"


def test_finite_numbers_are_logged_and_the_summary_written(tmp_path, wandb):
    found = opened(tmp_path, "wandb")
    found.log(3, {"a": 1.0, "b": float("nan"), "c": "text", "d": None})
    found.finish({"em": 0.5})
    assert wandb.logged == [(3, {"a": 1.0})]
    assert wandb.summary == {"em": 0.5} and wandb.finished == 1


def test_tensorboard_files_can_be_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = opened(tmp_path, "tensorboard")
    found.log(1, {"reward/mean": 0.25})
    found.log(2, {"reward/mean": 0.5})
    found.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    (config,) = events.Tensors("config/text_summary")
    assert b'{"seed":1}' in config.tensor_proto.string_val[0]


def test_steps_that_a_killed_run_logged_are_replaced(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for done, steps in ((0, (0, 1, 2, 3)), (2, (2, 3, 4))):
        with_steps = opened(tmp_path, "tensorboard", next_step=done)
        for step in steps:
            with_steps.log(step, {"reward/mean": done + step})
        with_steps.finish()
    # One event file per start; their names end in the second, the process and a counter.
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(0, 0), (1, 1), (2, 4), (3, 5), (4, 6)]


def test_wandb_itself_offline_in_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for _ in range(2):
        notes = []
        run = opened(tmp_path, "wandb", warn=notes.append)
        run.log(1, {"reward/mean": 0.25})
        run.finish({"em": 0.5})
        assert notes == []
    kept = (tmp_path / "wandb_id.txt").read_text()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{kept}"))) >= 1


def test_every_tracker_of_accelerate_can_be_named():
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert set(get_args(TrackerName)) == set(LOGGER_TYPE_TO_CLASS)


def test_each_extra_that_is_named_for_a_missing_tracker_is_one():
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(get_args(TrackerName)) - set(extras) == {"wandb", "tensorboard"}  # always installed


def test_a_tracker_that_fails_is_switched_off_once():
    class Broken(GeneralTracker):
        name, requires_logging_directory, tracker = "wandb", False, None

        def log(self, values, step):
            raise OSError("no network")

        def finish(self):
            raise AssertionError("must not be called")

    class Fine(GeneralTracker):
        name, requires_logging_directory, tracker = "other", False, None
        seen = 0

        def log(self, values, step):
            self.seen += 1

    said, fine = [], Fine()
    both = Trackers({"wandb": Broken(), "other": fine}, said.append)
    both.log(1, {"a": 1.0})
    both.log(2, {"a": 1.0})
    assert both.names == ("other",) and fine.seen == 2
    both.finish()
    assert said == ["wandb switched off: OSError: no network"]


def test_a_missing_package_is_a_config_error_before_anything_starts(tmp_path, wandb, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package != "mlflow" or None)
    expected = "run.report_to: 'mlflow' needs its package, which is not installed; pip install 'mmrl[mlflow]'"
    assert missing_trackers(("wandb", "mlflow")) == [expected]
    with pytest.raises(ConfigError, match=re.escape(expected)):
        opened(tmp_path, "wandb", "mlflow")
    assert wandb.inits == []
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_all(configs("train", TrainCommandConfig, read_line(["run.report_to=[mlflow]"])))


def test_an_unknown_tracker_is_refused_by_the_schema():
    with pytest.raises(ConfigError, match=r"run.report_to.0: got 'wandbb'.*'wandb'"):
        configs("train", TrainCommandConfig, read_line(["run.report_to=[wandbb]"]))


def test_a_tracker_that_does_not_start_is_a_config_error(tmp_path, wandb):
    def refuse(**arguments):
        raise RuntimeError("bad key")

    wandb.init = refuse
    with pytest.raises(ConfigError, match="does not start: RuntimeError: bad key"):
        opened(tmp_path, "wandb")


def test_secrets_do_not_leave():
    config = {"engine": {"api_key": "abc", "max_tokens": 5}, "list": [{"password": "x"}], "tokenizer": "t"}
    assert without_secrets(config) == {
        "engine": {"api_key": "(hidden)", "max_tokens": 5},
        "list": [{"password": "(hidden)"}],
        "tokenizer": "t",
    }


def test_trackers_close_also_when_the_run_fails(tmp_path, wandb):
    with pytest.raises(KeyboardInterrupt), trackers(("wandb",), run_at(tmp_path), **NAMED):
        raise KeyboardInterrupt
    assert wandb.finished == 1


def test_importing_the_report_loads_no_heavy_package():
    code = (
        "import sys, mmrl.report.trackers, mmrl.report.console, mmrl.report.console, mmrl.report.progress\n"
        "heavy = {'wandb', 'tensorboard', 'matplotlib', 'torch', 'transformers', 'trl', 'dspy', 'hydra'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
