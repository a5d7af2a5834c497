"""A disk that is full or read-only: one line that names the file, and a run that goes on from what is saved."""

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from mmrl.cli import main
from mmrl.errors import StorageError, storage
from mmrl.trainer import checkpoint
from tests.helpers.runs import command, contents, saved_each_step


def full(number=errno.ENOSPC):
    return OSError(number, os.strerror(number))


PLACES = ["metrics.jsonl", "journal/", "eval/", "checkpoint-2", "summary.json", "report.html"]


@pytest.mark.parametrize(
    ("name", "number"), [*((place, errno.ENOSPC) for place in PLACES), ("metrics.jsonl", errno.EROFS)]
)
def test_a_full_disk_is_one_line_and_the_run_goes_on_from_what_is_saved(
    name, number, random_model, whole, tmp_path, capsys, monkeypatch
):
    run = tmp_path / "run"
    append = os.write

    def refuse(path):
        if name in path:
            raise full(number)

    def broken_fsync(descriptor):
        refuse(os.readlink(f"/proc/self/fd/{descriptor}"))

    def broken_write(descriptor, data):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        # What is there, then nothing more: step 1 has room in the metrics, and step 2 for half a line.
        if name in path and (name == "eval/" or os.path.getsize(path) > 4000):
            append(descriptor, data[:20])
            refuse(path)
        return append(descriptor, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken_fsync)
        patched.setattr(os, "write", broken_write)
        code = main(saved_each_step(random_model, run))
    shown = capsys.readouterr().err
    (line,) = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert code == 1 and "Traceback" not in shown
    assert name in line and os.strerror(number) in line
    assert f"mmrl train resume={run}" in " ".join(shown.split())
    assert not list(run.rglob("*.tmp")) and not list(run.rglob(".writing-*"))
    assert main(["train", f"resume={run}"]) == 0
    assert contents(run) == contents(whole)


FULL = "No space left on device; free some space"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            RuntimeError("[enforce fail at inline_container.cc:664] . PytorchStreamWriter failed writing file 3"),
            r"PyTorch could not write it, with \d+\.\d\d GB free on its disk; see that a file",
        ),
        (RuntimeError("open file failed with strerror: Read-only file system"), "Read-only file system; see that a"),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), FULL),
        (Exception("No space left on device (os error 28)"), FULL),  # tokenizers
        (OSError(errno.ENOSPC, "No space left on device"), FULL),
    ],
)
def test_what_libraries_say_of_a_disk_is_understood(error, says, tmp_path):
    assert re.search(f"/checkpoint-4: {says}", str(checkpoint._refused(error, tmp_path / "checkpoint-4")))
    with pytest.raises(StorageError, match=says), storage(tmp_path):
        raise error


def test_a_disk_without_room_is_asked_where_torch_gives_no_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with (
        pytest.raises(StorageError, match=r"with 0\.00 GB free on its disk; free some space"),
        storage(tmp_path / "run"),
    ):
        raise RuntimeError("unexpected pos 64 vs 0")


def test_a_folder_that_is_gone_is_understood_and_what_is_no_matter_of_files_stays(tmp_path):
    with pytest.raises(StorageError, match="No such file or directory; see that a file can be"), storage(tmp_path):
        torch.save({}, tmp_path / "removed" / "rng_state_1.pth")
    assert checkpoint._refused(RuntimeError("shapes differ"), tmp_path) is None
    with pytest.raises(ZeroDivisionError), storage(tmp_path):
        raise ZeroDivisionError


@pytest.mark.parametrize("stays", [True, False])
def test_a_path_that_is_missing_since_a_program_moved_the_process_is_put_down_to_that(stays, tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    Path("file").touch()
    with pytest.raises(StorageError, match=r"^file: No such file .*os\.chdir in a program moves"), storage():
        folder = tmp_path / "elsewhere"
        folder.mkdir()
        os.chdir(folder)
        if not stays:
            folder.rmdir()
        Path("file").read_text()


def test_a_run_that_cannot_begin_leaves_its_folder_free(random_model, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(full()))
        assert main(command(random_model, tmp_path / "run", "train.steps=1")) == 1
    assert "environment.json: No space left on device; free some space" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {"run.lock"}
