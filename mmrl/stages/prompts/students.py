"""Students, which DSPy optimises in the place of programs: modules with their predictors, whose `forward` is a rollout.

DSPy changes the instructions and demonstrations of its predictors; a candidate is the task's program with these. The
prompts of a program without DSPy are predictors of one input and one output: what a module is sent and what it replies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import dspy
from dspy.utils.callback import BaseCallback
from pydantic_core import to_jsonable_python

from mmrl.errors import ConfigError, ParseFailure
from mmrl.records import Example, Forest, Rollout
from mmrl.rollout.dspy.dspy_program import DspyProgram
from mmrl.system.files import JsonObject, plain
from mmrl.tasks.base import Context, Task
from mmrl.tasks.prompts import ModulePrompt, PromptedTask, Shot, last_user

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

    def __init__(self, task: Task, program: DspyProgram, forward: Forward):
        self._task, self._program = task, program
        self.module = program.module.deepcopy()
        self.module.__class__ = _student_class(type(self.module), type(self.module), forward)
        # A program that was compiled before may be compiled again, demonstrations and all.
        self.module._compiled = False
        _distinguish(self.module)

    def candidate(self, state: State) -> DspyCandidate:
        """The task's program with other prompts."""
        module = self._program.module.deepcopy()
        for name, predictor in module.named_predictors():
            # As loading a file of them would.
            predictor.load_state({**copy.deepcopy(state[name]), "lm": None})
        return DspyCandidate(self._task, module, self._program.layout)

    def problem(self, module: str, instructions: str) -> str:
        """The reason why a module cannot have these instructions: none, any text will do."""
        return ""


class DspyCandidate(DspyProgram):
    """A DSPy program with other prompts; it notes what each predictor was sent and gave, as DSPy's own trace has it."""

    def __init__(self, task: Task, module: dspy.Module, layout: str):
        super().__init__(module, layout)
        self.task = _with_program(task, self)
        self.traces: dict[str, tuple[list[JsonObject], JsonObject | None]] = {}
        """Example -> steps, and the one that did not end."""

    async def run(self, example: Example, ctx: Context) -> object:
        """See `DspyProgram.run`."""
        trace: list[tuple[Any, dict[str, Any], dspy.Prediction]] = []
        begun = _Begun()
        try:
            # A context replaces the whole list, in which the user may have callbacks of their own.
            with dspy.context(callbacks=[*(dspy.settings.callbacks or ()), begun]):
                return await self.run_traced(example, ctx, trace)
        finally:
            steps = [{**self._given(*sent), "outputs": as_json(dict(outputs.items()))} for *sent, outputs in trace]
            last = next(reversed(begun.calls.values()), None)
            self.traces[example.id] = (steps, last and self._given(*last))

    def _given(self, predictor: Any, inputs: Mapping[str, object]) -> JsonObject:
        # `BestOfN` and `Refine` run copies of predictors, which have the names of what they were copied from.
        return {"module": self.structure.name_of([predictor]), "inputs": as_json(inputs)}

    def steps(self, forest: Forest, rollout: Rollout) -> list[JsonObject]:
        """Inputs and outputs of each module's calls (`module`, `inputs`, `outputs`), in order.

        A reply that could not be parsed is the last, with `outputs` None and its `text`.
        """
        steps, failed = self.traces.pop(rollout.example, ([], None))
        unread = [call.text for call in forest.path(rollout) if not call.ok]
        if rollout.error == ParseFailure.kind and failed is not None and unread:
            # The reply that could not be read is not in the trace.
            steps = [*steps, {**failed, "outputs": None, "text": unread[-1]}]
        return steps


class _Begun(BaseCallback):
    """Calls of predictors that have begun and not ended well."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Any, dict[str, Any]]] = {}

    def on_module_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """See `BaseCallback`."""
        if isinstance(instance, dspy.Predict):
            self.calls[call_id] = (instance, inputs.get("kwargs", {}))

    def on_module_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """See `BaseCallback`."""
        if exception is None:
            self.calls.pop(call_id, None)


class PromptedStudent:
    """The student of a program without DSPy: one predictor for each module's prompt."""

    suffix = ".yaml"

    def __init__(self, task: Task, forward: Forward):
        assert isinstance(task, PromptedTask)
        self._task, self._prompted = task, task
        self._start = task.prompt_set()
        self.module = _student_class(dspy.Module, type(task.program), forward)()
        self._shown: dict[str, str] = {}
        for name, prompt in self._start.items():
            predictor = dspy.Predict(dspy.Signature("prompt -> reply", prompt.instructions))
            predictor.demos = [dspy.Example(augmented=True, prompt=s.user, reply=s.assistant) for s in prompt.shots]
            # As DSPy shows it: without spaces at its ends, or a sentence of DSPy's own where it is empty.
            self._shown[name] = predictor.signature.instructions
            setattr(self.module, name, predictor)
        _distinguish(self.module)

    def candidate(self, state: State) -> PromptedCandidate:
        """The task's program with other prompts."""
        prompts = {name: self._prompt(name, state[name]) for name in self._start}
        return PromptedCandidate(self._task, self._prompted, prompts)

    def _prompt(self, name: str, state: JsonObject) -> ModulePrompt:
        instructions = state["signature"]["instructions"]
        if instructions == self._shown[name]:
            instructions = self._start[name].instructions
        # A plain example of the task holds no reply of a module.
        shots = [Shot(demo["prompt"], demo["reply"]) for demo in state["demos"] if {"prompt", "reply"} <= set(demo)]
        return ModulePrompt(instructions, tuple(shots))

    def problem(self, module: str, instructions: str) -> str:
        """The reason why a module cannot have these instructions: placeholders that it needs may be missing."""
        try:
            self._prompted.with_prompt_set({module: ModulePrompt(instructions)})
        except ConfigError as error:
            return "; ".join(error.problems)
        return ""


class PromptedCandidate:
    """A program without DSPy, with other prompts."""

    def __init__(self, task: Task, prompted: PromptedTask, prompts: Mapping[str, ModulePrompt]):
        self._prompted, self._prompts = prompted, prompts
        self.task = _with_program(task, prompted.with_prompt_set(prompts))

    def steps(self, forest: Forest, rollout: Rollout) -> list[JsonObject]:
        """See `DspyCandidate.steps`."""
        path = forest.path(rollout)
        steps: list[JsonObject] = []
        for module in self._prompts:
            shot = self._prompted.shot_of(path, module)
            if shot is not None:
                steps.append({"module": module, "inputs": {"prompt": shot.user}, "outputs": {"reply": shot.assistant}})
        if path and not path[-1].ok:
            call = path[-1]
            sent = last_user(call.prompt_text) or call.prompt_text
            steps.append({"module": call.module, "inputs": {"prompt": sent}, "outputs": None, "text": call.text})
        return steps

    def save(self, path: Path) -> None:
        """Write its prompts as `task.prompts=` reads them."""
        self._prompted.write_prompts(path, self._prompts)


Candidate: TypeAlias = DspyCandidate | PromptedCandidate
"""Some prompts as a program."""
Student: TypeAlias = DspyStudent | PromptedStudent
"""The program that DSPy optimises in the place of the task's: `module`; files with its prompts end in `suffix`."""


def student_of(task: Task, forward: Forward) -> Student:
    """The student of a task, whose program has prompts that can be changed (`split.prompt_problems`)."""
    if isinstance(task.program, DspyProgram):
        return DspyStudent(task, task.program, forward)
    return PromptedStudent(task, forward)


def state_of(module: dspy.Module) -> State:
    """All that a candidate is, as JSON: what a saved program is loaded from, but for LMs."""
    own = ("demos", "signature", "fields")
    state = {
        name: {key: value for key, value in predictor.dump_state().items() if key in own}
        for name, predictor in module.named_predictors()
    }
    made: State = as_json(state)
    return made


def _student_class(kind: Any, source: Any, play: Forward) -> Any:
    """A subclass of a module's class whose `forward` is a rollout.

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
    named = module.named_predictors()
    shared = [
        (name, one)
        for name, one in named
        if any(other is not one and other.signature.equals(one.signature) for _, other in named)
    ]
    for name, predictor in shared:
        # One field is enough: equality of signatures looks at all of them.
        field = next(iter(predictor.signature.fields))
        predictor.signature = predictor.signature.with_updated_fields(field, **{MARK: name})


def _with_program(task: Task, program: Any) -> Task:
    """The same task, with the same data, tools and reward, around another program."""
    # Shallow: data, corpora and tools are large, and no candidate changes them.
    made = copy.copy(task)
    made.program = program
    return made


def as_json(value: object) -> JsonObject:
    """A value as JSON would read it back, whatever objects it holds; the same in every process.

    What JSON has no form for becomes text: the value is for prompts, where it would be text as well.
    """
    made: JsonObject = plain(to_jsonable_python(_sorted(value), fallback=str, inf_nan_mode="strings"))
    return made


def _sorted(value: object) -> object:
    """Sort sets, whose order differs between processes."""
    if isinstance(value, Mapping):
        return {str(key): _sorted(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_sorted(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value
