"""A run directory: never shared, never overwritten, whole after a kill."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mmrl.errors import CheckpointError, ConfigError, DataError
from mmrl.run.settle import allocate
from mmrl.store.rundir import RunDir
from mmrl.system.files import append_jsonl, atomic_dir, atomic_write, read_jsonl


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "first"


def create(path, **config):
    return RunDir.create(path, config, ["mmrl", "train"])


def test_create_writes_config_and_environment(path):
    with create(path, seed=3, algo={"fork_probs": (0.7, 0.3)}) as run:
        assert run.config == {"seed": 3, "algo": {"fork_probs": [0.7, 0.3]}}
        assert run.environment["command"] == ["mmrl", "train"]
        assert run.environment["versions"]["numpy"]
        assert run.checkpoints.is_dir()
        assert run.summary == {}


def test_a_folder_with_something_in_it_is_refused_and_untouched(path):
    path.mkdir(parents=True)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"run\.dir: .*first exists and is not empty"):
        create(path)
    assert [file.name for file in path.iterdir()] == ["notes.txt"]
    with pytest.raises(ConfigError, match="is a file"):
        create(path / "notes.txt")
    (path / "notes.txt").unlink()
    create(path).close()


@pytest.mark.parametrize(("config", "command"), [({}, "train"), ({"policy": "tiny"}, "eval")])
def test_an_existing_run_is_refused_with_the_way_to_continue_it(path, config, command):
    create(path, **config).close()
    with pytest.raises(ConfigError, match=f"mmrl {command} resume="):
        create(path)


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.isdir("/proc"), reason="needs a place that refuses writes")
def test_a_place_that_cannot_be_written_is_one_error():
    with pytest.raises(ConfigError, match=r"run\.dir: cannot write to /proc"):
        create("/proc/mmrl-run")


def test_a_second_process_is_told_who_holds_the_run(path):
    with create(path):
        code = f"from mmrl.store.rundir import RunDir; RunDir.open({str(path)!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert f"in use by pid {os.getpid()}" in done.stderr
    RunDir.open(path).close()  # free again


def test_names_of_simultaneous_runs_never_collide(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: allocate(tmp_path, "x"), range(40)))
    assert len(set(paths)) == 40
    assert {path.name for path in paths} == {"x", *(f"x-{n}" for n in range(2, 41))}


def test_not_a_run_is_said_with_the_nearest_run(path, tmp_path):
    create(path).close()
    with pytest.raises(CheckpointError, match="no such run"):
        RunDir.read(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"not a run directory.*newest run below it is .*first"):
        RunDir.read(tmp_path)


def test_a_half_written_line_is_forgotten(path):
    with create(path) as run:
        run.append_metrics(1, {"reward/mean": 1.0})
    with open(run.metrics_path, "a") as file:
        file.write('{"step": 2, "rew')
    assert [record["step"] for record in RunDir.read(path).history()] == [1]
    with RunDir.open(path) as run:
        run.append_metrics(2, {"reward/mean": 2.0})
        assert [record["reward/mean"] for record in run.history()] == [1.0, 2.0]


def test_a_broken_line_in_the_middle_is_an_error_with_its_place(path):
    with create(path) as run:
        run.metrics_path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
        with pytest.raises(DataError, match=r"metrics\.jsonl:2: "):
            run.history()


def test_lines_of_one_step_are_merged_in_order(path):
    with create(path) as run:
        run.append_metrics(2, {"reward/mean": 0.5})
        run.append_metrics(2, {"eval/dev/em": 0.25})
        run.append_metrics(0, {"eval/dev/em": 0.0})
        assert run.history() == [{"step": 0, "eval/dev/em": 0.0}, {"step": 2, "reward/mean": 0.5, "eval/dev/em": 0.25}]


def test_truncation_forgets_later_steps_only(path):
    with create(path) as run:
        for step in range(6):
            run.append_metrics(step, {"reward/mean": step / 7})
            run.journal_path(step).write_bytes(b"x")
            run.eval_path(step, "dev").write_text("{}\n")
        before = run.metrics_path.read_bytes()
        run.truncate_after(3)
        assert [record["step"] for record in run.history()] == [0, 1, 2, 3]
        assert before.startswith(run.metrics_path.read_bytes())
        assert run.journal_steps() == [0, 1, 2, 3]
        assert not run.eval_path(4, "dev").exists()
        assert run.eval_path(3, "dev").exists()


WRITER = """
import sys
from mmrl.store.rundir import RunDir
from mmrl.records import Forest
from mmrl.store.journal import write_step
with RunDir.create(sys.argv[1], {}, []) as run:
    print("ready", flush=True)
    for step in range(1, 10**9):
        write_step(run, Forest(calls={}, rollouts=(), modules=("m",) * 3000, step=step))
        run.append_metrics(step, {f"key/{n}": n / 3 for n in range(500)})
"""


@pytest.mark.parametrize("delay", [0.03, 0.11, 0.2])
def test_a_run_killed_while_writing_can_be_continued(path, delay):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    process.stdout.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    from mmrl.store.journal import read_step

    with RunDir.open(path, command=["again"]) as run:
        history = run.history()
        assert [record["step"] for record in history] == list(range(1, len(history) + 1))
        assert all(len(record) == 501 for record in history)
        assert all(len(read_step(run, step)[0].modules) == 3000 for step in run.journal_steps())
        assert len(run.journal_steps()) - len(history) in (0, 1)
        assert not list(path.rglob("*.tmp"))
        assert run.environment["resumed"][0]["command"] == ["again"]


def test_atomic_write_and_append(tmp_path):
    atomic_write(tmp_path / "a", "one")
    atomic_write(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_text() == "two"
    append_jsonl(tmp_path / "b", [])
    assert read_jsonl(tmp_path / "b") == []
    append_jsonl(tmp_path / "b", [{"x": np.int64(1)}, {"x": tmp_path}])
    assert read_jsonl(tmp_path / "b") == [{"x": 1}, {"x": str(tmp_path)}]
    with pytest.raises(TypeError, match="cannot write a object"):
        append_jsonl(tmp_path / "b", [{"x": object()}])
    assert len((tmp_path / "b").read_text().splitlines()) == 2


def test_git_state_of_the_users_folder(tmp_path):
    from mmrl.store.machine import git_state

    assert git_state(tmp_path) is None

    def git(words):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)

    git("init -q")
    git("-c user.name=a -c user.email=b commit -q --allow-empty -mx")
    assert git_state(tmp_path)["dirty"] is False
    (tmp_path / "f").write_text("x")
    git("add f")
    assert git_state(tmp_path)["dirty"] is True


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    with atomic_dir(tmp_path / "whole") as folder:
        (folder / "below").mkdir()
        (folder / "below" / "file").write_text("content")
        assert not (tmp_path / "whole").exists()
    assert (tmp_path / "whole" / "below" / "file").read_text() == "content"
    with pytest.raises(RuntimeError), atomic_dir(tmp_path / "half") as folder:
        (folder / "file").write_text("content")
        raise RuntimeError
    with pytest.raises(OSError), atomic_dir(tmp_path / "whole") as folder:  # never over another one
        (folder / "file").write_text("other")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    assert (tmp_path / "whole" / "below" / "file").is_file()
