"""Trackers: lazy, offline without a key, no secrets, and never the end of a run."""

import json
import re
import struct
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from accelerate.tracking import GeneralTracker

from mmrl import secrets as hidden
from mmrl.cli.configs import train_configs
from mmrl.cli.overrides import read_line
from mmrl.config import RunConfig
from mmrl.config.schema import WITH_PROJECTS, TrackerName
from mmrl.credit.entries import Entry
from mmrl.errors import ConfigError
from mmrl.report.trackers import Trackers, missing_trackers, trackers, without_secrets
from mmrl.run.check import check_all
from mmrl.stages.step_metrics import shown_calls
from tests.helpers.runs import forest


class FakeConfig(dict):
    """`wandb.config`."""

    def update(self, values, allow_val_change):  # type: ignore[override]  # as wandb has it
        super().update(values)


class FakeWandb:
    """Stands where the package would behind accelerate's tracker; remembers what it was called with."""

    __spec__ = ModuleSpec("wandb", None)  # found where packages are looked for

    def __init__(self):
        self.inits, self.logged, self.config, self.summary, self.finished = [], [], FakeConfig(), {}, 0

    def Table(self, columns, data):
        return {"columns": columns, "data": data}

    def init(self, **arguments):
        self.inits.append(arguments)
        return self

    def log(self, metrics, step):
        assert step is None
        self.logged.append(metrics)

    def define_metric(self, *names, **options):
        pass

    def finish(self):
        self.finished += 1


VARIABLES = ("WANDB_NAME", "WANDB_PROJECT", "WANDB_RUN_GROUP", "WANDB_TAGS")


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(hidden, "_secrets", {})
    monkeypatch.setattr(hidden, "_forms", ())
    return fake


KEPT = []
"""Trackers that a test closes itself, or leaves open as a killed run does."""
NAMED: dict[str, Any] = {"name": "run", "group": "grpo-hotpotqa", "device": "cpu"}


def opened(tmp_path, *names, config=None, next_step=0, warn=print, **settings):
    run = run_at(tmp_path, next_step, config)
    manager = trackers(RunConfig(report_to=names, **settings), run, **NAMED, warn=warn)
    KEPT.append(manager)
    return manager.__enter__()


def run_at(tmp_path, next_step=0, config=None):
    history = [{"step": step} for step in range(next_step)]
    return SimpleNamespace(path=tmp_path, summary={}, config=config or {"seed": 1}, history=lambda: history)


def test_a_login_of_wandb_is_respected_and_the_mode_is_said(tmp_path, wandb, monkeypatch):
    """`wandb login` leaves its key in a netrc file, for the server in use."""
    said = []
    opened(tmp_path, "wandb", warn=said.append)
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {'k3' * 20}\n")
    opened(tmp_path, "wandb", warn=said.append)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    opened(tmp_path, "wandb", warn=said.append)
    (tmp_path / "netrc").write_text(f"machine wandb.example.org login user password {'k3' * 20}\n")
    opened(tmp_path, "wandb", warn=said.append)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    opened(tmp_path, "wandb", warn=said.append)
    monkeypatch.setenv("WANDB_MODE", "shared")
    opened(tmp_path, "wandb", warn=said.append)
    modes = ["offline", "online", "offline", "online", "online", "shared"]
    assert [text.split(",")[0] for text in said] == [f"wandb: {mode}" for mode in modes]
    inits = [arguments["mode"] for arguments in wandb.inits]
    assert inits == [mode if mode == "offline" else None for mode in modes] and "x" * 40 not in str(wandb.inits)
    assert "wandb sync" in said[0] and "login for https://wandb.example.org" in said[3] and "k3k3" not in str(said)
    assert hidden.hide(f"refused {'k3' * 20}") == "refused ${oc.env:WANDB_API_KEY}"


def test_wandb_gets_group_and_tags(tmp_path, wandb):
    opened(tmp_path, "wandb")
    opened(tmp_path, "wandb", group="mine", tags=("a", "b"), name="x", wandb_project="p")
    named = [[arguments[key] for key in ("name", "project", "group", "tags")] for arguments in wandb.inits]
    # no tags at all: wandb reads WANDB_TAGS where it is given None
    assert named == [["run", "mmrl", "grpo-hotpotqa", None], ["x", "p", "mine", ["a", "b"]]]


def test_variables_of_wandb_hold_where_the_config_says_nothing(tmp_path, wandb, monkeypatch):
    for name in ("NAME", "PROJECT", "RUN_GROUP"):
        monkeypatch.setenv(f"WANDB_{name}", f"their {name}")
    opened(tmp_path, "wandb")
    opened(tmp_path, "wandb", group="mine", name="x", wandb_project="mmrl")
    named = [[arguments[key] for key in ("name", "project", "group")] for arguments in wandb.inits]
    assert named == [["their NAME", "their PROJECT", "their RUN_GROUP"], ["x", "mmrl", "mine"]]


def test_mlflow_gets_names_that_it_takes():
    sent = []

    class Mlflow:
        name = "mlflow"

        def log(self, values, step):
            # as `mlflow.utils.validation` has it in every version
            assert all(re.fullmatch(r"[/\w.\- ]*", key) for key in values), values
            sent.append((step, values))

    said: list[str] = []
    both: Any = {"mlflow": Mlflow()}
    Trackers(both, said.append).log(1, {"reward/mean": 0.5, "module/queries[0].predict/reward": 0.25, "eval/a:b": 1.0})
    names = {"reward/mean": 0.5, "module/queries_0_.predict/reward": 0.25, "eval/a_b": 1.0}
    assert (sent, said) == ([(1, names)], [])


LONG = "word " * 2000


def calls(count):
    return [
        {"example": f"q{n}", "module": "m", "prompt": LONG, "completion": f"a|b\n`c` {SECRET}", "reward": 0.5}
        | {"advantage": -0.25 if n else None}
        for n in range(count)
    ]


SECRET = "s3cret-value-of-mine"


def test_calls_are_sent_as_texts_so_many_and_so_long(tmp_path, wandb):
    hidden.add_secret("MINE", SECRET)
    both = opened(tmp_path, "wandb", "tensorboard", report_calls=3)
    assert both.calls == 3
    both.log_calls(7, calls(5))
    both.finish()
    (logged,) = wandb.logged
    table = logged["rollouts"]
    assert logged["step"] == 7 and table["columns"][:3] == ["step", "example", "module"] and len(table["data"]) == 3
    assert table["data"][0][-2:] == [0.5, None] and table["data"][1][-2:] == [0.5, -0.25]
    assert all(len(row[3]) < 2100 for row in table["data"]) and SECRET not in str(table)
    (text,) = events(tmp_path).Tensors("rollouts/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert shown.count("**m** · q") == 3 and "reward 0.500 · advantage -0.250" in shown and SECRET not in shown
    assert opened(tmp_path, "wandb", report_calls=0).calls == opened(tmp_path).calls == 0


def test_the_calls_that_are_told_are_those_of_examples_that_differ():
    made, entries = forest(1)
    entries = [Entry(**{**entry, "call": entry["call"]}) for entry in entries]
    told = shown_calls(made, entries, 7)
    assert [call["example"] for call in told] == ["q0"] * 4 + ["q2"] * 3
    expected = {"example": "q0", "module": "rewriter", "prompt": "", "reward": 0.75, "advantage": pytest.approx(0.83)}
    expected["completion"] = "### who made it; <script>alert(1)</script> ###"
    assert told[0] | {"prompt": ""} == expected


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
    assert wandb.logged == [{"a": 1.0, "step": 3}]
    assert wandb.summary == {"em": 0.5} and wandb.finished == 1


def events(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(tmp_path / "tensorboard")).Reload()


def test_tensorboard_files_can_be_read_back_and_steps_of_a_killed_run_are_replaced(tmp_path):
    for done, steps in ((0, (0, 1, 2, 3)), (2, (2, 3, 4))):
        found = opened(tmp_path, "tensorboard", next_step=done)
        for step in steps:
            found.log(step, {"reward/mean": done + step})
        found.finish()
    # One event file per start; their names end in the second, the process and a counter.
    read = events(tmp_path)
    assert [(e.step, e.value) for e in read.Scalars("reward/mean")] == [(0, 0), (1, 1), (2, 4), (3, 5), (4, 6)]
    assert read.Tensors("config/text_summary")[0].tensor_proto.string_val[0] == b'    {\n     "seed": 1\n    }'


def test_wandb_itself_offline_in_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for _ in range(2):
        notes = []
        run = opened(tmp_path, "wandb", warn=notes.append)
        run.log(1, {"reward/mean": 0.25})
        run.finish({"em": 0.5})
        assert notes == ["wandb: offline, as the environment variable WANDB_MODE says"]
    kept = (tmp_path / "wandb_id.txt").read_text()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{kept}"))) >= 1


def wandb_records(path):
    """Records of a `.wandb` file: LevelDB's log format after a header of 7 bytes, for files of one block (32 KiB)."""
    read = import_module(
        "wandb.proto.wandb_internal_pb2"
    ).Record.FromString  # made as it loads, so that no type is known
    data, at, records = path.read_bytes(), 7, []
    assert data[:4] == b":W&B" and len(data) < 2**15
    while at < len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1, "a whole record"
        records.append(read(data[at + 7 : at + 7 + length]))
        at += 7 + length
    return records


def test_wandb_keeps_steps_that_are_done_again_and_draws_by_step(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = opened(tmp_path, "wandb")
    for step, value in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.5)):
        run.log(step, {"reward/mean": value})
    run.finish()
    import_module("wandb").teardown()  # its process writes the rest of the file
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    records = wandb_records(file)
    lines = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
    ]
    rows = [(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line]
    assert rows == [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.5)]
    assert [record.metric.step_metric for record in records if record.metric.glob_name == "*"] == ["step"]


def test_trackers_are_those_of_accelerate_and_have_its_projects_and_extras():
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    names = set(get_args(TrackerName))
    assert names == set(LOGGER_TYPE_TO_CLASS)
    first = {name for name, kind in LOGGER_TYPE_TO_CLASS.items() if not kind.requires_logging_directory}
    assert set(WITH_PROJECTS) == first - {"dvclive"}, "which passes over its first argument"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert names - set(project["optional-dependencies"]) == {"wandb"}  # always installed


def test_a_tracker_that_fails_is_switched_off_once():
    class Broken(GeneralTracker):
        name, requires_logging_directory, tracker = "wandb", False, None

        def log(self, values, step=None):
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
    assert fine.seen == 2
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
        check_all(train_configs(read_line(["run.report_to=[mlflow]"])))


def test_a_tracker_that_does_not_start_is_a_config_error(tmp_path, wandb):
    def refuse(**arguments):
        raise RuntimeError("bad key")

    wandb.init = refuse
    with pytest.raises(ConfigError, match="does not start: RuntimeError: bad key"):
        opened(tmp_path, "wandb")


def test_secrets_do_not_leave():
    config = {"engine": {"api_key": "abc", "max_tokens": 5}, "list": [{"password": "x"}], "tokenizer": "t"}
    sent = {"engine": {"api_key": "(hidden)", "max_tokens": 5}, "list": [{"password": "(hidden)"}], "tokenizer": "t"}
    assert without_secrets(config) == sent


def test_trackers_close_also_when_the_run_fails(tmp_path, wandb):
    with pytest.raises(KeyboardInterrupt), trackers(RunConfig(report_to=("wandb",)), run_at(tmp_path), **NAMED):
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
