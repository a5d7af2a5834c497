"""Effects of `algo.*` of stages that optimise prompts: what DSPy's optimisers get, the split, the prompt model."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from dspy.teleprompt import BootstrapFewShot

from mmrl.config.other_stages import PROMPT_SCHEMAS, PromptConfig
from mmrl.engines.base import Completion, Request
from mmrl.records import Example
from mmrl.stages.prompts import optimisers
from mmrl.stages.prompts.optimisers import Bench, optimise
from mmrl.stages.prompts.split import split
from tests.config.effects import Options, acts, nested
from tests.config.effects.endpoints import VALUES, Server, _given, _traced, answering
from tests.helpers.fakes import FakeEngine, FakeTask
from tests.helpers.prompts import ScriptedEngine, banking, prompt_stage

CLASSES = {
    "miprov2": "MIPROv2",
    "bootstrap_fewshot": "BootstrapFewShotWithRandomSearch",
    "gepa": "GEPA",
    "simba": "SIMBA",
}
ALL = "prompts.*"
WRITING = "prompts.miprov2;prompts.gepa;prompts.simba"
BOOTSTRAPPING = "prompts.miprov2;prompts.bootstrap_fewshot"
BY_HAND = {"auto": None, "num_candidates": 4, "num_trials": 4}


def section(name: str, options: Options) -> PromptConfig:
    return PROMPT_SCHEMAS[name].model_validate({"name": name, **nested(options)})


class Looked(Exception):
    """A bootstrapping has looked ahead."""


class FakeRollouts:
    """Notes how far ahead a bootstrapping looks."""

    shows_failures = False

    def __init__(self) -> None:
        self.sampler = SimpleNamespace(failure_score=0.0, aside=None)
        self.following = 0

    def ahead(self, function: Any, item: Any, following: Any) -> bool:
        self.following = len(following)
        raise Looked


def received(name: str, options: Options, folder: Path) -> object:
    """What DSPy's own class is given, and how far its bootstrapping looks ahead."""
    got: list[object] = []

    class Recorder:
        def __init__(self, **given: Any):
            self.strategies: list[Any] = []
            got.append(given)

        def compile(self, student: Any, **given: Any) -> Any:
            got.extend([given, vars(self).copy()])
            try:
                trainset = list(range(1000))
                BootstrapFewShot._bootstrap_one_example(SimpleNamespace(trainset=trainset, max_rounds=1), trainset[0])
            except (Looked, AttributeError):  # the latter: an optimiser without bootstrapping
                pass

    rollouts: Any = FakeRollouts()
    bench = Bench(
        task=FakeTask(None),
        rollouts=rollouts,
        student=SimpleNamespace(module="student"),  # type: ignore[arg-type]
        train=[],
        validation=[None] * 60,  # type: ignore[list-item]
        seed=0,
        writer=SimpleNamespace(max_tokens=5),  # type: ignore[arg-type]
        note=lambda *_: None,
        log=io.StringIO(),
    )
    with patch.object(optimisers, CLASSES[name], Recorder):
        optimise(section(name, options), bench)
    lms = [
        value.kwargs for given in got if isinstance(given, dict) for value in given.values() if hasattr(value, "kwargs")
    ]
    plain = [
        {key: value for key, value in given.items() if isinstance(value, str | int | float | None)}
        for given in got
        if isinstance(given, dict)
    ]
    return plain, lms, rollouts.following, rollouts.shows_failures


def metric(name: str, options: Options, folder: Path) -> object:
    """What DSPy's bootstrapping learns of failed and of poor rollouts."""
    threshold = section(name, options).metric_threshold
    results = ({"score": score, "error": error} for score in (0.2, 0.7) for error in (None, "parse"))
    return [
        optimisers.worth_showing(threshold)(None, SimpleNamespace(rollout_result=result), trace=[])
        for result in results
    ], received(name, options, folder)


def parts(name: str, options: Options, folder: Path) -> object:
    """Which examples candidates learn from and are compared on."""
    examples = [Example(id=f"e{n}", inputs={}) for n in range(40)]
    return [[example.id for example in part] for part in split(section(name, options), examples, 0)]


def requests(name: str, options: Options, folder: Path) -> object:
    """What the policy is sent as the prompt model."""

    class Engine(FakeEngine):
        async def generate(self, request: Request) -> Completion:
            self.requests.append(request)
            return Completion(ids=(5, 6), logprobs=None, finish="length")

    engine = Engine(lambda request: "")
    stage = prompt_stage(folder / "run", banking(4), engine, name, **options)
    with stage.rundir:
        writer = stage._make_writer(folder, None)
        assert writer is not None
        writer.write([{"role": "user", "content": "Write."}], 1.0, None)
    return [request.sampling for request in engine.requests]


def endpoint(name: str, options: Options, folder: Path) -> object:
    """The client of the prompt model."""
    key, given = _given("prompt_model", options)
    server = Server(key)
    with answering(server):
        stage = prompt_stage(folder / "run", banking(4), ScriptedEngine(None), name, prompt_model=given)
        with stage.rundir:
            chat = stage._endpoint()
            assert chat is not None
            return _traced(chat, server)


acts(BOOTSTRAPPING + ";prompts.gepa", "validation", parts, 0.5, 0.75)
acts(BOOTSTRAPPING + ";prompts.gepa", "validation_items", parts, None, 7)
acts(BOOTSTRAPPING, "max_bootstrapped_demos max_labeled_demos", received, 3, 5)
acts(BOOTSTRAPPING, "metric_threshold", metric, None, 0.5)
acts(BOOTSTRAPPING, "bootstrap_ahead", received, 8, 30)
acts(WRITING, "prompt_max_tokens", requests, 64, 65, shared=True)
for key, (one, other) in VALUES.items():
    acts(WRITING, f"prompt_model.{key}", endpoint, one, other, shared=True)
acts("prompts.miprov2;prompts.gepa", "auto", received, "light", "medium")
acts("prompts.miprov2", "num_candidates num_trials", received, 4, 5, **BY_HAND)
acts("prompts.miprov2", "num_instruct_candidates", received, None, 3, **BY_HAND)
acts("prompts.miprov2", "minibatch", received, None, False, **BY_HAND)
acts("prompts.miprov2", "minibatch_size minibatch_full_eval_steps view_data_batch_size", received, 3, 4)
acts(
    "prompts.miprov2",
    "program_aware_proposer data_aware_proposer tip_aware_proposer fewshot_aware_proposer",
    received,
    True,
    False,
)
acts("prompts.miprov2", "init_temperature", received, 1.0, 0.5)
acts("prompts.bootstrap_fewshot", "max_rounds num_candidate_programs", received, 1, 2)
acts("prompts.bootstrap_fewshot", "labeled_sample", received, True, False)
acts("prompts.bootstrap_fewshot", "stop_at_score", received, None, 90.0)
acts("prompts.gepa", "max_full_evals max_metric_calls", received, 4, 5, auto=None)
acts("prompts.gepa", "reflection_minibatch_size", received, 3, 4)
acts("prompts.gepa", "candidate_selection_strategy", received, "pareto", "current_best")
acts("prompts.gepa", "skip_perfect_score use_merge add_format_failure_as_feedback", received, True, False)
acts("prompts.gepa", "perfect_score", received, 1.0, 2.0)
acts("prompts.gepa", "component_selector", received, "round_robin", "all")
acts("prompts.gepa", "max_merge_invocations", received, 5, 6)
acts("prompts.gepa;prompts.simba", "prompt_temperature", received, 1.0, 0.5)
acts("prompts.simba", "bsize num_candidates max_steps max_demos demo_input_field_maxlen", received, 3, 4)
acts("prompts.simba", "temperature_for_sampling temperature_for_candidates", received, 0.2, 0.3)
