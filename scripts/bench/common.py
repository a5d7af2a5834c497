"""What the benchmarks share: random models, a clock, how a ratio meets its bar, and how results are printed and kept.

Every bench is `python -m scripts.bench.<name> [option=value ...]`; `scripts.bench` runs them all. Each makes a list of
`Bar`s, prints its own table and ends with `finish`.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from mmrl.models.linear import use_onednn

MODELS = {
    "test": (16, 2, 2, 1, 8, 32, 64),
    "1M": (128, 4, 4, 2, 32, 384, 2048),
    "9M": (320, 6, 5, 5, 64, 960, 4096),
    "smollm2_135m": (576, 30, 9, 3, 64, 1536, 49152),
}
"""hidden, layers, heads, kv heads, head_dim, intermediate, vocabulary."""
LLAMAS = frozenset({"smollm2_135m"})
"""Those of `MODELS` without norms on queries and keys."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One measured number beside what it should be."""

    what: str
    value: float
    bar: float | None
    """None: printed for comparison, without a bar."""
    at_most: bool = False
    """Whether the bar is a ceiling."""
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
        """Whether the bar is reached; None without a bar. NaN reaches none."""
        if self.bar is None:
            return None
        return self.value <= self.bar if self.at_most else self.value >= self.bar


def options(arguments: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """`name=value` arguments over defaults; `threads` and `out` are always known. Sets torch's threads, silences peers.

    Raises:
        SystemExit: an unknown name.
    """
    defaults = {"threads": "1", "out": ""} | dict(known)
    given = dict(argument.partition("=")[::2] for argument in arguments)
    if unknown := sorted(set(given) - set(defaults)):
        raise SystemExit(f"unknown option {', '.join(unknown)}: expected some of {'=, '.join(defaults)}=")
    found = defaults | given
    torch.set_num_threads(int(found["threads"]))
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    return found


def make_model(size: str, matmul: str = "torch") -> Any:
    """A random Qwen3, or Llama (`LLAMAS`), of one of the sizes in `MODELS`; `matmul` as `model.matmul`."""
    hidden, layers, heads, kv_heads, head_dim, inner, vocabulary = MODELS[size]
    torch.manual_seed(0)
    kind = transformers.LlamaConfig if size in LLAMAS else transformers.Qwen3Config
    config = kind(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    made: Any = transformers.AutoModelForCausalLM.from_config(config)
    if matmul == "onednn":
        use_onednn(made)
    return made.eval()


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


def timed(
    runs: Mapping[str, Callable[[], object]], repeats: int, warm: bool = True
) -> dict[str, list[tuple[float, float]]]:
    """(CPU seconds, wall-clock seconds) of each run, alternating; with `warm`, a first round that does not count."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(repeats + warm):
        for name, run in runs.items():
            seconds[name].append(once(run))
    return {name: several[warm:] for name, several in seconds.items()}


def clock(threads: int) -> int:
    """Which of the two seconds counts: the CPU's with one thread (neighbours do not move it), else the wall clock's."""
    return 0 if threads == 1 else 1


def cosine(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
    """Of two gradients, all parameters together.

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


def machine() -> dict[str, Any]:
    """Where and with what a result was made."""
    packages = ("torch", "transformers", "trl", "peft", "accelerate")
    return {
        "machine": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(bars: Sequence[Bar]) -> str:
    """One line per bar: what, measured, bar, met or missed, tokens."""
    head = f"{'what':42}{'measured':>10}{'bar':>9}  {'':7}{'padded':>9}{'real':>9}{'unique':>9}"
    lines = [head]
    for bar in bars:
        sign = "" if bar.bar is None else "≤ " if bar.at_most else "≥ "
        wanted = "" if bar.bar is None else f"{sign}{bar.bar:g}{bar.unit}"
        word = {None: "", True: "met", False: "MISSED"}[bar.met]
        tokens = "".join(f"{'' if n is None else n:>9}" for n in (bar.padded, bar.real, bar.unique))
        lines.append(f"{bar.what:42}{f'{bar.value:.3g}{bar.unit}':>10}{wanted:>9}  {word:7}{tokens}".rstrip())
    return "\n".join(lines)


def finish(bench: str, bars: Sequence[Bar], out: str, **details: Any) -> int:
    """Print the bars, write the JSON (`out`, else `outputs/bench/<bench>_<time>.json`); 1 when a bar is missed."""
    missed = [bar.what for bar in bars if bar.met is False]
    kept = [asdict(bar) | {"met": bar.met} for bar in bars]
    result = {"bench": bench, **machine(), "missed": missed, "bars": kept, **details}
    path = Path(out or f"outputs/bench/{bench}_{time.strftime('%Y%m%d_%H%M%S')}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(table(bars))
    load = ", ".join(f"{value:.1f}" for value in result["load"])
    print(f"load {load}; {'bars missed: ' + ', '.join(missed) if missed else 'all bars reached'}; {path}", flush=True)
    return 1 if missed else 0
