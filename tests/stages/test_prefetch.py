"""`train.staleness=1`: the next batch is sampled while this one trains, from weights one step older."""

from __future__ import annotations

import asyncio
import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.cli import main
from mmrl.config.engines import TransformersConfig
from mmrl.engines import EngineSetup
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from mmrl.errors import SyncFailure
from mmrl.stages.collect import Prefetch
from mmrl.store.journal import decode_step, read_step
from mmrl.store.rundir import RunDir
from mmrl.system.portal import rollout_loop
from mmrl.trainer.checkpoint import saved_extra
from tests.helpers import runs
from tests.helpers.runs import SMALL, numbers

STEPS = 4
# A random model earns nothing, so that only the decay moves its weights.
OPTIONS = ["algo=mhgpo_fof", "train.staleness=1", "train.weight_decay=2.0", "train.save_every=1", "train.keep=10"]
EVENTS: list[tuple[Any, ...]] = []


def copied(model: Any) -> Any:
    """A copy of the weights, without the trainer's wrapper around `forward`, which would lead back to the original."""
    made = copy.deepcopy(model).eval()
    for module in made.modules():
        module.__dict__.pop("forward", None)
    return made


class OwnWeights(TransformersEngine):
    """Stands for a server: samples from a copy of the weights, which is as old as the last push."""

    def __init__(self, model: Any, tokenizer: Any, config: Any, setup: Any):
        self.trained = model
        self.served = copied(model)
        decoding = TransformersConfig()  # the server's own keys say nothing of this decode loop
        super().__init__(
            self.served, tokenizer, decoding, EngineSetup(max_context=setup.max_context, threads=setup.threads)
        )
        self.policy_version = -1

    def set_version(self, version: int, state: Any = None) -> None:
        EVENTS.append(("push", version, threading.current_thread().name))
        super().set_version(version)  # refuses while anything is in flight
        with torch.no_grad():
            for own, newest in zip(self.served.parameters(), self.trained.parameters(), strict=True):
                own.copy_(newest)

    async def generate(self, request: Any) -> Any:
        EVENTS.append(("call", self.policy_version, threading.current_thread().name))
        return await super().generate(request)

    def close(self) -> None:
        EVENTS.append(("close",))
        super().close()


def stand_in(patch: pytest.MonkeyPatch, name: str) -> None:
    """A server without vLLM: a class of this module."""
    EVENTS.clear()
    patch.setattr("mmrl.engines.ENGINES", {"vllm_server": f"{__name__}:{name}", "transformers": "unused:x"})
    patch.setattr("mmrl.engines.vllm.command.vllm_problems", lambda *_: [])


@pytest.fixture(autouse=True)
def _a_server_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "OwnWeights")


def fails_to_push_version_3(patch: pytest.MonkeyPatch, kind: type[OwnWeights]) -> None:
    real = kind.set_version

    def broken(self: Any, version: int, state: Any = None) -> None:
        if version == 3:
            raise SyncFailure("the server said no")
        real(self, version, state)

    patch.setattr(kind, "set_version", broken)


def command(model: str, folder: Path, *overrides: str) -> list[str]:
    words: list[str] = runs.command(model, folder, "engine=vllm_server", *overrides)
    return words


def nothing_sampled() -> bool:
    return not asyncio.all_tasks(rollout_loop())


def versions(folder: Path, step: int) -> set[int | None]:
    return {call.policy_version for call in read_step(RunDir.read(folder), step)[0].calls.values()}


@pytest.fixture(scope="module")
def stale(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Any, ...]]]:
    """A run of `STEPS` steps with an evaluation in its middle, and what its engine saw."""
    folder = tmp_path_factory.mktemp("stale") / "run"
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch, "OwnWeights")
        assert main(command(random_model, folder, *OPTIONS, f"train.steps={STEPS}")) == 0
    return folder, list(EVENTS)


def test_each_batch_after_the_first_comes_from_weights_one_step_older(stale: Any) -> None:
    folder, _ = stale
    assert [versions(folder, step) for step in range(1, STEPS + 1)] == [{0}, {0}, {1}, {2}]
    history = RunDir.read(folder).history()
    assert [record["rollouts/policy_lag"] for record in history[1:]] == [0, 1, 1, 1]
    assert [record["rollouts/policy_lag_max"] for record in history[1:]] == [0, 1, 1, 1]


def test_recorded_log_probabilities_are_those_of_the_older_weights(stale: Any, random_model: str) -> None:
    from transformers import AutoModelForCausalLM

    folder, _ = stale
    forest = read_step(RunDir.read(folder), STEPS)[0]
    gaps = {}
    for version in (STEPS - 2, STEPS - 1):
        model = AutoModelForCausalLM.from_pretrained(str(folder / "checkpoints" / f"checkpoint-{version}")).eval()
        worst = 0.0
        for call in forest.calls.values():
            ids = torch.tensor([call.prompt_ids + call.completion_ids])
            with torch.no_grad():
                scores = model(input_ids=ids).logits[0].log_softmax(-1)
            start = len(call.prompt_ids) - 1
            ours = [float(scores[start + t, token]) for t, token in enumerate(call.completion_ids)]
            worst = max(worst, *(abs(a - b) for a, b in zip(ours, call.logprobs, strict=True)))
        gaps[version] = worst
    assert gaps[STEPS - 2] < 1e-4 < gaps[STEPS - 1]


def test_weights_are_pushed_between_batches_and_never_under_one(stale: Any) -> None:
    _, events = stale
    pushes = [event[1] for event in events if event[0] == "push"]
    assert pushes == list(range(STEPS + 1)), "each version once, evaluations after steps 2 and 4 included"
    threads = {event[2] for event in events if event[0] == "push"}
    assert threads == {threading.main_thread().name}
    loops = {event[2] for event in events if event[0] == "call"}
    assert loops == {"mmrl-rollouts"}, "evaluations and what is sampled ahead have one loop"
    assert events[-1] == ("close",)


def test_without_staleness_nothing_runs_beside_the_trainer(random_model: str, tmp_path: Path) -> None:
    assert main(command(random_model, tmp_path / "run", "algo=mhgpo_fof", "train.steps=2")) == 0
    assert [versions(tmp_path / "run", step) for step in (1, 2)] == [{0}, {1}]
    assert all("rollouts/policy_lag" not in record for record in RunDir.read(tmp_path / "run").history())


def test_a_stopped_run_goes_on_with_the_batch_that_it_had_sampled_ahead(
    stale: Any, random_model: str, tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "run"
    options = [*OPTIONS, f"train.steps={STEPS}", "train.save_every=10"]
    with pytest.MonkeyPatch.context() as patch:
        fails_to_push_version_3(patch, OwnWeights)
        assert main(command(random_model, folder, *options)) != 0
    said = capsys.readouterr().err
    assert "the server said no" in said and f"mmrl train resume={folder}" in said
    assert nothing_sampled()
    assert (folder / "checkpoints" / "checkpoint-3").is_dir(), "the state after the last finished step is saved"
    assert main(["train", f"resume={folder}"]) == 0
    assert [versions(folder, step) for step in range(1, STEPS + 1)] == [{0}, {0}, {1}, {2}]
    assert numbers(folder) == numbers(stale[0])


class Versions(OwnWeights):
    """Stands for a server with adapters: a copy of the weights for each version that is served."""

    def __init__(self, model: Any, tokenizer: Any, config: Any, setup: Any):
        super().__init__(model, tokenizer, config, setup)
        self.tokenizer, self.setup = tokenizer, setup
        self.copies: dict[int, Any] = {}
        self.lock = threading.Lock()

    def set_version(self, version: int, state: Any = None) -> None:
        EVENTS.append(("push", version, threading.current_thread().name))
        self.copies[version] = copied(self.served)
        self.copies[version].load_state_dict(self.trained.state_dict())
        self.copies.pop(version - self.setup.versions, None)
        self.policy_version = version

    async def generate(self, request: Any) -> Any:
        version = self.policy_version if request.version is None else request.version
        return await asyncio.to_thread(self._alone, request, version)

    def _alone(self, request: Any, version: int) -> Any:
        setup = EngineSetup(max_context=self.setup.max_context, threads=self.setup.threads)
        with self.lock:  # torch's modules decode in one thread at a time
            engine = TransformersEngine(self.copies[version], self.tokenizer, TransformersConfig(), setup)
            engine.policy_version = version
            engine.enter()
            try:
                return asyncio.run(engine.generate(request))
            finally:
                engine.close()


@pytest.mark.parametrize("stops", [False, True])
def test_two_batches_ahead_come_each_from_one_version(
    random_model: str, tmp_path: Path, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a run that a failed push has stopped: the checkpoint holds both batches."""
    folder = tmp_path / "run"
    options = ["algo=mhgpo_fof", "train.staleness=2", "model.lora={r: 4}", "train.save_every=10", "train.lr=1e-3"]
    options += ["engine.urls=[http://127.0.0.1:1]"]

    stand_in(monkeypatch, "Versions")
    with pytest.MonkeyPatch.context() as patch:
        if stops:
            fails_to_push_version_3(patch, Versions)
        code = main(command(random_model, folder, *options, "train.steps=5"))
    if stops:
        assert code != 0
        ahead = saved_extra(folder / "checkpoints" / "checkpoint-3")["sampled_ahead"]
        assert [decode_step(lines)[0].step for lines in ahead] == [4, 5]
        assert main(["train", f"resume={folder}"]) == 0
    else:
        assert code == 0
        assert [event[1] for event in EVENTS if event[0] == "push"] == list(range(6))
    assert [versions(folder, step) for step in range(1, 6)] == [{0}, {0}, {0}, {1}, {2}]
    assert [record["rollouts/policy_lag"] for record in RunDir.read(folder).history()[1:]] == [0, 1, 2, 2, 2]
    assert nothing_sampled()


def test_dspy_programs_are_sampled_in_the_other_thread_too(random_model: str, tmp_path: Path) -> None:
    options = ["task=banking77", "algo=mmgrpo", "algo.rollouts=2", "algo.group_size=2", "train.steps=3"]
    small = [option for option in SMALL if not option.startswith(("task.retriever", "algo.group_size"))]
    engine = ["engine=vllm_server", "train.staleness=1", "train.weight_decay=2.0"]
    folder = tmp_path / "run"
    assert main(["train", *options, f"model.path={random_model}", f"run.dir={folder}", *small, *engine]) == 0
    assert [versions(folder, step) for step in (1, 2, 3)] == [{0}, {0}, {1}]
    assert all(record["rollouts/failed_share"] == 0 for record in RunDir.read(folder).history()[1:])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["engine=transformers"], "train.staleness: got 1 with engine=transformers"),
        (["algo.ratio_one=true"], "train.staleness: got 1, which has no effect with algo.ratio_one=true"),
        (["train.old_logprobs=recompute"], "which has no effect with train.old_logprobs=recompute"),
        (["algo.zero_variance=refill"], "train.staleness: got 1 with algo.zero_variance=refill"),
        (["algo.temperature=0.7", "algo.top_p=0.9"], "vLLM can record none with algo.temperature=0.7"),
        (["train.staleness=2"], "train.staleness: got 2 without an adapter"),
        (["train.staleness=2", "model.lora={r: 4}"], "train.staleness: got 2 with vLLM on a CPU"),
    ],
)
def test_what_cannot_be_corrected_is_refused(
    options: list[str], says: str, random_model: str, tmp_path: Path, capsys: Any
) -> None:
    assert main(command(random_model, tmp_path / "run", "train.staleness=1", *options)) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_a_kl_term_in_the_reward_needs_recorded_logprobs(random_model: str, tmp_path: Path, capsys: Any) -> None:
    options = ["algo=ppo", "algo.beta=0.1", "algo.temperature=0.7", "algo.top_p=0.9"]
    line = [option for option in command(random_model, tmp_path / "run") if not option.startswith("algo")]
    assert main([*line, *options]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "algo.kl: got reward, which takes the log-probabilities that the engine records, and vLLM can record" in said
    assert "use algo.top_p=1 and algo.top_k=0, algo.kl=loss or algo.beta=0" in said


async def _slowly(value: int, seconds: float = 0.05) -> int:
    await asyncio.sleep(seconds)
    return value


def test_prefetch_hands_over_each_batch_once_and_for_its_step() -> None:
    prefetch: Prefetch[int] = Prefetch()
    prefetch.wait()  # nothing to wait for
    prefetch.start(2, lambda: _slowly(7, 0.2))
    prefetch.start(3, lambda: _slowly(8))
    prefetch.wait(3)
    assert prefetch.steps == [2, 3] and prefetch.take(3) == 8
    assert prefetch.sampled() == {2: 7} and prefetch.steps == [2]
    prefetch.put(3, 9)
    assert prefetch.sampled() == {2: 7, 3: 9}
    assert [prefetch.take(2), prefetch.take(3), prefetch.steps] == [7, 9, []]
    prefetch.close()


def test_prefetch_raises_what_sampling_raised_to_whoever_takes_it() -> None:
    async def fails() -> int:
        raise SyncFailure("gone")

    prefetch: Prefetch[int] = Prefetch()
    prefetch.start(1, fails)
    prefetch.wait()
    assert prefetch.sampled() == {}
    with pytest.raises(SyncFailure, match="gone"):
        prefetch.take(1)
    prefetch.start(2, lambda: _slowly(1))
    assert prefetch.take(2) == 1
    prefetch.close()


def test_prefetch_ends_at_once_when_it_is_closed() -> None:
    prefetch: Prefetch[int] = Prefetch()
    begun, ends = threading.Event(), []

    async def endless() -> int:
        begun.set()
        try:
            return await _slowly(1, 3600)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    prefetch.start(1, endless)
    assert begun.wait(60)
    prefetch.close()
    prefetch.close()
    assert ends == ["cancelled"]
    assert nothing_sampled()
