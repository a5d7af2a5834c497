"""`mmrl eval policy=RUN` without `task=`: the task as the run had it."""

import pytest

from mmrl.cli import main
from mmrl.cli.configs import configured
from mmrl.config.schema import RunConfig, StartConfig
from mmrl.sets.command import RunKeys
from mmrl.store.policy import write_policy
from mmrl.store.rundir import RunDir
from mmrl.system.files import plain
from tests.helpers.lines import evaluation, refused


def run_of(folder, *words):
    config = configured(words)
    RunDir.create(folder, plain(config.model_dump(mode="json")), ["mmrl"]).close()
    return config


def test_it_has_the_runs_task_with_what_is_typed(tmp_path):
    words = ["task=search_agent", "task.max_turns=3", "task.dataset=nq", "algo=mt_grpo", "task.retriever.top_k=7"]
    trained = run_of(tmp_path, *words)
    config = evaluation(f"policy={tmp_path}", "task.max_turns=2", "eval.items=5")
    assert config.task == trained.task.model_copy(update={"max_turns": 2})
    assert evaluation(f"policy={tmp_path}", "task=search_agent").task.max_turns != 3, "a task that is typed is that one"
    assert evaluation("policy=tiny").task.name == "hotpotqa"


def test_prompts_are_those_of_the_policy(tmp_path):
    run_of(tmp_path, "task=banking77", "algo=mmgrpo", "task.prompts=old.json")
    write_policy(tmp_path, weights="tiny_dspy", prompts="new.json", task="banking77")
    assert evaluation(f"policy={tmp_path}").task.prompts == "new.json"
    assert evaluation(f"policy={tmp_path}", "task.prompts=typed.json").task.prompts == "typed.json"


def test_settings_under_one_name_hold_as_if_they_were_typed(tmp_path, monkeypatch):
    run_of(tmp_path / "run", "task=hotpotqa", "model=hf", "model.path=some/folder", "model.chat_template=llama3")
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/plain.yaml").write_text("# @package _global_\nmodel: {chat_template: plain}\n")
    (tmp_path / "conf/experiment/child.yaml").write_text("# @package _global_\ndefaults: [plain, _self_]\nseed: 3\n")
    monkeypatch.chdir(tmp_path)
    templates = [evaluation("policy=run", *more).model.chat_template for more in ((), ["experiment=plain"])]
    assert templates == ["llama3", "plain"]
    assert evaluation("policy=run", "experiment=child").model.chat_template == "plain"


def test_endpoints_answer_as_they_did(tmp_path):
    endpoints = "engine.endpoints={reranker: {url: 'http://localhost:1/v1', model: big, key_env: null}}"
    trained = run_of(tmp_path, "task=hotpotqa", endpoints)
    assert evaluation(f"policy={tmp_path}").engine.endpoints == trained.engine.endpoints
    assert evaluation(f"policy={tmp_path}", "engine.endpoints=null").engine.endpoints is None


def test_packages_of_the_run_are_imported_and_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine_of_a_run.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    run_of(tmp_path / "run", "task=hotpotqa", "plugins=[mine_of_a_run]")
    assert evaluation(f"policy={tmp_path / 'run'}").plugins == ("mine_of_a_run",)
    assert "names code that is imported and run now: plugins=mine_of_a_run" in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["task.labelz=2", "task.data.dev=nowhere.json"])
def test_a_wrong_key_is_judged_as_if_the_task_were_typed(typed, tmp_path):
    run_of(tmp_path, "task=hotpotqa")
    (problem,) = refused(f"policy={tmp_path}", typed, command="eval")
    assert problem.startswith(typed.partition("=")[0])


def test_a_tilde_behind_a_key_is_the_home_folder(monkeypatch, tmp_path, errors_of):
    """A shell puts it in at the beginning of a word alone; a folder of this name is nobody's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home := tmp_path / "home"))
    monkeypatch.setattr("mmrl.run.session.session", lambda *args: 0)
    assert main(["train", "run.dir='~/runs/a'", "hardware=cpu"]) == 0
    assert (home / "runs" / "a" / "config.yaml").is_file()
    assert main(["train", "resume=~/runs/a"]) == 0
    for words in (["eval", "policy='~/runs/a'"], ["train", "algo=grpo", "from=~/runs/a"]):
        assert f"{home}/runs/a has no checkpoint yet" in errors_of(*words)
    assert f"{home}/runs/b: no such run directory" in errors_of("eval", "resume=~/runs/b")
    assert RunKeys(out="~/page").out == f"{home}/page"
    start = StartConfig(run="~/a").run
    run = RunConfig(dir="~/b", before="~/c")
    assert [start, run.dir, run.before] == [f"{home}/{name}" for name in "abc"]
    for words in (["eval", "policy=''"], ["train", "run.before=''"], ["train", "run.dir=''"]):
        assert "got '', expected to have at least 1 character" in errors_of(*words)
    assert {path.name for path in tmp_path.iterdir()} == {"home"}
