"""`mmrl.compose`, `train`, `evaluate`, `resume` and `Run`: the commands from Python."""

from __future__ import annotations

import asyncio
import json
import os
import pkgutil
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

import mmrl
from mmrl.api import words_of
from mmrl.cli import main
from mmrl.cli.configs import configured
from mmrl.errors import ConfigError, MmrlError
from mmrl.store.rundir import RunDir
from mmrl.system.files import file_digest
from tests.helpers import TOP
from tests.helpers.runs import numbers

SETTINGS: dict[str, Any] = {
    "hardware": {"name": "cpu", "threads": 1},
    "train": {"steps": 2, "batch_size": 2, "save_every": 1},
    "eval": {"bootstrap": 100, "items": 2, "every": 0},
    "algo.group_size": 2,
}
WORDS = ["algo=mhgpo_rr", "task=hotpotqa", "hardware=cpu", "hardware.threads=1", "train.steps=2", "train.batch_size=2"]
WORDS += ["train.save_every=1", "eval.bootstrap=100", "eval.items=2", "eval.every=0", "algo.group_size=2"]


def composed(folder: Path, **settings: Any) -> Any:
    return mmrl.compose("algo=mhgpo_rr", "task=hotpotqa", **SETTINGS, run={"dir": folder}, **settings)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> mmrl.Run:
    return mmrl.train(composed(tmp_path_factory.mktemp("api") / "run"))


def test_importing_it_loads_nothing_and_no_name_of_it_is_a_submodules() -> None:
    code = "import mmrl, sys; print(sorted({'torch', 'hydra', 'pydantic', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    # importing a submodule would rebind it
    assert {*mmrl.__all__}.isdisjoint(module.name for module in pkgutil.iter_modules(mmrl.__path__))
    assert {*mmrl.__all__} <= vars(sys.modules["mmrl.api"]).keys()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        mmrl.nothing  # noqa: B018


def test_arguments_are_the_words_of_the_command(tmp_path: Path) -> None:
    config = composed(tmp_path)
    assert config.model_dump() == configured([*WORDS, f"run.dir={tmp_path}"]).model_dump()
    assert config.train.steps == 2 and config.typed.keys[:3] == ("algo", "task", "hardware")
    again = configured(config.typed.command[2:])
    assert again.model_dump() == config.model_dump(), "what the run directory keeps can be typed"


class Choice(Enum):
    GRPO = "grpo"


@pytest.mark.parametrize(
    ("value", "means"),
    [
        (np.int64(3), 3),
        (np.float64(1e-4), 1e-4),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        (torch.tensor(3), 3),
        (Choice.GRPO, "grpo"),
        (Path("a b"), "a b"),
        ((Path("a"), {"b": np.str_("null")}), ["a", {"b": "null"}]),
        ("null", "null"),
        ("a/b.c-d+e", "a/b.c-d+e"),
        ("${x}", "${x}"),
    ],
    ids=repr,
)
def test_values_of_python_are_those_that_hydra_reads(value: Any, means: Any) -> None:
    (word,) = words_of(**{"task.x": value})
    assert OverridesParser.create().parse_override(word).value() == means


def test_values_that_no_word_can_have_are_refused() -> None:
    for value in (b"grpo", {1}, object(), 1j, range, iter([])):
        with pytest.raises(ConfigError, match=r"^task\.x: got a \w+, expected text, a number"):
            words_of(**{"task.x": value})
    with pytest.raises(ConfigError, match=r"^run\.dir: got a text with a NUL character$"):
        words_of("algo=grpo", run={"dir": "a\0b"})


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["algo=mhgpo"], {}),
        ([], {"train": {"stepps": 1, "lr": -1}}),
        (["algo=miprov2", "task=banking77"], {"train.steps": 1}),
        (["eval.top_k=2"], {}),
        (["train.steps=1"], {"train": {"steps": 2}}),
        (["from=nowhere"], {}),
        (["stages=[sft,grpo]"], {}),
        (["task"], {}),
        ([], {"model.path": "no/such/model"}),
        (["policy=tiny", "train.steps=1"], {}),
        (["policy=tiny"], {"split": "all"}),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_as_the_command_says_it(
    words: list[str], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    evaluates = words[:1] == ["policy=tiny"]
    with pytest.raises(ConfigError) as caught:
        (mmrl.evaluate if evaluates else mmrl.train)(mmrl.compose(*words, **settings))
    capsys.readouterr()
    assert main(["eval" if evaluates else "train", *words_of(*words, **settings)]) == 2
    said = [line.removeprefix("error: ") for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert caught.value.problems == said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: mmrl.train(mmrl.compose(policy="tiny")), "policy: is for mmrl.evaluate"),
        (lambda: mmrl.evaluate(mmrl.compose()), "policy: missing, expected policy=RUN_DIR"),
        (lambda: mmrl.compose("-m", "seed=1,2"), "-m: not for mmrl.compose"),
        (lambda: mmrl.compose(config_dir="no/such"), "--config-dir: no folder 'no/such'"),
        (lambda: mmrl.compose(["algo=grpo"]), "^got a list, expected words"),  # type: ignore[arg-type]
        (lambda: mmrl.train({"seed": 1}), "^got a dict, expected the config that"),  # type: ignore[arg-type]
        (lambda: mmrl.evaluate(None), "^got a NoneType, expected the config that"),
        (lambda: mmrl.compose(train={"lr": object()}), r"train\.lr: got a object"),
        (lambda: mmrl.Run("no/such"), "no/such"),
        (lambda: mmrl.resume("no/such"), "no/such"),
    ],
)
def test_what_only_python_can_get_wrong(call: Any, says: str) -> None:
    with pytest.raises(MmrlError, match=says):
        call()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"seed": -1}, "^seed: got -1, expected greater"),
        ({"train.steps": 5}, r"^train\.steps: unknown key"),
        ({"train": {"lr": -1.0}}, r"^train\.lr: got -1\.0, expected greater"),
        ({"train": {"step": 5}}, r"^train\.step: unknown key"),
    ],
)
def test_a_config_that_was_changed_is_checked_again(
    changed: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config: Any = mmrl.compose()
    sections = {
        key: getattr(config, key).model_copy(update=value) if isinstance(value, dict) else value
        for key, value in changed.items()
    }
    with pytest.raises(ConfigError, match=says):
        mmrl.train(config.model_copy(update=sections))
    assert not list(tmp_path.iterdir())


def test_a_run_leaves_its_process_as_it_was(made: mmrl.Run, tmp_path: Path) -> None:
    """The threads of torch and all random numbers: what a script draws for its next run is no constant."""

    def state() -> list[Any]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), torch.get_num_threads()]

    torch.set_num_threads(2)
    before = state()
    small: dict[str, Any] = {
        "eval": {"items": 1, "bootstrap": 100},
        "hardware": {"threads": 1},
        "run": {"dir": tmp_path / "eval"},
    }
    mmrl.evaluate(mmrl.compose(policy=made, **small))
    mmrl.train(composed(tmp_path / "run"))
    after = state()
    torch.set_num_threads(1)
    assert after == before


def test_a_process_has_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads would share seeds, and load each other's models in part."""
    refused: list[MmrlError] = []

    def second(config: Any) -> Any:
        with ThreadPoolExecutor() as pool:
            error = pool.submit(mmrl.train, config).exception()
        assert isinstance(error, MmrlError)
        refused.append(error)
        raise error

    monkeypatch.setattr("mmrl.run.train", second)
    for _ in range(2):
        with pytest.raises(MmrlError, match="one is under way here"):
            mmrl.train(composed(tmp_path))
    assert len(refused) == 2


def test_its_run_is_the_command_s(made: mmrl.Run, tmp_path: Path) -> None:
    """Weights, numbers and stored settings to the bit; only what was typed differs."""
    assert main(["train", *WORDS, f"run.dir={tmp_path / 'run'}"]) == 0
    here, there = RunDir.read(made.path), RunDir.read(tmp_path / "run")
    weights = [file_digest(run.path / "checkpoints/checkpoint-2/model.safetensors") for run in (here, there)]
    assert weights[0] == weights[1] and numbers(made.path) == numbers(there.path)
    assert {**here.config, "run": None} == {**there.config, "run": None}
    assert here.finished and here.environment["command"][:3] == ["mmrl", "train", "algo=mhgpo_rr"]


def test_what_a_run_has(made: mmrl.Run) -> None:
    history = RunDir.read(made.path).history()
    assert made.metrics.index.tolist() == [0, 1, 2]
    assert made.metrics["reward/mean"].tolist()[1:] == [record["reward/mean"] for record in history[1:]]
    items = made.evaluations
    assert items[["step", "split"]].drop_duplicates().to_numpy().tolist() == [[0, "dev"], [2, "dev"]]
    assert items[items.step == 2].f1.mean() == pytest.approx(made.metrics.loc[2, "eval/dev/f1"])
    assert made.policy == str(made.path)
    assert made.report.read_text().startswith("<!")
    assert repr(made) == f"mmrl.Run({str(made.path)!r})"


def test_the_credit_of_a_step_is_what_it_was_trained_on(made: mmrl.Run, tmp_path: Path, capsys: Any) -> None:
    assert main(["credit", f"run={made.path}", "step=2", "--json"]) == 0
    calls = json.loads(capsys.readouterr().out)["calls"]
    credit = made.credit(step=2)
    assert credit.id.tolist() == [call["id"] for call in calls]
    assert [list(row) for row in credit.advantages] == [call["advantages"] for call in calls]
    both = made.credit(2, "grpo", "mhgpo_rr", seed=1)
    assert both.algo.unique().tolist() == ["grpo", "mhgpo_rr"]
    named = made.credit(2, algo="grpo", page=tmp_path / "c.svg")
    assert named.algo.unique().tolist() == ["grpo"] and (tmp_path / "c.svg").is_file()
    with pytest.raises(ConfigError, match="step: got 9, expected a step that"):
        made.credit(9)


def test_a_policy_is_evaluated(made: mmrl.Run, tmp_path: Path) -> None:
    config = mmrl.compose(
        policy=made.policy, split="test", eval={"items": 3, "bootstrap": 100}, **{"run.dir": tmp_path / "e"}
    )
    found = mmrl.evaluate(config)
    assert found.path == tmp_path / "e" and found.evaluations.split.tolist() == ["test"] * 3
    assert found.metrics.index.tolist() == [2] and found.policy == made.policy
    assert found.metrics.loc[2, "f1"] == pytest.approx(found.evaluations.f1.mean())
    moved = made.path.rename(tmp_path / "moved")
    assert found.metrics.index.tolist() == [2], "which needs no policy"
    for read in (lambda: made.metrics, lambda: made.evaluations, lambda: made.report):
        with pytest.raises(MmrlError, match="no such run directory"):
            read()
    moved.rename(made.path)


def test_a_run_that_starts_from_another(made: mmrl.Run, tmp_path: Path) -> None:
    start: dict[str, Any] = {"from": made}
    config = mmrl.compose("algo=grpo", **start)
    assert config.model_dump()["start"]["run"] == str(made.path) and config.task.name == "hotpotqa"
    assert config.model_dump() == mmrl.compose(f"from={made.path}", "algo=grpo").model_dump()


@pytest.mark.parametrize("step", [0, 1])
def test_the_stop_button_ends_a_run_which_goes_on_to_the_same_bits(
    made: mmrl.Run, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Below a running event loop, as in a notebook: before training at once, after a step once that is saved."""
    folder, write = tmp_path / "run", RunDir.append_metrics

    def stops(run: RunDir, done: int, metrics: Any) -> None:
        write(run, done, metrics)
        if done == step:
            os.kill(os.getpid(), signal.SIGINT)

    async def cell() -> None:
        mmrl.train(composed(folder))

    with monkeypatch.context() as stopping:
        stopping.setattr(RunDir, "append_metrics", stops)
        with pytest.raises(KeyboardInterrupt) as stopped:
            asyncio.run(cell())
    assert stopped.value.__notes__ == [f"continue with: mmrl train resume={folder}"]
    assert "stopping: a step under way is trained and saved first" in capsys.readouterr().err
    assert [path.name for path in RunDir.read(folder).checkpoints.glob("checkpoint-*")] == ["checkpoint-1"] * step
    assert mmrl.Run(folder).metrics.index.tolist() == [0, 1][: step + 1]
    if step == 0:
        assert mmrl.Run(folder).evaluations.columns.tolist()[:3] == ["step", "split", "id"]
        with pytest.raises(ConfigError, match="has no checkpoint yet"):
            mmrl.Run(folder).policy  # noqa: B018
    assert mmrl.resume(folder).path == folder
    assert numbers(folder) == numbers(made.path)


@pytest.mark.parametrize("imports", [False, True])
def test_the_stop_button_ends_a_run_that_loads_its_model(
    made: mmrl.Run, imports: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, but after an import: half a module would stay in the process, in which the run goes on."""
    folder = tmp_path / "run"
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(1)\nWHOLE = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        if imports:
            import slow_module

            assert slow_module.WHOLE
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            time.sleep(0.01)
        pytest.fail("not stopped")

    async def cell() -> None:
        mmrl.train(composed(folder))

    with monkeypatch.context() as loading:
        loading.setattr("mmrl.run.rl.load_trainer", load)
        with pytest.raises(KeyboardInterrupt) as stopped:
            asyncio.run(cell())
    assert stopped.value.__notes__ == [f"continue with: mmrl train resume={folder}"]
    assert ("slow_module" in sys.modules) == imports
    assert numbers(mmrl.resume(folder).path) == numbers(made.path)


def test_the_page_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first block as it stands, but smaller."""
    monkeypatch.chdir(tmp_path)
    (block, *_) = re.findall(r"^```python\n(.*?)^```", (TOP / "docs" / "python.md").read_text(), re.M | re.S)
    small = {
        '{"steps": 20}': '{"steps": 3, "batch_size": 2}, eval={"items": 2}',
        'split="test"': 'split="test", eval={"items": 2}',
    }
    for old, new in small.items():
        assert block.count(old) == 1
        block = block.replace(old, new)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["run"].path.parent == Path("outputs/hotpotqa/mhgpo_rr") and len(names["test"].evaluations) == 2
