"""What DSPy optimises in the place of a task's program: a module with its predictors whose `forward` is a rollout.

DSPy changes the instructions and demonstrations of its predictors; a candidate is the task's program with these.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import dspy

from mmrl.errors import ConfigError
from mmrl.records import Example, Forest, Rollout
from mmrl.rollout.dspy.dspy_program import DspyProgram
from mmrl.stages.prompts.rollouts import Candidate, Rollouts, State, Student
from mmrl.stages.prompts.store import as_json
from mmrl.system.files import JsonObject
from mmrl.tasks.base import Context, Task

MARK = "mmrl_module"
"""Key in the description of a signature's fields: the predictor that it belongs to."""


class DspyStudent:
    """The student of a task with a DSPy program: a copy of it, predictors and all.

    Its class has the name and source of the user's, which some optimisers show to the prompt model.
    """

    def __init__(self, task: Task, rollouts: Rollouts):
        assert isinstance(task.program, DspyProgram)
        self._task, self._program = task, task.program
        self.module = task.program.module.deepcopy()
        self.module.__class__ = student_class(type(self.module), rollouts)
        distinguish(self.module)

    def candidate(self, state: State) -> Candidate:
        """See `rollouts.Student.candidate`."""
        module = self._program.module.deepcopy()
        put(module, state)
        return DspyCandidate(self._task, module)


class DspyCandidate:
    """A DSPy program with other prompts; it notes the traces of its rollouts, from which demonstrations are made."""

    def __init__(self, task: Task, module: dspy.Module):
        self.program = _Traced(module)
        self.task = with_other_program(task, self.program)

    def steps(self, forest: Forest, rollout: Rollout) -> list[JsonObject]:
        """See `rollouts.Candidate.steps`."""
        return self.program.traces.pop(rollout.example, [])

    def save(self, path: Path) -> None:
        """See `rollouts.Candidate.save`."""
        self.program.save(path)


class _Traced(DspyProgram):
    """Notes what each predictor was given and gave, as DSPy's own trace has it."""

    def __init__(self, module: dspy.Module):
        super().__init__(module)
        self.traces: dict[str, list[JsonObject]] = {}

    async def run(self, example: Example, ctx: Context) -> object:
        """See `DspyProgram.run`."""
        trace: list[tuple[Any, dict[str, Any], dspy.Prediction]] = []
        try:
            return await self.run_traced(example, ctx, trace)
        finally:
            # `BestOfN` and `Refine` run copies of predictors, which have the names of what they were copied from.
            self.traces[example.id] = [
                {
                    "module": self.structure.name_of([predictor]),
                    "inputs": as_json(inputs),
                    "outputs": as_json(dict(outputs.items())),
                }
                for predictor, inputs, outputs in trace
            ]


def student_class(kind: Any, rollouts: Rollouts) -> Any:
    """A subclass of a module's class whose `forward` is a rollout; by name and place it is that class."""

    def forward(self: dspy.Module, **inputs: object) -> dspy.Prediction:
        return rollouts.forward(self, inputs)

    names = {
        "forward": forward,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind)(kind.__name__, (kind,), names)


def distinguish(module: dspy.Module) -> None:
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
        field = next(iter(predictor.signature.fields))
        predictor.signature = predictor.signature.with_updated_fields(field, **{MARK: name})


def put(module: dspy.Module, state: State) -> None:
    """Give a program the prompts of a candidate, as loading them from a file would."""
    for name, predictor in module.named_predictors():
        given = {key: copy.deepcopy(value) for key, value in state[name].items()}
        predictor.load_state({**given, "lm": None})


def with_other_program(task: Task, program: Any) -> Task:
    """The same task, with the same data, tools and reward, around another program."""
    made = copy.copy(task)
    made.program = program
    return made


def student_of(task: Task, rollouts: Rollouts) -> Student:
    """The student of a task.

    Raises:
        ConfigError: its program has no prompts that can be changed.
    """
    if isinstance(task.program, DspyProgram):
        return DspyStudent(task, rollouts)
    raise ConfigError(f"task: {task.name} has no prompts that can be optimised")
