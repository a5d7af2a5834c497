"""`stages=[A,B]`: how its runs are composed, gone through, stopped, continued, shown and used."""

from __future__ import annotations

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import yaml

from mmrl.cli import main
from mmrl.cli.configs import eval_configs, train_configs
from mmrl.cli.overrides import read_line
from mmrl.config import PromptCommandConfig, StagedCommandConfig, TrainCommandConfig
from mmrl.errors import ConfigError, Stopped
from mmrl.models.policy import prompts_of, resolve, write_policy
from mmrl.report.rundir import RunDir, rows_of
from mmrl.run.check import check
from mmrl.run.settle import weight_run
from mmrl.run.start import started
from mmrl.sets.chain import begin, chain_page, go_on
from mmrl.sets.found import found_set
from mmrl.sets.page import SetPage
from mmrl.system.conf import conf_dir
from mmrl.system.files import append_jsonl, digests
from scripts.chaos.compare import comparable

SMALL = ["task=banking77", "eval.items=6", "train.save_every=1"]
SMALL += ["stage.sft.train.steps=2", "stage.sft.train.batch_size=2"]
SMALL += ["stage.mmgrpo.train.steps=1", "stage.mmgrpo.train.batch_size=2", "stage.mmgrpo.algo.rollouts=2"]


def staged(*words: str) -> StagedCommandConfig:
    (config,) = train_configs(read_line(words))
    assert isinstance(config, StagedCommandConfig)
    return config


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        train_configs(read_line(words))
    return "\n".join(caught.value.problems)


def test_better_together_is_prompts_then_weights():
    config = staged("algo=better_together", "task=banking77")
    assert config.algo.name == "miprov2+mmgrpo"
    assert [type(stage) for stage in config.stages] == [PromptCommandConfig, TrainCommandConfig]
    assert config == staged("stages=[miprov2,mmgrpo]", "task=banking77")


def test_a_stage_is_what_the_same_words_with_its_algorithm_would_be():
    words = ["task=hotpotqa", "seed=3", "train.batch_size=5"]
    config = staged(
        "stages=[sft,mhgpo_fof,miprov2]", *words, "stage.mhgpo_fof.algo.group_size=2", "stage.sft.train.steps=7"
    )
    first, second, third = config.stages
    assert [second] == train_configs(read_line([*words, "algo=mhgpo_fof", "algo.group_size=2"]))
    assert [first] == train_configs(read_line([*words, "algo=sft", "train.steps=7"]))
    assert [third] == train_configs(read_line(["task=hotpotqa", "seed=3", "algo=miprov2"]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["stages=[mmgrop]"], "stages: got 'mmgrop'"),
        (["stages=miprov2"], "stages: got 'miprov2', expected names of algo= in a list"),
        (["stages=[]"], "stages: got []"),
        (["stages=[sft,mmgrpo]", "stage.sft.eval.split=test"], "stage.sft.eval.split: is the same for all stages"),
        (["stages=[sft,mmgrpo]", "stage.sft.task=hover"], "stage.sft.task: is the same for all stages"),
        (
            ["stages=[sft,mmgrpo]", "stage.mmgrpo.model=hf"],
            "stage.mmgrpo.model: is the same for all stages, or that of the stage before",
        ),
        (["stages=[sft,mmgrpo]", "stage.ppo.train.steps=1"], "stage: got 'ppo', expected one of mmgrpo, sft"),
        (["stages=[sft,mmgrpo]", "stage.sft=1"], "stage.sft: expected stage.sft.KEY=VALUE"),
        (["stages=[sft,mmgrpo]", "algo.group_size=2"], "stage 1 (sft): algo.group_size: has no effect with sft"),
        (["stages=[sft,mmgrpo]", "algo=grpo"], "algo: has no effect beside stages=[sft,mmgrpo]"),
        (["stages=[sft,mmgrpo]", "stage.mmgrpo.algo=grpo"], "stage.mmgrpo.algo: is the same for all stages"),
        (["algo=mmgrpo", "stage.mmgrpo.train.steps=4"], "stage: unknown key"),
        (["-m", "algo=miprov2,mmgrpo", "stage.mmgrpo.train.steps=4"], "stage: unknown key"),
        (["stages=[sft,better_together]"], "stages: got better_together, which stands for several stages itself"),
        (["stages=[sft,mmgrpo]", "stage.mmgrpo.train.lrr=1"], "stage 2 (mmgrpo): train.lrr: unknown key"),
        (["stages=[miprov2,mmgrpo]", "stage.miprov2.train.steps=1"], "train.steps: has no effect with algo=miprov2"),
        (["algo=miprov2", "train.steps=1"], "train.steps: has no effect with algo=miprov2, which trains no weights"),
        (["algo=miprov2", "algo.group_size=1"], "algo.group_size"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused_by_the_key_that_was_typed(words, says):
    assert says in refusal("task=banking77", *words)


def test_the_jobs_of_a_sweep_may_be_runs_in_turn():
    swept = train_configs(read_line(["-m", "algo=mmgrpo,better_together", "task=banking77", "seed=3"]))
    alone = ["task=banking77", "seed=3"]
    assert swept == [*train_configs(read_line([*alone, "algo=mmgrpo"])), staged(*alone, "algo=better_together")]


def test_weights_of_each_module_apart_end_a_list():
    words = ["stages=[mmgrpo,miprov2]", "task=hover", "stage.mmgrpo.model.modules={}", "+model.lora={r: 4}"]
    assert any("stage 1 (mmgrpo) trains weights for each module apart" in text for text in check(staged(*words)))


def test_an_endpoint_without_a_models_name_is_refused():
    (config,) = train_configs(read_line(["algo=miprov2", "task=banking77", "engine=openai"]))
    assert any("engine: openai, whose model nothing names" in text for text in check(config))


def trained(folder: Path) -> dict[str, object]:
    """What two chains must share."""
    rows = rows_of(folder)
    weights = [path / "model.safetensors" for row in rows for path in sorted((row / "checkpoints").glob("ch*"))]
    return {
        "rows": [row.name for row in rows],
        "steps": [[comparable(record) for record in RunDir.read(row).history()] for row in rows],
        "weights": digests(weights),
        "items": [path.read_bytes() for row in rows for path in sorted((row / "eval").iterdir())],
        "page": [row[:7] for row in chain_page(folder).parts[0].rows],  # without times
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain") / "run"
    assert begin(staged("stages=[sft,mmgrpo]", *SMALL, f"run.dir={folder}"), ["mmrl"], in_process=True) == 0
    return folder


@pytest.fixture
def here(monkeypatch):
    """What is missing of a chain runs in this process, where everything is imported already."""
    monkeypatch.setattr("mmrl.sets.chain.go_on", partial(go_on, in_process=True))


def test_the_second_run_starts_from_what_the_first_has_made(whole):
    first, second = map(RunDir.read, rows_of(whole))
    assert [first.path.name, second.path.name] == ["1_sft", "2_mmgrpo"]
    assert second.config["model"]["path"] == str(first.checkpoints / "checkpoint-2")
    # one policy, evaluated where one run ends and where the next begins
    assert first.eval_path(2, "dev").read_text() == second.eval_path(0, "dev").read_text()
    assert resolve(str(whole)).base == str(second.checkpoints / "checkpoint-1")
    assert weight_run(whole)[0].path == second.path
    assert RunDir.read(first.path).resumed_as == whole, "what is continued is the whole"


def test_its_file_has_what_each_run_was_started_with(whole):
    content = yaml.safe_load((whole / "set.yaml").read_text())
    shared = ["task=banking77", "eval.items=6", "train.save_every=1"]
    sft = [*shared, "algo=sft", "train.steps=2", "train.batch_size=2"]
    mmgrpo = [*shared, "algo=mmgrpo", "train.steps=1", "train.batch_size=2", "algo.rollouts=2"]
    rows = {"1_sft": {"train": sft}, "2_mmgrpo": {"from": "1_sft", "train": mmgrpo}}
    assert content == {"shows": "sft+mmgrpo on banking77", "seeds": [0], "rows": rows}


def test_its_page_has_a_row_for_the_policy_after_each_run(whole, capsys):
    """Before: the policy that the first run began with; steps of a curve count on."""
    page = (whole / "set.html").read_text(encoding="utf-8")
    assert main(["show", str(whole)]) == 0
    shown = capsys.readouterr().out
    for text in (page, shown):
        assert "sft+mmgrpo on banking77" in text
    first, second = (line for line in chain_page(whole).parts[0].rows if line[0].startswith("sft"))
    items = [json.loads(line) for line in (whole / "1_sft" / "eval" / "step-000000-dev.jsonl").read_text().splitlines()]
    before = f"{sum(item['metrics']['em'] for item in items) / len(items):.3f}"
    assert (first[0], second[0]) == ("sft", "sft+mmgrpo")
    assert first[3] == second[3] == before
    steps = [line.split(",")[2:4] for line in (whole / "figure.csv").read_text().splitlines() if ",em on dev," in line]
    assert steps == [["sft", "0"], ["sft", "2"], ["sft+mmgrpo", "0"], ["sft+mmgrpo", "2"], ["sft+mmgrpo", "3"]]
    (whole / "set.html").unlink()
    assert main(["report", str(whole)]) == 0
    assert (whole / "set.html").is_file()


def test_a_run_starts_from_a_chain_as_from_its_last_run(whole):
    first = from_run(whole, "algo=mmgrpo")
    assert first == from_run(whole / "2_mmgrpo", "algo=mmgrpo") and first.start.run == str(whole / "2_mmgrpo")
    assert first.model.path == "tiny_dspy", "of the model's name; the weights come with the start"


def test_a_finished_chain_is_not_run_again(whole, capsys):
    assert main(["train", f"resume={whole}"]) == 2
    assert "this set is finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["credit", "run={}", "step=1"], "is a set of runs that start from one another; give one of them: {}/1_sft"),
        (["train", "stages=[sft,mmgrpo]", "task=banking77", "run.dir={}"], "exists and is not empty"),
        (["train", "from={}/3_x"], "3_x: no such run directory"),
    ],
)
def test_a_chain_in_place_of_a_run_is_refused_with_its_runs(words, says, whole, capsys):
    assert main([word.format(whole) for word in words]) == 2
    assert says.format(whole) in capsys.readouterr().err


@pytest.mark.parametrize("stopped", [pytest.param("1_sft", marks=pytest.mark.slow), "2_mmgrpo"])
def test_a_chain_stopped_in_any_run_goes_on_to_the_same_numbers(stopped, whole, tmp_path, monkeypatch, capsys, request):
    """The one stopped first goes on in a process for each run, as every command does."""
    folder = tmp_path / "run"
    write = RunDir.append_metrics

    def dies(run: RunDir, step: int, metrics: object) -> None:
        write(run, step, metrics)
        if run.path.name == stopped and step == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunDir, "append_metrics", dies)
    with pytest.raises(KeyboardInterrupt) as broken:  # in this process, which a test can break into
        begin(staged("stages=[sft,mmgrpo]", *SMALL, f"run.dir={folder}"), ["mmrl"], in_process=True)
    monkeypatch.setattr(RunDir, "append_metrics", write)
    before = {path: path.stat().st_mtime_ns for path in (folder / "1_sft").rglob("*") if path.is_file()}
    notes = [f"continue with: mmrl train resume={folder}"]
    assert broken.value.__notes__ == notes, "the whole, not the run that was under way"
    if stopped == "2_mmgrpo":
        request.getfixturevalue("here")
    assert main(["train", f"resume={folder}"]) == 0
    if stopped == "2_mmgrpo":
        kept = {path: path.stat().st_mtime_ns for path in before}
        assert kept == before, "a run that has ended is left as it is"
    assert trained(folder) == trained(whole)


def test_a_chain_that_is_terminated_between_two_runs_says_how_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.sets.chain.RunQueue.run", lambda queue: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as end:
        begin(staged("stages=[sft,mmgrpo]", *SMALL, f"run.dir={tmp_path / 'run'}"), ["mmrl"])
    assert isinstance(end.value.__cause__, Stopped)
    assert end.value.__cause__.__notes__ == [f"continue with: mmrl train resume={tmp_path / 'run'}"]


@pytest.mark.usefixtures("here")
def test_a_page_that_cannot_be_drawn_ends_no_chain(whole, tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no fonts")

    monkeypatch.setattr("mmrl.sets.page.SetPage.write", broken)
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "2_mmgrpo" / "summary.json").unlink()
    assert main(["train", f"resume={folder}"]) == 0
    assert "page not written (RuntimeError: no fonts)" in capsys.readouterr().err
    assert (folder / "2_mmgrpo" / "summary.json").is_file()


def test_a_chain_that_was_moved_has_its_policy(whole, tmp_path):
    moved = shutil.copytree(whole, tmp_path / "moved")
    assert resolve(str(moved)).base == str(moved / "2_mmgrpo" / "checkpoints" / "checkpoint-1")


def test_a_run_that_lost_its_config_is_not_removed(whole, tmp_path, capsys):
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "2_mmgrpo" / "config.yaml").unlink()
    assert main(["train", f"resume={folder}"]) == 2
    assert "2_mmgrpo: expected a run, got something else, which was not touched" in capsys.readouterr().err
    assert (folder / "2_mmgrpo" / "checkpoints").is_dir()


def test_a_run_under_way_goes_on_where_the_whole_was_moved_and_a_changed_start_is_refused(
    whole, here, tmp_path, capsys
):
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "2_mmgrpo" / "summary.json").unlink()
    checkpoint = folder / "1_sft" / "checkpoints" / "checkpoint-2"
    marker = (checkpoint / "complete.json").read_text()
    elsewhere = whole.rename(whole.with_name("elsewhere"))
    try:
        (checkpoint / "complete.json").write_text(marker.replace('"step": 2', '"step":  2'))
        assert main(["train", f"resume={folder / '2_mmgrpo'}"]) == 2
        assert "1_sft has another policy now than the one that this run started from" in capsys.readouterr().err
        (checkpoint / "complete.json").write_text(marker)
        assert main(["train", f"resume={folder}"]) == 0
    finally:
        elsewhere.rename(whole)
    assert trained(folder) == trained(whole)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("shows: x\nrows: {1_sft: {tain: [algo=sft]}}", "rows.1_sft.tain: unknown key"),
        ("shows: x\nrows: {1_sft: {train: [algo=sfd]}}", "sfd"),
        ("rows: [", "set.yaml"),
    ],
)
def test_a_damaged_file_of_a_chain_is_named(content, says, tmp_path, capsys):
    (tmp_path / "set.yaml").write_text(content)
    assert main(["train", f"resume={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


def test_a_chain_in_which_nothing_has_begun_says_how_to_begin(tmp_path, capsys):
    (tmp_path / "set.yaml").write_text("shows: x\nrows: {1_sft: {train: [algo=sft]}}")
    assert main(["show", str(tmp_path)]) == 2
    assert f"none of its runs has begun; continue it with: mmrl train resume={tmp_path}" in capsys.readouterr().err


def test_from_is_the_same_as_the_next_run(whole, tmp_path, monkeypatch, capsys):
    words = [f"from={whole / '1_sft'}", "algo=mmgrpo", "eval.items=6", "train.save_every=1"]
    words += ["train.steps=1", "train.batch_size=2", "algo.rollouts=2"]
    assert main(["train", *words, f"run.dir={tmp_path / 'run'}"]) == 0
    run, stage = RunDir.read(tmp_path / "run"), RunDir.read(whole / "2_mmgrpo")
    assert run.config["task"]["name"] == "banking77", "of the run that it starts from, since none was typed"
    assert [comparable(record) for record in run.history()] == [comparable(record) for record in stage.history()]
    weights = [path.checkpoints / "checkpoint-1" / "model.safetensors" for path in (run, stage)]
    assert len({*digests(weights)}) == 1
    assert run.config["start"] == {**stage.config["start"], "run": str(whole / "1_sft")}
    assert main(["train", f"from={whole / '1_sft'}", "algo=mmgrpo", "task.labels=7"]) == 2
    assert "task.labels" in capsys.readouterr().err, "a key of the run's own task is judged as if it were typed"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["from=nowhere"], "from: nowhere"),
        (["from=nowhere", "resume=x"], "remove from=nowhere"),
        (["from=EVAL"], "is an evaluation, which makes no policy"),
        (["from=NEW"], "from: run NEW has no checkpoint yet that is complete"),
    ],
)
def test_a_start_that_is_none_is_refused(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    task = {"task": {"name": "banking77"}, "model": {"name": "tiny", "path": "tiny"}}
    for name, config in (("EVAL", {"policy": "tiny", **task}), ("NEW", {"algo": {"name": "grpo"}, **task})):
        RunDir.create(tmp_path / name, config, ["mmrl"]).close()
    assert main(["train", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_policy_is_evaluated_with_the_prompts_that_it_was_made_with(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    prompts = folder / "prompts.json"
    prompts.write_text("{}")
    write_policy(folder, weights=str(folder / "2_mmgrpo"), prompts=str(prompts), task="banking77")
    assert prompts_of(str(folder)) == ("banking77", str(prompts))

    def of(*words: str) -> str | None:
        (config,) = eval_configs(read_line([f"policy={folder}", *words]))
        return config.task.prompts

    assert of("task=banking77") == str(prompts)
    assert of("task=banking77", "task.prompts=mine.json") == "mine.json"
    # the prompts of one task are none of another's
    assert of("task=hotpotqa") is None


def test_a_policy_whose_prompts_are_of_another_program_is_refused(tmp_path, capsys):
    prompts = tmp_path / "prompts.json"
    prompts.write_text('{"draft.predict": {"demos": [], "signature": {"instructions": "x", "fields": []}}}')
    write_policy(tmp_path, weights="tiny_dspy", prompts=str(prompts), task="banking77")
    assert main(["eval", f"policy={tmp_path}", "task=banking77", f"run.dir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert f"task.prompts: {prompts}" in error and "draft.predict" in error and "classify.predict" in error
    assert not (tmp_path / "run").exists()


def test_prompts_with_which_weights_were_trained_belong_to_them(tmp_path):
    folder = tmp_path / "run"
    (config,) = train_configs(read_line(["task=banking77", "algo=mmgrpo", "task.prompts=mine.json"]))
    with RunDir.create(folder, config.model_dump(mode="json"), ["mmrl"]):
        assert prompts_of(str(folder)) == ("banking77", "mine.json")


def test_a_chain_without_an_ended_run_has_no_policy(tmp_path):
    (tmp_path / "set.yaml").write_text("rows: {}")
    with pytest.raises(ConfigError, match="has not ended; continue it with"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"weights": ".", "prompts": null, "task": "x"}', '{"weights": 3, "prompts": null, "task": "x"}', "{"],
)
def test_a_damaged_policy_file_is_named(content, tmp_path):
    (tmp_path / "policy.json").write_text(content)
    with pytest.raises(ConfigError, match=r"policy\.json cannot be read"):
        resolve(str(tmp_path))


def test_costs_by_hand(tmp_path):
    """Counts are summed over steps, money over the starts of a process, each of which counts from 0."""
    lines = [
        [
            {"step": 1, "prompts/rollouts": 30.0, "prompts/calls": 33.0, "prompts/completion_tokens": 90.0},
            {"step": 2, "prompts/rollouts": 12.0, "prompts/calls": 12.0, "prompts/completion_tokens": 10.0}
            | {"prompts/writer/requests": 4.0, "prompts/writer/completion_tokens": 5.0, "prompts/writer/cost": 0.25},
        ],
        [
            {"step": 1, "rollouts/count": 8.0, "rollouts/calls": 9.0, "rollouts/tokens": 50.0, "endpoint/cost": 0.5}
            | {"time/step": 5.0, "time/eval": 2.0},
            {"step": 2, "rollouts/count": 8.0, "rollouts/calls": 7.0, "rollouts/tokens": 40.0, "endpoint/cost": 0.75},
            {"step": 3, "rollouts/count": 8.0, "rollouts/calls": 8.0, "rollouts/tokens": 10.0, "endpoint/cost": 0.5},
        ],
    ]
    stages = staged("stages=[miprov2,mmgrpo]", "task=banking77").stages
    paths = [tmp_path / "1_miprov2", tmp_path / "2_mmgrpo"]
    for path, config, records in zip(paths, stages, lines, strict=True):
        start = {"run": str(paths[0])} if path == paths[1] else None
        with RunDir.create(path, {**config.model_dump(mode="json"), "start": start}, ["mmrl"]) as run:
            append_jsonl(run.metrics_path, records)
    result = found_set("x", paths)
    first, second = (result.started(row, "banking77")[0].costs for row in ("miprov2", "miprov2+mmgrpo"))
    assert [*first.values()] == [42.0, 49.0, 105.0, 0.0, 0.0, 0.25]
    assert [*second.values()] == [42 + 24, 49 + 24, 105 + 100, 0.0, 7.0, 0.25 + 1.25]
    cost = SetPage(result).parts[-1].rows
    assert cost[0] == ["row", "rollouts", "calls", "tokens sampled", "time", "USD"], "nothing was trained"
    assert cost[2] == ["miprov2+mmgrpo", "66", "73", "205", "7.0 s", "1.50"]


def test_a_stage_that_comes_twice_leaves_the_others_theirs(tmp_path, monkeypatch):
    """The planner asks for equal words once."""
    planned = []
    monkeypatch.setattr("mmrl.sets.chain.RunQueue", lambda queue, *_, **__: planned.extend(queue) or Stopped())

    class Stopped:
        def run(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin(staged("stages=[sft,sft,mmgrpo]", *SMALL, f"run.dir={tmp_path / 'run'}"), [])
    assert [run.config.algo.name for run in planned] == ["sft", "sft", "mmgrpo"]


@pytest.fixture
def earlier(whole, tmp_path):
    """A run to start from, whose stored config a test may change: (run, change)."""
    run = shutil.copytree(whole / "1_sft", tmp_path / "a b")

    def change(**sections):
        config = yaml.safe_load((run / "config.yaml").read_text())
        for name, section in sections.items():
            config[name] = {**config[name], **section} if isinstance(section, dict) else section
        (run / "config.yaml").write_text(yaml.safe_dump(config))

    return run, change


def from_run(run, *words):
    (config,) = train_configs(read_line([f"from={run}", *words], command_keys=("from",)))
    return config


def test_lists_of_the_run_before_are_taken_over(earlier):
    run, change = earlier
    change(model={"lora": {"targets": ["q_proj", "v_proj"]}})
    assert from_run(run, "algo=mmgrpo").model.lora.targets == ("q_proj", "v_proj")


def test_variables_that_the_run_before_names_are_read(earlier, tmp_path, monkeypatch):
    run, change = earlier
    change(task={"labels": "${oc.env:LABELS}"})
    labels = tmp_path / "labels.json"
    labels.write_text('["a", "b"]')
    monkeypatch.setenv("LABELS", str(labels))
    (evaluation,) = eval_configs(read_line([f"policy={run}"]))
    assert from_run(run, "algo=mmgrpo").task.labels == evaluation.task.labels == str(labels)
    monkeypatch.delenv("LABELS")
    for made in (lambda: from_run(run, "algo=mmgrpo"), lambda: eval_configs(read_line([f"policy={run}"]))):
        with pytest.raises(ConfigError, match="task: the environment variable LABELS is not set"):
            made()


def test_the_papers_prompts_are_a_start_too(earlier):
    run, _ = earlier
    config = {**yaml.safe_load((run / "config.yaml").read_text()), "task": {"name": "hotpotqa", "prompts": "paper"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    made = started(from_run(run, "algo=mhgpo_rr"))
    assert made.task.prompts == "paper"
    assert made.start.prompts == digests([conf_dir() / "prompts" / "paper" / "hotpotqa.yaml"])[0]
    with pytest.raises(ConfigError, match=r"task\.prompts: has no effect with from="):
        from_run(run, "algo=mhgpo_rr", "task.prompts=null")


def test_settings_under_one_name_hold_in_a_run_from_another(earlier, tmp_path, monkeypatch):
    run, change = earlier
    change(task={"max_tokens": 7})
    rows = tmp_path / "conf" / "experiment"
    rows.mkdir(parents=True)
    (rows / "big.yaml").write_text("# @package _global_\ntask: {max_tokens: 5}\n")
    (rows / "other.yaml").write_text("# @package _global_\ntrain: {steps: 3}\n")
    (rows / "broken.yaml").write_text("task: {")
    monkeypatch.chdir(tmp_path)
    (evaluation,) = eval_configs(read_line([f"policy={run}", "experiment=big"]))
    assert from_run(run, "algo=mmgrpo", "experiment=big").task.max_tokens == evaluation.task.max_tokens == 5
    sweep = train_configs(
        read_line(["-m", f"from={run}", "algo=mmgrpo", "experiment=big,other"], command_keys=("from",))
    )
    assert [config.task.max_tokens for config in sweep] == [5, 7], "each job by its own"
    with pytest.raises(ConfigError, match="cannot be composed"):
        from_run(run, "algo=mmgrpo", "experiment=broken")


def test_packages_of_the_run_before_are_imported(earlier, tmp_path, monkeypatch, capsys):
    run, change = earlier
    change(plugins=["package_of_mine"])
    (tmp_path / "package_of_mine.py").write_text("print('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert from_run(run, "algo=mmgrpo").plugins == ("package_of_mine",)
    said = capsys.readouterr()
    assert "imported" in said.out and "plugins=package_of_mine" in said.err


def test_a_run_from_another_is_planned_and_examined(earlier, capsys):
    run, _ = earlier
    words = [f"from={run}", "algo=mmgrpo", "algo.rollouts=2", "train.batch_size=2", "hardware.threads=1"]
    assert main(["plan", *words, "dry=1"]) == 0
    assert "mmgrpo on banking77" in capsys.readouterr().out
    assert main(["doctor", *words, "examples=1"]) in (0, 1)
    assert f"mmgrpo on banking77 with {run / 'checkpoints' / 'checkpoint-2'}" in capsys.readouterr().out
    assert main(["show", str(run)]) == 0
    assert f"mmrl show '{run}'\n" in capsys.readouterr().out, "as a shell reads it"


def test_an_adapter_on_a_moved_run_before_is_found(tmp_path):
    (tmp_path / "1_sft" / "merged" / "checkpoint-1").mkdir(parents=True)
    run = tmp_path / "2_grpo"
    checkpoint = run / "checkpoints" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    stored = {"model": {"path": "was/1_sft/merged/checkpoint-1"}, "start": {"run": "was/1_sft"}}
    (run / "config.yaml").write_text(yaml.safe_dump(stored))
    assert resolve(str(checkpoint)).base == str(tmp_path / "1_sft" / "merged" / "checkpoint-1")
