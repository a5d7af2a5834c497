"""Generated problems of reasoning-gym, which makes and marks them: the task `reasoning_gym`.

The package has its own system messages, one of which `task.style` picks, and reads the answer from `<answer>` tags.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from typing_extensions import override

from mmrl.config.base import SPLITS
from mmrl.config.tasks import ReasoningGymConfig
from mmrl.errors import ConfigError, RewardFailure, gathered, refuse
from mmrl.records import Call, Example
from mmrl.system.user_code import call_scorer
from mmrl.tasks.base import Context, Demonstration, Program, Score, Task
from mmrl.tasks.gym.answers import EVALUATING, harmless
from mmrl.tasks.gym.generate import Entry, build, entries
from mmrl.tasks.prompts import QUESTION, PromptedTask, Prompts, Shot, Template, load_prompts, prompts_file, shot_of

MODULE = "solver"
TAKEN = ("dev", "test", "train")
"""Splits in the order in which they take questions: one of dev is in no other split."""
VERIFIER_S = 30.0
"""Time limit of the verifier of one answer."""


@dataclass(slots=True)
class Solver:
    """Implements `mmrl.tasks.base.Program`: one call; the prediction is the text in its last `<answer>` tags."""

    prompts: Prompts
    modules: tuple[str, ...] = (MODULE,)

    def question(self, example: Example) -> list[dict[str, str]]:
        """Return the prompt of the call."""
        return self.prompts.messages(MODULE, question=example.inputs["question"])

    async def run(self, example: Example, ctx: Context) -> str | None:
        """Answer in one call."""
        from reasoning_gym.utils import extract_answer

        reply = await ctx.call(MODULE, self.question(example), as_message=True)
        answer: str | None = extract_answer(reply.parsed["content"])
        return answer


class ReasoningGymTask(Task, PromptedTask):
    """Implements `mmrl.tasks.base.Task`.

    Raises:
        ConfigError: the package is missing; an unknown data set or parameter; bad prompts; all at once.
    """

    # Untyped, as in `OpenQaTask`.
    program: Any
    reward_sets = ("outcome",)
    main_metric = "accuracy"
    tools: Mapping[str, Any] = {}
    absent_features = frozenset({"penalties", "parse_failures", "observations", "repeated_calls"})

    def __init__(self, config: ReasoningGymConfig, seed: int):
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError("task: reasoning_gym needs the package reasoning-gym; pip install 'mmrl[gym]'")
        if config.dataset is None:
            raise ConfigError("task.dataset: missing; expected a data set of reasoning-gym, such as chain_sum")
        from reasoning_gym.utils import SYSTEM_PROMPTS

        self.name, self.config, self.failure_score = config.name, config, config.failure_score
        templates = {
            MODULE: {
                "system": Template(SYSTEM_PROMPTS[config.style], optional=QUESTION, instructions=True),
                "user": Template("{question}", required=QUESTION),
            }
        }
        problems: list[str] = []
        with gathered(problems):
            file = config.prompts and str(prompts_file(config.prompts, config.name))
            self.all_prompts = load_prompts(templates, file)
        with gathered(problems):
            self.verifier = build(config.dataset, config.params, 0, config.data.dev_items)
        refuse(problems)
        self._examples = self._made(config.dataset, config)
        self.program = self.make_program(self.all_prompts)

    def _made(self, dataset: str, config: ReasoningGymConfig) -> dict[str, list[Example]]:
        # The package makes problem i by seed + i.
        seeds = {split: config.data.seeds_of(split) for split in TAKEN}
        splits = {split: (numbers[0], len(numbers)) for split, numbers in seeds.items() if numbers}
        asked: set[str] = set()
        examples: dict[str, list[Example]] = {split: [] for split in SPLITS}
        for split, made in entries(type(self.verifier).__module__, dataset, config.params, splits).items():
            for number, entry in enumerate(made):
                if entry["question"] in asked:
                    continue
                if split != "train":  # a policy may well train on a question again
                    asked.add(entry["question"])
                inputs = {"question": entry["question"]}
                examples[split].append(Example(id=f"{split}{number}", inputs=inputs, metadata=entry))
        if "train" in splits and not examples["train"]:
            raise ConfigError(
                f"task.params: {dataset} makes {len(asked)} different problems with these, which are all in dev and "
                "test; expected parameters that make more, or fewer task.data.dev_items and task.data.test_items"
            )
        return examples

    @override
    def make_program(self, prompts: Prompts) -> Program:
        return Solver(prompts)

    @override
    def shot_of(self, path: Sequence[Call], module: str) -> Shot | None:
        return shot_of(path, module)

    @override
    def examples(self, split: str) -> Sequence[Example]:
        return self._examples[split]

    @override
    async def score(self, example: Example, prediction: Any, path: Sequence[Call], reward_set: str) -> Score:
        """Return the verifier's number; an answer that makes it raise, or that it would run as code, is no answer.

        Raises:
            RewardFailure: it takes too long.
        """
        try:
            async with asyncio.timeout(VERIFIER_S):
                reward = await call_scorer(self._verified, prediction, example.metadata)
        except TimeoutError:
            raise RewardFailure(f"the verifier of {self.config.dataset} took longer than {VERIFIER_S:g} s") from None
        metrics = {"accuracy": float(reward == 1), "score": reward, "answered": float(prediction is not None)}
        return Score(reward=reward, metrics=metrics, parts={"score": reward})

    def _verified(self, answer: str | None, entry: Entry) -> float:
        source = entry.get("metadata", {}).get("source_dataset")
        if answer is not None and source in EVALUATING and not harmless(answer):
            answer = None
        try:
            return float(self.verifier.score_answer(answer, entry))
        except Exception:  # some verifiers read numbers without a guard
            return 0.0

    def demonstrations(self, example: Example) -> list[Demonstration]:
        """Return the answer in its tags; none for problems whose data set knows no answer."""
        answer = example.metadata["answer"]
        if answer is None:
            return []
        written, messages = f"<answer>{answer}</answer>", self.program.question(example)
        return [Demonstration(module=MODULE, messages=messages, completion=written)]

    @override
    def describe(self) -> Mapping[str, object]:
        params = ", ".join(f"{name}={value}" for name, value in self.config.params.items())
        source = f"reasoning-gym {version('reasoning-gym')}: {self.config.dataset}({params})"
        return {"data": source, **{f"{split} items": len(self._examples[split]) for split in SPLITS}}
