"""`mmrl train stages=[A,B]`: a set whose rows start from one another, in its own folder.

RUN/set.yaml              the words of each row, from which a stopped set goes on
RUN/1_A, RUN/2_B          the rows' run directories
RUN/policy.json           the policy of the last row that has ended
RUN/set.html, …           the set's page
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import yaml

from mmrl.config import StageConfig, StagedCommandConfig, StartConfig
from mmrl.config.base import path_override
from mmrl.errors import CheckpointError, continue_with, storage
from mmrl.models.policy import SET, prompts_of, write_policy
from mmrl.report.overview import damage_named
from mmrl.report.rundir import refuse_full, rows_of
from mmrl.run import session
from mmrl.run.settle import run_folder
from mmrl.sets.found import found_set
from mmrl.sets.page import SetPage, redraw
from mmrl.sets.plan import Compose, Planner
from mmrl.sets.queue import RunQueue, SetRun, State, day_of, state_of
from mmrl.sets.words import read_file
from mmrl.system.conf import later_wins
from mmrl.system.files import JsonObject, atomic_write, read_yaml
from mmrl.system.stop import stoppable

SET_KEYS = ("seed", "run.dir")
"""Keys of its words that the set itself says for each run."""


def begin(config: StageConfig, command: Sequence[str], *, in_process: bool = False) -> int:
    """Start a checked run or chain of runs. Returns the exit code.

    Args:
        in_process: in this process, whose objects no other has.
    """
    if not isinstance(config, StagedCommandConfig):
        return session.begin(config, command)
    folder = Path(run_folder(config.run.dir, config.task.name, config.algo.name, suffix=f"_s{config.seed}"))
    refuse_full(folder)
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / SET, yaml.safe_dump(_written(config), sort_keys=False, allow_unicode=True, width=1000))
    return go_on(folder, _composed(config), command, in_process=in_process)


def resume(folder: Path, config: StageConfig) -> int:
    """Continue a run or chain of runs that was stopped. Returns the exit code."""
    return go_on(folder, _composed(config)) if isinstance(config, StagedCommandConfig) else session.resume(folder)


def _composed(config: StagedCommandConfig) -> Compose:
    """Return a look-up of the rows' configs, composed already: rows of one algorithm have the same words."""
    stages = {_algo(words): stage for words, stage in zip(config.words, config.stages, strict=True)}
    return lambda command, words, config_dir: stages[_algo(words)]


def _algo(words: Sequence[str]) -> str:
    return next(word for word in (word.lstrip("+") for word in words) if word.startswith("algo="))


def differs(folder: Path, config: StagedCommandConfig) -> bool:
    """True if the chain in a folder is another one than `config` asks for."""
    return read_yaml(folder / SET) != _written(config)


def _written(config: StagedCommandConfig) -> JsonObject:
    """Return the content of `set.yaml`."""
    names = [f"{number}_{stage.algo.name}" for number, stage in enumerate(config.stages, 1)]
    rows = {}
    for previous, name, words in zip(["", *names], names, config.words, strict=False):
        overrides = later_wins(word.lstrip("+") for word in words)
        settings = [word for word in overrides if word.partition("=")[0] not in SET_KEYS]
        rows[name] = {**({"from": previous} if previous else {}), "train": settings}
    folder = {"config_dir": str(Path(config.config_dir).resolve())} if config.config_dir else {}
    return {"shows": f"{config.algo.name} on {config.task.name}", "seeds": [config.seed], **folder, "rows": rows}


def chain_page(folder: Path) -> SetPage:
    """Return the page of the started runs of a chain.

    Raises:
        CheckpointError: none has; or a file of one is damaged.
    """
    started = [path for path in rows_of(folder) if (path / "config.yaml").is_file()]
    if not started:
        raise CheckpointError(f"{folder}: none of its runs has begun; continue it with: mmrl train resume={folder}")
    with damage_named(folder):
        shows = read_file(folder / SET).shows
        return SetPage(found_set(folder.resolve().name, started, shows))


def go_on(folder: Path, compose: Compose, command: Sequence[str] = (), *, in_process: bool = False) -> int:
    """Run what is missing of a chain, one run after the other. Returns the exit code of the one that failed.

    Raises:
        CheckpointError: it is finished.
        ConfigError: every problem of the file or of its words; a row's folder holds something else.
    """
    spec = read_file(folder / SET)
    planner = Planner(spec, compose, (), config_dir=spec.config_dir, folder=folder)
    plan = planner.plan(folder.name, [*spec.rows], [*spec.columns], ())
    if all(state_of(run.path) == "finished" for run in plan.queue):
        raise CheckpointError(f"{folder}: this set is finished; look at it with: mmrl show {folder}")

    def ended() -> None:
        finished = [run.path for run in plan.queue if state_of(run.path) == "finished"]
        with storage(folder):
            # After every run, so that a chain killed between two runs can still be evaluated and exported.
            policy = str(finished[-1])
            write_policy(folder, weights=policy, prompts=prompts_of(policy)[1], task=plan.queue[0].config.task.name)
        redraw(lambda: chain_page(folder), folder)

    if in_process:
        for run in plan.queue:
            day = day_of(each.path for each in plan.queue)
            run.code = 0 if state_of(run.path) == "finished" else _in_this_process(run, day, command)
            if run.code:
                break
            ended()
    else:
        with stoppable():
            try:
                RunQueue(plan.queue, 1, spec.config_dir, on_done=ended, attached=True).run()
            except KeyboardInterrupt as stop:
                # A run that was still loading its packages has not said it.
                continue_with(stop, f"mmrl train resume={shlex.quote(str(folder))}")
                raise
    code = next((run.code for run in plan.queue if run.code), 0)
    if not code:
        policy = shlex.quote(path_override("policy", folder))
        hints = f"page           {folder / 'set.html'}\nevaluate       mmrl eval {policy}"
        print(f"\n{chain_page(folder).text()}\n\n{hints}")
    return code


def _in_this_process(run: SetRun, day: str, command: Sequence[str]) -> int:
    if state_of(run.path) == "unfinished":
        return session.resume(run.path)
    assert isinstance(run.config, StageConfig)
    start = StartConfig(run=str(run.after.path)) if run.after is not None else None
    model = run.config.model.model_copy(update={"date": run.config.model.date or day})
    return session.begin(
        run.config.model_copy(update={"start": start, "model": model}).in_folder(str(run.path)), command
    )


def state_of_chain(folder: Path) -> State:
    """Return "finished" where all rows have ended."""
    rows = [folder / name for name in read_file(folder / SET).rows]
    return "finished" if all((path / "summary.json").is_file() for path in rows) else "unfinished"
