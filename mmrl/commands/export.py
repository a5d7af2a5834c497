"""`mmrl export`: a run's trained weights as a folder that other libraries load, with tokenizer, program and model card.

What is exported is decided first (`Choice`), then written beside the target and renamed, so that the folder is whole
or absent.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mmrl.config import WeightRunConfig
from mmrl.config.base import Section
from mmrl.errors import CheckpointError, ConfigError, storage
from mmrl.models.hub import licence_of
from mmrl.models.merged import require_undamaged
from mmrl.models.save import (
    check_template,
    copy_adapter,
    copy_full,
    ends_note,
    is_local,
    write_ends,
    write_merged,
    write_tokenizer,
)
from mmrl.report.card import CardFacts, is_hub_id, model_card, shorten_path, snippets
from mmrl.report.overview import Overview, damage_named
from mmrl.report.stats import series
from mmrl.run.build import build_task
from mmrl.run.settle import announce_code, module_assignment, weight_run
from mmrl.store.policy import EXTRA, INITIAL, Policy, checkpoint_step, complete_checkpoints, resolve
from mmrl.store.rundir import RunDir
from mmrl.system.files import atomic_dir, dumps, left_beside, user_path
from mmrl.tasks import TASKS
from mmrl.tasks.base import Task
from mmrl.tasks.dspy.base import DspyTask
from mmrl.tasks.prompts import prompts_file

UserPath = Annotated[Path, BeforeValidator(user_path)]
PROGRAM = "program.json"
PROMPTS = "prompts.yaml"
HOLDS = {
    "full": "full weights, of which all parameters were trained",
    "merged": "full weights, the LoRA adapter merged into them",
    "adapter": "the LoRA adapter alone",
}
"""Form of an export -> its weights, in words."""


class ExportArguments(Section):
    """Arguments of `mmrl export`."""

    run_dir: UserPath
    out: UserPath = Field(description="folder that is made")
    checkpoint: str = Field("last", description="last, best (by the run's main metric) or a number of steps")
    form: Literal["merged", "adapter"] | None = Field(
        None, description="of LoRA runs; null: merged, and adapters where modules have their own"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Parts of a policy that are exported."""

    form: Literal["full", "merged", "adapter"]
    adapters: Mapping[str, Path]
    """Folder below the export (empty: the export itself) -> adapter of the checkpoint; none for full weights."""
    modules: Mapping[str, str]
    """Module -> what it speaks with, in words; empty where all share one policy."""
    recorded: Mapping[str, object]
    """Facts of the folder that `policy=` needs (`store.policy.EXTRA`); empty: none."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders with weights below the export; empty where the export holds them itself."""
        return tuple(name for name in self.adapters if name)


def export(request: ExportArguments) -> None:
    """Write the folder, and print how it is used.

    Raises:
        ConfigError: a choice that the run does not have, a folder that is there.
        CheckpointError: no run, no such checkpoint, or a damaged one.
    """
    run, config = weight_run(request.run_dir)
    # Never merged into what is there: two exports in one folder would load as a mixture.
    if os.path.lexists(request.out):
        raise ConfigError(f"out: {request.out} exists, and is left as it is; choose another folder")
    with damage_named(run.path):
        overview = Overview.from_run(run)
    checkpoint = select_checkpoint(overview, request.checkpoint)
    policy = resolve(str(checkpoint))
    require_undamaged(policy, config.model)
    if config.start is not None and (policy.adapter or policy.adapters):
        # Where the run that it started from lies now.
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": policy.base})})
    choice = choose(policy, config, request, overview.modules)
    step = checkpoint_step(checkpoint) or 0
    try:
        request.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: cannot make {request.out.parent}: {error.strerror or error}") from None
    for left in left_beside(request.out):
        print(f"warning: {left} is of an export that was killed; delete it, unless one runs now", file=sys.stderr)
    # Beside the target and renamed: a copy that was interrupted would load, and answer nonsense.
    with storage(request.out), atomic_dir(request.out) as folder:
        notes = _write(folder, request, run, config, checkpoint, choice)
        with damage_named(run.path):
            text = _card(overview, request, config, choice, folder, step)
        (folder / "README.md").write_text(text, encoding="utf-8")
    print(f"exported step {step} of {run.path}: {request.out}")
    for note in notes:
        print(note)
    for name, code in _snippets(request.out, request.out, choice, config, config.model.path):
        print(f"\n{name}:\n" + "\n".join(f"  {line}" for line in code.splitlines()))
    print(f"\nupload it to the hub: hf upload ORG/NAME {request.out} --private")


def select_checkpoint(overview: Overview, text: str) -> Path:
    """Return the checkpoint that `checkpoint=` names.

    Raises:
        ConfigError: neither `last`, `best` nor a step.
        CheckpointError: the run has none such.
    """
    checkpoints = {checkpoint_step(path) or 0: path for path in complete_checkpoints(overview.run.checkpoints)}
    if not checkpoints:
        raise CheckpointError(f"{overview.run.path}: has no checkpoint yet that is complete")
    available = f"(there are: {', '.join(map(str, checkpoints))})"
    if text == "best":
        metric = overview.main_metric
        points = dict(zip(*series(overview.history, f"eval/{overview.split}/{metric}"), strict=True))
        scored = {step: value for step, value in points.items() if step in checkpoints}
        if not scored:
            raise CheckpointError(f"{overview.run.path}: no step with a checkpoint was evaluated {available}")
        # of equal ones the later, which has been trained longer
        step = max(scored, key=lambda step: (scored[step], step))
        print(f"best of the steps with a checkpoint: {step}, {metric} {scored[step]:.4f} on {overview.split}")
    elif text == "last":
        step = max(checkpoints)
    elif text.isascii() and text.isdigit():
        step = int(text)
    else:
        raise ConfigError(f"mmrl export: checkpoint: got '{text}', expected last, best or a step {available}")
    if step not in checkpoints:
        raise CheckpointError(f"{overview.run.path}: has no complete checkpoint of step {step} {available}")
    return checkpoints[step]


def choose(policy: Policy, config: WeightRunConfig, request: ExportArguments, modules: Sequence[str]) -> Choice:
    """Choose what is exported: as asked for, else as the policy has it.

    Args:
        modules: the program's, as far as the run has measured them.

    Raises:
        ConfigError: a form that the run does not have.
    """
    endpoints = {name: f"the endpoint's {endpoint.model}" for name, endpoint in (config.engine.endpoints or {}).items()}
    speaks = dict(policy.modules or {})  # module -> its weights; empty: all share one policy
    # A module that was never trained has the base weights.
    assignment = module_assignment(config, tuple(speaks))
    frozen = {*assignment.frozen_adapters, INITIAL}
    lora, per_module = policy.adapter is not None or bool(policy.adapters), bool(policy.adapters)
    if request.form == "adapter" and not lora:
        raise ConfigError("form: got adapter, and the run trained all parameters (model.lora is null); leave form out")
    form = (request.form or ("adapter" if per_module else "merged")) if lora else "full"
    folders = policy.adapters if policy.adapter is None else {"": policy.adapter}
    # An adapter that was never trained stays where adapters are served; merged it would be a copy of the base.
    adapters = {name: Path(folder) for name, folder in folders.items() if form == "adapter" or name not in frozen}
    if not (speaks or endpoints):
        return Choice(form=form, adapters=adapters, modules={}, recorded={})
    base = f"the base model, {shorten_path(config.model.path)} (frozen)"
    words = {
        name: base if weights in frozen else f"`{weights}/`" if per_module else "these weights"
        for name, weights in speaks.items()
    }
    words = words or dict.fromkeys(modules, "these weights")
    recorded: dict[str, object] = {}
    if speaks and form != "merged":
        recorded = {"modules": speaks, **({} if per_module else {"base": policy.initial})}
    return Choice(form=form, adapters=adapters, modules={**words, **endpoints}, recorded=recorded)


def _write(
    folder: Path, request: ExportArguments, run: RunDir, config: WeightRunConfig, checkpoint: Path, choice: Choice
) -> list[str]:
    """Write all files but the card. Returns notes for the user."""
    notes = []
    targets = [folder / name for name in choice.adapters] or [folder]
    base = config.model.path
    if choice.form == "full":
        copy_full(checkpoint, folder)
    for name, adapter in choice.adapters.items():
        if choice.form == "adapter":
            copy_adapter(adapter, base, config.model, folder / name)
        else:
            dtype = write_merged(base, adapter, config.model, folder / name)
            notes.append(f"merged into {base}, in its own type ({dtype})" + (f": {name}/" if name else ""))
    tokenizer = write_tokenizer(checkpoint, targets)
    if choice.form == "adapter":
        notes += filter(None, [ends_note(tokenizer, config.model)])
    else:
        for target in targets:
            write_ends(target, tokenizer)
    check_template(targets[0], config.model)
    notes.append("chat template checked: the same token ids as in training")
    if choice.recorded:
        (folder / EXTRA).write_text(dumps(choice.recorded, indent=1) + "\n", encoding="utf-8")
    if config.task.prompts is not None:
        prompts = prompts_file(str(config.task.prompts), config.task.name)
        if prompts.suffix != ".json":  # the state of a DSPy program, which `program.json` holds
            shutil.copyfile(prompts, folder / PROMPTS)
    return notes + _write_program(folder, run.path, config)


def _write_program(folder: Path, run: Path, config: WeightRunConfig) -> list[str]:
    """Write `program.json`, which plain DSPy loads, where the task is a DSPy program."""
    factory = TASKS.get(config.task.name)
    # Other tasks are not built for this: their corpora may be large.
    if isinstance(factory, type) and not issubclass(factory, DspyTask):
        return []
    announce_code(run, {"task": config.task.model_dump()}, (), program=True)
    try:
        task: Task = build_task(config.task, config.seed)
    except ConfigError as error:
        return [f"warning: {PROGRAM} is left out, the task cannot be built here: {error.problems[0]}"]
    if not (isinstance(task, DspyTask) and task.predictors):
        return []
    from mmrl.rollout.dspy.dspy_program import DspyProgram

    assert isinstance(task.program, DspyProgram)
    task.program.save(folder / PROGRAM)
    return [f"{PROGRAM}: the DSPy program's prompts, for program.load"]


def _snippets(
    name: Path, folder: Path, choice: Choice, config: WeightRunConfig, base: str
) -> Iterator[tuple[str, str]]:
    """Return the code that uses `folder` under the name `name`, and the base model under `base`."""
    rank = config.model.lora.r if choice.form == "adapter" and config.model.lora is not None else None
    spoken = choice.recorded.get("modules")
    modules = tuple(spoken) if isinstance(spoken, dict) else ()
    layout = getattr(config.task, "prompt_layout", "dspy") if (folder / PROGRAM).is_file() else None
    revision = None if is_local(config.model.path) else config.model.revision
    return snippets(name, choice.folders, base, rank, modules=modules, program=layout, revision=revision)


def _card(
    overview: Overview, request: ExportArguments, config: WeightRunConfig, choice: Choice, folder: Path, step: int
) -> str:
    where = Path(request.out.name)
    holds = HOLDS[choice.form]
    if names := choice.folders:
        holds += f", in {len(names)} folders ({', '.join(names)}), one for each module or group of modules"
    files = {split: source.partition(":")[0] for split, source in config.task.data.files.items()}
    facts = CardFacts(
        title=where.name,
        step=step,
        holds=f"This folder holds {holds}.",
        kind="adapter" if choice.form == "adapter" else "merged",
        licence=licence_of(config.model.path, config.model.revision),
        modules=choice.modules,
        prompts=_prompt_paragraphs(folder),
        snippets=dict(_snippets(where, folder, choice, config, shorten_path(config.model.path))),
        # data of the hub, which have a name that others know
        data={split: name for split, name in files.items() if name.count("/") == 1 and is_hub_id(name)},
    )
    return model_card(overview, facts)


def _prompt_paragraphs(folder: Path) -> list[str]:
    """Return the prompts of the program, as they lie in the export."""
    for name in (PROMPTS, PROGRAM):
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8")
            return [f"Prompts (`{name}`):", f"````{name.rpartition('.')[2]}\n{text.rstrip()}\n````"]
    return []
