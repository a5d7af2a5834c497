"""The documented plug point works as documented: the task in docs/extending.md trains."""

import re
import sys
from pathlib import Path

import pytest

from mmrl.cli import main

DOC = Path(__file__).parents[2] / "docs" / "extending.md"


def test_the_documented_task_trains_from_the_users_own_folder(tmp_path, random_model, monkeypatch, capsys):
    code = re.search(r"```python\n(.*?)```", DOC.read_text(), re.S)[1]
    yaml = re.search(r"```yaml\n(.*?)```", DOC.read_text(), re.S)[1]
    (tmp_path / "shout.py").write_text(code)
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "shout.yaml").write_text(yaml)
    assert len(code.splitlines()) < 50
    words = "plugins=[shout] task=shout algo=mhgpo_fof train.steps=1 train.batch_size=2 eval.items=2 task.max_tokens=4"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = main(["train", *words.split(), "model=hf", f"model.path={random_model}", "run.dir=run"])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "loud" in said.out


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (None, ["No module named"]),
        ("one = 1\nundefined_name\n", ["NameError", "line 2"]),
        ("one = 1\ntwo = = 2\n", ["SyntaxError", "line 2"]),
        ("import sys\nsys.exit(0)\n", ["SystemExit", "line 2"]),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_a_config_error_with_its_line(code, said, tmp_path, monkeypatch, errors_of):
    monkeypatch.chdir(tmp_path)
    if code is not None:
        (tmp_path / "broken_plugin.py").write_text(code)
    printed = errors_of("train", "plugins=[broken_plugin]")
    assert all(part in printed for part in ["error: plugins: cannot import 'broken_plugin': ", *said]), printed


def test_sigterm_while_a_plugin_is_imported_is_a_stop(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # What a SIGTERM raises in the main thread, wherever it is.
    (tmp_path / "slow_plugin.py").write_text("raise SystemExit(143)\n")
    assert main(["train", "plugins=[slow_plugin]"]) == 143
    assert "stopped by SIGTERM" in capsys.readouterr().err


def test_a_file_of_the_current_folder_stands_behind_what_is_installed(tmp_path, monkeypatch, errors_of):
    """A file `datasets.py` must not be what libraries import, nor a library what was meant by one's own `optuna.py`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    for name in ("optuna", "my_plugin"):
        (tmp_path / f"{name}.py").write_text("raise ValueError('mine')\n")
    printed = errors_of("train", "plugins=[optuna]")
    assert f"plugins: got 'optuna', and {tmp_path}/optuna.py has the name of " in printed and "mine" not in printed
    assert "plugins: cannot import 'my_plugin': ValueError: mine" in errors_of("train", "plugins=[my_plugin]")
    assert any("site-packages" in place for place in sys.path[: sys.path.index(str(tmp_path))])


def test_a_config_of_ones_own_whose_task_nobody_adds_is_named(tmp_path, monkeypatch, errors_of):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "ghost.yaml").write_text("# @package _global_\ntask:\n  name: hotpotqua  # mine\n")
    printed = errors_of("train", "task=ghost", "algo=grpo")
    assert "task.name: got 'hotpotqua' (conf/task/ghost.yaml), and no task of that name was added" in printed
    assert "did you mean 'hotpotqa'?" in printed
