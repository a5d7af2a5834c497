"""Preparation of a run: its config settled on this machine, its directory created, its plugins imported.

Called by `cli` and by every command that runs something; what comes after takes the config as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeVar

from mmrl.config import (
    EvalRunConfig,
    RlRunConfig,
    RootConfig,
    StageConfig,
    WeightRunConfig,
    schema_of,
    validate_stored,
)
from mmrl.config.base import flattened, value_at
from mmrl.config.teacher import is_url
from mmrl.config.validate import CHOICES
from mmrl.errors import CheckpointError, ConfigError, located
from mmrl.models.assignment import ModuleAssignment
from mmrl.run.inputs import changed_inputs
from mmrl.store.machine import changed_code
from mmrl.store.policy import prompts_of, run_of
from mmrl.store.rundir import RunDir
from mmrl.system.files import plain
from mmrl.system.objects import OBJECT, import_module, is_registered
from mmrl.system.processes import leads

ConfigT = TypeVar("ConfigT", bound=RootConfig)


def import_plugins(packages: Collection[str]) -> None:
    """Import the packages of `plugins=`; they may add to the literal dicts.

    Raises:
        ConfigError: a package that cannot be imported, or raises when it is.
    """
    # The text is not repeated: it may be an API key pasted into the wrong place.
    if malformed := sum(not all(part.isidentifier() for part in package.split(".")) for package in packages):
        got = f"got {malformed} that {'are' if malformed > 1 else 'is'} none"
        raise ConfigError(f"plugins: {got}, expected names of packages: letters, digits, _ and dots")
    for package in packages:
        import_module("plugins", package)


@dataclass(frozen=True, slots=True)
class Settled(Generic[ConfigT]):
    """A config with all that depends on this machine: what a run is built from, and its directory keeps."""

    config: ConfigT

    def in_folder(self, *below: str, suffix: str = "") -> Settled[ConfigT]:
        """Return a copy with the run directory: the user's, else a new one (`run_folder`)."""
        folder = run_folder(self.config.run.dir, self.config.task.name, *below, suffix=suffix)
        return Settled(self.config.in_folder(folder))

    @property
    def folder(self) -> Path:
        """The run directory."""
        assert self.config.run.dir is not None
        return Path(self.config.run.dir)


def settle(config: ConfigT, device: str | None = None, planned: bool = False) -> Settled[ConfigT]:
    """Fix what depends on this machine (device, threads, engine), so that a resume repeats it.

    A settled config is settled to itself, so a run that is continued goes through here as well: its GPUs may be gone.

    Args:
        device: the device to settle on; None: that of the hardware profile.
        planned: the run is only planned: the devices that it names need not be here.

    Raises:
        ConfigError: GPUs that this machine does not have.
    """
    import torch

    hardware = config.hardware
    device = device or hardware.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # The processes of a run share the CPUs that this one may use, which need not be all of the machine.
    threads = hardware.threads or max(1, len(os.sched_getaffinity(0)) // hardware.processes)
    # Ray's nodes are looked at where the processes are placed (`system.ray_cluster`).
    if device == "cuda" and not planned and hardware.ray is None:
        # Of several machines, the first alone serves, and who is first is not known yet; a server at an address that
        # the user gave has devices of its own.
        serving = hardware.rollout_devices if hardware.nodes == 1 and not config.engine.servers else 0
        _require_gpus(hardware.name, hardware.processes, serving)
    engine = hardware.engine if config.engine.name == "auto" else config.engine.name
    model = config.model
    # A run's prompts do not change at midnight, nor at a resume.
    day = datetime.now().date().isoformat()
    update: dict[str, object] = {
        "hardware": hardware.model_copy(update={"device": device, "threads": threads}),
        "engine": config.engine.model_copy(update={"name": engine}),
        "model": model.model_copy(update={"date": model.date or day}),
    }
    return Settled(config.model_copy(update=update))


def module_assignment(config: WeightRunConfig, modules: Sequence[str]) -> ModuleAssignment:
    """Describe which of a program's modules uses which weights in a training run."""
    answered = {module: endpoint.model for module, endpoint in (config.engine.endpoints or {}).items()}
    return ModuleAssignment(
        model=config.model,
        algo=config.algo,
        modules=tuple(modules),
        answered=answered,
        unlearning=getattr(config.task, "frozen", ()),
        unlearning_key=getattr(config.task, "frozen_key", "task.frozen"),
    )


def _require_gpus(profile: str, training: int, serving: int) -> None:
    """Raise `ConfigError` for GPUs that a hardware profile names and this machine does not have."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"hardware.device: got cuda (hardware={profile}), this machine has no CUDA device")
    available = torch.cuda.device_count()
    if available < training + serving:
        raise ConfigError(
            f"hardware.processes: profile '{profile}' asks for {training} GPUs to train and {serving} to serve "
            f"rollouts, this machine has {available}"
        )


def run_folder(folder: str | None, *below: str, suffix: str = "") -> str:
    """Return the run directory: the user's, else a new one, named by the time, in a folder below `outputs/`."""
    if folder is not None:
        return folder
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return str(allocate(Path("outputs", *below), stamp + suffix))


def allocate(parent: Path, name: str) -> Path:
    """Make and return a new folder `parent/name`, or `name-2`, `name-3`… when others were faster.

    Raises:
        ConfigError: nothing can be made there.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number, path = 1, parent / name
        while True:
            # `mkdir` is the test: two processes can never get the same folder.
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1
                path = parent / f"{name}-{number}"
    except OSError as error:
        raise ConfigError(f"run.dir: cannot make a folder below {parent}: {error.strerror or error}") from None


_SERVERS = (
    *("url", "urls", "router", "key_env", "python", "timeout_s", "start_timeout_s", "sync_timeout_s", "restarts"),
    *("attempts", "max_wait_s", "concurrency", "requests_per_minute"),
)
"""Keys, anywhere, of servers: another address of the same server, or another pace, changes nothing."""


def config_changes(stored: Mapping[str, object], current: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return config path -> (stored value, value now) where they differ, `run.*` left out.

    Raises:
        ConfigError: the stored config is none that this version understands.
    """
    # Validated first: keys that a newer version added have their defaults, and are no difference.
    stored_values = flattened(plain(validate_stored(schema_of(stored), stored).model_dump(mode="json")))
    current_values = flattened(plain(current))
    return {
        path: (stored_values.get(path, "absent"), current_values.get(path, "absent"))
        for path in dict.fromkeys([*current_values, *stored_values])
        if stored_values.get(path) != current_values.get(path)
        and not path.startswith("run.")
        # null is whichever day a run begins on
        and not (path == "model.date" and None in (stored_values.get(path), current_values.get(path)))
    }


def refuse_edits(folder: Path, config: RootConfig) -> None:
    """Refuse to continue a run whose config, or a file that this names, is not the one that it was started with.

    Another machine or another address of a server, which a user may choose, and code of the user's that was mended are
    named in a line on stderr.

    Raises:
        CheckpointError: it is another.
        ConfigError: the copy is damaged.
    """
    run = RunDir.read(folder)
    if "config" not in (facts := run.environment):  # of a run of an earlier version
        return
    if not isinstance(copy := facts["config"], dict):
        raise CheckpointError(f"{folder}/environment.json: config: holds no settings; restore it")
    with located(f"{folder}/environment.json: config: "):
        changes = config_changes(copy, config.model_dump(mode="json"))
    # The steps of a run that was extended are known.
    if "train.steps" in changes and changes["train.steps"][0] in run.planned_steps:
        changes.pop("train.steps")
    changes.pop("start.run", None)  # it may have moved: its content is compared later (`config_of_resumed`)
    texts = {path: f"{path}={new} (was {old})" for path, (old, new) in changes.items()}
    allowed = [
        path
        for path, values in changes.items()
        if path.startswith("hardware.")
        or path.rpartition(".")[2] in _SERVERS
        or (path.startswith("algo.distill.") and all(is_url(str(value)) for value in values))
    ]
    if refused := [text for path, text in texts.items() if path not in allowed]:
        raise CheckpointError(
            f"{folder}/config.yaml: is not the config that the run was started with (environment.json): "
            f"{', '.join(refused)}; put it back, or start a new run"
        )
    if changed := changed_inputs(facts) if leads() else []:  # they may be large, and the others wait for the main one
        raise CheckpointError(
            f"{folder}: other content than when the run was started (environment.json): {', '.join(changed)}; put it "
            "back, or start a new run"
        )
    if code := changed_code(facts):
        print(f"warning: {folder}: has changed since the last start: {', '.join(code)}", file=sys.stderr)
    if texts:
        print(f"warning: {folder}/config.yaml: since the start: {', '.join(texts.values())}", file=sys.stderr)


def weight_run(path: Path) -> tuple[RunDir, WeightRunConfig]:
    """Return the run that has trained the weights of the policy at `path`, and its config with the policy's prompts.

    Of prompts that were optimised from another run (`from=RUN`) that is the run before.

    Raises:
        CheckpointError: no weights were trained, or it is no training run.
    """
    prompts = prompts_of(str(path))[1]
    run = RunDir.read(path)
    if "policy" in run.config:
        raise CheckpointError(f"{path}: this is an evaluation, which has no weights; give the run that it evaluated")
    config = stored_config(path, StageConfig, reading=True)
    if isinstance(config, WeightRunConfig):
        return run, config
    if config.start is not None:
        # Prompts that were optimised for weights that another run has trained.
        start = run_of(config.start.run)
        run, trained = weight_run(start if start.is_dir() else path.absolute().parent / start.name)
        return run, trained.model_copy(update={"task": trained.task.model_copy(update={"prompts": prompts})})
    now = prompts or "the ones that it started with"
    raise CheckpointError(f"{path}: {config.refusal}; its prompts are {now}")


def stored_config(folder: Path, schema: type[ConfigT], *, reading: bool = False) -> ConfigT:
    """Return the config of a run, with its plugins imported; writes nothing.

    A run directory may come from somebody else, and what its config names is their code: it is named in a line on
    stderr before it is imported.

    Args:
        schema: of the runs that are wanted; `RootConfig`: any.
        reading: nothing is to be run: plugins are imported where a name in the config is not built in, else not.

    Raises:
        CheckpointError: it is no run, or one of another kind.
        ConfigError: this version does not understand it.
    """
    # No lock is taken here: the processes of the run take it, and may be others than this one.
    stored = RunDir.read(folder).config
    if not stored.keys() & {"algo", "policy"}:
        raise CheckpointError(f"{folder}/config.yaml: has neither algo nor policy, expected one as in every run's")
    stored_schema = schema_of(stored)
    if not issubclass(stored_schema, schema):
        refusal = (RlRunConfig if schema is EvalRunConfig else stored_schema).refusal
        raise CheckpointError(f"{folder}: {refusal.format(folder=folder)}")
    packages = packages_of(stored) if not reading or _needs_plugins(stored) else []
    announce_code(folder, stored, packages, program=not reading)
    import_plugins(packages)
    # The folder as typed, not as stored: a run directory may have been moved.
    with located(f"{folder}/config.yaml: "):
        return validate_stored(stored_schema, stored).in_folder(str(folder))


def packages_of(stored: Mapping[str, object]) -> list[str]:
    """Return the packages that the config of a run names (`plugins`)."""
    plugins = stored.get("plugins")
    # anything but names is for validation to refuse
    return [name for name in plugins if isinstance(name, str)] if isinstance(plugins, list) else []


def announce_code(folder: Path, stored: Mapping[str, object], packages: Sequence[str], *, program: bool) -> None:
    """Say on stderr which code outside mmrl the config of a run makes this process import.

    Args:
        packages: of `plugins`.
        program: the objects that `task` and `algo` name are imported, too, and `engine.python` and `task.command` are
            started.
    """
    settings = code_outside(stored, packages, program=program)
    if settings := [text for text in settings if not is_registered(text.partition("=")[2])]:  # of this very process
        line = f"{folder}/config.yaml names code that is imported and run now: {', '.join(settings)}"
        print(line, file=sys.stderr, flush=True)


def code_outside(stored: Mapping[str, object], packages: Sequence[str], *, program: bool) -> list[str]:
    """Return the settings of a config, as typed, that name code outside mmrl; arguments as for `announce_code`."""
    sections = {name: stored.get(name) for name in ("task", "algo") if program}
    texts = flattened({name: section for name, section in sections.items() if isinstance(section, Mapping)})
    settings = [f"{key}={value}" for key, value in texts.items() if isinstance(value, str) and OBJECT.fullmatch(value)]
    settings += [f"plugins={','.join(packages)}"] if packages else []
    started = {key: value_at(stored, key) for key in ("engine.python", "task.command") if program}
    return settings + [f"{key}={words}" for key, words in started.items() if words is not None]


def _needs_plugins(stored: Mapping[str, object]) -> bool:
    """True if a name that chooses a section's schema is none of those that are known by now."""
    builtin = {path: {*schemas, "auto"} for path, schemas in CHOICES.items()}
    names = {path: value_at(stored, f"{path}.name") for path in builtin}
    return any(str(name) not in builtin[path] for path, name in names.items() if name)
