"""`MMRL`: training of a DSPy program from Python, by the very run that `mmrl train task=dspy` makes.

    from mmrl.optimize import MMRL
    trained = MMRL(metric=metric, algo="mmgrpo", model="hf", **{"model.path": "…"}).compile(
        program, trainset=train, valset=dev)
    trained(question="…")        # plain DSPy, with the trained policy as its LM
    trained.run_dir              # what `mmrl show`, `eval` and `export` take

Nothing is trained here: `mmrl.api` makes and runs the config, which holds the objects by names (`mmrl.system.objects`).
Importing this file imports DSPy.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import dspy
from dspy.teleprompt import Teleprompter

from mmrl import api, run
from mmrl.config import EvalRunConfig, RootConfig, StageConfig, StartConfig
from mmrl.config.base import SHIPPED, value_at
from mmrl.errors import CheckpointError, ConfigError, MmrlError, continue_with, gathered, refuse
from mmrl.rollout.dspy.policy_lm import ServedPolicy, as_trained
from mmrl.rollout.dspy.structure import Structure
from mmrl.store.policy import prompts_of
from mmrl.store.rundir import RunDir, is_run, refuse_full
from mmrl.system.conf import options
from mmrl.system.notebook import as_the_command, outside_of_loops
from mmrl.system.objects import display_name, is_registered, register
from mmrl.tasks.dspy.base import set_prompts

Metric = Callable[..., Any]
HELD_BACK = 5
"""Every n-th example of the trainset is held back for evaluation if there is no valset."""
_NUMBERS = itertools.count(1)


class MMRL(Teleprompter):
    """Trains a DSPy program's modules by reinforcement learning; a DSPy optimiser.

    Args:
        metric: `(example, prediction)` -> a number, or a mapping of numbers with `score`, as for `task.metric`.
        algo: name of an algorithm (`mmrl train algo=`); or several, each a step from the policy of the one before:
            `["miprov2", "mmgrpo"]` optimises prompts, then trains weights with them.
        model: a name of `conf/model`, a folder with weights, or a hub id.
        run_dir: folder of the run; None: a new one below `outputs/`.
        settings: any key of the config, as on the command line. Sections may be mappings:
            `train={"steps": 100}, seed=1, hardware="cpu"`, or `**{"train.steps": 100}`. Of one step of several below
            its name: `miprov2={"algo": {"auto": "light"}}`.
    """

    def __init__(
        self,
        metric: Metric,
        algo: str | Sequence[str] = "mmgrpo",
        model: str | None = None,
        run_dir: Path | str | None = None,
        **settings: Any,
    ):
        super().__init__()
        self.metric, self.algo, self.model, self.run_dir, self.settings = metric, algo, model, run_dir, settings

    def compile(  # DSPy's has **kwargs, which would hide a misspelt argument
        self,
        student: dspy.Module,
        *,
        trainset: Sequence[dspy.Example],
        valset: Sequence[dspy.Example] | None = None,
        algo: str | Sequence[str] | None = None,
        resume: Path | str | None = None,
    ) -> dspy.Module:
        """Train, and return a copy of `student` whose LM is the trained policy, with `run_dir` beside it.

        Args:
            student: its predictors are the modules that are trained; it stays as it is.
            trainset: examples with inputs (`.with_inputs(…)`).
            valset: what is evaluated before and after; None: every fifth example of the trainset is held back for it.
            algo: in place of the optimiser's.
            resume: run directory of a stopped run of the same program and data, which is continued. Of several steps
                the folder of all: steps that have ended are kept, and missing ones start with the settings given now.

        Raises:
            MmrlError: whatever the command would have ended with, in the same words.
        """
        train, dev = _split(list(trainset), None if valset is None else list(valset))
        try:
            folder = outside_of_loops(
                lambda: self._run(
                    student, train, dev, self.algo if algo is None else algo, None if resume is None else Path(resume)
                )
            )
        except ConfigError as error:
            error.args = (display_name(str(error)),)
            error.problems = [display_name(problem) for problem in error.problems]
            raise
        return load(student, folder)

    def _run(
        self,
        student: dspy.Module,
        train: list[dspy.Example],
        dev: list[dspy.Example],
        algo: str | Sequence[str],
        resume: Path | None,
    ) -> Path:
        """Run the training as the command does. Returns the folder of the run, of several steps that of the last."""
        # A copy of the program: what the caller does to it meanwhile is no part of the run.
        given = {"program": student.deepcopy(), "metric": self.metric, "data.train": train, "data.dev": dev}
        from mmrl.run import session

        with as_the_command():
            if not isinstance(algo, str):
                return self._run_steps(given, algo, resume)
            if resume is not None:
                _register_again(given, resume)
                return api.finished(resume, session.resume(resume))
            folder = {} if self.run_dir is None else {"run.dir": self.run_dir}
            words = api.words_of(f"algo={algo}", *self._words(given, self._register(given)), **folder)
            return api.finished(*run.train(_composed(words)))

    def _run_steps(self, given: Mapping[str, Any], algos: Sequence[str], resume: Path | None) -> Path:
        """Run what is missing of several steps in this process. Returns the folder of the last one.

        FOLDER/1_A, FOLDER/2_B     their run directories
        FOLDER/set.html, …         a page with a row for each
        """
        from mmrl.cli.overrides import read_line
        from mmrl.run import session
        from mmrl.run.build import check_model
        from mmrl.run.check import check_all
        from mmrl.run.settle import run_folder
        from mmrl.sets.found import set_of_run_dirs
        from mmrl.sets.page import SetPage, redraw
        from mmrl.sets.queue import day_of
        from mmrl.sets.sweep import job_state
        from mmrl.sets.words import words_of_steps

        if not algos:
            raise ConfigError("algo: got [], expected the name of an algorithm, or several")
        labels = [f"{number}_{algo}" for number, algo in enumerate(algos, start=1)]
        begun = [] if resume is None else _begun(resume, labels)
        names = [_register_again(given, path) for path in begun] or [self._register(given)]
        shared = self._words(given, names[0])
        read_line(shared)  # a key that is given twice
        problems: list[str] = []
        steps = words_of_steps(shared, [*dict.fromkeys(algos)], None, problems)
        configs: list[StageConfig] = []
        for algo in algos:
            with gathered(problems):
                configs.append(_composed(steps[algo]))
                check_all(configs[-1:])
        refuse(dict.fromkeys(problems))
        # Before a folder is made: a model that cannot be had must leave none behind.
        check_model(configs[0])
        if configs[0].run.dir is not None:
            raise ConfigError("run.dir: each step has a folder of its own; the folder of all is run_dir=")
        folder = resume
        if folder is None and self.run_dir is not None:
            folder = Path(self.run_dir)
            refuse_full(folder)
        folder = folder or Path(run_folder(None, "dspy", "+".join(algos), suffix=f"_s{configs[0].seed}"))
        paths = [folder / label for label in labels]
        day = day_of(paths)
        states: list[str] = []
        for number, path in enumerate(paths):
            start = {"run": str(paths[number - 1])} if number else None
            if path in begun:  # where its start lies now is looked up when it goes on
                start = RunDir.read(path).config.get("start")
            model = configs[number].model.model_copy(update={"date": configs[number].model.date or day})
            update = {"start": start and StartConfig.model_validate(start), "model": model}
            configs[number] = configs[number].model_copy(update=update).in_folder(str(path))
            with gathered(problems):
                states.append(job_state(path, configs[number]))
        refuse(problems)

        def page() -> SetPage:
            runs = [path for path in paths if (path / "config.yaml").is_file()]
            return SetPage(set_of_run_dirs(folder.resolve().name, runs, f"{'+'.join(algos)} on dspy"))

        try:
            for config, path, state in zip(configs, paths, states, strict=True):
                if state == "unfinished":
                    api.finished(path, session.resume(path))
                elif state == "new":
                    api.finished(*run.train(config))
                redraw(page, folder)
        except (MmrlError, KeyboardInterrupt) as error:
            if hasattr(error, "__notes__"):  # of the step alone
                error.__notes__ = []
                continue_with(error, f"MMRL(…).compile(…, resume={str(folder)!r}) in Python")
            raise
        print(f"\n{page().text()}\n\npage           {folder / 'set.html'}")
        return paths[-1]

    def _register(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Register the objects under new names. Returns key of `task` -> name."""
        number = next(_NUMBERS)
        # a function's own name, or that of the object's class
        metric_name = re.sub(r"\W", "", getattr(self.metric, "__name__", type(self.metric).__name__))
        # Digests, so that a resume can tell other examples.
        names = {
            "program": f"program_{number}_{type(given['program']).__name__}",
            "metric": f"metric_{number}_{metric_name}",
            "data.train": f"train_{number}_{_digest(given['data.train'])}",
            "data.dev": f"dev_{number}_{_digest(given['data.dev'])}",
        }
        return {key: register(name, given[key]) for key, name in names.items()}

    def _words(self, given: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
        """Return the words for `mmrl.compose`, without `algo=` and `run.dir=`.

        Raises:
            ConfigError: settings that cannot be words.
            ValueError: the first example has no inputs.
        """
        # The task says which other example lacks one of these.
        inputs = list(given["data.train"][0].inputs().keys())
        named = {f"task.{key}": name for key, name in names.items()}
        own = api.words_of(task="dspy", **named, **{"task.inputs": inputs}, **_model_settings(self.model))
        return api.words_of(*own, **self.settings)


def _composed(words: Sequence[str]) -> StageConfig:
    """Return the config of a run of this process."""
    config = api.compose(*words)
    if config.hardware.processes * config.hardware.nodes > 1:
        raise ConfigError("hardware.processes: objects of this process are not in others; see docs/python.md")
    assert isinstance(config, StageConfig)
    return config


def _register_again(given: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Register the objects where the config of a run that goes on finds them. Returns key of `task` -> name.

    Raises:
        CheckpointError: it has no such objects, or was started with other examples.
    """
    from mmrl.run.build import forget_task
    from mmrl.run.settle import stored_config

    run = RunDir.read(folder)
    stored = {key: str(value_at(run.config, f"task.{key}")) for key in given}
    if not all(map(is_registered, stored.values())):
        raise CheckpointError(f"{folder}: was not started from Python; continue it with: mmrl train resume={folder}")
    for split in ("train", "dev"):
        if not stored[f"data.{split}"].endswith(f"_{_digest(given[f'data.{split}'])}"):
            raise CheckpointError(f"{folder}: the {split} examples are not those that the run was started with")
    for key, value in given.items():
        register(stored[key].partition(":")[2], value)
    config = stored_config(run.path, RootConfig)
    # Its task may have been built in this process already, from the objects of before.
    forget_task(config.task, config.seed)
    return stored


def _begun(folder: Path, labels: Sequence[str]) -> list[Path]:
    """Return the steps in a folder that have begun.

    Raises:
        CheckpointError: the folder is none of such steps.
    """
    runs = sorted(path for path in folder.glob("*/") if is_run(path))
    if not folder.is_dir() or is_run(folder) or (other := [run.name for run in runs if run.name not in labels]):
        got = "no such folder" if not folder.is_dir() else "is a run itself" if is_run(folder) else f"has {other[0]}"
        raise CheckpointError(f"{folder}: {got}, expected the folder of {', '.join(labels)}")
    return runs


def load(program: dspy.Module, run_dir: Path | str) -> dspy.Module:
    """Return a copy of `program` whose predictors use the weights and prompts of a run; it runs in plain DSPy.

    Called itself it has the prompts of its training; a part of it called alone has them without `task.prompt_layout`.

    Args:
        program: the one that was trained, as it was written.
        run_dir: a run directory.

    Raises:
        ConfigError: the program has other predictors than the run's, or the run has no checkpoint.
    """
    from mmrl.run.settle import stored_config

    folder = Path(run_dir)
    trained = program.deepcopy()
    trained.set_lm(None)
    structure = Structure(trained)
    served = _served(folder, structure.modules)
    if (prompts := prompts_of(str(folder))[1]) is not None:
        set_prompts(trained, prompts)
    as_trained(trained, served, structure, getattr(stored_config(folder, RootConfig).task, "prompt_layout", "dspy"))
    trained.run_dir = folder
    return trained


def _served(folder: Path, modules: Sequence[str] = ()) -> ServedPolicy:
    """Open the policy of a run, which has to have weights for all of these modules."""
    from mmrl.run.build import fixed_engine
    from mmrl.run.check import served
    from mmrl.run.settle import settle, stored_config

    config = stored_config(folder, RootConfig)
    # With the limits and the engine of training: the program is to speak as it did there.
    shared = {name: getattr(config, name) for name in ("seed", "task", "model", "hardware", "engine", "eval", "run")}
    evaluation = settle(EvalRunConfig(policy=str(folder), plugins=config.plugins, **shared)).config
    policy = served(evaluation)
    if policy.modules is not None and (missing := [name for name in modules if name not in policy.modules]):
        raise ConfigError(
            f"{folder}: has no weights for {', '.join(missing)}; its modules are {', '.join(policy.modules)}"
        )
    # Left open: the engine serves for as long as the program is used.
    resources = ExitStack()
    engine, tokenizer = resources.enter_context(fixed_engine(evaluation, policy, folder, evaluation.policy))
    name, limit = f"mmrl/{folder.name}", config.task.max_tokens
    return ServedPolicy(name, engine, tokenizer, resources, limit, reopen=partial(_served, folder.absolute()))


def _split(train: list[dspy.Example], dev: list[dspy.Example] | None) -> tuple[list[dspy.Example], list[dspy.Example]]:
    """Split the examples into train and dev."""
    if len(train) < (1 if dev is not None else 2):
        raise ConfigError(f"trainset: got {len(train)} examples, expected at least 2, or one and a valset")
    if dev is not None:
        return train, dev
    # Spread over the whole set, which may be sorted.
    held = train[HELD_BACK - 1 :: HELD_BACK] or train[-1:]
    # Compared by identity: an example may occur twice, and one of the two be held back.
    remaining = [example for example in train if not any(example is other for other in held)]
    print(
        f"no valset: {len(held)} of {len(train)} examples of the trainset are held back for evaluation", file=sys.stderr
    )
    return remaining, held


def _digest(examples: Sequence[dspy.Example]) -> str:
    """Return a digest of the examples' contents, so that a run is not continued on different ones."""
    text = json.dumps([dict(example.items()) for example in examples], default=repr, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _model_settings(model: str | None) -> dict[str, str]:
    """Return the settings for `model`: a file of `conf/model`, or any other model with the neutral config."""
    if model is None or model in (names := options("model")):
        return {} if model is None else {"model": model}
    if model in SHIPPED:
        return {"model": "tiny", "model.path": model}
    return {"model": "hf", "model.path": model} if "hf" in names else {"model.path": model}
