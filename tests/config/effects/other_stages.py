"""What each key of the stages does that optimise prompts, and of supervised ones."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import dspy

from mmrl.config.other_stages import PROMPT_SCHEMAS, PromptConfig
from mmrl.errors import ParseFailure, TooManyFailures
from mmrl.records import Example
from mmrl.run.build import build_stage
from mmrl.stages.prompts import optimisers
from mmrl.stages.prompts.loop import Loop
from mmrl.stages.prompts.optimisers import SearchSetup, optimise
from mmrl.stages.prompts.split import split
from mmrl.system.memo import Memo
from mmrl.tasks.dspy.own import FunctionProgram
from tests.config.effects import Options, acts, nested, refused
from tests.config.effects.endpoints import VALUES, _traced, answering
from tests.config.effects.training import Failing
from tests.helpers.programs import Chain, FakeEngine, FakeTask, seeded_letter
from tests.helpers.stages import (
    CHAT,
    MIPRO,
    OWN,
    ScriptedEngine,
    Teachable,
    banking,
    config_of,
    optimised,
    prompt_stage,
    run,
    stage_of,
)

CLASSES = {"miprov2": "_Mipro", "bootstrap_fewshot": "BootstrapFewShotWithRandomSearch", "gepa": "GEPA"}
ALL = "prompts.*"
WRITING = "prompts.miprov2;prompts.gepa"
BOOTSTRAPPING = "prompts.miprov2;prompts.bootstrap_fewshot"
BY_HAND = {"auto": None, "num_candidates": 4, "num_trials": 4}


def section(name: str, options: Options) -> PromptConfig:
    return PROMPT_SCHEMAS[name].model_validate({"name": name, **nested(options)})


def received(name: str, options: Options, folder: Path) -> object:
    """What DSPy's own class is given."""
    got: list[dict[str, Any]] = []

    class Recorder:
        def __init__(self, *setup: Any, **given: Any):
            self.strategies: list[Any] = []
            got.append(given)

        def compile(self, student: Any, **given: Any) -> Any:
            got.extend([given, vars(self).copy()])

    stage = SimpleNamespace(task=FakeTask(None), config=SimpleNamespace(seed=0))
    student = SimpleNamespace(module="student")
    rollouts: Any = SimpleNamespace(loop=SimpleNamespace(failure=None), stage=stage, student=student)
    writer: Any = SimpleNamespace(lm=lambda temperature: dspy.LM("writer", temperature=temperature))
    of_run: Any = {"train": [], "validation": [None] * 60, "note": MagicMock(), "on_batch": MagicMock()}
    setup = SearchSetup(rollouts=rollouts, writer=writer, **of_run)
    with patch.object(optimisers, CLASSES[name], Recorder):
        optimise(section(name, options), setup)
    lms = [value.kwargs for given in got for value in given.values() if hasattr(value, "kwargs")]
    return [{key: v for key, v in given.items() if isinstance(v, str | int | float | None)} for given in got], lms


def metric(name: str, options: Options, folder: Path) -> object:
    """What DSPy's bootstrapping learns of failed and of poor rollouts."""
    threshold = section(name, options).metric_threshold
    results = [
        SimpleNamespace(score=score, rollout=SimpleNamespace(error=error))
        for score in (0.2, 0.7)
        for error in (None, "parse")
    ]
    return [
        optimisers.worth_showing(threshold)(None, SimpleNamespace(_played=result), trace=[]) for result in results
    ], received(name, options, folder)


def parts(name: str, options: Options, folder: Path) -> object:
    """Which examples candidates learn from and are compared on."""
    examples = [Example(id=f"e{n}", inputs={}) for n in range(40)]
    return [[example.id for example in part] for part in split(section(name, options), examples, 0)]


def tried(name: str, options: Options, folder: Path) -> object:
    """The instructions of all trials."""
    (folder / "instructions.yaml").write_text("classify.predict: [Name the intent.]")
    if options["instructions"]:
        options = {**options, "instructions": str(folder / options["instructions"])}
    optimised(folder / "run", banking(), name, **{**MIPRO, "num_instruct_candidates": None, **options})
    trials = (folder / "run" / "prompts" / "trials.jsonl").read_text().splitlines()
    return [json.loads(trial)["modules"]["classify.predict"]["instructions"] for trial in trials]


def requests(name: str, options: Options, folder: Path) -> object:
    """What the policy is sent as the prompt model."""
    engine = FakeEngine(lambda request: "x")
    stage = prompt_stage(folder / "run", banking(4), engine, name, **options)
    with stage.rundir:
        writer = stage._make_writer(Memo(folder / "memo.jsonl"), loop := Loop())
        assert writer is not None
        loop.run(lambda: writer.lm(1.0)("Write."))
    return [request.sampling for request in engine.requests]


def endpoint(name: str, options: Options, folder: Path) -> object:
    """The client of the prompt model."""
    with answering("prompt_model", options) as (given, server):
        stage = prompt_stage(folder / "run", banking(4), ScriptedEngine(None), name, prompt_model=given)
        with stage.rundir:
            writer = stage._make_writer(Memo(folder / "memo.jsonl"), Loop())
            assert writer is not None and writer.endpoint is not None
            return _traced(writer.endpoint, server)


acts(ALL, "validation", parts, 0.5, 0.75)
acts(ALL, "validation_items train_items", parts, None, 3)
acts("prompts.miprov2", "instructions", tried, None, "instructions.yaml")
acts(BOOTSTRAPPING, "max_bootstrapped_demos max_labeled_demos", received, 3, 5)
acts(BOOTSTRAPPING, "metric_threshold", metric, None, 0.5)
acts(WRITING, "prompt_max_tokens", requests, 64, 65, shared=True)
for key, (one, other) in VALUES.items():
    acts(WRITING, f"prompt_model.{key}", endpoint, one, other, shared=True)
acts(WRITING, "auto", received, "light", "medium")
acts("prompts.miprov2", "num_candidates num_trials", received, 4, 5, **BY_HAND)
acts("prompts.miprov2", "num_instruct_candidates", received, None, 3, **BY_HAND)
acts("prompts.miprov2", "minibatch", received, None, False, **BY_HAND)
acts("prompts.miprov2", "minibatch_size minibatch_full_eval_steps", received, 3, 4)
proposers = "program_aware_proposer data_aware_proposer tip_aware_proposer fewshot_aware_proposer"
acts("prompts.miprov2", proposers, received, True, False)
acts("prompts.bootstrap_fewshot", "max_rounds num_candidate_programs", received, 1, 2)
acts("prompts.gepa", "max_full_evals max_metric_calls", received, 4, 5, auto=None)
acts("prompts.gepa", "reflection_minibatch_size max_merge_invocations", received, 3, 4)
acts("prompts.gepa", "candidate_selection_strategy", received, "pareto", "current_best")
acts("prompts.gepa", "skip_perfect_score use_merge", received, True, False)
acts("prompts.gepa", "component_selector", received, "round_robin", "all")
acts(WRITING, "init_temperature perfect_score prompt_temperature", received, 1.0, 0.5)


ALGO, TRAIN = "supervised.algo", "supervised.train"


def sequences(name: str, options: Options, folder: Path) -> object:
    """What is trained on, by module and ids."""
    for number in (1, 2):
        (folder / f"{number}.jsonl").write_text(f"{json.dumps(CHAT)}\n" * number, encoding="utf-8")
    own = {f"algo.{key}": str(folder / value) if key == "file" else value for key, value in options.items()}
    task = Teachable(Chain(("a", "b")), reward=lambda prediction: 1.0 + sum(map(ord, prediction)) % 3)
    stage, _ = stage_of(folder / "run", own, task=task)
    taken = stage._sampled() if stage.config.algo.source == "rollouts" else stage._demonstrated()
    return [(item.module, item.completion_ids) for _, item in taken]


async def picky(example: Example, ctx: Any) -> None:
    """Half of its replies do not parse."""

    def parse(text: str) -> None:
        if text > "m":
            raise ParseFailure("late letter")

    await ctx.call("a", [{"role": "user", "content": example.inputs["text"]}], parse=parse)


def requested(name: str, options: Options, folder: Path) -> object:
    """How the rollouts are sampled."""
    engine = FakeEngine(seeded_letter)
    own = {**OWN, "algo.min_reward": 0.0, **{f"algo.{key}": value for key, value in options.items()}}
    stage_of(folder / "run", own, task=Teachable(FunctionProgram(picky, ("a",))), engine=engine)[0]._rollouts()
    return sorted(str(request.sampling) for request in engine.requests)


def stopped(name: str, options: Options, folder: Path) -> object:
    """Whether failed rollouts stop the stage."""
    own = {**OWN, "algo.min_reward": 0.0, **{f"train.{key}": value for key, value in options.items()}}
    try:
        stage_of(folder / "run", own, engine=Failing(seeded_letter))[0]._sampled()
    except TooManyFailures as error:
        return str(error)
    return ""


def handed(name: str, options: Options, folder: Path) -> object:
    """What a run gives to its trainer."""
    config = config_of({**{f"train.{key}": value for key, value in options.items()}})
    task: Any = Teachable(Chain(("a", "b")))
    log: Any = SimpleNamespace(rundir=SimpleNamespace(path=folder, checkpoints=folder))
    with (
        patch("mmrl.trainer.trl_trainer.MmrlTrainer") as trainer,
        patch("mmrl.models.load.load_policy", lambda *given: (None, None, {})),
        patch("mmrl.run.build.build_engine"),
        patch("mmrl.run.build._setup"),
    ):
        build_stage(config, task, log)
    return str(trainer.call_args.args[2])


def trained(name: str, options: Options, folder: Path) -> object:
    """Weights after two steps."""
    own = {f"{name}.{key}": value for key, value in options.items()}
    _, weights, _ = run(folder / "run", {"train.steps": 2, "train.lr": 1e-2, "train.grad_clip": 9.0, **own})
    return [value.double().sum().item() for value in weights.values()]


acts(ALGO, "source", sequences, "task", "rollouts")
acts(ALGO, "file", sequences, "1.jsonl", "2.jsonl", source="file")
acts(ALGO, "modules", sequences, None, {"b": 1.0})
acts(ALGO, "rollouts", sequences, 1, 2, source="rollouts", per_example=None)
acts(ALGO, "min_reward", sequences, 1.0, 3.0, source="rollouts", per_example=None)
acts(ALGO, "per_example", sequences, 1, 2, source="rollouts", rollouts=2)
acts(ALGO, "temperature top_p", requested, 1.0, 0.5)
acts(ALGO, "top_k parse_retries", requested, 0, 2)

# What the trainer makes of each is observed of `train.*` of a run by reinforcement learning.
acts(TRAIN, "steps save_every keep microbatch_tokens", handed, 64, 65)
acts(TRAIN, "lr grad_clip adam_beta1 adam_beta2 weight_decay", handed, 0.1, 0.2)
acts(TRAIN, "schedule", handed, "constant", "linear")
acts(TRAIN, "warmup_steps", handed, 0, 1, schedule="constant_with_warmup")
acts(TRAIN, "packing", handed, "padded", "trie")
acts(TRAIN, "batch_size", trained, 2, 3)
acts(TRAIN, "max_failed_share", stopped, 0.6, 0.1)
for key, value in {"old_logprobs": "recompute", "tis": "2.0", "staleness": "1"}.items():
    refused(TRAIN, key, value, "with algo=sft", typed=f"train.{key}", starts=f"train.{key}")
