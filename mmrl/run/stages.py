"""`mmrl train`, whatever the kind of stage; and runs of several stages, each from the policy of the one before.

A run of several stages is a folder whose `stages/1_NAME`, `stages/2_NAME` … are run directories of their own, gone
through in turn by the code that runs a stage alone. What it has of its own is a summary: the evaluations of all stages
in one history, what each stage has cost and gained, and `policy.json`, the policy of the last stage that has ended.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from mmrl.config import (
    EvalCommandConfig,
    PromptCommandConfig,
    SftCommandConfig,
    StageConfig,
    StagedCommandConfig,
    TrainCommandConfig,
)
from mmrl.errors import CheckpointError, ConfigError, storage
from mmrl.models.policy import STAGES, newest_checkpoint, prompts_of, require_undamaged, resolve, write_policy
from mmrl.report.rundir import RunDir, step_of
from mmrl.run import train as weights
from mmrl.run.check import check_all
from mmrl.run.queue import holds_only_leftovers
from mmrl.run.settle import run_folder, schema_of, stored_config
from mmrl.system.files import atomic_dir, atomic_write, dumps, plain, read_jsonl


def begin(config: StageConfig | StagedCommandConfig, command: Sequence[str], resumed: bool = False) -> int:
    """Start a checked run, or continue the one in `run.dir`. Returns the exit code."""
    if isinstance(config, TrainCommandConfig):
        return weights.train(config, command, resumed)
    if isinstance(config, StagedCommandConfig):
        return _in_turn(config, command, resumed)
    from mmrl.run.improve import improve

    return improve(config, command, resumed)


def resume(folder: Path) -> int:
    """Continue a stopped or killed run, to the numbers that it would have had."""
    schema = schema_of(RunDir.read(folder).config)
    # an evaluation is refused in words of its own
    config = stored_config(folder, TrainCommandConfig if schema is EvalCommandConfig else schema)
    assert isinstance(config, TrainCommandConfig | PromptCommandConfig | SftCommandConfig | StagedCommandConfig)
    return begin(config, ["mmrl", "train", f"resume={folder}"], resumed=True)


def _in_turn(config: StagedCommandConfig, command: Sequence[str], resumed: bool) -> int:
    """All stages of a run, from the first that has not ended."""
    folder = run_folder(config.run.dir, config.task.name, config.algo.name, suffix=f"_s{config.seed}")
    config = config.in_folder(folder)
    stored = plain(config.model_dump(mode="json"))
    opened = RunDir.open(folder, command) if resumed else RunDir.create(folder, stored, command)
    with opened as rundir:
        if rundir.finished:
            raise CheckpointError(f"{folder}: this run is finished; look at it with: mmrl show {folder}")
        stages: list[Path] = []
        for number, stage in enumerate(config.stages, start=1):
            assert isinstance(stage, TrainCommandConfig | PromptCommandConfig | SftCommandConfig)
            path = rundir.path / STAGES / f"{number}_{stage.algo.name}"
            print(f"-- stage {number} of {len(config.stages)}: {stage.algo.name}")
            if code := _one(stage, path, stages[-1] if stages else None, command):
                return code
            stages.append(path)
            with storage(rundir.path):
                write_policy(rundir.path, weights=str(path), prompts=prompts_of(str(path))[1], task=config.task.name)
                _gather(rundir, stages)
        return _finish(config, rundir, stages)


def _one(stage: StageConfig, path: Path, before: Path | None, command: Sequence[str]) -> int:
    """One stage: started, continued, or left as it is where it has ended."""
    if (path / "config.yaml").is_file():
        if (run := RunDir.read(path)).finished:
            if changed := run.ledger.changed(None):
                file, problem = next(iter(changed.items()))
                raise CheckpointError(f"{file} {problem}; restore it from a copy, or start a new run")
            print(f"ended before: {path}")
            return 0
        if before is not None:
            _refuse_moved(run, after(stage, before))
        return resume(path)
    if path.is_dir():  # a kill came before its config was written
        if not holds_only_leftovers(path):
            raise CheckpointError(f"{path}: has no config.yaml; restore it from a copy, or move the folder away")
        shutil.rmtree(path)
    made = stage if before is None else after(stage, before)
    if before is not None:
        check_all([made.in_folder(None)])  # prompts and weights are there only now
    return begin(made.in_folder(str(path)), command)


def _refuse_moved(run: RunDir, now: StageConfig) -> None:
    """Raises `CheckpointError` where a stage under way began with other files than those of this folder."""
    config = stored_config(run.path, type(now))
    pairs = (("model.path", config.model.path, now.model.path), ("task.prompts", config.task.prompts, now.task.prompts))
    for key, began, here in pairs:
        # Both may be files, typed in two ways.
        if began != here and Path(str(began)).resolve() != Path(str(here)).resolve():
            raise CheckpointError(
                f"{run.path}: began with {key}={began}, and the stage before is {here} now: the run was moved, or is "
                "continued from another folder; put it back, or continue it from the folder that it was started in"
            )


def after(stage: StageConfig, before: Path) -> StageConfig:
    """A stage from the policy that the run `before` has made: its weights, and its prompts.

    Raises:
        ConfigError: weights that no further stage can start from.
    """
    policy = resolve(str(before))
    require_undamaged(policy)
    changed: dict[str, object] = {}
    if policy.modules:
        raise ConfigError(
            f"stages: {before.name} has trained weights for each module apart (model.modules, algo.frozen_serving), "
            "from which no further stage can start; make it the last stage"
        )
    path = policy.base if policy.adapter is None else _merged(before, stage)
    if path != stage.model.path:
        changed["model"] = stage.model.model_copy(update={"path": path, "revision": None})
    if (prompts := prompts_of(str(before))[1]) is not None:
        changed["task"] = stage.task.model_copy(update={"prompts": prompts})
    return stage.model_copy(update=changed)


def _merged(before: Path, stage: StageConfig) -> str:
    """The weights of a run with its adapter merged into them: what is trained next gets an adapter of its own.

    So the reference of a KL term is the policy that the stage starts from.
    """
    from mmrl.models.save import write_merged, write_tokenizer

    target = before / "merged"
    checkpoint = newest_checkpoint(before)
    assert checkpoint is not None
    if not (target / "config.json").is_file():
        with atomic_dir(target) as folder:
            write_merged(resolve(str(before)).base, checkpoint, stage.model, folder)
            write_tokenizer(checkpoint, [folder])
    return str(target)


def _gather(rundir: RunDir, stages: Sequence[Path]) -> None:
    """Bring the history and the evaluations of the ended stages together in the run's own files, each step once.

    Steps count through all stages. Where a stage begins, the evaluation is that of the end of the stage before: of the
    same policy, evaluated once more in the folder of the later stage.
    """
    lines: dict[int, dict[str, object]] = {}
    offset = 0
    for path in stages:
        run = RunDir.read(path)
        for record in run.history():
            step = offset + int(record["step"])
            lines[step] = {**record, **lines.get(step, {}), "step": step}
        for file in sorted((path / "eval").glob("step-*.jsonl")):
            step, split = step_of(file) or 0, file.stem.split("-", 2)[2]
            if step or not offset:
                atomic_write(rundir.eval_path(offset + step, split), file.read_text(encoding="utf-8"))
        offset = max(lines, default=0)
    atomic_write(rundir.metrics_path, "".join(dumps(lines[step]) + "\n" for step in sorted(lines)))


def _finish(config: StagedCommandConfig, rundir: RunDir, stages: Sequence[Path]) -> int:
    """Summary and report of all stages."""
    from mmrl.report.console import finish

    last = max(step for file in (rundir.path / "eval").glob("step-*.jsonl") if (step := step_of(file)) is not None)
    split, metric = config.eval.split, str(RunDir.read(stages[-1]).summary.get("main_metric"))
    summaries = [RunDir.read(path).summary for path in stages]
    text = finish(
        rundir,
        {**dict(summaries[-1].get("facts") or {}), "stages": ", ".join(path.name for path in stages)},
        read_jsonl(rundir.eval_path(0, split)),
        read_jsonl(rundir.eval_path(last, split)),
        seed=config.seed,
        split=split,
        bootstrap=config.eval.bootstrap,
        seconds=sum(float(summary.get("seconds") or 0.0) for summary in summaries),
        main_metric=metric,
    )
    print(text)
    return 0 if rundir.finished else 1
