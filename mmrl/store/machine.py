"""`environment.json` of a run directory: versions, machine, git state; `RunDir.create` adds a copy of the config.

What a reader needs to know to run it again.
"""

from __future__ import annotations

import os
import platform
import site
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from mmrl.system.files import JsonObject, file_digest

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM")


def describe_environment(command: Sequence[str]) -> JsonObject:
    """Collect everything that a reader needs to run `command` again, besides the config."""
    # Only if it is loaded anyway: importing it would cost seconds.
    torch = sys.modules.get("torch")
    return {
        "command": list(command),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "cores_usable": usable_cores(),
        "threads": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
        | ({"torch": torch.get_num_threads()} if torch is not None and hasattr(torch, "get_num_threads") else {}),
        "versions": versions(),
        "cwd": str(Path.cwd()),
        "git": git_state(Path.cwd()),
        "mmrl_git": git_state(Path(__file__).parent),
        "mmrl_code": code_digest(),
        "own_code": own_code(),
    }


def own_code() -> dict[str, str]:
    """Return file -> SHA-256 of the modules that are loaded and neither installed nor mmrl's: programs, metrics, data.

    Files below the current folder are named from there.
    """
    places = (sys.prefix, sys.base_prefix, *site.getsitepackages(), site.getusersitepackages())
    installed = tuple(Path(place).resolve() for place in places)
    here, found = Path.cwd(), dict[str, str]()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if not file.endswith(".py") or not _of_user(os.path.abspath(file), installed):
            continue
        path = Path(file).absolute()
        if path.is_file():
            name = path.relative_to(here) if path.is_relative_to(here) else path
            found[str(name)] = file_digest(path)
    return found


@cache  # some 2,700 modules are loaded beside torch
def _of_user(file: str, installed: tuple[Path, ...]) -> bool:
    path = Path(file)
    if path.is_relative_to(Path(__file__).parents[1]):
        return False
    path = path.resolve()
    return not any(path.is_relative_to(place) for place in installed)


def changed_code(facts: JsonObject) -> list[str]:
    """Return the files of the user's code that are others now than in the last start that `environment.json` knows."""
    starts = [facts, *(start for start in facts.get("resumed") or () if isinstance(start, dict))]
    code, folder = starts[-1].get("own_code") or {}, Path(str(starts[-1].get("cwd", "")))
    return [name for name, digest in code.items() if (folder / name).is_file() and file_digest(folder / name) != digest]


@cache
def code_digest() -> str:
    """Return a digest of mmrl's own sources: a commit says nothing of what was changed and not committed."""
    top = Path(__file__).parents[1]
    lines = (f"{path.relative_to(top)} {sha256(path.read_bytes()).hexdigest()}\n" for path in sorted(top.rglob("*.py")))
    return sha256("".join(lines).encode()).hexdigest()


def git_state(folder: Path) -> JsonObject | None:
    """Return `{"commit", "dirty"}` of the repository around `folder`; None without git or outside of a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            # Without optional locks: reading the state must not disturb a git command of the user.
            ["git", "--no-optional-locks", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache  # read from some fifty files, for each run and export
def versions() -> dict[str, str]:
    """Return package -> version: of mmrl, and of what it can use, as far as it is installed."""
    installed = {}
    # Where mmrl itself is not installed, and runs from its source, nobody knows what it requires.
    with suppress(metadata.PackageNotFoundError):
        installed["mmrl"] = metadata.version("mmrl")
        for requirement in map(Requirement, metadata.requires("mmrl") or ()):
            if "dev" not in str(requirement.marker):
                with suppress(metadata.PackageNotFoundError):
                    installed[requirement.name] = metadata.version(requirement.name)
    return installed


def usable_cores() -> int | None:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def cpu_name() -> str:
    """Return the name of this machine's CPU."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
