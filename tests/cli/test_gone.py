"""Words that are gone are refused with what replaces them."""

from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.cli.configs import configured
from mmrl.cli.gone import GONE
from mmrl.config import RlRunConfig, validate_stored
from mmrl.errors import ConfigError
from mmrl.models import replies
from mmrl.serve import tools
from mmrl.store.policy import write_policy
from mmrl.store.rundir import RunDir
from mmrl.system import objects


@pytest.mark.parametrize(("command", "key"), [pair for pair in GONE if pair[1]])
def test_a_word_that_is_gone_is_refused_with_what_replaces_it(command, key, capsys):
    assert main([command, key if "=" in key else f"{key}=2"]) == 2
    assert f"{key}: is gone; {GONE[command, key]}" in capsys.readouterr().err


@pytest.mark.parametrize("command", [command for command, key in GONE if not key])
def test_a_command_that_is_gone_is_refused_with_what_replaces_it(command, capsys):
    assert main([command, "anything", "seed=1"]) == 2
    assert capsys.readouterr().err == f"error: mmrl {command}: is gone; {GONE[command, '']}\n"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train", "stage.miprov2.algo.auto=light"], "stage"),
        (["train", "-m", "algo=mmgrpo,better_together"], "algo=better_together"),
        (["compare", "algo=mmgrpo,better_together"], "algo=better_together"),
    ],
)
def test_a_key_below_one_that_is_gone_and_a_value_in_a_list_are_refused(words, key, capsys):
    assert main(words) == 2
    assert f"{key}: is gone; {GONE[words[0], key]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ("stages: [miprov2, mmgrpo]", "stages"),
        ("stage: {miprov2: {algo: {auto: light}}}", "stage"),
        ("defaults: [override /algo: better_together]", "algo=better_together"),
        ("defaults: [override /engine: vllm_server]\nengine: {push: disk}", "engine.push"),
    ],
)
def test_a_key_or_choice_of_a_config_file_that_is_gone_is_refused_likewise(content, key, tmp_path, capsys):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "old.yaml").write_text(f"# @package _global_\n{content}\n")
    assert main(["train", "--config-dir", str(tmp_path), "experiment=old"]) == 2
    assert capsys.readouterr().err == f"error: {key}: is gone; {GONE['train', key]}\n"


@pytest.mark.parametrize("word", ["stages=[miprov2,mmgrpo]", "algo=better_together"])
def test_a_word_of_a_set_that_is_gone_is_refused_likewise(word, tmp_path, capsys):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "old.yaml").write_text(f"shows: x\nrows: {{a: {{train: ['{word}']}}}}\n")
    assert main(["compare", "--config-dir", str(tmp_path), "set=old"]) == 2
    key = word.partition("=")[0] if "[" in word else word
    assert capsys.readouterr().err == f"error: a: {key}: is gone; {GONE['train', key]}\n"


@pytest.mark.parametrize("command", ["train", "plan", "doctor"])
def test_steps_of_a_command_that_makes_one_run_are_refused_with_the_command_that_runs_them(command, capsys):
    assert main([command, "algo=miprov2+mmgrpo"]) == 2
    assert "mmrl compare algo=miprov2+mmgrpo runs one after the other" in capsys.readouterr().err


def test_the_folder_that_stages_made_is_refused_with_the_run_of_its_last_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    RunDir.create("chain/2_mmgrpo", {"task": {"name": "banking77"}}, ["mmrl"]).close()
    Path("chain/set.yaml").write_text("shows: sft+mmgrpo\n")
    write_policy(Path("chain"), weights="chain/2_mmgrpo", prompts=None, task="banking77")
    for words in (["show", "chain"], ["train", "resume=chain"], ["train", "from=chain"], ["eval", "policy=chain"]):
        assert main(words) in (1, 2)
        error = capsys.readouterr().err
        assert "chain: was made by stages= of an earlier version" in error and "2_mmgrpo" in error, words


def test_a_run_that_stored_the_only_way_that_is_left_goes_on():
    config = configured(["engine=vllm_server"])
    stored = config.model_dump(mode="json")
    stored["engine"]["push"] = "disk"
    assert validate_stored(RlRunConfig, stored).model_dump() == config.model_dump()
    stored["engine"]["push"] = "nccl"
    with pytest.raises(ConfigError, match=r"engine\.push"):
        validate_stored(RlRunConfig, stored)


def test_names_that_scripts_of_others_import_are_there():
    assert (tools.callable_tools, tools.read_message) == (replies.callable_tools, replies.message_of)
    assert objects.put is objects.register
