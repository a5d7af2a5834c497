"""The command line: help, one clear error for each mistake, exit code 2, light imports; credit; stops."""

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from mmrl.cli import main
from mmrl.cli.arguments import ShowArguments
from mmrl.cli.configs import configured
from mmrl.cli.new_task import NewTaskArguments
from mmrl.config import ALGO_SCHEMAS
from mmrl.config.retriever import IndexInfoArguments, SearchIndexArguments, ServeIndexArguments, build_schema
from mmrl.report.rundir import RunDir
from mmrl.run.export import ExportArguments
from mmrl.sets.command import SetKeys
from scripts.fuzz import command_lines

COMMANDS = [name for name in command_lines.COMMANDS if " " not in name]


def test_help_imports_neither_torch_nor_hydra():
    code = (
        "import sys; from mmrl.cli import main; code = main(['--help']);"
        "heavy = {'torch', 'hydra', 'transformers', 'numpy', 'pydantic'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f"  {command}  " in done.stdout
    for algo in ALGO_SCHEMAS:
        assert algo in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["trian"], 2, "Did you mean 'train'?"),
        (["train", "algo=nope"], 2, "error: algo: got 'nope'"),
        (["eval"], 2, "policy: missing"),
        (["eval", "policy=./nowhere"], 2, "policy: got './nowhere'"),
        (["show"], 2, "expected one: mmrl show RUN_DIR"),
        (["show", "nowhere"], 2, "nowhere"),
        (["train", "resume=nowhere"], 2, "nowhere: no such run directory"),
        (["train", "resume=nowhere", "seed=3"], 2, "remove seed=3"),
        (["train", "task.data.train=missing.json"], 2, "task.data.train"),
        (["train", "task.reward=judge"], 2, "task.reward: got 'judge'"),
        (["train", "train.batch_size=1000000"], 2, "train.batch_size: got 1000000"),
        (["train", "algo.minibatches=25"], 2, "algo.minibatches: got 25"),
        (["train", "model=hf", "model.path=./nowhere"], 2, "model.path: './nowhere' is no folder"),
        (["train", "model.path=./nowhere"], 2, "use model=hf model.path=./nowhere"),
        (["train", "hardware.sharding=fsdp2"], 2, "hardware.sharding: got fsdp2"),
        (["train", "model.path=tinny"], 2, "did you mean 'tiny'?"),
        (["train", "-m", "seed=1,2", "run.dir=x"], 2, "run.dir: the runs of a sweep"),
        (["train", "run.dir=/dev/null"], 2, "run.dir: /dev/null is a file"),
    ],
)
def test_mistakes_end_with_exit_code_2_and_no_traceback(arguments, code, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert not (tmp_path / "outputs").exists(), "nothing may be written before the input is known to be right"


def test_a_profile_for_a_gpu_is_refused_where_there_is_none(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["train", "hardware=gpu1"]) == 2
    assert "this machine has no CUDA device" in capsys.readouterr().err


def test_a_run_directory_in_use_is_never_overwritten(tmp_path, capsys):
    (tmp_path / "precious.txt").write_text("mine")
    assert main(["train", f"run.dir={tmp_path}"]) == 2
    assert "run.dir" in capsys.readouterr().err
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_cfg_job_prints_the_composed_config():
    done = subprocess.run(
        [sys.executable, "-m", "mmrl", "train", "algo=mhgpo_is", "--cfg", "job"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "name: mhgpo_is" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["algo=mhgpo_fof"], "rollouts: expected a file"),
        (["rollouts=x.json"], "algo: missing"),
        (["algo=mhgpo_fo", "rollouts=x.json"], "did you mean 'mhgpo_fof'?"),
        (["algo=mhgpo_fof", "rollouts=x.json"], "x.json"),
        (["algo=mhgpo_fof", "rollouts=x.json", "train.lr=1"], "train.lr: has no effect on mmrl credit"),
        (["algo=mhgpo_fof", "rollouts=x.json", "seed=x"], "seed: got 'x'"),
    ],
)
def test_mistakes_of_credit(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["credit", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_job_that_a_launcher_lost_is_counted_as_not_finished(monkeypatch, tmp_path, capsys):
    """Jobs may run in other processes (submitit): what they leave behind is files, and they are pickled."""
    from mmrl.cli import configs

    def only_the_first(line, job):
        assert pickle.loads(pickle.dumps(job)).args == job.args
        job(lambda: configured(["seed=1"]))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(configs, "swept", only_the_first)
    monkeypatch.setattr("mmrl.sets.sweep.check_all", lambda *_: None)
    monkeypatch.setattr("mmrl.sets.sweep.begin", lambda config, command: 0)
    assert main(["train", "-m", "seed=1,2"]) == 1
    said = capsys.readouterr()
    assert "-- job 1 of 2: algo=mhgpo_rr task=hotpotqa seed=1" in said.out
    assert "sweep: 1 of 2 runs finished" in said.err
    assert not list((tmp_path / "outputs").glob(".sweep-*")) and not list(tmp_path.rglob("*_s1"))


def test_a_sweep_with_folders_of_its_own_keeps_what_is_finished_and_continues_the_rest(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "-m", "seed=0,1,2", "train.steps=2", "run.dir=runs/s${seed}"]
    for seed in (0, 1):
        config = configured([f"seed={seed}", "train.steps=2"])
        with RunDir.create(f"runs/s{seed}", config.model_dump(mode="json"), ["mmrl"]) as run:
            if seed == 0:
                run.write_summary({"main_metric": "f1"})
                (run.path / "report.html").write_text("<html></html>")
    done = []
    monkeypatch.setattr("mmrl.sets.sweep.begin", lambda config, command: done.append(("train", config.run.dir)) or 0)
    monkeypatch.setattr("mmrl.sets.sweep.resume", lambda folder, config: done.append(("resume", str(folder))) or 0)
    assert main(words) == 0
    assert done == [("resume", "runs/s1"), ("train", "runs/s2")]
    assert "finished before, kept: runs/s0" in capsys.readouterr().out
    assert main([word.replace("steps=2", "steps=3") for word in words]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and len(done) == 2
    assert errors[0].startswith("error: run.dir: runs/s0 holds a run with other settings: train.steps=2 (requested: 3)")


def test_sigterm_while_packages_load_is_said(monkeypatch, capsys):
    monkeypatch.setattr("mmrl.cli._dispatch", lambda words: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(5))
    assert main(["train"]) == 143
    assert capsys.readouterr().err == "stopped by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


PLAN = """
import sys
import time
from mmrl.cli import main
code = main(["plan", "task.data.train=nowhere.json", "task.dataset=hotpotqa"])
assert code == 2
heavy = {"torch", "transformers"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""


def test_a_plan_refuses_a_data_file_before_torch_loads():
    done = subprocess.run([sys.executable, "-c", PLAN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("error: task.data.train: ")


LIGHT = """
import sys
import time
from mmrl.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "hydra", "omegaconf", "transformers", "trl", "numpy", "yaml"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize("command", command_lines.COMMANDS)
def test_help_of_a_command_is_its_own_and_light(command):
    done = subprocess.run([sys.executable, "-c", LIGHT, *command.split(), "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: mmrl {command} ")
    assert f"  mmrl {command}" in done.stdout or command == "index", "an example"
    assert "Compose a run from" not in done.stdout and max(map(len, done.stdout.splitlines())) <= 120
    for other in set(COMMANDS) - {command.split()[0]}:
        assert f"    mmrl {other} " not in done.stdout


def test_help_names_every_key_of_a_command_that_reads_its_own(capsys):
    sections = {
        "show": ShowArguments,
        "export": ExportArguments,
        "index build": build_schema(["retriever=dense"]),
        "index info": IndexInfoArguments,
        "index search": SearchIndexArguments,
        "serve-retriever": ServeIndexArguments,
        "new-task": NewTaskArguments,
    }
    for command, section in sections.items():
        assert main([*command.split(), "--help"]) == 0
        shown = capsys.readouterr().out
        keys = set(section.model_fields) - {"run_dir", "name"}
        assert {key for key in keys if f"{key}=" not in shown} == set(), command
    assert main(["compare", "--help"]) == 0
    shown = capsys.readouterr().out
    assert {key for key in SetKeys.model_fields if f"{key}=" not in shown} == set()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["index", "biuld"], "Did you mean 'build'?"),
        (["report"], "Missing parameter: run_dir"),
        (["report", "a", "b"], "unexpected extra argument"),
        (["show", "run", "step=x"], "mmrl show: step: got 'x', expected integer"),
        (["show", "run", "exmple=x"], "did you mean 'example'?"),
        (["train", "resume=a", "resume=b"], "resume: given more than once"),
        (["train", "--config-dir"], "--config-dir/-cd: expected one argument"),
        (["train", "seed=interval(0,3)", "-m"], "seed=interval(0,3): "),
    ],
)
def test_words_that_no_command_takes_are_named_on_one_line(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and len(error.splitlines()) == 1


def test_ctrl_c_while_a_command_is_starting_is_said(capsys, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("mmrl.cli.arguments.read_arguments", stopped)
    assert main(["show", "run"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
