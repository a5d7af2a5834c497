"""The door of a run: its config settled once on this machine, its directory placed once, its plugins imported.

Called by `cli` and by every command that runs something; what comes after takes the config as it is.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from mmrl.config import RootConfig, TrainCommandConfig, validate_stored
from mmrl.errors import CheckpointError, ConfigError
from mmrl.report.rundir import RunDir, allocate

ConfigT = TypeVar("ConfigT", bound=RootConfig)


def import_plugins(packages: Iterable[str]) -> None:
    """Import the packages of `plugins=`; they may add to the literal dicts. The current folder is searched last.

    Raises:
        ConfigError: a package that cannot be imported, or raises when it is.
    """
    here = str(Path.cwd())
    for package in packages:
        if here not in sys.path and "" not in sys.path:
            sys.path.append(here)  # `python -m` puts it there, the `mmrl` command does not
        try:
            importlib.import_module(package)
        except ConfigError:
            raise
        except ImportError as error:
            raise ConfigError(f"plugins: cannot import '{package}' ({error})") from error
        except Exception as error:  # the user's own code: where it failed is what they need
            raise ConfigError(f"plugins: cannot import '{package}' ({_where(error)})") from error


def _where(error: Exception) -> str:
    """The error and the file and line that raised it."""
    if isinstance(error, SyntaxError):
        return f"{error.filename} line {error.lineno}: {type(error).__name__}: {error.msg}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename} line {last.lineno}: {type(error).__name__}: {error}"


def settle(config: ConfigT) -> ConfigT:
    """Fix what depends on this machine (device, threads, engine), so that a resume repeats it.

    Raises:
        ConfigError: GPUs that this machine does not have.
    """
    settled = _settled(config, config.hardware.device)
    refuse_absent(settled)
    return settled


def plannable(config: TrainCommandConfig, device: str | None) -> TrainCommandConfig:
    """`settle` for a run that is only planned: the devices it names need not be here.

    Args:
        device: name of the device that is planned for; None: the hardware profile's own.
    """
    return _settled(config, "cpu" if device == "cpu" else "cuda" if device else config.hardware.device)


def _settled(config: ConfigT, device: str) -> ConfigT:
    import torch

    hardware = config.hardware
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # The processes of a run share the CPUs that this one may use, which need not be all of the machine.
    threads = hardware.threads or max(1, len(os.sched_getaffinity(0)) // hardware.processes)
    engine = hardware.engine if config.engine.name == "auto" else config.engine.name
    return config.model_copy(
        update={
            "hardware": hardware.model_copy(update={"device": device, "threads": threads}),
            "engine": config.engine.model_copy(update={"name": engine}),
        }
    )


def refuse_absent(config: RootConfig) -> None:
    """Raises `ConfigError` for GPUs that this machine does not have."""
    import torch

    hardware = config.hardware
    if hardware.device != "cuda":
        return
    if not torch.cuda.is_available():
        raise ConfigError(f"hardware.device: got cuda (hardware={hardware.name}), this machine has no CUDA device")
    # Of several machines, the first alone serves, and who is first is not known yet; a server at an address that the
    # user gave has devices of its own.
    serving = hardware.rollout_devices if hardware.nodes == 1 and config.engine.server is None else 0
    here = torch.cuda.device_count()
    if here < hardware.processes + serving:
        raise ConfigError(
            f"hardware.processes: profile '{hardware.name}' asks for {hardware.processes} GPUs to train"
            + (f" and {serving} to serve rollouts" if serving else "")
            + f", this machine has {here}; set hardware.processes, or take another profile"
        )


def placed(config: ConfigT) -> ConfigT:
    """The config with a run directory: the user's, else a new one below `outputs/`."""
    if config.run.dir is not None:
        return config
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    below = Path("outputs") / config.task.name
    if isinstance(config, TrainCommandConfig):
        return in_folder(config, allocate(below / config.algo.name, f"{stamp}_s{config.seed}"))
    return in_folder(config, allocate(below / "eval", stamp))


def in_folder(config: ConfigT, folder: Path | None) -> ConfigT:
    """The config with this run directory; None: with none, as a user leaves it out."""
    where = None if folder is None else str(folder)
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": where})})


def stored_config(folder: Path, schema: type[ConfigT]) -> ConfigT:
    """The config of a run that is to be continued, with its plugins imported; writes nothing.

    Raises:
        CheckpointError: it is no run, or one of the other command.
        ConfigError: this version does not understand it.
    """
    stored = RunDir.read(folder).config
    # Each command's config has a key that the other's has not.
    other, key = ("eval", "policy") if schema is TrainCommandConfig else ("train", "algo")
    if key in stored:
        raise CheckpointError(
            f"{folder}: this is a run of mmrl {other}; continue it with: mmrl {other} resume={folder}"
        )
    import_plugins(stored.get("plugins", ()))
    try:
        return in_folder(validate_stored(schema, stored), folder)
    except ConfigError as error:
        raise ConfigError(f"{folder}/config.yaml: {problem}" for problem in error.problems) from None
