"""Trackers: lazy, offline without a key, no secrets, and never the end of a run."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from mmrl.errors import ConfigError
from mmrl.report.trackers import Trackers, open_trackers, trackers, without_secrets


class FakeWandb:
    """Stands where the package would; remembers what it was told."""

    def __init__(self):
        self.inits, self.logged, self.summary, self.finished = [], [], {}, 0
        self.Settings = dict

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


def opened(tmp_path, *names, config=None, warn=print):
    return open_trackers(names, tmp_path, name="run", config=config or {"seed": 1}, project="p", warn=warn)


def test_wandb_is_offline_without_a_key(tmp_path, wandb, monkeypatch):
    opened(tmp_path, "wandb")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    opened(tmp_path, "wandb")
    assert [arguments["mode"] for arguments in wandb.inits] == ["offline", None]
    assert "x" * 40 not in str(wandb.inits)


def test_a_resumed_run_keeps_its_wandb_id(tmp_path, wandb):
    opened(tmp_path, "wandb", config={"secret": "hush"})
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
    assert [(e.step, float(e.tensor_proto.float_val[0])) for e in events.Tensors("reward/mean")] == [
        (1, 0.25),
        (2, 0.5),
    ]


def test_a_tracker_that_fails_is_switched_off_once():
    class Broken:
        def log(self, step, metrics):
            raise OSError("no network")

        def finish(self, summary):
            raise AssertionError("must not be called")

    class Fine:
        seen = 0

        def log(self, step, metrics):
            self.seen += 1

        def finish(self, summary):
            pass

    said, fine = [], Fine()
    both = Trackers({"wandb": Broken(), "other": fine}, said.append)
    both.log(1, {"a": 1.0})
    both.log(2, {"a": 1.0})
    assert both.names == ("other",) and fine.seen == 2
    both.finish()
    assert said == ["wandb switched off: OSError: no network"]


def test_unknown_and_missing_trackers_are_config_errors(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"run.report_to: got 'wandbb'.*did you mean 'wandb'"):
        opened(tmp_path, "wandbb")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"run.report_to: 'wandb' cannot be imported"):
        opened(tmp_path, "wandb")


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
    config = SimpleNamespace(
        run=SimpleNamespace(report_to=("wandb",), wandb_project="p", name="n"), model_dump=lambda mode: {"seed": 1}
    )
    with pytest.raises(KeyboardInterrupt), trackers(config, SimpleNamespace(path=tmp_path, summary={})):
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
