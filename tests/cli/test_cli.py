"""The command line: help, one clear error for each mistake, exit code 2, light imports; credit; stops."""

import os
import pickle
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import yaml

from mmrl.cli import main
from mmrl.cli.arguments import ShowArguments
from mmrl.cli.configs import configured
from mmrl.cli.new_task import NewTaskArguments
from mmrl.commands.export import ExportArguments
from mmrl.config import ALGO_SCHEMAS
from mmrl.config.retriever import ServeIndexArguments, build_schema
from mmrl.run.check import Checked
from mmrl.sets.command import SetKeys
from mmrl.store.rundir import RunDir
from mmrl.system.files import plain
from tests.fuzz import command_lines
from tests.helpers import TOP

COMMANDS = [name for name in command_lines.COMMANDS if " " not in name]


def test_a_job_that_a_launcher_lost_is_counted_as_not_finished(monkeypatch, tmp_path, capsys):
    """Jobs may run in other processes (submitit): what they leave behind is files, and they are pickled."""
    from mmrl.cli import configs

    def only_the_first(line, job):
        assert pickle.loads(pickle.dumps(job)).args == job.args
        job(lambda: configured(["seed=1"]))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(configs, "swept", only_the_first)
    monkeypatch.setattr("mmrl.sets.sweep.check_all", lambda configs: [Checked(config) for config in configs])
    monkeypatch.setattr("mmrl.sets.sweep.begin", lambda checked: (tmp_path, 0))
    assert main(["train", "-m", "seed=1,2"]) == 1
    said = capsys.readouterr()
    assert "-- job 1 of 2: algo=mhgpo_rr task=hotpotqa seed=1" in said.out
    assert "sweep: 1 of 2 runs finished" in said.err
    assert not list((tmp_path / "outputs").glob(".sweep-*")) and not list(tmp_path.rglob("*_s1"))


def test_a_sweep_with_folders_of_its_own_keeps_what_is_finished_and_continues_the_rest(
    monkeypatch, tmp_path, capsys, errors_of
):
    monkeypatch.chdir(tmp_path)
    words = ["train", "-m", "seed=0,1,2", "train.steps=2", "run.dir=runs/s${seed}"]
    for seed in (0, 1):
        config = configured([f"seed={seed}", "train.steps=2"])
        with RunDir.create(f"runs/s{seed}", config.model_dump(mode="json"), ["mmrl"]) as run:
            if seed == 0:
                run.write_summary({"main_metric": "f1"})
                (run.path / "report.html").write_text("<html></html>")
    done = []

    def begin(checked):
        done.append(("train", checked.config.run.dir))
        return tmp_path, 0

    monkeypatch.setattr("mmrl.sets.sweep.begin", begin)
    monkeypatch.setattr("mmrl.sets.sweep.resume", lambda folder: done.append(("resume", str(folder))) or 0)
    assert main(words) == 0
    assert done == [("resume", "runs/s1"), ("train", "runs/s2")]
    assert "finished before, kept: runs/s0" in capsys.readouterr().out
    errors = errors_of(*(word.replace("steps=2", "steps=3") for word in words)).splitlines()
    assert len(errors) == 2 and len(done) == 2
    assert errors[0].startswith("error: run.dir: runs/s0 holds a run with other settings: train.steps=2 (requested: 3)")


def test_sigterm_while_packages_load_is_said(monkeypatch, capsys):
    monkeypatch.setattr("mmrl.cli._dispatch", lambda words: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(5))
    assert main(["train"]) == 143
    assert capsys.readouterr().err == "stopped by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


ALONE = """
import sys
from mmrl.cli import main
code = main(sys.argv[1:])
print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""
CREDIT = f"credit algo=mhgpo_fof,mhgpo_rr,mmgrpo rollouts={TOP}/docs/forests/agents.json --json"


@pytest.mark.parametrize(
    ("line", "code", "heavy"),
    [
        ("--help", 0, "torch hydra transformers numpy pydantic"),
        *(
            (f"{command} --help", 0, "torch hydra omegaconf transformers trl numpy yaml")
            for command in command_lines.COMMANDS
        ),
        (CREDIT, 0, "torch transformers trl dspy datasets numpy httpx openai rich mmrl.tasks"),
        ("plan task.data.train=nowhere.json task.dataset=hotpotqa", 2, "torch transformers"),
    ],
)
def test_a_command_that_needs_no_heavy_package_loads_none(line, code, heavy):
    """How long it takes to start is measured by `make bench`."""
    done = subprocess.run([sys.executable, "-c", ALONE, *line.split()], capture_output=True, text=True)
    *errors, loaded = done.stderr.splitlines()
    assert (done.returncode, len(errors)) == (code, code // 2), errors
    assert not set(loaded.split()) & set(heavy.split())


def test_help_names_every_command_and_algorithm(output_of):
    shown = output_of("--help")
    assert [name for name in COMMANDS if f"  {name}  " not in shown] == []
    assert [name for name in ALGO_SCHEMAS if name not in shown] == []


@pytest.mark.parametrize("command", command_lines.COMMANDS)
def test_help_of_a_command_is_its_own(command, output_of):
    shown = output_of(*command.split(), "--help")
    assert shown.startswith(f"Usage: mmrl {command} ")
    assert f"  mmrl {command}" in shown or command == "index", "an example"
    assert "Compose a run from" not in shown and max(map(len, shown.splitlines())) <= 120
    for other in set(COMMANDS) - {command.split()[0]}:
        assert f"    mmrl {other} " not in shown


def test_help_names_every_key_of_a_command_that_reads_its_own(output_of):
    sections: dict[str, Any] = {
        "show": ShowArguments,
        "export": ExportArguments,
        "index build": build_schema(["retriever=dense"]),
        "serve-retriever": ServeIndexArguments,
        "new-task": NewTaskArguments,
        "compare": SetKeys,
    }
    for command, section in sections.items():
        shown = output_of(*command.split(), "--help")
        keys = set(section.model_fields) - {"run_dir", *(["name"] if command == "new-task" else [])}
        assert {key for key in keys if f"{key}=" not in shown} == set(), command


@pytest.mark.parametrize(
    ("words", "as_typed"),
    [
        (["help"], ["--help"]),
        (["help", "train"], ["train", "--help"]),
        (["index", "build", "help"], ["index", "build", "-h"]),
    ],
)
def test_help_is_a_word_too(words, as_typed, capsys):
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert main(as_typed) == 0 and printed == capsys.readouterr().out and "Usage: mmrl" in printed


def test_the_whole_config_is_printed_before_a_run(capsys):
    assert main(["train", "algo=grpo", "--cfg", "full"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown == plain(configured(["algo=grpo"]).model_dump(mode="json"))
    assert shown["train"]["save_every"] and shown["algo"]["clip_high"] is not False
    assert main(["eval", "policy=tiny", "--cfg", "full"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["split"] == "dev"


def test_a_refused_setting_that_nobody_has_typed_names_what_has_set_it(random_model, errors_of, tmp_path):
    words = [
        "task=search_agent",
        "model=hf",
        f"model.path={random_model}",
        "train.steps=1",
        f"run.dir={tmp_path / 'run'}",
    ]
    said = errors_of("train", "algo=grpo", *words)
    assert "train.warmup_steps: got 20, expected less than the run's 2 optimizer steps (set by algo=grpo;" in said
    said = errors_of("train", "algo=grpo", "train.warmup_steps=20", *words)
    assert "2 optimizer steps" in said and "set by" not in said
