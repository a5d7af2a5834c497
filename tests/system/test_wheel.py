"""The wheel in an environment of its own, which has what the wheel declares and nothing else."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

TOP = Path(__file__).parents[2]
SOURCES = ("mmrl", "conf", "pyproject.toml", "README.md", "LICENSE")
NOT_DECLARED = ("gguf", "tensorboard", "pytest", "faiss", "fastapi", "sentence_transformers", "vllm")

pytestmark = pytest.mark.slow


def required(by: Distribution, extras: frozenset[str] = frozenset(), seen: set | None = None) -> Iterator[Distribution]:
    """What a distribution needs, and what that needs in turn, as it is installed here."""
    seen = set() if seen is None else seen
    for line in by.requires or ():
        wanted = Requirement(line)
        key = (wanted.name.lower(), frozenset(wanted.extras))
        applies = wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in (*extras, ""))
        if applies and key not in seen:
            seen.add(key)
            found = distribution(wanted.name)
            yield found
            yield from required(found, key[1], seen)


def linked(found: Distribution, packages: Path) -> None:
    """Put an installed distribution into another environment."""
    for name in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
        if not (packages / name).exists():
            (packages / name).symlink_to(Path(str(found.locate_file(name))))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a command of the environment, outside of this repository."""
    top = tmp_path_factory.mktemp("wheel")
    source, environment, here = top / "source", top / "environment", top / "here"
    source.mkdir()
    here.mkdir()
    for name in SOURCES:
        if (TOP / name).is_dir():
            shutil.copytree(TOP / name, source / name, symlinks=True)
        else:
            shutil.copy(TOP / name, source / name)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    variables |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MMRL_CACHE": str(top / "cache")}

    def run(*words: object, at: Path = here) -> str:
        done = subprocess.run([*map(str, words)], cwd=at, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    build = f"from setuptools import build_meta; build_meta.build_wheel({str(top)!r})"
    run(sys.executable, "-c", build, at=source)
    (wheel,) = top.glob("mmrl-*.whl")
    run(sys.executable, "-m", "venv", environment)
    shutil.rmtree(source)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'), end='')"))
    (metadata,) = packages.glob("mmrl-*.dist-info")
    for found in required(PathDistribution(metadata)):
        linked(found, packages)
    return lambda command, *words: run(environment / "bin" / command, *words)


def test_the_environment_has_what_the_wheel_declares_and_nothing_else(run):
    run("python", "-m", "pip", "check")
    code = f"import importlib.util; print([name for name in {NOT_DECLARED} if importlib.util.find_spec(name)])"
    assert run("python", "-c", code).strip() == "[]"
    assert "site-packages" in run("python", "-c", "import mmrl; print(mmrl.__file__)")


SMALL = ["task.max_tokens=8", "eval.items=2", "hardware=cpu", "hardware.threads=1"]
SEARCH = ["algo.auto=null", "algo.num_candidates=2", "algo.num_trials=2", "algo.minibatch=false"]
SEARCH += ["algo.train_items=4", "algo.validation_items=2", "algo.max_bootstrapped_demos=1"]
STEP = ["train.steps=1", "train.warmup_steps=0", "train.batch_size=2", "algo.group_size=2", "algo.beta=0"]


@pytest.mark.parametrize(("algo", "settings"), [("miprov2", SEARCH), ("grpo", STEP)])
def test_a_search_and_a_training_run_there(run, algo, settings, tmp_path):
    run("mmrl", "train", f"algo={algo}", "task=qa_direct", *SMALL, *settings, f"run.dir={tmp_path / 'run'}")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["algo"] == algo and "finished" in summary
    assert "Traceback" not in run("mmrl", "show", tmp_path / "run")
