"""Students, which DSPy optimises in the place of programs: modules with their predictors, whose `forward` is a rollout.

DSPy changes the instructions and demonstrations of its predictors; a candidate is the task's program with these. The
prompts of a program without DSPy are predictors of one input and one output: what a module is sent and what it replies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import dspy
from pydantic_core import to_jsonable_python

from mmrl.errors import ConfigError, ParseFailure
from mmrl.records import Example, Forest, Rollout
from mmrl.rollout.dspy.dspy_program import DspyProgram
from mmrl.system.files import JsonObject, plain
from mmrl.tasks.base import Context, Program, Task
from mmrl.tasks.prompts import ModulePrompt, PromptedTask, Prompts, Shot, last_user

MARK = "mmrl_module"
"""Key in the description of a signature's field: the predictor that it belongs to."""
State = Mapping[str, JsonObject]
"""Module -> what DSPy saves of its predictor: instructions, fields, demonstrations. All that a candidate is."""
Forward = Callable[[dspy.Module, Mapping[str, object]], dspy.Prediction]
"""A student's `forward`: its prompts and the inputs of an example, to the prediction of a rollout."""


class DspyStudent:
    """The student of a DSPy program: a copy of it, predictors and all.

    Its class has the name and source of the user's, which some optimisers show to the prompt model.
    """

    suffix = ".json"

    def __init__(self, program: DspyProgram, forward: Forward):
        self._program = program
        self.module = program.module.deepcopy()
        self.module.__class__ = _student_class(type(self.module), type(self.module), forward)
        # A program that was compiled before may be compiled again, demonstrations and all.
        self.module._compiled = False
        _distinguish(self.module)

    def program(self, state: State) -> TracedProgram:
        """Return the task's program with other prompts."""
        module = self._program.module.deepcopy()
        for name, predictor in module.named_predictors():
            # As loading a file of them would.
            predictor.load_state({**copy.deepcopy(state[name]), "lm": None})
        return TracedProgram(module, self._program.layout)

    def steps(self, program: Program, forest: Forest, rollout: Rollout) -> list[JsonObject]:
        """Return the `module`, `inputs` and `outputs` of each module's calls in a program's rollout, in order.

        A reply that could not be parsed, and ended the rollout, is the last, with `outputs` None and its `text`.
        """
        assert isinstance(program, TracedProgram)
        steps = []
        for predictor, inputs, outputs in program.trace:
            # `BestOfN` and `Refine` run copies of predictors, which have the names of what they were copied from.
            step = {"module": program.structure.name_of([predictor]), "inputs": as_json(inputs)}
            if outputs is not None:
                steps.append({**step, "outputs": as_json(dict(outputs.items()))})
            elif rollout.error == ParseFailure.kind:
                unread = [call.text for call in forest.path(rollout) if not call.ok]
                steps.append({**step, "outputs": None, "text": unread[-1]})
        return steps

    def save(self, state: State, path: Path) -> None:
        """Write prompts as `task.prompts=` reads them, and DSPy's `load`."""
        self.program(state).save(path)

    def problem(self, module: str, instructions: str) -> str:
        """Return the reason why a module cannot have these instructions: none, any text will do."""
        return ""


class TracedProgram(DspyProgram):
    """A DSPy program that keeps DSPy's trace of its run (`DspyProgram.run_traced`): each rollout has a copy of it."""

    trace: Sequence[Any] = ()

    async def run(self, example: Example, ctx: Context) -> object:
        """See `DspyProgram.run`."""
        self.trace = trace = list[Any]()
        return await self.run_traced(example, ctx, trace)


class PromptedStudent:
    """The student of a program without DSPy: one predictor for each module's prompt."""

    suffix = ".yaml"

    def __init__(self, task: PromptedTask, kind: type, forward: Forward):
        self._task, self._start = task, task.all_prompts.by_module()
        self.module = _student_class(dspy.Module, kind, forward)()
        self._displayed: dict[str, str] = {}
        for name, prompt in self._start.items():
            predictor = dspy.Predict(dspy.Signature("prompt -> reply", prompt.instructions))
            predictor.demos = [dspy.Example(augmented=True, prompt=s.user, reply=s.assistant) for s in prompt.shots]
            # As DSPy shows it: without spaces at its ends, or a sentence of DSPy's own where it is empty.
            self._displayed[name] = predictor.signature.instructions
            setattr(self.module, name, predictor)
        _distinguish(self.module)

    def program(self, state: State) -> Program:
        """See `DspyStudent.program`."""
        return self._task.make_program(self._prompts(state))

    def _prompts(self, state: State) -> Prompts:
        return self._task.all_prompts.replaced({name: self._prompt(name, state[name]) for name in self._start})

    def _prompt(self, name: str, state: JsonObject) -> ModulePrompt:
        instructions = state["signature"]["instructions"]
        if instructions == self._displayed[name]:
            instructions = self._start[name].instructions
        # A plain example of the task holds no reply of a module.
        shots = [Shot(demo["prompt"], demo["reply"]) for demo in state["demos"] if {"prompt", "reply"} <= set(demo)]
        return ModulePrompt(instructions, tuple(shots))

    def steps(self, program: Program, forest: Forest, rollout: Rollout) -> list[JsonObject]:
        """See `DspyStudent.steps`."""
        path = forest.path(rollout)
        steps: list[JsonObject] = []
        for module in self._start:
            shot = self._task.shot_of(path, module)
            if shot is not None:
                steps.append({"module": module, "inputs": {"prompt": shot.user}, "outputs": {"reply": shot.assistant}})
        if path and not path[-1].ok:
            call = path[-1]
            sent = last_user(call.prompt_text) or call.prompt_text
            steps.append({"module": call.module, "inputs": {"prompt": sent}, "outputs": None, "text": call.text})
        return steps

    def save(self, state: State, path: Path) -> None:
        """Write prompts as `task.prompts=` reads them."""
        self._prompts(state).write(path)

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
    return PromptedStudent(task, type(task.program), forward)


def state_of(module: dspy.Module) -> State:
    """Return a candidate as JSON: the state that a saved program is loaded from, but for LMs."""
    parts = ("demos", "signature", "fields")
    state = {
        name: {key: value for key, value in predictor.dump_state().items() if key in parts}
        for name, predictor in module.named_predictors()
    }
    serialized: State = as_json(state)
    return serialized


def _student_class(kind: Any, source: Any, play: Forward) -> Any:
    """Return a subclass of a module's class whose `forward` is a rollout.

    Args:
        source: the class whose name and place, and with them source code, it has.
    """

    def forward(self: dspy.Module, **inputs: object) -> dspy.Prediction:
        return play(self, inputs)

    names = {"__module__": source.__module__, "__qualname__": source.__qualname__, "__doc__": source.__doc__}
    return type(kind)(source.__name__, (kind,), {**names, "forward": forward})


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
