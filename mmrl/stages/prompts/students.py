"""Students, which DSPy optimises in the place of programs: modules with their predictors, whose `forward` is a rollout.

DSPy changes the instructions and demonstrations of its predictors; a candidate is the task's program with these. The
prompts of a program without DSPy are predictors of one input and one output: what a module is sent and what it replies.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import dspy
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from pydantic_core import to_jsonable_python

from mmrl import rng
from mmrl.errors import ConfigError, ParseFailure
from mmrl.records import Call, Example, Rollout
from mmrl.rollout.dspy.dspy_program import DspyProgram
from mmrl.system.files import JsonObject, plain
from mmrl.tasks.base import Context, Program, Task
from mmrl.tasks.prompts import ModulePrompt, PromptedTask, Prompts, Shot, last_user

MARK = "mmrl_module"
"""Key in the description of a signature's field: the predictor that it belongs to."""
State = Mapping[str, JsonObject]
"""Module -> what DSPy saves of its predictor: instructions, fields, demonstrations. All that a candidate is."""
Step: TypeAlias = tuple[str, JsonObject, dspy.Prediction | FailedPrediction]
"""Call of a module in a rollout: its name, inputs and outputs; the reply that could not be parsed and ended it."""
Forward = Callable[..., dspy.Prediction]


class DspyStudent:
    """The student of a DSPy program: a copy of it, predictors and all."""

    suffix = ".json"
    source: str | None = None
    """Source of the program for the prompt model; None: DSPy finds it."""

    def __init__(self, program: DspyProgram, forward: Forward):
        self._program = program
        self.module = program.module.deepcopy()
        # Of the object, not of its class: DSPy's copies have it too, and its proposers read the class's source.
        self.module.forward = forward
        # A program that was compiled before may be compiled again, demonstrations and all.
        self.module._compiled = False
        _distinguish(self.module)

    def program(self, module: dspy.Module) -> Program:
        """Return a program of one rollout of a candidate."""
        return TracedProgram(self._program, module)

    def steps(self, program: Program, path: Sequence[Call], rollout: Rollout) -> list[Step]:
        """Return the calls of a program's rollout, in order."""
        assert isinstance(program, TracedProgram)
        steps, named = list[Step](), {name for name, _ in self.module.named_predictors()}
        for predictor, inputs, outputs in program.trace:
            # `BestOfN` and `Refine` run copies of predictors, which have the names of what they were copied from.
            name = program.structure.name_of([predictor])
            if name is None or name not in named:
                continue  # the advice of `Refine`
            if outputs is not None:
                steps.append((name, as_json(inputs), dspy.Prediction(base=as_json(dict(outputs.items())))))
            elif rollout.error == ParseFailure.kind:
                steps.append((name, as_json(inputs), _unread(path)))
        return steps

    def save(self, module: dspy.Module, path: Path) -> None:
        """Write a candidate's prompts as `task.prompts=` reads them, and DSPy's `load`."""
        TracedProgram(self._program, module).save(path)

    def problem(self, module: str, instructions: str) -> str:
        """Return the reason why a module cannot have these instructions: none, any text will do."""
        return ""


class TracedProgram(DspyProgram):
    """A candidate in one rollout, with DSPy's trace of it (`DspyProgram.run_traced`)."""

    def __init__(self, program: DspyProgram, candidate: dspy.Module):
        vars(self).update(vars(program))
        # With the predictors of the candidate and the `forward` of its class; `Structure` knows copies of predictors.
        self.module = copy.copy(candidate)
        vars(self.module).pop("forward", None)
        self.trace = list[Any]()

    async def run(self, example: Example, ctx: Context) -> object:
        """See `DspyProgram.run`."""
        return await self.run_traced(example, ctx, self.trace)


class PromptedStudent:
    """The student of a program without DSPy: one predictor for each module's prompt."""

    suffix = ".yaml"

    def __init__(self, task: PromptedTask, program: Program, forward: Forward):
        self._task, self._start = task, task.all_prompts.by_module()
        self.source = ""
        with suppress(OSError, TypeError):  # of a notebook
            self.source = inspect.getsource(type(program))
        self.module = dspy.Module()
        self.module.forward = forward
        self._displayed: dict[str, str] = {}
        for name, prompt in self._start.items():
            predictor = dspy.Predict(dspy.Signature("prompt -> reply", prompt.instructions))
            predictor.demos = [dspy.Example(augmented=True, prompt=s.user, reply=s.assistant) for s in prompt.shots]
            # As DSPy shows it: without spaces at its ends, or a sentence of DSPy's own where it is empty.
            self._displayed[name] = predictor.signature.instructions
            setattr(self.module, name, predictor)
        _distinguish(self.module)

    def program(self, module: dspy.Module) -> Program:
        """See `DspyStudent.program`."""
        return self._task.make_program(self._prompts(module))

    def _prompts(self, module: dspy.Module) -> Prompts:
        return self._task.all_prompts.replaced({name: self._prompt(name, p) for name, p in module.named_predictors()})

    def _prompt(self, name: str, predictor: dspy.Predict) -> ModulePrompt:
        instructions = predictor.signature.instructions
        if instructions == self._displayed[name]:
            instructions = self._start[name].instructions
        # A plain example of the task holds no reply of a module.
        shots = [Shot(demo["prompt"], demo["reply"]) for demo in predictor.demos if {"prompt", "reply"} <= {*demo}]
        return ModulePrompt(instructions, tuple(shots))

    def steps(self, program: Program, path: Sequence[Call], rollout: Rollout) -> list[Step]:
        """See `DspyStudent.steps`."""
        shots = [(module, shot) for module in self._start if (shot := self._task.shot_of(path, module)) is not None]
        steps: list[Step] = [
            (module, {"prompt": shot.user}, dspy.Prediction(reply=shot.assistant)) for module, shot in shots
        ]
        if path and not path[-1].ok:
            sent = last_user(path[-1].prompt_text) or path[-1].prompt_text
            steps.append((path[-1].module, {"prompt": sent}, _unread(path)))
        return steps

    def save(self, module: dspy.Module, path: Path) -> None:
        """Write a candidate's prompts as `task.prompts=` reads them."""
        self._prompts(module).write(path)

    def problem(self, module: str, instructions: str) -> str:
        """Return the reason why a module cannot have these instructions: placeholders that it needs may be missing."""
        try:
            self._task.all_prompts.replaced({module: ModulePrompt(instructions)})
        except ConfigError as error:
            return "; ".join(error.problems)
        return ""


Student: TypeAlias = DspyStudent | PromptedStudent
"""The program that DSPy optimises in the place of the task's: `module`; files with its prompts end in `suffix`."""


def student_of(task: Task, forward: Forward) -> Student:
    """Return the student of a task, whose program has prompts that can be changed (`split.prompt_problems`)."""
    if isinstance(task.program, DspyProgram):
        return DspyStudent(task.program, forward)
    assert isinstance(task, PromptedTask)
    return PromptedStudent(task, task.program, forward)


def module_state(module: dspy.Module) -> State:
    """Return a candidate as JSON: the state that a saved program is loaded from, but for LMs."""
    parts = ("demos", "signature", "fields")
    state = {
        name: {key: value for key, value in predictor.dump_state().items() if key in parts}
        for name, predictor in module.named_predictors()
    }
    serialized: State = as_json(state)
    return serialized


def digest_of(state: State) -> str:
    """Return the name of a candidate."""
    return f"{rng.digest(json.dumps(state, sort_keys=True)):032x}"


def _unread(path: Sequence[Call]) -> FailedPrediction:
    """Return the last reply that could not be parsed, as GEPA reads it."""
    return FailedPrediction(completion_text=next(call.text for call in reversed(path) if not call.ok))


def _distinguish(module: dspy.Module) -> None:
    """Give predictors with equal signatures unequal ones: GEPA knows a predictor's part of a trace by its signature.

    The mark is beside what prompts are made of, and no saved program has it.
    """
    predictors = module.named_predictors()
    shared = [
        (name, predictor)
        for name, predictor in predictors
        if any(other is not predictor and other.signature.equals(predictor.signature) for _, other in predictors)
    ]
    for name, predictor in shared:
        # One field is enough: equality of signatures looks at all of them.
        field = next(iter(predictor.signature.fields))
        predictor.signature = predictor.signature.with_updated_fields(field, **{MARK: name})


def as_json(value: object) -> JsonObject:
    """Return a value as JSON would read it back, whatever objects it holds; the same in every process.

    What JSON has no form for becomes text: the value is for prompts, where it would be text as well.
    """
    serialized: JsonObject = plain(to_jsonable_python(_sorted(value), fallback=str, inf_nan_mode="strings"))
    return serialized


def _sorted(value: object) -> object:
    """Sort sets, whose order differs between processes."""
    if isinstance(value, Mapping):
        return {str(key): _sorted(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_sorted(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value
