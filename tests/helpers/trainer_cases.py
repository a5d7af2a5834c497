"""Tiny random models, calls and trainers for the trainer's tests, and the cases that sharded processes train too.

`python -m tests.helpers.trainer_cases FOLDER` trains these under FSDP2 on a CPU (started by `test_sharded`). accelerate
shards on GPUs only and would fall back to DDP here, so its state is set by hand; everything else is what a run on GPUs
does, with gloo for NCCL.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import state
from accelerate.utils import DistributedType
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mmrl.config import AlgoConfig, LoraConfig, ModelConfig, TrainConfig
from mmrl.config.algo import PpoConfig
from mmrl.credit.entries import Entry
from mmrl.records import Call
from mmrl.system.child_process import free_port
from mmrl.trainer.objective import StepBatch, TrainCall
from mmrl.trainer.settings import Settings
from mmrl.trainer.sharding import gather_tensor, loaded_once
from mmrl.trainer.trl_trainer import MmrlTrainer, Update
from scripts.chaos.compare import comparable
from tests.helpers.hybrids import HYBRIDS, hybrid_model

torch.set_num_threads(1)
logging.getLogger("transformers").setLevel(logging.ERROR)
VOCAB = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {**SIZES, "num_local_experts": 4},
    "gemma3": {
        "text_config": {**SIZES, "head_dim": 8, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 1,
        "image_token_index": 37,
        "boi_token_index": 38,
        "eoi_token_index": 39,
    },
}
"""Whose files name or divide weights otherwise than the model does."""
LORA = LoraConfig(r=4, alpha=8)


def tiny_model(kind: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    made: Any
    if kind == "gpt2":  # nothing in it is computed in float32, unlike the others' norms and rotary embeddings
        sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3}
        dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        made = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **sizes, **dropout))
    elif kind == "bloom":  # whose attention is its own, so that no prefix is shared
        made = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4))
    elif kind in HYBRIDS:
        made = hybrid_model(kind, VOCAB, seed, max_position_embeddings=128)
    elif kind in OTHERS:
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **OTHERS[kind]))
    elif kind == "llama":
        made = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    else:
        made = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True))
    return made.to(dtype).eval()


class _DoubleNorm(torch.nn.Module):
    def __init__(self, norm: Any):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class _DoubleAngles(torch.nn.Module):
    def __init__(self, angles: Any):
        super().__init__()
        self.frequencies = angles.inv_freq.double()

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turns = position_ids[..., None].double() * self.frequencies
        both = torch.cat([turns, turns], dim=-1)
        return both.cos(), both.sin()


def exact_model(kind: str = "qwen3", seed: int = 0) -> Any:
    """A model all in float64: norms and rotary angles of the families compute in float32 otherwise."""
    model = tiny_model(kind, seed, torch.float64)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, _DoubleNorm(child))
            elif type(child).__name__.endswith("RotaryEmbedding"):
                setattr(parent, name, _DoubleAngles(child))
    return model.eval()


def tiny_tokenizer() -> Any:
    words = {"[PAD]": 0, "[EOS]": 1, **{f"w{i}": i for i in range(2, VOCAB)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[EOS]")), pad_token="[PAD]", eos_token="[EOS]"
    )


def train_entry(advantages: Any, weights: Any, returns: Any = None) -> Entry:
    return Entry(call="", reward=0.0, advantages=advantages, weights=weights, returns=returns)


def train_call(*, entries: tuple[Entry, ...] = (), minibatch: int = 0, **call: Any) -> TrainCall:
    """A call to train on, from the fields of its `Call`."""
    made = Call(**{"example": "q", "parent": None, "completion_tokens": len(call["completion_ids"]), **call})
    return TrainCall(call=made, entries=entries, minibatch=minibatch)


def with_changes(train: TrainCall, **changes: Any) -> TrainCall:
    """`train` with other fields, its call's among them."""
    of_train = {name: changes.pop(name) for name in ("entries", "minibatch") if name in changes}
    tokens = len(changes.get("completion_ids", train.call.completion_ids))
    return replace(train, call=replace(train.call, **{"completion_tokens": tokens, **changes}), **of_train)


def sampled(calls: list[TrainCall]) -> list[Call]:
    """The calls without what they are trained with."""
    return [train.call for train in calls]


def without_advantage(calls: list[TrainCall]) -> list[TrainCall]:
    """The same calls in groups where everyone did equally well."""
    zero = [tuple(replace(entry, advantages=(0.0,) * len(entry.weights)) for entry in call.entries) for call in calls]
    return [replace(call, entries=entries) for call, entries in zip(calls, zero, strict=True)]


def make_calls(
    count: int = 6, seed: int = 0, minibatches: int = 1, modules: tuple[str, ...] = ("a", "b"), noise: float = 0.3
) -> list[TrainCall]:
    """Calls of many lengths, seq-mean weights within each mini-batch, old log-probabilities around log(1/VOCAB)."""
    draw = random.Random(seed)
    shapes = [(draw.randint(2, 12), draw.randint(1, 9)) for _ in range(count)]
    calls = []
    for number, (prompt, tokens) in enumerate(shapes):
        size = len([n for n in range(count) if n % minibatches == number % minibatches])
        advantage = draw.uniform(-2, 2)
        calls.append(
            train_call(
                id=f"c{number}",
                module=modules[number % len(modules)],
                prompt_ids=tuple(draw.randrange(2, VOCAB) for _ in range(prompt)),
                completion_ids=tuple(draw.randrange(2, VOCAB) for _ in range(tokens)),
                logprobs=tuple(-3.7 + draw.uniform(-noise, noise) for _ in range(tokens)),
                entries=(train_entry(advantages=(advantage,) * tokens, weights=(1 / (size * tokens),) * tokens),),
                minibatch=number % minibatches,
            )
        )
    return calls


def make_trainer(
    folder: Path,
    model: Any = None,
    *,
    calls: Any = None,
    on_step_end: Any = None,
    lora: LoraConfig | None = None,
    algo: dict[str, Any] | AlgoConfig | None = None,
    seed: int = 0,
    resume_from: Path | None = None,
    recorded: Any = dict,
    next_batch: Any = None,
    adapters: Any = None,
    checkpointing: bool = False,
    selfcheck: bool = True,
    **train: Any,
) -> MmrlTrainer:
    """A trainer whose step s trains on `calls(s)` (or always on the list `calls`)."""
    algo_config = algo if isinstance(algo, AlgoConfig) else AlgoConfig(name="test", **{"beta": 0.0, **(algo or {})})
    chosen = calls if callable(calls) else (lambda step: calls or make_calls(minibatches=algo_config.minibatches))
    settings = Settings(
        train=TrainConfig(**{"steps": 1, "lr": 1e-3, "save_every": 100, **train}),
        algo=algo_config,
        model=ModelConfig(
            name="test", path="tiny", lora=lora, gradient_checkpointing=checkpointing, selfcheck=selfcheck
        ),
        seed=seed,
    )
    trainer = MmrlTrainer(
        tiny_model() if model is None else model,
        tiny_tokenizer(),
        settings,
        output_dir=folder,
        adapters=adapters,
    )
    trainer.follow(
        next_batch or (lambda step: StepBatch(step=step, calls=chosen(step), minibatches=algo_config.minibatches)),
        on_step_end or (lambda step, metrics: None),
        recorded,
    )
    if resume_from is not None:
        trainer.train = partial(trainer.train, resume_from)
    return trainer


def trained(
    folder: Path, model: Any = None, calls_of: Any = None, **options: Any
) -> tuple[MmrlTrainer, list[dict[str, float]]]:
    """A trainer at the end of its run, and the metrics of each step; `calls_of(trainer)` are a step's calls."""
    seen: list[dict[str, float]] = []
    if calls_of is not None:
        options["calls"] = lambda step: calls_of(trainer)
    trainer: MmrlTrainer = make_trainer(
        folder, model, on_step_end=lambda step, metrics: seen.append(metrics), **options
    )
    trainer.train()
    return trainer, seen


def resumable(folder: Path, resume_from: Path | None = None, **options: Any) -> tuple[dict[int, Any], MmrlTrainer]:
    """A run from its start or on from a checkpoint: what of each step's metrics a resume must repeat, by step."""
    seen: dict[int, Any] = {}
    trainer = make_trainer(
        folder,
        resume_from=resume_from,
        on_step_end=lambda step, metrics: seen.update({step: comparable(metrics)}),
        **options,
    )
    trainer.train()
    return seen, trainer


def agreeing(trainer: MmrlTrainer, shift: float = 0.0) -> list[TrainCall]:
    """Calls whose sampler said what the trainer says, less `shift`."""
    said = trainer.forwards.policy_logprobs(sampled(make_calls()))
    return [with_changes(c, logprobs=tuple(v - shift for v in lp)) for c, lp in zip(make_calls(), said, strict=True)]


def weights_of(trainer: MmrlTrainer) -> dict[str, torch.Tensor]:
    """A copy of all parameters by name."""
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """Names of tensors that differ in a bit."""
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-8) -> None:
    """Gradients of the same parameters, equal within a tolerance relative to the largest."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= tolerance * max(1.0, float(gradient.abs().max())), name


def gradients(trainer: MmrlTrainer, calls: list[TrainCall], budget: int | None = None) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of one optimizer step over `calls`, without taking it."""
    if budget is not None:
        trainer.forwards.budget = budget
    trainer.model.zero_grad()
    if getattr(trainer, "optimizer", None) is None:
        trainer.create_optimizer_and_scheduler(1)
    packs = trainer.step_packs(StepBatch(step=1, calls=calls))[0]
    loss = trainer.training_step(trainer.model, {"update": Update(1, packs, first=True)})
    found = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    return trainer.totals.losses[-1] if trainer.totals.losses else float(loss), found


def with_targets(calls: list[TrainCall], values: list[tuple[float, ...]] | None = None) -> list[TrainCall]:
    """Returns that a critic can learn: 1 for module a, -1 for b."""
    found = []
    for number, call in enumerate(calls):
        tokens = len(call.call.completion_ids)
        target = 1.0 if call.call.module == "a" else -1.0
        entries = tuple(replace(entry, returns=(target,) * tokens) for entry in call.entries)
        old = values[number] if values else (0.0,) * tokens
        found.append(with_changes(call, entries=entries, values=old))
    return found


CASES: dict[str, dict[str, Any]] = {
    "separate": {"critic": "separate"},
    "adapter": {"critic": "adapter", "lora": True},
    "head": {"critic": "head", "padded": True, "model": "llama"},
    "policy": {"beta": 0.1},
    "experts": {"model": "qwen3_moe"},
    "lora": {"beta": 0.1, "lora": True, "padded": True},
    "offload": {"critic": "separate", "lora": True, "offload": True},
}
"""`separate`, `policy` and `experts` train everything, `policy` against a reference; `llama` ties no weights."""
VALUE_CALLS = make_calls(5, seed=9)


def build(folder: Path, name: str, seen: list[dict[str, float]], **train: Any) -> Any:
    """A trainer of three steps of two updates each, that saves after each; its metrics go to `seen`."""
    case = CASES[name]
    algo: Any = {"beta": case.get("beta", 0.0), "epochs": 2}
    if "critic" in case:
        algo = PpoConfig(
            name="ppo", critic=case["critic"], critic_lr_factor=10.0, critic_warmup_steps=3, value_clip=10.0, **algo
        )
    settings = {
        "steps": 3,
        "save_every": 1,
        "keep": 3,
        "schedule": "linear",
        "grad_clip": 0.1,
        "microbatch_tokens": 64,
        "packing": "padded" if case.get("padded") else "auto",
    }
    return make_trainer(
        folder,
        tiny_model(case.get("model", "qwen3")),
        lora=LORA if case.get("lora") else None,
        algo=algo,
        calls=lambda step: with_targets(make_calls(7, seed=step)),
        on_step_end=lambda step, metrics: seen.append(metrics),
        **{**settings, **train},
    )


def watch_gradients(trainer: Any) -> list[dict[str, torch.Tensor]]:
    """Fills with the whole gradients of each update, by parameter, before they are clipped."""
    found: list[dict[str, torch.Tensor]] = []
    clip = trainer._clip_grad_norm

    def spy(model: Any) -> Any:
        own = trainer.critic.named_parameters() if trainer.critic is not None else {}
        named = dict(trainer.model.named_parameters()) | {f"critic:{name}": p for name, p in own.items()}
        found.append({name: gather_tensor(p.grad).clone() for name, p in named.items() if p.grad is not None})
        return clip(model)

    trainer._clip_grad_norm = spy
    return found


def two_processes(command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run Python with `command` as ranks 0 and 1 of a group, with torch's variables of a launch; both must end well.

    gloo ends a process by SIGABRT where its sockets fail, which CI's machine has shown once: that alone is tried again.
    """
    for last in (False, True):
        root, port = str(Path(__file__).parents[2]), str(free_port())
        group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        common = {**os.environ, **group, "PYTHONPATH": root, "PYTHONFAULTHANDLER": "1", "ACCELERATE_USE_CPU": "true"}
        workers = [
            subprocess.Popen(
                [sys.executable, *command],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **variables},
                stderr=subprocess.PIPE,
                text=True,
                cwd=root,
            )
            for rank in range(2)
        ]
        try:
            errors = [worker.communicate(timeout=600)[1] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        codes = [worker.returncode for worker in workers]
        if codes == [0, 0]:
            return
        # Who was aborted comes last: of a long output CI shows the end.
        said = "\n".join(text for _, text in sorted(zip(codes, errors, strict=True), reverse=True))
        assert not last and -signal.SIGABRT in codes, f"exit codes {codes}\n{said}"
        warnings.warn(f"aborted, and tried again: exit codes {codes}\n{said}", stacklevel=2)


def shard_on_cpu() -> None:
    """Make accelerate's state FSDP where it would be MULTI_CPU."""
    before = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        before(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    state.AcceleratorState.__init__ = init


def run(folder: Path, name: str) -> None:
    """Train one case from its start, then on from one process's second step; the main process writes what it saw."""
    seen: list[dict[str, float]] = []
    with loaded_once():  # as `run.build.load_trainer`
        trainer = build(folder / "two" / name, name, seen)
    plugin = trainer.accelerator.state.fsdp_plugin
    # Pinning memory takes a GPU.
    plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False) if CASES[name].get("offload") else OffloadPolicy()
    gradients = watch_gradients(trainer)
    trainer.train()
    pushed = trainer.whole_state()
    trained = dict(trainer.model.named_parameters())
    if trainer.critic is not None:
        trained |= trainer.critic.named_parameters()
    facts: dict[str, Any] = {
        "kind": str(trainer.accelerator.distributed_type),
        "whole": [name for name, parameter in trained.items() if not isinstance(parameter, DTensor)],
        "metrics": seen,
        "resumed": [],
    }
    main = trainer.accelerator.is_main_process
    if trainer.critic is not None:
        facts["values"] = trainer.forwards.values(sampled(VALUE_CALLS if main else VALUE_CALLS[:1]))
        trainer.forwards.values(sampled(VALUE_CALLS[:2] if main else []))
    start = folder / "one" / name / "checkpoint-2"
    with loaded_once():
        again = build(folder / "again" / name, name, facts["resumed"], resume_from=start)
    again.train()
    if main:
        (folder / "two" / name / "facts.json").write_text(json.dumps(facts))
        torch.save(gradients, folder / "two" / name / "gradients.pt")
        torch.save(pushed, folder / "two" / name / "pushed.pt")


if __name__ == "__main__":
    gc.freeze()  # each training ends by collecting garbage, of which imports leave none
    shard_on_cpu()
    for case in CASES:
        run(Path(sys.argv[1]), case)
