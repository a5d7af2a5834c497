"""Shared by the benchmarks: random models, a clock, bars that a ratio must reach, printing and storing of results.

Every bench has its `OPTIONS` with their defaults, and `measure`, which returns its `Bar`s and details for the JSON;
`scripts.bench` runs them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from mmrl.models.linear import use_onednn
from mmrl.plan.shapes import KNOWN, Shape
from mmrl.report.text import align
from mmrl.store.machine import describe_environment
from scripts import key_values

MODELS = {
    "test": Shape(layers=2, hidden=16, heads=2, kv_heads=1, head_dim=8, intermediate=32, vocab=64, tied=True),
    "1M": Shape(layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=384, vocab=2048, tied=True),
    "smollm2_135m": KNOWN["HuggingFaceTB/SmolLM2-135M-Instruct"],
}
MODELS["hybrid"] = MODELS["1M"]
"""Of these layers three of four are gated delta nets, as in Qwen 3.5."""


@dataclass(frozen=True)
class Bar:
    """A measured number beside the limit that it must reach."""

    what: str
    value: float
    bar: float | None = None
    """None: printed for comparison, without a limit."""
    _: KW_ONLY
    at_most: bool = False
    """The limit is a ceiling."""
    unit: str = "x"
    """`x` of a ratio, `s` of seconds, `%`, or nothing."""
    padded: int | None = None
    """Tokens that a peer forwards, padding included."""
    real: int | None = None
    """Tokens of all sequences."""
    unique: int | None = None
    """Tokens left when every shared prefix counts once."""

    @property
    def met(self) -> bool | None:
        """True where the limit is reached; None without one. NaN reaches none."""
        if self.bar is None:
            return None
        return self.value <= self.bar if self.at_most else self.value >= self.bar


Measured = tuple[list[Bar], dict[str, Any]]
"""Bars of a bench, and details for its JSON."""


def options(arguments: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """`name=value` arguments over defaults; `threads` and `out` are always known. Sets torch's threads, silences peers.

    Raises:
        SystemExit: an unknown name.
    """
    found = key_values(arguments, {"threads": "1", "out": ""} | dict(known))
    torch.set_num_threads(int(found["threads"]))
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    return found


def make_model(size: str, matmul: str = "torch") -> Any:
    """A random Qwen3 of one of the sizes in `MODELS`, SmolLM2's Llama or a Qwen 3.5; `matmul` as `model.matmul`."""
    kinds = {"smollm2_135m": transformers.LlamaConfig, "hybrid": hybrid_config}
    model = random_model(MODELS[size], kinds.get(size, transformers.Qwen3Config))
    if matmul == "onednn":
        use_onednn(model)
    return model


def hybrid_config(**fields: Any) -> Any:
    """A config of Qwen 3.5's text model, whose recurrent heads are as many and as wide as the others."""
    heads = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), fields["num_attention_heads"])
    widths = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), fields["head_dim"])
    return transformers.AutoConfig.for_model("qwen3_5_text", **fields, **heads, **widths)


def random_model(
    shape: Shape, kind: Any = transformers.Qwen3Config, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """A model of a shape with random weights, made on the device; equal weights for equal arguments."""
    config = kind(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        max_position_embeddings=32768,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def once(run: Callable[[], object]) -> tuple[float, float]:
    """(CPU seconds, wall-clock seconds) of one run; on a GPU the wall clock waits for it."""
    _wait()
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    _wait()
    return time.process_time() - cpu, time.perf_counter() - wall


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


Seconds = dict[str, list[tuple[float, float]]]
"""Side of a comparison -> (CPU seconds, wall-clock seconds) of each of its runs."""


def timed(runs: Mapping[str, Callable[[], object]], repeats: int, warm: bool = True) -> Seconds:
    """Seconds of runs that alternate; with `warm`, a first round is left out."""
    seconds: Seconds = {name: [] for name in runs}
    for _ in range(repeats + warm):
        for name, run in runs.items():
            seconds[name].append(once(run))
    return {name: several[warm:] for name, several in seconds.items()}


def summary(seconds: Seconds, threads: int) -> dict[str, Any]:
    """Least seconds of each side, for the JSON.

    With one thread the CPU's seconds count, which neighbours on a shared machine do not move; else the wall clock's.
    """
    counted = {name: [pair[threads != 1] for pair in pairs] for name, pairs in seconds.items()}
    return {
        "seconds": {name: min(several) for name, several in counted.items()},
        "wall_clock": {name: min(wall for _, wall in pairs) for name, pairs in seconds.items()},
        "clock": "cpu" if threads == 1 else "wall",
    }


def token_counts(lengths: Sequence[tuple[int, int]], unique: int) -> dict[str, int]:
    """Token counts of a `Bar`, for rows of (prompt, completion) lengths."""
    prompts, completions = zip(*lengths, strict=True)
    padded = len(lengths) * (max(prompts) + max(completions))
    return {"padded": padded, "real": sum(prompts) + sum(completions), "unique": unique}


def show(name: str, seconds: Mapping[str, float]) -> None:
    """Print the seconds of each side as soon as they are measured."""
    print(f"{name}: " + ", ".join(f"{side} {spent:.3f} s" for side, spent in seconds.items()), flush=True)


def cosine(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
    """Cosine between two gradients, all parameters together.

    Raises:
        SystemExit: they are not of the same parameters.
    """
    if left.keys() != right.keys():
        raise SystemExit(f"gradients of different parameters: {sorted(left.keys() ^ right.keys())[:4]}")
    dot = one = two = 0.0
    for name in left:
        a, b = left[name].double().flatten(), right[name].double().flatten()
        dot, one, two = dot + float(a @ b), one + float(a @ a), two + float(b @ b)
    return dot / (one * two) ** 0.5 if one and two else float("nan")


def table(bars: Sequence[Bar]) -> str:
    """One line per bar: what, measured, bar, met or missed, tokens."""
    rows = [["what", "measured", "bar", "", "padded", "real", "unique", ""]]
    for bar in bars:
        wanted = "" if bar.bar is None else f"{'≤' if bar.at_most else '≥'} {bar.bar:g}{bar.unit}"
        word = {None: "", True: "met", False: "MISSED"}[bar.met]
        tokens = ["" if count is None else str(count) for count in (bar.padded, bar.real, bar.unique)]
        rows.append([bar.what, f"{bar.value:.3g}{bar.unit}", wanted, word, *tokens, ""])
    return align(rows, indent="")


def finish(bench: str, bars: Sequence[Bar], out: str, **details: Any) -> int:
    """Print the bars, write the JSON (`out`, else `outputs/bench/<bench>_<time>.json`); 1 when a bar is missed."""
    missed = [bar.what for bar in bars if bar.met is False]
    kept = [asdict(bar) | {"met": bar.met} for bar in bars]
    found = {"bench": bench, **describe_environment(sys.argv), "load": os.getloadavg()}
    result = {**found, "missed": missed, "bars": kept, **details}
    path = Path(out or f"outputs/bench/{bench}_{time.strftime('%Y%m%d_%H%M%S')}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(table(bars))
    load = ", ".join(f"{value:.1f}" for value in result["load"])
    print(f"load {load}; {'bars missed: ' + ', '.join(missed) if missed else 'all bars reached'}; {path}", flush=True)
    return 1 if missed else 0
