"""Generation by vLLM in the training process, on the trainer's own device; on a GPU it sleeps while the trainer works.

Programs reach it through `rollout.context`; `stages.rl` calls `set_version` before anything is sampled from new
weights and `sleep` when sampling is over. LoRA adapters go through disk, each version under a name and a number of its
own (vLLM keys its prefix cache on the name); full weights go from memory to memory. One thread drives vLLM while there
are requests; weights change on the caller's, and only when there are none.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from mmrl.config.engines import VllmColocatedConfig
from mmrl.engines.base import Completion, EngineSetup, Request
from mmrl.engines.embedded.batch_rows import BatchRow
from mmrl.engines.vllm.base import PushedAdapter, PushingEngine
from mmrl.engines.vllm.command import ENDS, RESET_TRIES, RESET_WAIT_S, engine_arguments, resources, sampling_fields
from mmrl.errors import ConfigError, EngineFailure, SyncFailure
from mmrl.models.load import local_path

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase
    from vllm import RequestOutput
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.llm_engine import LLMEngine

LOG = logging.getLogger("mmrl.engines")


@dataclass(slots=True, eq=False)
class _VllmRequest:
    """Request that vLLM works on; a program waits for `future` in its event loop."""

    id: str
    row: BatchRow
    adapter: PushedAdapter | None
    version: int
    future: Future[Completion]

    def answer(self, result: Completion | Exception) -> None:
        """Set the result; called in the driver's thread."""
        with contextlib.suppress(InvalidStateError):  # its program has given up
            if isinstance(result, Exception):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)


class VllmColocatedEngine(PushingEngine):
    """Engine by vLLM in this process."""

    config: VllmColocatedConfig
    busy_s: float = 0.0

    @property
    @override
    def computing_s(self) -> float:
        return self.busy_s

    def __init__(
        self,
        model: nn.Module | None,
        tokenizer: PreTrainedTokenizerBase,
        config: VllmColocatedConfig,
        setup: EngineSetup,
    ):
        super().__init__(model, tokenizer, config, setup)
        self._sleeps = setup.device != "cpu" if config.sleep is None else config.sleep
        self._asleep = False
        self._ids = map(str, itertools.count(1))
        self._in_flight = 0
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue()
        """Work for the driver's thread; None: the end."""
        self._live: dict[str, _VllmRequest] = {}
        """Requests in flight; the driver's thread alone has them."""
        self._driver: threading.Thread | None = None
        self._vllm = self._start()
        try:
            self.rules = self._rules(self._vllm.model_config.max_model_len)
            self._base_probes = self._probes(None) if self.names else {}
        except BaseException:
            self.close()
            raise

    # -- what programs use -----------------------------------------------------------------------------------------

    @override
    async def generate(self, request: Request) -> Completion:
        self.rules.check(request)
        job = _VllmRequest(
            id=next(self._ids),
            row=self.rules.row(request),
            adapter=self._adapter_of(request.module, self.policy_version),
            version=self.policy_version,
            future=Future(),
        )
        self._in_flight += 1
        try:
            if self._driver is None or not self._driver.is_alive():
                self._driver = threading.Thread(target=self._driven, name="mmrl-vllm", daemon=True)
                self._driver.start()
            self._waiting.put(partial(self._begin, job))
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            self._waiting.put(partial(self._drop, [job.id]))
            raise
        finally:
            self._in_flight -= 1

    # -- the thread that drives vLLM -------------------------------------------------------------------------------

    def _driven(self) -> None:
        while (work := self._waiting.get()) is not None:
            started = time.perf_counter()
            work()
            while self._live:
                with contextlib.suppress(queue.Empty):
                    while (work := self._waiting.get_nowait()) is not None:
                        work()
                    self._fail("the engine was closed")  # None came
                    return
                if self._live:
                    self._step()
                # Step by step: rollouts that wait are not to time out while others are computed (`computing_s`).
                now = time.perf_counter()
                self.busy_s, started = self.busy_s + now - started, now

    def _begin(self, job: _VllmRequest) -> None:
        try:
            self._awake()
            fields = sampling_fields(job.row.request.sampling, job.row.limit, self.rules.eos_ids)
            self._add(job.id, job.row.prompt_ids, fields, job.adapter)
            self._live[job.id] = job
        except Exception as error:  # vLLM's own words, whatever their type
            job.answer(EngineFailure(f"vLLM refused the request: {type(error).__name__}: {error}"))

    def _drop(self, names: Sequence[str]) -> None:
        """Forget requests whose callers are gone."""
        in_flight = [name for name in names if self._live.pop(name, None) is not None]
        try:
            if in_flight:
                self._vllm.abort_request(in_flight)
        except Exception as error:
            LOG.warning("vLLM could not drop %d requests: %s: %s", len(in_flight), type(error).__name__, error)

    def _fail(self, reason: str) -> None:
        for job in self._live.values():
            job.answer(EngineFailure(reason))
        self._live.clear()

    def _step(self) -> None:
        try:
            outputs = self._vllm.step()
        except Exception as error:
            self._fail(f"vLLM failed: {type(error).__name__}: {error}")
            return
        for output in outputs:
            if output.finished and output.request_id in self._live:
                done = self._live.pop(output.request_id)
                try:
                    done.answer(self._answer(done, output.outputs[0]))
                except Exception as error:  # one call's; the thread goes on for the others
                    expected = isinstance(error, EngineFailure)
                    done.answer(error if expected else EngineFailure(f"vLLM's reply: {type(error).__name__}: {error}"))

    def _settle(self) -> None:
        """Return once the driver's thread has nothing in flight: calls that timed out leave before it has noticed."""
        if self._driver is None or not self._driver.is_alive():
            return
        settled = threading.Event()

        def settle() -> None:
            # Put by a caller without open calls, so what is still in flight has been cancelled.
            self._drop(list(self._live))
            settled.set()

        self._waiting.put(settle)
        while not settled.wait(0.1):
            if not self._driver.is_alive():
                return

    def _answer(self, job: _VllmRequest, output: CompletionOutput) -> Completion | Exception:
        if (finish := str(output.finish_reason)) not in ENDS:
            return EngineFailure(f"vLLM cut the completion off (finish reason '{finish}')")
        ids = [int(token) for token in output.token_ids]
        if not ids or output.logprobs is None:
            return EngineFailure("vLLM sent no tokens or no log-probabilities")
        logprobs = [float(row[token].logprob) for row, token in zip(output.logprobs, ids, strict=True)]
        return self._completion(job.row, ids, logprobs, finish, job.version)

    def _add(
        self, name: str, prompt_ids: Sequence[int], fields: Mapping[str, Any], adapter: PushedAdapter | None
    ) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=list(prompt_ids))
        lora = None if adapter is None else _lora_request(adapter)
        self._vllm.add_request(name, prompt, SamplingParams(**fields), lora_request=lora)

    # -- weights ---------------------------------------------------------------------------------------------------

    def set_version(self, version: int, state: Mapping[str, Tensor] | None = None) -> None:
        """Push the trainer's weights, policy `version` now, and check that vLLM serves them.

        Args:
            state: the weights, where the model in this process does not hold them whole.

        Raises:
            SyncFailure: the push failed; with vLLM's words.
            RuntimeError: calls are in flight; their tokens would come from two policies.
        """
        if self._in_flight:
            raise RuntimeError("the policy changed while the engine was generating")
        self._settle()
        try:
            self._awake()
            self._push(version, state)
        except Exception as error:
            raise SyncFailure(
                f"policy version {version} was not taken by vLLM: {type(error).__name__}: {error}"
            ) from error
        self.policy_version = version

    def _load(self, adapter: PushedAdapter) -> None:
        if not self._vllm.add_lora(_lora_request(adapter)):
            raise EngineFailure(f"the adapter in {adapter.folder} was not loaded")

    def _unload(self, adapter: PushedAdapter) -> None:
        self._vllm.remove_lora(adapter.number)

    def _replace(self, version: int, state: Mapping[str, Tensor] | None) -> None:
        """Replace the weights from memory to memory."""
        if self.model is None:
            return
        from transformers.core_model_loading import revert_weight_conversion

        source = self.model.state_dict() if state is None else dict(state)
        # vLLM knows the names and shapes of files, which transformers has changed as it loaded them (experts, stacked).
        published: Mapping[str, Tensor] = revert_weight_conversion(self.model, source)
        weights = ((name, tensor.detach()) for name, tensor in published.items())
        self._vllm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        for _ in range(RESET_TRIES):
            if self._vllm.reset_prefix_cache() is not False:
                return
            self._vllm.step()  # of calls that were given up, which end with it
            time.sleep(RESET_WAIT_S)
        raise EngineFailure("vLLM did not empty its prefix cache, which has prefixes of the weights before")

    @override
    def _probes(self, adapter: PushedAdapter | None) -> dict[str, list[float]]:
        """Nothing else is in flight."""
        name, ids = next(self._ids), self.probe_ids
        self._add(name, ids, {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}, adapter)
        done: list[RequestOutput] = []
        while not done:
            done = [output for output in self._vllm.step() if output.finished and output.request_id == name]
        rows = zip(done[0].prompt_logprobs[1:], ids[1:], strict=True)
        return {"vLLM": [float(row[token].logprob) for row, token in rows]}

    # -- memory ----------------------------------------------------------------------------------------------------

    @override
    def sleep(self) -> None:
        """Free vLLM's KV cache; its weights wait in host memory (sleep level 1)."""
        # Level 2 would drop the weights too; with adapters nobody would push the base again.
        if self._sleeps and not self._asleep and not self._in_flight:
            self._settle()
            self._vllm.sleep(level=1)
            self._asleep = True

    def _awake(self) -> None:
        if self._asleep:
            import torch

            # vLLM takes memory beside torch's allocator, which has kept what the update no longer needs.
            torch.cuda.empty_cache()
            self._vllm.wake_up()
            self._asleep = False

    @override
    def close(self) -> None:
        if self._driver is not None and self._driver.is_alive():
            self._waiting.put(None)
            self._driver.join(10)
        engine, self._vllm = self._vllm, None
        if engine is not None:
            from vllm.distributed import cleanup_dist_env_and_memory

            engine.engine_core.shutdown()
            with contextlib.suppress(Exception):  # the run is over; what vLLM cannot tidy up ends with the process
                cleanup_dist_env_and_memory()

    def _start(self) -> LLMEngine:
        # vLLM's core in this process too, or no weights could go from memory to memory.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.update(resources(self.config, self.setup))
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        path = local_path(self.weights.path)
        arguments = engine_arguments(self.config, self.setup, path, self.mode, len(self.names), self.rank)
        if self._sleeps:
            arguments.append("--enable-sleep-mode")
        LOG.info("starting vLLM in this process")
        try:
            parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([*arguments, *self.config.args])
        except SystemExit:  # argparse has printed what it does not know
            raise ConfigError(f"engine.args: got {list(self.config.args)}, which vLLM's engine does not take") from None
        engine_args = EngineArgs.from_cli_args(parsed)
        engine_args.disable_log_stats = True
        try:
            return LLMEngine.from_engine_args(engine_args)
        except Exception as error:
            raise EngineFailure(f"vLLM did not start: {type(error).__name__}: {error}") from error


def _lora_request(adapter: PushedAdapter) -> LoRARequest:
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, adapter.number, adapter.folder)
