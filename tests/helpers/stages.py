"""Stages without a command line.

Of prompts: banking77's mini world, and an engine whose answers a function of messages decides. Supervised ones: a
task of two modules, and a small new model.
"""

import asyncio
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from mmrl.config import (
    EvalConfig,
    HardwareConfig,
    ModelConfig,
    PromptRunConfig,
    RunConfig,
    SftRunConfig,
    validate,
)
from mmrl.config.engines import TransformersConfig
from mmrl.config.prompts import PROMPT_SCHEMAS
from mmrl.config.tasks import task_schema
from mmrl.engines.base import Completion, Engine
from mmrl.models.assignment import ModuleAssignment
from mmrl.models.chat import encode_text
from mmrl.models.load import load_tokenizer
from mmrl.run.build import build_task
from mmrl.stages.evaluate import Evaluations
from mmrl.stages.prompts.stage import PromptStage
from mmrl.stages.sft import SftStage
from mmrl.stages.step_log import StepLog
from mmrl.store.policy import newest_checkpoint
from mmrl.store.rundir import RunDir
from mmrl.tasks.base import Demonstration
from mmrl.trainer.adapters import make_adapters
from mmrl.trainer.settings import Settings
from mmrl.trainer.trl_trainer import MmrlTrainer
from tests.helpers.configs import nested
from tests.helpers.engines import model
from tests.helpers.programs import Chain, FakeEngine, FakeTask, filled, seeded_letter
from tests.models.test_models import make_tokenizer

MODEL = ModelConfig(name="tiny", path="tiny_dspy")
# What small optimisers take, of seconds.
MIPRO: dict[str, Any] = {
    "auto": None,
    "num_candidates": 5,
    "num_instruct_candidates": 3,
    "num_trials": 6,
    "minibatch": True,
    "minibatch_size": 8,
    "minibatch_full_eval_steps": 3,
    "max_labeled_demos": 2,
}
OPTIMISERS: dict[str, dict[str, Any]] = {
    "bootstrap_fewshot": {"num_candidate_programs": 2, "max_labeled_demos": 2, "max_rounds": 2},
    "gepa": {"auto": None, "max_metric_calls": 60, "max_merge_invocations": 1},
}
OPTIONS = {"miprov2": MIPRO, **OPTIMISERS}


class Cut(str):
    """Answer that ends at the limit of new tokens."""


class ScriptedEngine(Engine):
    """Answers messages by `answer(messages, temperature, seed)`; an answer may be an exception, or `Cut`."""

    def __init__(self, answer: Any):
        self.answer, self.tokenizer = answer, load_tokenizer(MODEL)
        self.requests: list[Any] = []
        self.waiting = self.most = 0

    async def generate(self, request: Any) -> Completion:
        self.requests.append(request)
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(0)
        self.waiting -= 1
        text = self.answer(request.messages, request.sampling.temperature, request.sampling.seed)
        if isinstance(text, BaseException):
            raise text
        ids = tuple(encode_text(self.tokenizer, text))
        if isinstance(text, Cut):
            return Completion(ids=ids, logprobs=None, finish="length")
        return Completion(ids=(*ids, self.tokenizer.eos_token_id), logprobs=None, finish="eos")


def field(name: str, text: str) -> str:
    return f"[[ ## {name} ## ]]\n{text}\n\n"


def proposal(messages: Any, seed: int) -> str | None:
    """An instruction, or what DSPy's proposers ask before it; None for a request of the task's."""
    *_, last = messages[-1]["content"].split("Respond with")
    if "`new_instruction`" in messages[0]["content"]:
        return json.dumps({"reasoning": "as it says", "new_instruction": f"Do well, {seed % 1000}."})
    for name in ("proposed_instruction", "observations", "summary", "program_description", "module_description"):
        if f"[[ ## {name} ## ]]" in last or f"`{name}`" in last:
            return filled(**{name: f"Classify it, {name} {seed % 1000}."})
    return None


def banking(items: int = 24, **options: Any) -> Any:
    """The config and the task."""
    config = task_schema("banking77").model_validate({"name": "banking77", "data": {"train_items": items}, **options})
    return config, build_task(config, 0)


def labelled(task: Any, label: str) -> str:
    return filled(reasoning="as it says", label=label)


def text_in(messages: Any) -> str:
    return messages[-1]["content"].split("[[ ## text ## ]]\n")[1].split("\n\nRespond")[0]


def share(text: str) -> float:
    """A number in [0, 1) that belongs to a text."""
    return int(hashlib.md5(text.encode()).hexdigest(), 16) % 1000 / 1000


def better_with_demonstrations(task: Any, base: float = 0.3, each: float = 0.2) -> Any:
    """Right on a share of the examples that grows with each demonstration in the prompt, and with "Do well" in it.

    At a temperature above 0 it grows by chance.
    """
    gold = {e.inputs["text"]: e.metadata["label"] for e in task.examples("train")}
    wrong = min(gold.values())

    def answer(messages: Any, temperature: float, seed: int) -> str:
        made = proposal(messages, seed)
        if made is not None:
            return made
        text, shown = text_in(messages), sum(m["role"] == "assistant" for m in messages)
        luck = share(str(seed)) if temperature else 0.0
        right = share(text) < base + each * shown + 0.4 * ("Do well" in messages[0]["content"]) + luck / 2
        return labelled(task, gold[text] if right else next(x for x in gold.values() if x not in (gold[text], wrong)))

    return answer


def prompt_command(config: Any, algo: str, seed: int = 3, **options: Any) -> PromptRunConfig:
    return PromptRunConfig(
        seed=seed,
        task=config,
        model=MODEL,
        hardware=HardwareConfig(name="cpu"),
        engine=TransformersConfig(name="transformers"),
        eval=EvalConfig(parse_retries=0),
        run=RunConfig(),
        algo=PROMPT_SCHEMAS[algo](name=algo, **options),
    )


def prompt_stage(folder: Path, task: Any, engine: Any, algo: str, seed: int = 3, **options: Any) -> PromptStage:
    """A stage on a run directory, new or begun before."""
    config, built = task
    there = (folder / "config.yaml").exists()
    rundir = RunDir.open(folder) if there else RunDir.create(folder, {"seed": seed, "algo": {"name": algo}}, ["mmrl"])
    log = StepLog(rundir=rundir, progress=MagicMock(), trackers=MagicMock(calls=0))
    return PromptStage(
        config=prompt_command(config, algo, seed, **options),
        task=built,
        engine=engine,
        tokenizer=load_tokenizer(MODEL),
        reward_set="outcome",
        log=log,
        task_with=lambda prompts: built,
    )


def optimised(
    folder: Path, task: Any, algo: str = "miprov2", answer: Any = None, engine: Any = None, **options: Any
) -> Any:
    """What a stage that runs to its end says, and the engine that it sent its requests to."""
    engine = engine or ScriptedEngine(answer or better_with_demonstrations(task[1]))
    stage = prompt_stage(folder, task, engine, algo, **options)
    with stage.rundir:
        stage.result = stage.search()
    return SimpleNamespace(
        **asdict(stage.result),
        facts=stage.describe(),
        trials=stage.trials,
        unusable=stage.unusable,
        validation=len(stage.validation),
        calls=stage.paid["calls"],
        requests=stage.paid["writer/requests"],
    ), engine


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


TOKENIZER = make_tokenizer()
MINE = {"role": "user", "content": "Say 3"}
CHAT = {"messages": [MINE, {"role": "assistant", "content": "three"}]}
SMALL = {
    "train.steps": 4,
    "train.batch_size": 3,
    "train.lr": 1e-3,
    "train.save_every": 2,
    "train.microbatch_tokens": 64,
}
LORA = {"model.lora.r": 2, "model.lora.targets": ("q_proj", "v_proj")}
OWN = {"algo.source": "rollouts", "algo.rollouts": 4, "algo.min_reward": 0.05}


class Teachable(FakeTask):
    """Two modules, of which each example shows both."""

    def demonstrations(self, example):
        text = example.inputs["text"]
        return [shown("a", text, f"{text[-1]}{text[-1]}"), shown("b", f"{text} again", text[-1])]


def shown(module: str, content: str, completion: str) -> Demonstration:
    return Demonstration(module=module, messages=[{"role": "user", "content": content}], completion=completion)


def new_model(context: int = 256) -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    ends = {"eos_token_id": None, "pad_token_id": None}
    return model(scale=0.02, vocab_size=len(TOKENIZER), max_position_embeddings=context, **heads, **ends).train()


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def config_of(options=()):
    sections: dict[str, Any] = {
        "task": {"name": "dspy"},
        "model": {"name": "x", "path": "x", "dtype": "float32"},
        "hardware": {"name": "cpu", "device": "cpu"},
        "engine": {"name": "transformers"},
        "eval": {"every": 0},
        "run": {},
        "algo": {"name": "sft"},
        "train": {},
    }
    for path, value in nested({**SMALL, **dict(options)}).items():
        sections[path] = {**sections[path], **value}
    return validate(SftRunConfig, sections)


def stage_of(folder, options=(), task=None, engine=None, stopping=None, **more):
    """A stage in a run directory, which is made where it is not there yet."""
    config = config_of(options)
    rundir = RunDir.read(folder) if (folder / "config.yaml").exists() else RunDir.create(folder, {"seed": 0}, ["test"])
    notes = []
    progress: Any = SimpleNamespace(note=notes.append, status=lambda text: None, step=lambda step, metrics: None)
    trackers: Any = SimpleNamespace(log=lambda step, metrics: None)
    log = StepLog(rundir=rundir, progress=progress, trackers=trackers)
    if stopping is not None:
        progress.step = lambda step, metrics: setattr(log.stop, "requested", step == stopping)
    task = task or Teachable(Chain(("a", "b")))
    assignment = ModuleAssignment(model=config.model, algo=config.algo, modules=tuple(task.program.modules))
    trainer = MmrlTrainer(
        new_model(),
        TOKENIZER,
        Settings.supervised(config.train, config.model, config.seed),
        output_dir=rundir.checkpoints,
        adapters=make_adapters(assignment),
    )
    stage = SftStage(
        config=config,
        task=task,
        trainer=trainer,
        tokenizer=TOKENIZER,
        assignment=assignment,
        engine=engine or FakeEngine(seeded_letter),
        reward_set="outcome",
        log=log,
        **more,
    )
    rundir.close()
    return stage, notes


def train(stage, resumed=False, evaluate=lambda step: {}):
    """Train to the end; the checkpoint after the last step."""
    evaluations = Evaluations(examples=(), last_step=stage.config.train.steps, stage=stage)
    with patch.object(Evaluations, "metrics", lambda self, step: evaluate(step)):
        stage.improve(evaluations, newest_checkpoint(stage.log.rundir.path) if resumed else None)
    return newest_checkpoint(stage.log.rundir.path)


def run(folder, options=(), resumed=False, evaluate=lambda step: {}, **more):
    stage, _ = stage_of(folder, options, **more)
    path = train(stage, resumed, evaluate)
    return path, weights(stage.trainer.model), stage.log.rundir.history()


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return {"algo.source": "file", "algo.file": str(path)}
