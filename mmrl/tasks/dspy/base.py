"""Base of tasks with DSPy programs: splits, prompts of predictors, demonstrations, facts for summaries.

Base of `banking77`, `papillon`, `hover` and `own`. The program of such a task is a raw `dspy.Module`; whoever builds
the task wraps it (`mmrl.rollout.with_program`). DSPy takes seconds to import, so it is imported when a task is built.
"""

from __future__ import annotations

import json
import logging
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from typing_extensions import override

from mmrl.config.base import SPLITS
from mmrl.config.tasks import TaskConfig
from mmrl.errors import ConfigError, DataError, gathered, refuse
from mmrl.records import Example
from mmrl.system.files import user_path
from mmrl.system.objects import display_name
from mmrl.tasks.base import Task, Tool
from mmrl.tasks.data.layouts import subset_of
from mmrl.tasks.data.rows import Row, Source, check_unique, same_rows
from mmrl.tasks.dspy.fields import adapter_in_use
from mmrl.tasks.mini.examples import mini_records
from mmrl.tasks.prompts import PAPER, Template, load_prompts, prompts_file

if TYPE_CHECKING:
    import dspy

log = logging.getLogger("mmrl.data")

T = TypeVar("T")


class DspyTask(Task):
    """Implements `mmrl.tasks.base.Task` but for `score`; subclasses bring the program and the examples.

    Args:
        config: the `task` section.
        seed: the run's seed; it draws the training subset of `task.data.train_items`, and nothing else.

    Raises:
        ConfigError: options without effect, bad prompts or data; all problems at once.
    """

    mini_kind: ClassVar[str]
    """Its examples of the mini world: `claims`, `support` or `requests`."""
    places: ClassVar[Mapping[str, tuple[int, int]]] = {}
    """Split -> where the items of the paper begin and end in their source, with `task.sample=paper`."""
    reward_sets: tuple[str, ...] = ("outcome",)
    absent_features: Collection[str] = frozenset({"penalties", "observations"})
    """Features that the program never has, so that options about them are refused (`mmrl.config.rules`)."""
    main_metric: str
    # Untyped: an attribute of `Task`, which a subclass cannot narrow.
    program: Any
    """A raw `dspy.Module` until whoever builds the task wraps it, or another program."""

    def __init__(self, config: TaskConfig, seed: int):
        self.name = config.name
        self.config = config
        self.failure_score = config.failure_score
        # a plugin's task may have a config without it
        self.prompt_layout: str = getattr(config, "prompt_layout", "dspy")
        self.tools: Mapping[str, Tool] = {}
        # All problems are collected before anything is raised: a run that fails one at a time costs a start for each.
        problems = self.option_problems() + self.source_problems()
        self._examples: dict[str, list[Example]] = {}
        with gathered(problems):
            loaded = self.load()
            for split in SPLITS:
                self._examples[split] = subset_of(loaded[split], split, seed, config.data.items_of(split))
        refuse(problems)
        # `make_program` may need what `load` has read (labels), so it comes last.
        self.program = program = self.make_program()
        self.predictors: Mapping[str, dspy.Predict] = {}
        """Path -> predictor of a DSPy program."""
        if is_dspy_module(program):
            if config.prompts == PAPER:
                prompts_file(PAPER, config.name)  # refuses it: these tasks' texts are the papers' snippets
            set_prompts(program, config.prompts)
            self.predictors = dict(program.named_predictors())
            adapter_in_use(self.prompt_layout)  # refuses the one that has no such layout
        elif problems := [
            f"task.{key}: has no effect with this program, whose prompts are its own code"
            for key, is_set in (
                ("prompts", config.prompts is not None),
                ("prompt_layout", self.prompt_layout != "dspy"),
            )
            if is_set
        ]:
            raise ConfigError(problems)

    def load(self) -> Mapping[str, Sequence[Example]]:
        """Return the examples of each split, from the mini world or from files: all, or the paper's sample.

        Raises:
            ConfigError: data that cannot be used.
        """
        if not self.sources:
            return {split: self.mini(split) for split in SPLITS}
        problems, examples = list[str](), dict[str, Sequence[Example]]()
        for split in SPLITS:
            with gathered(problems):
                examples[split] = self.read(split) if split in self.sources else []
        refuse(problems)
        return examples

    def mini(self, split: str) -> Sequence[Example]:
        """Return the mini world's examples of a split, for a config that names no data."""
        return mini_records(split, self.mini_kind)

    @abstractmethod
    def read(self, split: str) -> Sequence[Example]:
        """Read the examples of a split's source."""

    def read_all(self, split: str, example: Callable[[str, Row, str], Example]) -> Sequence[Example]:
        """Convert all rows of a split's source, for `read`.

        Args:
            example: of the source's config key, a row, and the id for a row without one: its place, which is stable,
                since a source is read whole.
        """
        key = f"task.data.{split}"
        rows = enumerate(self.rows(split))
        return check_unique(key, ((row, example(key, row, f"{split}-{number}")) for number, row in rows))

    @abstractmethod
    def make_program(self) -> Any:
        """Build the raw `dspy.Module`, called with the inputs of an example as keywords."""

    def option_problems(self) -> list[str]:
        """Report options that were set without effect; those that no program of this task reads were refused before."""
        return []

    def source_problems(self) -> list[str]:
        """Report sources that two splits would use in full."""
        disjoint = self.places if getattr(self.config, "sample", None) == "paper" else {}
        return [
            f"task.data: {sentence}; expected a source each"
            + (f", or task.sample=paper for {' and '.join(splits)}" if set(splits) <= set(self.places) else "")
            for splits, sentence in same_rows(self.sources, "all of" if self.places else "both").items()
            if not set(splits) <= set(disjoint)
        ]

    @property
    def sources(self) -> dict[str, str]:
        """Split -> file or hub id, for the splits that have one."""
        return self.config.data.files

    def rows(self, split: str) -> list[Row]:
        """Read the rows of a split's source."""
        return Source(f"task.data.{split}", self.sources[split]).rows(split)

    @override
    def examples(self, split: str) -> Sequence[Example]:
        return self._examples[split]

    def sampled(self, split: str, items: Sequence[T], what: str) -> Sequence[T]:
        """Return the paper's sample of a split.

        Args:
            items: those of its source, in the order of the sample.
            what: they in words.

        Raises:
            DataError: they end before the sample begins.
        """
        first, end = self.places[split]
        if len(items) < end:
            problem = (
                f"task.data.{split}: {self.sources[split]} has {len(items)} {what}, the paper's {split} sample is "
                f"numbers {first} to {end - 1}; set task.sample=all to use every row"
            )
            if len(items) <= first:
                raise DataError(problem)
            log.warning("%s", problem)
        return items[first:end]

    @override
    def describe(self) -> Mapping[str, object]:
        data = ", ".join(f"{split} {display_name(spec)}" for split, spec in self.sources.items()) or "mini world"
        return {"data": data, **{f"{split} items": len(self._examples[split]) for split in SPLITS}}


def is_dspy_module(program: object) -> bool:
    """Check if `program` is a `dspy.Module`, without importing DSPy: if it is one, DSPy is imported already."""
    dspy = sys.modules.get("dspy")
    return dspy is not None and isinstance(program, dspy.Module)


def awaits(module: dspy.Module) -> bool:
    """Check if `aforward` runs: the most derived class with either method decides (CodeAct inherits ReAct's)."""
    for names in (vars(module), *map(vars, type(module).__mro__)):
        if "aforward" in names or "forward" in names:
            return "aforward" in names
    return False


def read_json(key: str, path: str) -> Any:
    """Read a JSON file that a config key names.

    Raises:
        DataError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(user_path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{key}: cannot read '{path}': {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{key}: {path} is not JSON: {error}") from None


def set_prompts(program: dspy.Module, path: str | None) -> None:
    """Replace predictors' prompts: instructions from a YAML file (`module: {instructions: text}`), or instructions
    and demonstrations from a JSON file that DSPy saved (`program.save("file.json")`).

    Raises:
        ConfigError: no such file, malformed, or made for other predictors.
    """
    if path is None:
        return
    # In the order of the program's attributes, which is also the order of its modules.
    predictors = dict(program.named_predictors())
    if path.endswith(".json"):
        _load_state(program, path)
        for predictor in predictors.values():
            # A saved state may name an LM, whose calls would not be recorded.
            predictor.lm = None
        return
    templates = {
        name: {"instructions": Template(predictor.signature.instructions)} for name, predictor in predictors.items()
    }
    for name, roles in load_prompts(templates, path).texts.items():
        predictors[name].signature = predictors[name].signature.with_instructions(roles["instructions"])


def _load_state(program: dspy.Module, path: str) -> None:
    state = read_json("task.prompts", path)
    # `metadata` holds the versions that DSPy writes beside the predictors; a `dspy.Retrieve` has a state too.
    saved = set(state) - {"metadata"} if isinstance(state, dict) else set()
    expected = [name for name, _ in program.named_parameters()]
    if saved != set(expected):
        raise ConfigError(
            f"task.prompts: {path} holds {', '.join(sorted(saved)) or 'no predictors'}, "
            f"expected the state of {', '.join(expected)}"
        )
    try:
        program.load_state(state)
    except Exception as error:  # DSPy raises what the first wrong key leads to
        raise ConfigError(f"task.prompts: {path} cannot be loaded: {type(error).__name__}: {error}") from None
