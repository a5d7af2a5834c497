"""Runs that start from one another (`from=RUN`): composed, continued, shown and used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmrl.cli import main
from mmrl.cli.configs import eval_configs, train_configs
from mmrl.cli.overrides import read_line
from mmrl.errors import ConfigError
from mmrl.run.check import check
from mmrl.run.settle import weight_run
from mmrl.run.start import config_of_resumed, started
from mmrl.sets.found import set_of_run_dirs
from mmrl.sets.page import SetPage
from mmrl.sets.sweep import job_state
from mmrl.store.policy import prompts_of, resolve, write_policy
from mmrl.store.rundir import RunDir
from mmrl.system.conf import conf_dir
from mmrl.system.files import append_jsonl, file_digest
from scripts.chaos.compare import comparable

SMALL = ["eval.items=6", "train.save_every=1", "train.batch_size=2"]
SFT = ["algo=sft", "task=banking77", "train.steps=2", *SMALL]
MMGRPO = ["algo=mmgrpo", "train.steps=1", "algo.rollouts=2", *SMALL]


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        train_configs(read_line(words))
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["algo=miprov2", "train.steps=1"], "train.steps: has no effect with algo=miprov2, which trains no weights"),
        (["algo=miprov2", "algo.group_size=1"], "algo.group_size"),
    ],
)
def test_keys_of_weights_are_none_of_prompts(words, says):
    assert says in refusal("task=banking77", *words)


def test_an_endpoint_without_a_models_name_is_refused():
    (config,) = train_configs(read_line(["algo=miprov2", "task=banking77", "engine=openai"]))
    assert any("engine: openai, whose model nothing names" in text for text in check(config))


def trained(folder: Path) -> dict[str, object]:
    """What two starts of the same runs must share."""
    rows = [folder / "1_sft", folder / "2_mmgrpo"]
    weights = [path / "model.safetensors" for row in rows for path in sorted((row / "checkpoints").glob("ch*"))]
    return {
        "steps": [[comparable(record) for record in RunDir.read(row).history()] for row in rows],
        "weights": [*map(file_digest, weights)],
        "items": [path.read_bytes() for row in rows for path in sorted((row / "eval").iterdir())],
        "page": [row[:7] for row in SetPage(set_of_run_dirs("x", rows)).parts[0].rows],  # without times
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with two runs, of which the second has started from the first."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", *SFT, f"run.dir={folder / '1_sft'}"]) == 0
    assert main(["train", f"from={folder / '1_sft'}", *MMGRPO, f"run.dir={folder / '2_mmgrpo'}"]) == 0
    return folder


def test_the_second_run_starts_from_what_the_first_has_made(whole, tmp_path, capsys):
    first, second = (RunDir.read(whole / name) for name in ("1_sft", "2_mmgrpo"))
    assert second.config["task"]["name"] == "banking77", "of the run that it starts from, since none was typed"
    assert second.config["model"]["path"] == str(first.checkpoints / "checkpoint-2")
    # one policy, evaluated where one run ends and where the next begins
    assert first.eval_path(2, "dev").read_text() == second.eval_path(0, "dev").read_text()
    assert resolve(str(second.path)).base == str(second.checkpoints / "checkpoint-1")
    assert weight_run(second.path)[0].path == second.path
    assert main(["train", f"from={first.path}", "algo=mmgrpo", "task.labels=7"]) == 2
    assert "task.labels" in capsys.readouterr().err, "a key of the run's own task is judged as if it were typed"


def test_their_page_has_a_row_for_the_policy_after_each_run(whole, tmp_path):
    """Before: the policy that the first run began with; steps of a curve count on."""
    assert main(["compare", str(whole), f"out={tmp_path}"]) == 0
    page = SetPage(set_of_run_dirs("x", [whole / "1_sft", whole / "2_mmgrpo"]))
    first, second = (line for line in page.parts[0].rows if line[0].startswith("sft"))
    items = [json.loads(line) for line in (whole / "1_sft" / "eval" / "step-000000-dev.jsonl").read_text().splitlines()]
    before = f"{sum(item['metrics']['em'] for item in items) / len(items):.3f}"
    assert (first[0], second[0]) == ("sft", "sft+mmgrpo")
    assert first[3] == second[3] == before
    lines = (tmp_path / "figure.csv").read_text().splitlines()
    steps = [line.split(",")[2:4] for line in lines if ",em on dev," in line]
    assert steps == [["sft", "0"], ["sft", "2"], ["sft+mmgrpo", "0"], ["sft+mmgrpo", "2"], ["sft+mmgrpo", "3"]]


def test_a_run_under_way_goes_on_where_both_were_moved_and_a_changed_start_is_refused(whole, tmp_path, capsys):
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
        assert main(["train", f"resume={folder / '2_mmgrpo'}"]) == 0
    finally:
        elsewhere.rename(whole)
    assert trained(folder) == trained(whole)


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
    folder = tmp_path / "run"
    (config,) = train_configs(read_line(["task=banking77", "algo=miprov2"]))
    RunDir.create(folder, config.model_dump(mode="json"), ["mmrl"]).close()
    prompts = folder / "prompts.json"
    prompts.write_text("{}")
    write_policy(folder, weights=str(whole / "2_mmgrpo"), prompts=str(prompts), task="banking77")
    assert prompts_of(str(folder)) == ("banking77", str(prompts))
    assert resolve(str(folder)).base == str(whole / "2_mmgrpo" / "checkpoints" / "checkpoint-1")

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


def test_a_run_of_prompts_that_has_not_ended_has_no_policy(tmp_path):
    (config,) = train_configs(read_line(["task=banking77", "algo=miprov2"]))
    RunDir.create(tmp_path / "run", config.model_dump(mode="json"), ["mmrl"]).close()
    with pytest.raises(ConfigError, match="has not ended; continue it with"):
        resolve(str(tmp_path / "run"))


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
    configs = train_configs(read_line(["-m", "algo=miprov2,mmgrpo", "task=banking77"]))
    paths = [tmp_path / "1_miprov2", tmp_path / "2_mmgrpo"]
    for path, config, records in zip(paths, configs, lines, strict=True):
        start = {"run": str(paths[0])} if path == paths[1] else None
        with RunDir.create(path, {**config.model_dump(mode="json"), "start": start}, ["mmrl"]) as run:
            append_jsonl(run.metrics_path, records)
    result = set_of_run_dirs("x", paths)
    first, second = (result.started(row, "banking77")[0].costs for row in ("miprov2", "miprov2+mmgrpo"))
    assert [*first.values()] == [42.0, 49.0, 105.0, 0.0, 0.0, 0.25]
    assert [*second.values()] == [42 + 24, 49 + 24, 105 + 100, 0.0, 7.0, 0.25 + 1.25]
    cost = SetPage(result).parts[-1].rows
    assert cost[0] == ["row", "rollouts", "calls", "tokens sampled", "time", "USD"], "nothing was trained"
    assert cost[2] == ["miprov2+mmgrpo", "66", "73", "205", "7.0 s", "1.50"]


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


def test_prompts_optimised_for_trained_weights_are_exported_with_them(whole, tmp_path):
    (config,) = train_configs(read_line(["task=banking77", "algo=miprov2"]))
    start = {"run": "was/elsewhere/2_mmgrpo"}
    run = shutil.copytree(whole, tmp_path / "moved") / "3_miprov2"
    RunDir.create(run, {**config.model_dump(mode="json"), "start": start}, ["mmrl"]).close()
    prompts = run / "prompts.json"
    prompts.write_text("{}")
    write_policy(run, weights="../2_mmgrpo", prompts=str(prompts), task="banking77")
    weights, trained = weight_run(run)
    assert weights.path == tmp_path / "moved" / "2_mmgrpo" and trained.task.prompts == str(prompts)


def test_a_run_from_another_is_the_same_job_of_a_sweep(whole, tmp_path):
    """Weights and prompts in its stored config are the other run's, and none that were typed."""
    same = from_run(whole / "1_sft", *MMGRPO)
    assert job_state(whole / "2_mmgrpo", same) == "finished"
    for other in (from_run(whole / "1_sft", *MMGRPO, "train.lr=1"), from_run(whole / "2_mmgrpo", *MMGRPO)):
        with pytest.raises(ConfigError, match="holds a run with other settings"):
            job_state(whole / "2_mmgrpo", other)


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
    tasks: list[Any] = [from_run(run, "algo=mmgrpo").task, evaluation.task]
    assert [task.labels for task in tasks] == [str(labels)] * 2
    monkeypatch.delenv("LABELS")
    for made in (lambda: from_run(run, "algo=mmgrpo"), lambda: eval_configs(read_line([f"policy={run}"]))):
        with pytest.raises(ConfigError, match="task: the environment variable LABELS is not set"):
            made()


@pytest.mark.parametrize(
    ("stored", "words", "computed", "left_out"),
    [
        (("float32", "eager", "onednn"), "", ("float32", "eager", "onednn"), ""),
        (("bfloat16", "eager", "torch"), "model.dtype=float32", ("float32", "eager", "torch"), ""),
        (("float32", "auto", "onednn"), "hardware.device=cuda", ("float32", "auto", "torch"), "matmul"),
        (("float32", "auto", "onednn"), "model.dtype=bfloat16", ("bfloat16", "auto", "torch"), "matmul"),
        (("bfloat16", "flash_attention_2", "torch"), "", ("bfloat16", "flash_attention_2", "torch"), ""),
        (("bfloat16", "flash_attention_3", "torch"), "", ("bfloat16", "auto", "torch"), "attention"),
        (("auto", "flash_attention_2", "torch"), "model.dtype=float32", ("float32", "auto", "torch"), "attention"),
    ],
)
def test_an_evaluation_computes_as_its_policys_run_did(earlier, capsys, monkeypatch, stored, words, computed, left_out):
    """But for what cannot hold here, which nobody has typed."""
    monkeypatch.setattr("transformers.utils.import_utils.is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr("transformers.utils.import_utils.is_flash_attn_3_available", lambda: False)
    run, change = earlier
    change(model=dict(zip(("dtype", "attention", "matmul"), stored, strict=True)))
    (config,) = eval_configs(read_line([f"policy={run}", *words.split()]))
    model = config.model
    assert (model.dtype, model.attention, model.matmul) == computed
    assert not [problem for problem in check(config) if problem.startswith("model.")]
    said = capsys.readouterr().err
    assert ("warning: model." in said) == bool(left_out)
    had = dict(zip(("dtype", "attention", "matmul"), stored, strict=True))
    assert not left_out or f"warning: model.{left_out}: left out {had[left_out]} of {run}, wh" in said


def test_settings_of_ones_own_that_cannot_hold_are_refused(earlier):
    run, change = earlier
    change(model={"dtype": "bfloat16"})
    (config,) = eval_configs(read_line([f"policy={run}", "model.matmul=onednn"]))
    assert any(problem.startswith("model.matmul: got onednn") for problem in check(config))


def test_the_papers_prompts_are_a_start_too(earlier):
    run, _ = earlier
    config = {**yaml.safe_load((run / "config.yaml").read_text()), "task": {"name": "hotpotqa", "prompts": "paper"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    made = started(from_run(run, "algo=mhgpo_rr"))
    assert made.task.prompts == "paper"
    assert made.start.prompts == file_digest(conf_dir() / "prompts" / "paper" / "hotpotqa.yaml")
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
    (rows / "child.yaml").write_text("# @package _global_\ndefaults: [below/middle, _self_]\ntrain: {steps: 3}\n")
    (rows / "below").mkdir()
    (rows / "below/middle.yaml").write_text("# @package _global_\ndefaults: [/experiment/big]\n")
    monkeypatch.chdir(tmp_path)
    (evaluation,) = eval_configs(read_line([f"policy={run}", "experiment=big"]))
    assert from_run(run, "algo=mmgrpo", "experiment=big").task.max_tokens == evaluation.task.max_tokens == 5
    (evaluation,) = eval_configs(read_line([f"policy={run}", "experiment=below/middle"]))
    assert from_run(run, "algo=mmgrpo", "experiment=child").task.max_tokens == evaluation.task.max_tokens == 5
    sweep = train_configs(
        read_line(["-m", f"from={run}", "algo=mmgrpo", "experiment=big,other"], command_keys=("from",))
    )
    assert [config.task.max_tokens for config in sweep] == [5, 7], "each job by its own"
    with pytest.raises(ConfigError, match=r"broken\.yaml:1: cannot be read"):
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


def test_a_run_starts_from_a_checkpoint_of_another_also_where_both_were_moved(whole, tmp_path):
    checkpoint = Path("1_sft", "checkpoints", "checkpoint-1")  # not its newest
    (config,) = train_configs(read_line([f"from={whole / checkpoint}", "algo=mmgrpo"], command_keys=("from",)))
    config = started(config)
    assert config.model.path == str(whole / checkpoint) and config.task.name == "banking77"
    moved = shutil.copytree(whole, tmp_path / "moved")
    elsewhere = whole.rename(whole.with_name("elsewhere"))
    try:
        again = config_of_resumed(config, moved / "2_mmgrpo")
    finally:
        elsewhere.rename(whole)
    assert again.model.path == str(moved / checkpoint) and again.start == config.start
