"""Damaged run directories: `show`, `report`, `compare` and `credit` show what is left or say what cannot be read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.cli import main
from tests.fuzz.run_dirs import finding
from tests.helpers.runs import fake_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = fake_run(tmp_path_factory.mktemp("damaged") / "run", steps=3)
    run.write_summary({"name": "x", "main_metric": "em"})
    return run.path


@settings(max_examples=12)
@given(data=st.data())
def test_a_damaged_run_is_shown_or_refused(whole, data):
    assert finding(whole, data.draw) is None


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("config.yaml", "seed: 0", "seed: [0\nx", ":3: cannot be read: not YAML (expected ',' or ']', but got ':')"),
        ("eval/step-000000-dev.jsonl", '"d3","metrics":', '"d3","metrix":', ":4: expected an item with id"),
    ],
)
def test_the_damaged_file_is_named(name, old, new, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = fake_run(tmp_path / "run", steps=1)
    run.write_summary({"name": "x", "main_metric": "em"})
    path = run.path / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    for command in ("show", "report", "compare"):
        assert main([command, str(run.path)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines and all(line.startswith("error: ") for line in lines), (command, lines)
        assert f"{path.name}{says}" in lines[0], (command, lines)
    assert not (tmp_path / "outputs").exists()


def test_what_only_the_pages_template_notices_is_one_line(tmp_path, errors_of):
    run = fake_run(tmp_path / "run", steps=1)
    run.write_summary({"name": "x", "facts": "t"})
    (line,) = errors_of("report", str(run.path)).splitlines()
    assert line.startswith(f"error: {run.path}: cannot be shown (")
