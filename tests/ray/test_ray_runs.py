"""hardware=ray: complete runs on a cluster of three nodes, disturbed and not, against those of hardware=cpu2."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from mmrl.cli import main
from mmrl.store.rundir import RunDir
from mmrl.system.conf import later_wins
from scripts.chaos.compare import comparable, differences
from tests.helpers.fake_vllm import fake_vllm
from tests.helpers.watch import started, until

pytestmark = pytest.mark.ray
SMALL = ["algo=mhgpo_rr", "train.steps=4", "train.batch_size=4", "train.save_every=1", "train.keep=9", "eval.items=6"]
SMALL += ["eval.every=0", "hardware.threads=1", "algo.beta=0.001"]
NODES = ["hardware=ray", "hardware.processes=1", "hardware.nodes=2"]


@pytest.fixture
def start(two_nodes: Any, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `mmrl train` in a folder below the test's own; nothing may be left of it."""
    running: list[subprocess.Popen[str]] = []

    def begin(folder: str, *words: str) -> subprocess.Popen[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        running.append(started("train", *later_wins(words), cwd=tmp_path / folder))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()
    until(lambda: not workers())
    nothing_left(two_nodes)


def workers() -> list[psutil.Process]:
    """Processes of runs, the main one first."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [])[-2:] == ["mmrl", "worker"]:
            with suppress(psutil.Error):  # it has ended since
                found.append((process.environ().get("RANK", ""), process))
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]


def nothing_left(cluster: Any) -> None:
    import ray
    from ray._private import state

    # In a process of its own: this one's would count as a driver.
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
        left = [actor["ActorClassName"] for actor in state.actors().values() if actor["State"] != "DEAD"]
        # Ray Train's own: one for each cluster, and one for each killed driver, which asks the dashboard, and there is
        # none here, whether its run has ended.
        assert set(left) <= {"_AutoscalingCoordinatorActor", "PlacementGroupCleaner"}
        groups = ray.util.placement_group_table().values()
        assert {group["state"] for group in groups} <= {"REMOVED"}
    finally:
        ray.shutdown()


def finished(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, out + err
    assert "Traceback" not in out + err
    return out, err


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes of this machine, without Ray."""
    folder = tmp_path_factory.mktemp("undisturbed")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["train", *later_wins([*SMALL, "hardware=cpu2", "run.dir=run"])]) == 0
    finally:
        os.chdir(before)
    return folder / "run"


def assert_equal(expected: Path, actual: Path) -> None:
    """The same to the last bit but for the hardware that the config names."""
    one, two = RunDir.read(expected), RunDir.read(actual)
    assert list(map(comparable, one.history())) == list(map(comparable, two.history()))
    named = {text.partition(":")[0] for text in differences(expected, actual)}
    assert {name for name in named if "training_args" not in name} <= {"config.yaml"}


def test_two_processes_on_two_nodes_have_the_numbers_of_two_on_one_machine(
    start: Callable[..., Any], undisturbed: Path, tmp_path: Path
) -> None:
    out, err = finished(start("whole", *SMALL, *NODES, "run.dir=run"))
    assert out.count("training reward") == 1 and "Warning" not in err and err.count("step 4/4") == 1
    assert_equal(undisturbed, tmp_path / "whole" / "run")


def test_a_process_and_a_node_that_are_killed_change_no_number(
    start: Callable[..., Any], two_nodes: Any, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "killed" / "run"
    process = start("killed", *SMALL, *NODES, "run.dir=run")
    until((run / "checkpoints" / "checkpoint-1").is_dir, process)
    workers()[1].kill()
    until((run / "checkpoints" / "checkpoint-2").is_dir, process)
    node = next(iter(two_nodes.worker_nodes))
    two_nodes.remove_node(node, allow_graceful=False)
    two_nodes.add_node(num_cpus=2, object_store_memory=80 * 2**20)
    out, err = finished(process)
    assert out.count("training reward") == 1
    assert re.findall(r"a process was lost; .*\((.*\))", err) == ["start 1 of 3)", "start 2 of 3)"]
    assert_equal(undisturbed, run)


def has_more_steps(run: Path, done: int) -> bool:
    return (run / "metrics.jsonl").is_file() and len(RunDir.read(run).history()) > done


def test_a_signal_saves_and_the_run_goes_on_to_the_same_numbers(
    start: Callable[..., Any], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "stopped" / "run"
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = start("stopped", *([*SMALL, *NODES, "run.dir=run"] if code == 143 else ["resume=run"]))
        done = len(RunDir.read(run).history()) if code == 130 else 1
        until(partial(has_more_steps, run, done), process)
        process.send_signal(number)
        assert "continue with: mmrl train resume=run" in "".join(finished(process, code))
    finished(start("stopped", "resume=run"))
    assert_equal(undisturbed, run)


def test_a_process_lost_too_often_ends_the_run_which_can_go_on(start: Callable[..., Any], tmp_path: Path) -> None:
    run = tmp_path / "lost" / "run"
    process = start("lost", *SMALL, *NODES, "run.dir=run", "hardware.ray.max_failures=0")
    until((run / "checkpoints" / "checkpoint-1").is_dir, process)
    workers()[0].parent().kill()
    _, err = finished(process, 1)
    assert "lost more often than hardware.ray.max_failures=0" in err
    assert err.splitlines()[-1] == "stopped; continue with: mmrl train resume=run"


def test_a_run_that_waits_for_room_ends_at_a_second_signal(start: Callable[..., Any]) -> None:
    def boards() -> list[Any]:
        return [one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [""])[0] == "ray::Board"]

    words = [*later_wins([*SMALL, "hardware.threads=2", "train.steps=99"]), *NODES, "run.dir=run"]
    start("first", *words)
    until(workers)
    waiting = start("second", *words)
    until(lambda: len(boards()) == 2, waiting)
    for _ in range(2):
        time.sleep(2)
        waiting.send_signal(signal.SIGTERM)
    _, err = finished(waiting, 143)
    assert err == "stopped; continue with: mmrl train resume=run\n"


def test_a_driver_that_is_killed_takes_everything_along(start: Callable[..., Any], tmp_path: Path) -> None:
    process = start("driver", *SMALL, *NODES, "run.dir=run")
    until((tmp_path / "driver" / "run" / "checkpoints" / "checkpoint-1").is_dir, process)
    process.kill()


def test_a_run_that_stops_by_itself_is_not_started_again(start: Callable[..., Any], tmp_path: Path) -> None:
    """Its own process finds the fault, after the cluster has been looked at."""
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "run").mkdir()
    process = start("wrong", *SMALL, *NODES, "run.dir=run")
    until(lambda: workers() or process.poll() is not None)
    (tmp_path / "wrong" / "run" / "mine.txt").touch()
    _, err = finished(process, 2)
    assert "run.dir: run exists and is not empty" in err and "a process was lost" not in err


LENIENT = """from mmrl.engines.vllm.base import PushingEngine

PushingEngine._tolerance = property(lambda engine: 1e9)  # scripted servers know no weights
"""


def test_servers_of_a_run_that_are_killed_lose_no_call(start: Callable[..., Any], tmp_path: Path) -> None:
    program, runs = fake_vllm(tmp_path, context=4096), []
    words = [*SMALL, *NODES, "run.dir=run", "model.lora={r: 8}", "plugins=[lenient]", "algo.zero_variance=keep"]
    words += ["engine=vllm_server", "engine.replicas=2", f"engine.python={program}", "train.steps=3"]
    for name in ("served", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "lenient.py").write_text(LENIENT)
        process = start(name, *words)
        until((folder / "run" / "checkpoints" / "checkpoint-1").is_dir, process)
        found = [one for one in psutil.process_iter(["cmdline"]) if str(program) in (one.info["cmdline"] or [])]
        assert len(found) == 2
        if name == "killed":
            found[0].parent().kill()
        finished(process)
        runs.append(RunDir.read(folder / "run"))
    served, killed = ([comparable(record) for record in run.history()] for run in runs)
    assert [record.pop("engine/restarts") for record in served[1:]] == [0.0] * 3
    assert [record.pop("engine/restarts") for record in killed[1:]][-1] == 1.0
    assert served == killed
