"""Supervised stages on a task of two modules and a small new model, without a command line."""

import json
from types import SimpleNamespace

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mmrl.config import SftCommandConfig, validate
from mmrl.models.assignment import ModuleAssignment
from mmrl.report.rundir import RunDir
from mmrl.stages.sft import SftStage, trainable
from mmrl.stages.step_log import StepLog
from mmrl.tasks.base import Demonstration
from tests.config.effects import nested
from tests.helpers.fakes import Chain, FakeEngine, FakeTask, seeded_letter
from tests.models.test_models import make_tokenizer

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


def new_model(context: int = 256) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = Qwen3Config(vocab_size=len(TOKENIZER), max_position_embeddings=context, **sizes, **heads)
    return Qwen3ForCausalLM(config)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def config_of(options=()):
    sections = {
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
    return validate(SftCommandConfig, sections)


def stage_of(folder, options=(), task=None, engine=None, stopping=None, **more):
    """A stage in a run directory, which is made where it is not there yet."""
    config = config_of(options)
    rundir = RunDir.read(folder) if (folder / "config.yaml").exists() else RunDir.create(folder, {"seed": 0}, ["test"])
    notes = []
    progress = SimpleNamespace(note=notes.append, status=lambda text: None, step=lambda step, metrics: None)
    log = StepLog(rundir=rundir, progress=progress, trackers=SimpleNamespace(log=lambda step, metrics: None))
    if stopping is not None:
        progress.step = lambda step, metrics: setattr(log.stop, "requested", step == stopping)
    task = task or Teachable(Chain(("a", "b")))
    assignment = ModuleAssignment(model=config.model, algo=config.algo, modules=tuple(task.program.modules))
    stage = SftStage(
        config=config,
        task=task,
        model=trainable(new_model(), config, assignment),
        tokenizer=TOKENIZER,
        assignment=assignment,
        engine=engine or FakeEngine(seeded_letter),
        reward_set="outcome",
        log=log,
        **more,
    )
    rundir.close()
    return stage, notes


def run(folder, options=(), resumed=False, **more):
    stage, _ = stage_of(folder, options, **more)
    path = stage.run(resumed)
    return path, weights(stage.model), stage.log.rundir.history()


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return {"algo.source": "file", "algo.file": str(path)}
