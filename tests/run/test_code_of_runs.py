"""What a run directory names is somebody's code: reading it imports nothing that it need not, and says what it does."""

import importlib
import json
import shutil
import sys

import pytest
import yaml

from mmrl.cli import main
from tests.helpers.runs import command

EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


@pytest.fixture(scope="module")
def trained(random_model, tmp_path_factory):
    """A finished run of a built-in task whose config names a package that lies in its folder."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "evil.py").write_text("")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "path", [*sys.path])
        assert main(command(random_model, folder / "run", "algo=mhgpo_fof", "train.steps=1", "plugins=[evil]")) == 0
    (folder / "run" / "evil.py").write_text(EVIL)
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def said_in(monkeypatch, capsys):
    """Exit code and errors of a command that stands in a folder, as whoever was sent one may."""

    def said(folder, *words):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [place for place in sys.path if place != ""])
        monkeypatch.setattr("mmrl.run.build._TASKS", {})
        for name in ("evil", "mine"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        capsys.readouterr()
        return main([*words]), capsys.readouterr().err

    return said


@pytest.mark.parametrize(
    "words",
    [
        ["credit", "run=.", "step=1"],
        ["export", ".", "out=../exported"],
        ["show", "."],
        ["show", ".", "step=1"],
        ["eval", "policy=.", "task=hotpotqa", "eval.items=2", "run.dir=../evaluated", "task.max_tokens=4"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_reading_a_run_imports_nothing_for_what_is_built_in(run, said_in, words):
    code, said = said_in(run, *words)
    assert code == 0, said
    assert not (run / "ran").exists() and "names code" not in said


def test_continuing_a_run_names_its_code_before_it_is_imported(run, said_in):
    code, said = said_in(run, "train", "resume=.", "train.steps=+1")
    assert code == 0, said
    assert (run / "ran").exists()
    assert said.index("config.yaml names code that is imported and run now: plugins=evil") < said.index("step 2/2")


def stored_with(run, **sections):
    """Put sections into the config of a run; the data stay."""
    path = run / "config.yaml"
    stored = yaml.safe_load(path.read_text())
    if "task" in sections:
        sections["task"]["data"] = stored["task"]["data"]
    path.write_text(yaml.safe_dump({**stored, **sections}))
    # As whoever made the run would have it: a config that differs from the copy is refused.
    facts = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps({**facts, "config": {**stored, **sections}}))


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"engine": {"name": "vllm_server", "python": "./evil"}}, "engine.python=./evil"),
        ({"task": {"name": "agent", "command": "sh ./evil"}}, "task.command=sh ./evil"),
    ],
)
def test_a_program_that_a_run_would_start_is_named(section, named, run, said_in):
    stored_with(run, plugins=[], **section)
    said = f"config.yaml names code that is imported and run now: {named}"
    assert said in said_in(run, "train", "resume=.", "train.steps=+1")[1]
    assert said not in said_in(run, "credit", "run=.", "step=1")[1]


def test_an_unknown_name_needs_its_plugin(run, said_in):
    stored_with(run, task={"name": "mine"})
    code, said = said_in(run, "credit", "run=.", "step=1")
    assert (code, (run / "ran").exists()) == (0, True)
    assert "names code that is imported and run now: plugins=evil" in said


PROGRAM = """
import dspy
from pathlib import Path

Path(__file__).with_name("ran").touch()


class Answerer(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)


def metric(example, prediction, trace=None):
    return 1.0
"""


@pytest.fixture
def written(tmp_path):
    """A folder with a program, its data, and nothing of it on the path."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    for name in ("rows", "other"):
        rows = "".join(json.dumps({"question": f"{name}{n}"}) + "\n" for n in range(4))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    return tmp_path


OWN = ["task=dspy", "task.inputs=[question]", "task.data.train=rows.jsonl", "task.data.dev=other.jsonl"]
SHORT = ["algo=mmgrpo", "algo.rollouts=2", "train.steps=1", "train.batch_size=2", "eval.items=2", "task.max_tokens=4"]


def training(model, *words):
    model_words = ["model=hf", f"model.path={model}", "hardware=cpu", "hardware.threads=1"]
    return ["train", *OWN, *SHORT, *model_words, "run.dir=run", *words]


def test_a_users_modules_lie_in_the_current_folder(written, random_model, said_in):
    names = ["task.program=mine:Answerer", "task.metric=mine:metric"]
    code, said = said_in(written, *training(random_model, *names))
    assert code == 0, said
    assert "names code" not in said, "it was typed"
    (written / "ran").unlink()
    code, said = said_in(written, "export", "run", "out=exported")
    assert code == 0, said
    assert "names code that is imported and run now: task.metric=mine:metric, task.program=mine:Answerer" in said
    (written / "ran").unlink()
    for words in (["credit", "run=run", "step=1"],):
        assert said_in(written, *words)[0] == 0 and not (written / "ran").exists()


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("mine:Answerr", "task.program: 'mine' has no 'Answerr'; did you mean 'Answerer'?"),
        ("mime:Answerer", "No module named 'mime'; it is neither installed nor in {folder}; did you mean 'mine'?"),
    ],
)
def test_a_wrong_name_gets_the_near_one(written, random_model, said_in, program, says):
    code, said = said_in(written, *training(random_model, f"task.program={program}", "task.metric=mine:metric"))
    assert code == 2 and says.format(folder=written) in said, said


def test_supervised_runs_are_extended_and_have_no_credit(random_model, tmp_path, capsys, errors_of):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(4)))
    words = ["task=banking77", "algo=sft", "algo.source=file", f"algo.file={tmp_path}/chats.jsonl", "eval.items=2"]
    words += ["train.batch_size=2", "task.max_tokens=2", "model=hf", f"model.path={random_model}", "hardware=cpu"]
    words += ["hardware.threads=1", "model.lora=null", "train.warmup_steps=0", "train.schedule=constant"]
    for name, steps in (("short", 1), ("long", 2)):
        assert main(["train", *words, f"run.dir={tmp_path / name}", f"train.steps={steps}"]) == 0
    assert main(["train", f"resume={tmp_path / 'short'}", "train.steps=+1"]) == 0
    weights = [tmp_path / name / "checkpoints" / "checkpoint-2" / "model.safetensors" for name in ("short", "long")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    capsys.readouterr()
    said = errors_of("credit", f"run={tmp_path / 'long'}", "step=1")
    assert "this run is supervised (algo=sft), so its calls have no credit" in said
