"""engine=vllm_server against a real vLLM's CPU build, with the shipped tiny model. Run by: make test-vllm.

One server serves most tests: starting it is what takes time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmrl.config.engines import VllmServerConfig
from mmrl.engines import Completion, Request, Sampling, build_engine
from mmrl.engines.vllm.base import probe_logprobs
from mmrl.engines.vllm.command import server_arguments
from mmrl.errors import EngineFailure, LengthFailure, SyncFailure
from mmrl.models.load import load_model, load_tokenizer
from mmrl.system.conf import later_wins
from tests.helpers.engines import (
    PYTHON,
    TINY,
    ask,
    gap,
    many_long_prompts_agree,
    needs_vllm,
    perturb,
    prompt_of,
    pushes_arrive,
    samples_agree,
    serving,
    setup_in,
    steps_of,
)

pytestmark = [pytest.mark.vllm, needs_vllm]


def config(**settings: Any) -> VllmServerConfig:
    return VllmServerConfig(name="vllm_server", python=PYTHON, **settings)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    with serving(config(), tmp_path_factory.mktemp("vllm")) as engine_and_model:
        yield engine_and_model


@pytest.mark.parametrize("devices", [(), (0,), (1, 2)])
def test_vllms_parser_reads_what_a_server_on_gpus_is_started_with(devices: tuple[int, ...], tmp_path: Path) -> None:
    """Only parsed: no GPU is here."""
    setup = replace(setup_in(tmp_path), device="cuda", devices=devices)
    words = server_arguments(config(args=("--max-num-seqs=4",)), setup, str(tmp_path), "processed", 2, 9)
    code = (
        "import sys; from vllm.entrypoints.launchers.cli_args import make_arg_parser; "
        "from vllm.utils.argparse_utils import FlexibleArgumentParser; "
        "make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])"
    )
    command = [str(PYTHON), "-c", code, *words, "--host", "127.0.0.1", "--port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_samples_have_the_log_probabilities_of_transformers(served: Any, tokenizer: Any) -> None:
    engine, model = served
    samples_agree(engine, model, tokenizer)


def test_why_completions_end(served: Any, tokenizer: Any) -> None:
    engine, _ = served
    prompt = prompt_of(tokenizer, "Who wrote it?")
    (full,) = ask(engine, prompt, temperature=0.0, max_tokens=64)
    assert full.finish == "eos" and full.ids[-1] == tokenizer.eos_token_id
    (cut,) = ask(engine, prompt, temperature=0.0, max_tokens=1)
    assert (cut.finish, cut.ids) == ("length", full.ids[:1])
    second = tokenizer.decode(list(full.ids[1:2]))
    (stopped,) = ask(engine, prompt, temperature=0.0, max_tokens=64, stop=(second,))
    assert stopped.finish == "stop" and stopped.ids == full.ids[: len(stopped.ids)]
    assert second in tokenizer.decode(list(stopped.ids))
    with pytest.raises(LengthFailure):
        ask(engine, prompt * 100)
    with pytest.raises(EngineFailure, match="vocabulary"):
        ask(engine, (10**6,))


def test_many_long_prompts_at_once(served: Any, tokenizer: Any) -> None:
    """More prompt tokens than fit into one of vLLM's batches; in parts, with seeds, they end its CPU build."""
    engine, model = served
    many_long_prompts_agree(engine, model, tokenizer)
    assert served[0].restarts == 0


def test_truncated_sampling_has_no_log_probabilities_to_record(served: Any, tokenizer: Any) -> None:
    engine, _ = served
    (made,) = ask(engine, prompt_of(tokenizer, "Who?"), temperature=0.7, top_p=0.9)
    assert made.logprobs is None and made.ids


def test_a_push_changes_the_policy_and_no_stale_prefix_is_served(served: Any, tokenizer: Any) -> None:
    engine, model = served
    pushes_arrive(engine, model, tokenizer, lambda: engine._api.io.wait(engine._api.probe("base", engine.probe_ids)))
    assert len(engine._api.io.wait(engine._api.models())) == 1 + 2  # the base and two versions


def test_a_push_that_the_server_refuses_stops_with_its_words(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = served
    monkeypatch.setattr("mmrl.engines.vllm.base.save_weights", lambda *_: {"default": Path("/no/such/adapter")})
    with pytest.raises(SyncFailure, match=r"(?s)version 9 was not taken.*No adapter found.*vllm\.log"):
        engine.set_version(9)


def test_a_push_of_other_weights_than_the_trainers_is_noticed(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = served

    def other(*arguments: Any) -> list[float]:
        return [value - 0.01 for value in probe_logprobs(*arguments)]

    monkeypatch.setattr("mmrl.engines.vllm.base.probe_logprobs", other)
    with pytest.raises(SyncFailure, match=r"does not serve the pushed adapter 'default'.*differ by 0\.01"):
        engine.set_version(10)


def test_a_stuck_push_ends_in_time(served: Any) -> None:
    engine, _ = served
    os.killpg(engine.replicas[0].process.pid, signal.SIGSTOP)
    whole = engine.config
    engine.config = whole.model_copy(update={"sync_timeout_s": 1.0})
    try:
        with pytest.raises(SyncFailure, match=r"(?s)within engine\.sync_timeout_s=1 s.*vllm\.log"):
            engine.set_version(11)
    finally:
        engine.config = whole
        os.killpg(engine.replicas[0].process.pid, signal.SIGCONT)
    engine.set_version(12)


def test_a_server_killed_while_it_generates_is_started_again(served: Any, tokenizer: Any) -> None:
    engine, model = served
    engine.set_version(20)
    prompt = prompt_of(tokenizer, "Who wrote it?")

    async def with_a_kill() -> list[Completion]:
        sampling = [Sampling(max_tokens=400, temperature=1.0, seed=seed, stop=("never said",)) for seed in range(8)]
        # Halted first, so that none of them is answered before the kill.
        os.killpg(engine.replicas[0].process.pid, signal.SIGSTOP)
        asked = [
            asyncio.create_task(engine.generate(Request(prompt_ids=prompt, sampling=one, module="m")))
            for one in sampling
        ]
        await asyncio.sleep(0.05)
        os.killpg(engine.replicas[0].process.pid, signal.SIGKILL)
        return await asyncio.gather(*asked)

    made = asyncio.run(with_a_kill())
    assert engine.restarts == 1
    assert {one.policy_version for one in made} == {20}
    assert max(gap(model, prompt, one, 1.0) for one in made) < 1e-4
    (replica,) = engine.replicas
    replica.restarts_left = 0
    os.killpg(replica.process.pid, signal.SIGKILL)
    with pytest.raises(EngineFailure, match=r"(?s)ended again after engine\.restarts=2 starts.*vllm\.log"):
        ask(engine, prompt)


@pytest.mark.slow
def test_full_weights_reach_the_server_through_disk(tmp_path: Path, tokenizer: Any) -> None:
    model = load_model(TINY, "cpu")
    prompt = prompt_of(tokenizer, "Who wrote it?")
    engine: Any = build_engine(config(), model, tokenizer, setup_in(tmp_path))
    try:
        perturb(model, 1)
        engine.set_version(1)
        (made,) = ask(engine, prompt, temperature=0.7)
        assert gap(model, prompt, made, 0.7) < 1e-4
    finally:
        engine.close()
    assert not engine.replicas[0].process.alive


def started(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    """A training run of three steps in a process of its own, LoRA at its defaults."""
    small = ["hardware.threads=1", "train.steps=3", "train.batch_size=4", "eval.items=2", "eval.every=0"]
    server = ["engine=vllm_server", f"engine.python={PYTHON}", "model.lora={}", f"run.dir={run_dir}"]
    command = [sys.executable, "-m", "mmrl", "train", *later_wins([*server, *small, *overrides])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps_until_end(process: subprocess.Popen[str], run_dir: Path) -> list[dict[str, Any]]:
    """The steps of a run that ends well; calls that were lost on the way have been asked again."""
    out, _ = process.communicate()
    assert process.returncode == 0, out
    steps = steps_of(run_dir)
    assert [(record["step"], record["rollouts/failed_share"]) for record in steps] == [(1, 0), (2, 0), (3, 0)]
    return steps


def kill_server(process: subprocess.Popen[str], run_dir: Path, log: str) -> None:
    """Once the second step's weights have been written: its rollouts are under way then, or the push is."""
    while process.poll() is None and not list((run_dir / "engine" / "weights").glob("v000001-*")):
        time.sleep(0.05)
    time.sleep(0.5)
    (server,) = [
        int(stat.parent.name)
        for stat in Path("/proc").glob("[0-9]*/stat")
        if stat_of(stat) == [str(process.pid), stat.parent.name]
        and os.path.realpath(stat.parent / "fd" / "1") == str((run_dir / "engine" / log).resolve())
    ]
    os.killpg(server, signal.SIGKILL)


def stat_of(path: Path) -> list[str]:
    """Parent and process group of a process; nothing of one that has gone."""
    try:
        return path.read_text().rpartition(")")[2].split()[1:3]
    except OSError:
        return []


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_training_with_a_server_end_to_end(staleness: int, tmp_path: Path) -> None:
    run = started(tmp_path / "run", f"train.staleness={staleness}")
    steps = steps_until_end(run, tmp_path / "run")
    assert [record.get("rollouts/policy_lag", 0) for record in steps] == ([0, 1, 1] if staleness else [0, 0, 0])
    on_policy = steps[:1] if staleness else steps
    assert max(record["train/logprob_gap_max"] for record in on_policy) < 1e-4
    assert all(record["engine/restarts"] == 0 for record in steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "weights", "log", "restarts"),
    [
        (1, "model.lora={}", "vllm.log", 1),
        (2, "model.lora={}", "vllm-2.log", 1),
        # On a CPU, full weights start every server anew, so the killed one is started by the push that was under way.
        (2, "model.lora=null", "vllm-2.log", 0),
    ],
    ids=["the only one", "one of two", "one of two with full weights"],
)
def test_a_server_is_killed_in_mid_step(servers: int, weights: str, log: str, restarts: int, tmp_path: Path) -> None:
    run = started(tmp_path / "run", f"engine.replicas={servers}", weights)
    kill_server(run, tmp_path / "run", log)
    steps = steps_until_end(run, tmp_path / "run")
    assert (steps[-1]["engine/restarts"], steps[-1]["engine/servers"]) == (restarts, servers)
    assert max(record["train/logprob_gap_max"] for record in steps) < 1e-4


@pytest.mark.slow
def test_a_run_whose_server_cannot_be_had_again_stops_with_its_state_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = started(folder, "engine.restarts=0")
    kill_server(run, folder, "vllm.log")
    out, _ = run.communicate()
    assert run.returncode not in (0, None), out
    assert "ended again after engine.restarts=0" in out and "vllm.log" in out
    assert f"mmrl train resume={folder}" in out and "Traceback" not in out
    assert (folder / "checkpoints" / "checkpoint-1").is_dir()
    on = subprocess.run([sys.executable, "-m", "mmrl", "train", f"resume={folder}"], capture_output=True, text=True)
    assert on.returncode == 0, on.stdout + on.stderr
    assert [record["step"] for record in steps_of(folder)] == [1, 2, 3]
