"""hardware=ray: clusters that cannot take a run are refused in a line each, before a folder is made."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.system import ray_cluster

pytestmark = pytest.mark.ray


@pytest.fixture
def refused(tmp_path: Path, errors_of: Callable[..., str]) -> Callable[..., str]:
    """What is said of a run that is refused, of which nothing may be left."""

    def said(*words: str, run: str = "") -> str:
        err = errors_of("train", "hardware=ray", *words, f"run.dir={run or tmp_path / 'run'}")
        assert not (tmp_path / "run").exists() and not list(tmp_path.glob(".mmrl-*"))
        return err.strip()

    return said


def test_no_cluster(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    err = refused(f"hardware.ray.address={address}")
    assert f"hardware.ray.address: got {address}, expected HOST:PORT of a Ray cluster" in err
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert f"hardware.ray.address: got {address}" in refused()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hardware.processes=3"], "takes 3 CPUs and 0 GPUs on each; the Ray cluster has "),
        (["hardware.nodes=3"], "hardware.processes: got 2 on each of hardware.nodes=3 nodes, which takes 2 CPUs"),
        (["hardware.threads=2"], "takes 4 CPUs and 0 GPUs on each"),
        (["hardware.device=cuda"], "takes 2 CPUs and 2 GPUs on each; the Ray cluster has "),
        (
            ["engine=vllm_server", "engine.python=python", "engine.replicas=3", "model.lora={r: 8}"],
            "training and vLLM servers take 5 CPUs and 0 GPUs together",
        ),
    ],
)
def test_too_small(
    connected: Any, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setattr("mmrl.engines.vllm.command._has_vllm", lambda python: True)
    err = refused(*words)
    assert said in err and len(err.splitlines()) == 1
    assert err.rstrip().endswith("(nodes that are up; no autoscaler is waited for)")


def test_a_folder_of_this_machine_alone(
    connected: Any, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Every process has another folder there.
    err = refused(run="/proc/self/cwd/run")
    assert err.count("expected a folder that all nodes share") == 2


def test_nodes_with_another_mmrl(connected: Any, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "__version__", "9.9")
    assert refused().count("has mmrl 0.1.0, expected 9.9, as here") == 2


def test_a_cluster_of_another_python(
    connected: Any, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    ray.shutdown()
    monkeypatch.setattr("ray._private.utils.compute_version_info", lambda: (ray.__version__, "3.9.0"))
    assert "Version mismatch" in refused()
