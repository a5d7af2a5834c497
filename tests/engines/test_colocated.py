"""engine=vllm_colocated without vLLM: the thread that drives it, sleep and waking, failures, refusals."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
)

from mmrl import engines
from mmrl.cli import main
from mmrl.config import HardwareConfig, ModelConfig
from mmrl.config.engines import VllmColocatedConfig
from mmrl.engines import Completion, EngineSetup, Request, Sampling
from mmrl.engines.vllm.colocated import VllmColocatedEngine
from mmrl.errors import ConfigError, EngineFailure, SyncFailure
from mmrl.models.load import load_model, load_tokenizer, name_in_whole
from mmrl.run.launch import hardware_problems
from tests.helpers.hybrids import SIZES as HYBRID
from tests.helpers.runs import command
from tests.helpers.trainer_cases import tiny_model

TINY = ModelConfig(name="tiny", path="tiny")


class FakeVllm:
    """vLLM's engine as far as ours uses it: one token per request and step, `length` tokens in all."""

    def __init__(self, length: int = 3):
        self.length, self.asleep, self.broken, self.finish = length, False, False, "length"
        self.model_config = SimpleNamespace(max_model_len=512)
        self.engine_core = SimpleNamespace(shutdown=lambda: self.events.append("shutdown"))
        self.live: dict[str, list[int]] = {}
        self.params: dict[str, Any] = {}
        self.events: list[Any] = []
        self.widest = 0
        self.weights: dict[str, torch.Tensor] = {}
        self.held = 0
        """Resets of the prefix cache that vLLM refuses."""

    def add_request(self, name: str, prompt: Any, params: Any, lora_request: Any = None) -> None:
        assert not self.asleep
        if prompt["prompt_token_ids"][0] == 13:
            raise ValueError("unlucky")
        self.live[name], self.params[name] = [], params

    def abort_request(self, names: list[str]) -> None:
        self.events += [("abort", name) for name in names]
        for name in names:
            self.live.pop(name, None)

    def step(self) -> list[Any]:
        if self.broken:
            raise RuntimeError("out of memory")
        self.widest = max(self.widest, len(self.live))
        done = []
        for name, ids in list(self.live.items()):
            ids.append(7)
            if len(ids) >= min(self.length, self.params[name].max_tokens):
                rows = [{7: SimpleNamespace(logprob=-0.5)} for _ in ids]
                made = SimpleNamespace(token_ids=ids, logprobs=rows, finish_reason=self.finish)
                done.append(SimpleNamespace(request_id=name, finished=True, outputs=[made]))
                del self.live[name]
        return done

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.weights = dict(kwargs["weights_iterator"])
        self.events.append((method, len(self.weights)))

    def reset_prefix_cache(self) -> bool:
        self.events.append("reset")
        self.held -= 1
        return self.held < 0

    def sleep(self, level: int) -> None:
        self.asleep = True
        self.events.append(("sleep", level))

    def wake_up(self) -> None:
        self.asleep = False
        self.events.append("wake")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    made = FakeVllm()
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": SimpleNamespace},
        "vllm.inputs": {"TokensPrompt": dict},
        "vllm.distributed": {"cleanup_dist_env_and_memory": lambda: None},
    }
    for name, content in contents.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    monkeypatch.setattr(VllmColocatedEngine, "_start", lambda self: made)
    monkeypatch.setattr(VllmColocatedEngine, "_check_served", lambda self: None)
    monkeypatch.setattr("mmrl.engines.vllm.base.vllm_problems", lambda *_: [])
    return made


def build(tmp_path: Path, *, device: str = "cuda", **settings: Any) -> VllmColocatedEngine:
    setup = EngineSetup(max_context=64, weights=TINY, device=device, folder=tmp_path, samplings=((1.0, 1.0, 0),))
    config = VllmColocatedConfig(name="vllm_colocated", **settings)
    return VllmColocatedEngine(load_model(TINY, "cpu"), load_tokenizer(TINY), config, setup)


@pytest.fixture
def engine(fake: FakeVllm, tmp_path: Path) -> Iterator[VllmColocatedEngine]:
    with closing(build(tmp_path)) as made:
        made.set_version(0)
        yield made


async def one(engine: Any, prompt: tuple[int, ...] = (5, 6), **settings: Any) -> Completion:
    sampling = Sampling(**({"max_tokens": 8, "seed": 1} | settings))
    return await engine.generate(Request(prompt_ids=prompt, sampling=sampling, module="m"))


def together(engine: Any, *limits: int) -> list[Any]:
    """Completions, or what was raised, of requests of so many tokens at once."""

    async def all_of_them() -> list[Any]:
        asked = asyncio.gather(*[one(engine, max_tokens=count) for count in limits], return_exceptions=True)
        return await asyncio.wait_for(asked, 10)

    return asyncio.run(all_of_them())


def test_concurrent_requests_share_steps_and_come_back_to_whoever_asked(fake: FakeVllm, tmp_path: Path) -> None:
    engine = build(tmp_path)
    engine.set_version(4)
    made = together(engine, 1, 2, 3, 8)
    assert [len(completion.ids) for completion in made] == [1, 2, 3, 3]
    assert {completion.policy_version for completion in made} == {4}
    assert all(set(completion.logprobs or ()) == {-0.5} for completion in made)
    assert asyncio.run(one(engine)).ids == (7, 7, 7), "another event loop, the same thread"
    assert engine.busy_s > 0
    engine.close()
    engine.close()
    assert fake.events.count("shutdown") == 1


def test_it_sleeps_while_the_trainer_works_and_wakes_for_a_push_or_a_call(
    fake: FakeVllm, engine: VllmColocatedEngine
) -> None:
    engine.sleep()
    engine.sleep()
    assert asyncio.run(one(engine)).ids
    engine.sleep()
    engine.set_version(1)
    pushed = [event for event in fake.events if event[0] == "reload_weights"]
    assert fake.events == [*pushed[:1], "reset", ("sleep", 1), "wake", ("sleep", 1), "wake", *pushed[1:], "reset"]
    assert pushed[0][1] == len(engine.model.state_dict())


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gemma3"])
@pytest.mark.parametrize("gathered", [False, True])
def test_full_weights_are_pushed_by_the_names_of_files(
    kind: str, gathered: bool, fake: FakeVllm, engine: VllmColocatedEngine, tmp_path: Path
) -> None:
    engine.model = model = tiny_model(kind)
    engine.set_version(1, model.state_dict() if gathered else None)
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    beside = fake.weights.keys() - saved.keys()
    assert all(name.endswith("lm_head.weight") for name in beside), "tied, and once in a file"
    assert all(torch.equal(fake.weights[name], weight) for name, weight in saved.items())


@pytest.mark.parametrize("trained", [True, False])
def test_an_adapter_of_a_text_part_is_pushed_by_the_names_of_the_whole(
    trained: bool, fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loads all of Qwen 3.5, and would leave out an adapter of layers that are not there."""
    pushed: list[Any] = []
    monkeypatch.setattr(VllmColocatedEngine, "_load", lambda self, adapter: pushed.append(adapter))
    monkeypatch.setattr(VllmColocatedEngine, "_probes", lambda self, adapter: {})
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_5", text_config={**HYBRID, "vocab_size": 300}, vision_config=vision)
    whole = Qwen3_5ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path / "base")
    section = ModelConfig(name="whole", path=str(tmp_path / "base"), dtype="float32")
    policy = get_peft_model(load_model(section, "cpu"), LoraConfig(target_modules=["q_proj", "in_proj_qkv"]))
    policy.save_pretrained(str(tmp_path / "adapter"))
    folders = {} if trained else {"default": str(tmp_path / "adapter")}
    setup = EngineSetup(weights=section, folder=tmp_path, samplings=((1.0, 1.0, 0),), folders=folders)
    settings = VllmColocatedConfig(name="vllm_colocated")
    with closing(VllmColocatedEngine(policy if trained else None, load_tokenizer(TINY), settings, setup)) as engine:
        engine.set_version(0)
    names = load_file(Path(pushed[0].folder) / "adapter_model.safetensors").keys()
    layers = {name.rpartition(".lora_")[0].removeprefix("base_model.model.") for name in names}
    assert len(layers) == 3
    assert layers <= dict(whole.named_modules()).keys()


def text_of(kind: str, arch: str, folder: Path, **text: Any) -> Any:
    """The config of a small model of images, in a folder without weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 300, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, text_config=sizes | text)
    config.architectures = [arch]
    config.save_pretrained(folder)
    return config


def test_the_whole_may_have_a_model_of_the_parts_class_in_it(tmp_path: Path) -> None:
    """Llama 4's text part, whose names transformers' conversions do not mention."""
    experts = {"intermediate_size_mlp": 32, "num_local_experts": 2, "head_dim": 16}
    config = text_of("llama4", "Llama4ForConditionalGeneration", tmp_path, **experts)
    rename = name_in_whole(ModelConfig(name="whole", path=str(tmp_path)))
    assert rename is not None
    with torch.device("meta"):
        whole, part = Llama4ForConditionalGeneration(config), Llama4ForCausalLM(config.text_config)
    assert {rename(name) for name, _ in part.named_parameters()} <= dict(whole.named_parameters()).keys()


def test_a_whole_without_the_parts_class_is_refused(tmp_path: Path) -> None:
    text_of("mllama", "MllamaForConditionalGeneration", tmp_path, cross_attention_layers=[1])
    with pytest.raises(ConfigError, match="which has no MllamaForCausalLM in it; use engine=transformers"):
        name_in_whole(ModelConfig(name="whole", path=str(tmp_path)))


def test_weights_are_not_served_beside_prefixes_of_those_before(
    fake: FakeVllm, engine: VllmColocatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmrl.engines.vllm.colocated.RESET_WAIT_S", 0.0)
    fake.held = 2
    engine.set_version(1)
    assert fake.events.count("reset") == 1 + 3
    fake.held = 10**9
    with pytest.raises(SyncFailure, match=r"version 2 .*vLLM did not empty its prefix cache"):
        engine.set_version(2)


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"sleep": False}])
def test_it_stays_awake_on_a_cpu_and_where_it_is_told_to(options: Any, fake: FakeVllm, tmp_path: Path) -> None:
    engine = build(tmp_path, **options)
    engine.set_version(0)
    engine.sleep()
    assert ("sleep", 1) not in fake.events
    engine.close()


@pytest.mark.parametrize(
    ("device", "settings", "given"),
    [
        ("cuda", {"gpu_memory": 0.8, "sleep": True}, ["--gpu-memory-utilization 0.8", "--enable-sleep-mode"]),
        ("cuda", {"args": ("--max-num-seqs=4",), "logprobs": "raw"}, ["--max-num-seqs=4", "raw_logprobs"]),
        ("cuda", {"logprobs": "processed"}, ["--logprobs-mode processed_logprobs"]),
        ("cpu", {"kv_cache_gb": 3}, ["--enforce-eager", "KV cache 3"]),
    ],
)
def test_vllm_is_started_as_the_section_says(
    device: str, settings: Any, given: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []
    vllm = MagicMock()
    vllm.EngineArgs.add_cli_args.return_value.parse_args = seen.extend
    vllm.LLMEngine.from_engine_args.return_value.model_config.max_model_len = 512
    for name in ("distributed", "engine.arg_utils", "utils.argparse_utils", "v1.engine.llm_engine"):
        monkeypatch.setitem(sys.modules, f"vllm.{name}", vllm)
    monkeypatch.setattr("mmrl.engines.vllm.base.vllm_problems", lambda *_: [])
    monkeypatch.setattr(VllmColocatedEngine, "_check_served", lambda self: None)
    with patch.dict(os.environ):
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        build(tmp_path, device=device, **settings).close()
        words = " ".join([*seen, "KV cache", os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")])
    assert all(part in words for part in given), words


def test_a_program_that_gives_up_frees_its_row(fake: FakeVllm, engine: VllmColocatedEngine) -> None:
    fake.length = 10**9

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one(engine, max_tokens=60), 0.05)
        while not any(event[0] == "abort" for event in fake.events):
            await asyncio.sleep(0.01)

    slow = fake.step
    fake.step = lambda: asyncio.run(asyncio.sleep(0.005)) or slow()
    asyncio.run(give_up())
    assert fake.live == {}
    engine.set_version(1)


def test_failures_are_told_with_vllms_words_and_hang_nobody(
    fake: FakeVllm, engine: VllmColocatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineFailure, match="vLLM refused the request: ValueError: unlucky"):
        asyncio.run(one(engine, (13,)))
    fake.finish = "abort"
    with pytest.raises(EngineFailure, match=r"vLLM cut the completion off \(finish reason 'abort'\)"):
        asyncio.run(one(engine))
    fake.broken = True
    assert [str(failure) for failure in together(engine, 8, 8, 8)] == ["vLLM failed: RuntimeError: out of memory"] * 3
    monkeypatch.setattr(fake, "collective_rpc", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(SyncFailure, match="policy version 2 was not taken by vLLM: ZeroDivisionError"):
        engine.set_version(2)


def test_a_reply_that_cannot_be_read_fails_its_call_and_no_other(fake: FakeVllm, engine: VllmColocatedEngine) -> None:
    """Diverged weights: vLLM reports a log-probability of nan for one of the calls under way."""
    plain, odd = fake.step, {"1": float("nan"), "2": None}

    def step() -> list[Any]:
        made = plain()
        for output in made:
            if output.request_id in odd:
                value = odd[output.request_id]
                row = {} if value is None else {7: SimpleNamespace(logprob=value)}
                output.outputs[0].logprobs = [row for _ in output.outputs[0].token_ids]
        return made

    fake.step = step
    first, second, third = together(engine, 1, 2, 3)
    assert isinstance(first, EngineFailure) and "log-probability of nan" in str(first)
    assert isinstance(second, EngineFailure) and "KeyError" in str(second)
    assert third.ids == (7, 7, 7)


def test_calls_that_were_given_up_are_gone_before_weights_change_or_vllm_sleeps(
    fake: FakeVllm, engine: VllmColocatedEngine
) -> None:
    fake.length = 10**9
    stepping = threading.Event()
    plain = fake.step

    def slow() -> list[Any]:
        stepping.set()
        time.sleep(0.1)
        assert not fake.asleep, "vLLM was put to sleep in the middle of a step"
        stepping.clear()
        return plain()

    fake.step = slow

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one(engine, max_tokens=60), 0.15)

    for change in (engine.sleep, lambda: engine.set_version(1)):
        asyncio.run(give_up())
        change()
        assert not stepping.is_set() and fake.live == {}
    fake.length = 3
    assert asyncio.run(one(engine)).policy_version == 1, "the thread lives on"


def test_weights_never_change_under_a_call(fake: FakeVllm, engine: VllmColocatedEngine) -> None:

    async def push_too_early() -> None:
        asked = asyncio.create_task(one(engine))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="while the engine was generating"):
            engine.set_version(1)
        await asked

    asyncio.run(push_too_early())


def test_what_it_cannot_do_is_refused_before_anything_loads(
    random_model: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = engines.problems(VllmColocatedConfig(name="vllm_colocated"), "vllm_colocated", training=True)
    assert "needs vLLM, which" in problem and "engine=vllm_server" in problem and "make vllm-cpu" in problem
    found = engines.problems(VllmColocatedConfig(sleep=True), "vllm_colocated", training=True, device="cpu")
    assert found[-1] == "engine.sleep: got true, vLLM has no sleep mode on a CPU; leave it out"
    (problem,) = hardware_problems(HardwareConfig(name="two", processes=2), "vllm_colocated", modules=False)
    assert problem.startswith("engine: vllm_colocated runs in one process, profile 'two' has 2")
    with pytest.raises(ConfigError):
        build(tmp_path, device="cpu", sleep=True)
    assert main(command(random_model, tmp_path / "run", "engine=vllm_colocated", "train.staleness=1")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "train.staleness: got 1 with engine=vllm_colocated" in said
