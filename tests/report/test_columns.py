"""`mmrl eval -m`: several evaluations as columns of one table."""

import json
from pathlib import Path

from mmrl.cli import main
from mmrl.errors import MmrlError
from mmrl.report.tables import column_names, columns_text
from mmrl.run import eval as evaluation

METRICS = {"n": 20.0, "em": 0.25, "em_low": 0.1, "em_high": 0.4, "failed_share": 0.05, "module/x/length": 3.0}


def test_columns_are_named_by_what_differs():
    jobs = [["task=hotpotqa", "++policy=tiny"], ["task=2wiki", "++policy=tiny"]]
    assert column_names(jobs) == ["hotpotqa", "2wiki"]
    jobs = [["task=nq", "++seed=1"], ["task=nq", "++seed=2"]]
    assert column_names(jobs) == ["seed=1", "seed=2"]
    assert column_names([["task=nq"]]) == ["all"]


def test_the_table_has_a_row_per_metric_and_says_what_is_missing():
    text = columns_text(
        {
            "a": METRICS,
            "b": METRICS | {"f1": 0.5, "f1_low": 0.4, "f1_high": 0.6, "n": 5.0},
        }
    )
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:]}
    assert text.splitlines()[0].split() == ["a", "b"]
    assert lines["em"] == ["0.250", "[0.100,", "0.400]", "0.250", "[0.100,", "0.400]"]
    assert lines["f1"] == ["-", "0.500", "[0.400,", "0.600]"]
    assert lines["items"] == ["20", "5"]
    assert lines["failed"][2:] == ["5.0%", "5.0%"]
    assert "module/x/length" not in text


def test_one_command_evaluates_all_and_one_that_stops_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    seen = []

    def evaluate(config, command):
        seen.append((config.task.name, config.task.dataset))
        if config.task.name == "2wiki":
            raise MmrlError("stopped")
        (Path(config.run.dir) / "journal").mkdir(parents=True)
        (Path(config.run.dir) / "config.yaml").touch()
        (Path(config.run.dir) / "summary.json").write_text(json.dumps({"metrics": METRICS}))
        return 0

    monkeypatch.setattr(evaluation, "evaluate_policy", evaluate)
    assert main(["eval", "-m", "policy=tiny", "task=hotpotqa,2wiki,musique"]) == 1
    assert seen == [("hotpotqa", "hotpotqa"), ("2wiki", "2wiki"), ("musique", "musique")]
    shown = capsys.readouterr()
    assert "error: stopped" in shown.err
    assert shown.out.split("\n\n")[-1].splitlines()[0].split() == ["hotpotqa", "musique"]
