"""Which runs the papers' tables need: shared by their digests, where they evaluate, from which checkpoint."""

import pytest

from mmrl.cli.configs import set_config
from mmrl.errors import ConfigError
from mmrl.run.build import evaluation_devices
from mmrl.run.check import process_problems
from mmrl.store.rundir import RunDir
from scripts.papers.cost import device_hours
from scripts.papers.plan import TablePlanner, before_collapse
from scripts.papers.spec import read_table


def planned(table, row, column=None, scale="paper", typed=()):
    spec = read_table(table)
    planner = TablePlanner(spec=spec, scale=scale, compose=set_config, overrides=typed)
    return planner.plan(table, [row], [column] if column else [*spec.columns], (0,))


def test_tables_share_runs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def training(table, row, *typed):
        return next(run.path for run in planned(table, row, None, "mini", typed).queue if run.command == "train")

    fof = training("mhgpo-table2", "MHGPO")
    assert fof == training("mhgpo-table6", "4") == training("mhgpo-table4", "MHGPO-FoF composite")
    assert fof != training("mhgpo-table6", "5")
    assert training("mhgpo-fig5", "MAPPO", "model.matmul=torch") == training("mhgpo-fig5", "MAPPO")
    assert training("mhgpo-fig5", "MAPPO", "model.matmul=onednn") != training("mhgpo-fig5", "MAPPO")
    # What a training starts from is no part of the evaluation of its result.
    train, evaluation = planned("mmgrpo-table1", "mmGRPO", "PAPILLON qwen3", "mini").queue
    assert "model.path=tiny_prompts" in train.all_words() and evaluation.after is train
    assert not any(word.startswith("model.path=") for word in evaluation.all_words())


@pytest.mark.parametrize(
    ("table", "row", "column", "gpus"),
    [
        ("mmgrpo-table1", "mmGRPO", "HoVer qwen3", ()),
        ("mhgpo-table1", "MAS Qwen2.5-72B", "MuSiQue", tuple(range(8))),
        ("turn-table2", "GRPO", "NQ", tuple(range(8))),
        ("turn-table5", "MT-GRPO", "TriviaQA", tuple(range(8))),
    ],
)
def test_evaluations_of_the_papers_use_the_gpus_that_they_name(monkeypatch, tmp_path, table, row, column, gpus):
    """`mmrl eval` is one process: of a profile with several its server takes all devices, or it is refused."""
    monkeypatch.chdir(tmp_path)
    *_, evaluation = planned(table, row, column).queue
    assert evaluation.command == "eval" and process_problems(evaluation.config) == []
    assert evaluation_devices(evaluation.config.hardware) == gpus
    hours, devices = device_hours(evaluation, 500)
    assert devices == max(1, len(gpus)) and 0 < hours < 24


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ([0.2, 0.4, 0.5, 0.45], 3),  # never collapsed: the newest
        ([0.2, 0.4, 0.1, 0.0], 1),  # collapsed after step 1
        ([0.2, 0.5, 0.1, 0.4], 3),  # came back
    ],
)
def test_the_last_checkpoint_before_a_collapse(tmp_path, scores, chosen):
    config = {"eval": {"split": "dev"}, "algo": {"name": "ppo"}, "train": {"steps": 3}}
    run = RunDir.create(tmp_path / "run", config, ["mmrl"])
    for step, score in enumerate(scores):
        run.append_metrics(step, {"eval/dev/em": score})
        folder = run.checkpoints / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "complete.json").write_text('{"files": {}}')
    run.close()
    assert before_collapse(tmp_path / "run", "em").name == f"checkpoint-{chosen}"
    if chosen == 1:
        for step in (0, 1):
            (tmp_path / f"run/checkpoints/checkpoint-{step}/complete.json").unlink()
        with pytest.raises(ConfigError, match=r"is left from before its collapse after step 1 \(train.keep\)"):
            before_collapse(tmp_path / "run", "em")
