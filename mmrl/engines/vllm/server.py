"""Generation by a vLLM server, started by mmrl or given by its address; weights follow the trainer by version.

Programs reach it through `rollout.context`; `stages.weights` calls `set_version` before anything is sampled from new
weights. LoRA adapters are hot-loaded under a name that is new with each version: vLLM keys its prefix cache on the
adapter's name, so an adapter reloaded in place would be served with stale prefixes. Full weights go through disk. After
each push the server's log-probabilities of a fixed text are compared with the trainer's own, and, with adapters, the
base's with what they were at the start.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mmrl.config.engines import VllmServerConfig
from mmrl.engines.base import BusyClock, Completion, EngineSetup, Request
from mmrl.engines.vllm.api import VllmApi
from mmrl.engines.vllm.base import PushedAdapter, VllmEngine
from mmrl.engines.vllm.command import BASE, sampling_fields, server_arguments, server_environment
from mmrl.errors import EngineFailure, SyncFailure
from mmrl.models.load import model_path
from mmrl.system.child_process import ChildProcess
from mmrl.system.http_client import HttpFailure

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger("mmrl.engines")
T = TypeVar("T")

TRIES = 4
"""Tries of one request at a server that is alive but does not answer."""
DYING_S = 5.0
"""How long a server that failed a request is watched for its end."""


class VllmServerEngine(VllmEngine):
    """Serves by one vLLM server behind HTTP."""

    def __init__(
        self,
        model: torch.nn.Module | None,
        tokenizer: PreTrainedTokenizerBase,
        config: VllmServerConfig,
        setup: EngineSetup,
    ):
        super().__init__(model, tokenizer, config, setup)
        self.config = config
        self.restarts = 0
        """Starts after the first one, over the whole run."""
        self._replaced: Path | None = None
        """Full weights that took the place of those the server started with."""
        self._restarts_left = config.restarts
        self._clock = BusyClock()
        self._deadline = 0.0
        """When the push under way is given up."""
        self._recovering = asyncio.Lock()
        self._process = None if config.url is not None else self._managed(model_path(self.weights))
        url = config.url.removesuffix("/").removesuffix("/v1") if config.url is not None else ""
        self._api = VllmApi(url, config.timeout_s, config.concurrency)
        self._base = BASE
        try:
            if self._process is not None:
                LOG.info("starting vLLM; its log: %s", self._process.log)
            self.rules = self._rules(self._api.io.wait(self._boot()))
            if self.names:
                self._base_probe = self._api.io.wait(self._api.probe(self._base, self.probe_ids))
        except BaseException:
            self.close()
            raise

    # -- what programs use -----------------------------------------------------------------------------------------

    @property
    def busy_s(self) -> float:
        """Seconds during which at least one request was in flight."""
        return self._clock.seconds

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`.

        Raises:
            LengthFailure: the prompt alone fills the context.
            EngineFailure: the request is impossible, or the server failed for good; with the server's message.
        """
        self.rules.check(request)
        with self._clock.running():
            return await self._api.io.run(self._generate(request))

    async def _generate(self, request: Request) -> Completion:
        row = self.rules.row(request)
        fields = sampling_fields(request.sampling, row.limit, self.rules.eos_ids)
        failures = 0
        while True:
            # Read anew with each try: a server that was started again knows the newest adapters only.
            version, name = self.policy_version, self._name_of(self._adapter_of(request.module))
            try:
                ids, logprobs, reason = await self._api.completion(name, request.prompt_ids, fields)
                break
            except HttpFailure as error:
                failures += 1
                await self._recover(error, failures)
        return self._completion(row, ids, logprobs, reason, version)

    def _name_of(self, adapter: PushedAdapter | None) -> str:
        return self._base if adapter is None else adapter.name

    # -- weights ---------------------------------------------------------------------------------------------------

    def set_version(self, version: int, state: Mapping[str, torch.Tensor] | None = None) -> None:
        """The trainer's weights are policy `version` now: push them, and check that the server serves them.

        Args:
            state: the weights, gathered from processes that share them; they are pushed without the check, which
                would need a forward on all processes. None: the model in this process has them whole.

        Raises:
            SyncFailure: the push failed or took longer than `engine.sync_timeout_s`; with the server's message.
            RuntimeError: calls are in flight, and full weights cannot change under them.
        """
        if self._clock.count and not self.names:
            raise RuntimeError("the policy changed while the engine was generating")
        self._restarts_left = self.config.restarts
        try:
            if self._process is not None and not self._process.alive:
                self._api.io.wait(self._restart())
            while not self._pushed(version, state):
                self._api.io.wait(self._restart())
        except TimeoutError:
            raise SyncFailure(
                f"policy version {version} did not reach the vLLM server within "
                f"engine.sync_timeout_s={self.config.sync_timeout_s:g} s; {self._log_tail()}"
            ) from None
        except (HttpFailure, EngineFailure, OSError) as error:  # OSError: the weights could not be written
            raise SyncFailure(
                f"policy version {version} was not taken by the vLLM server: {error}; {self._log_tail()}"
            ) from error
        self.policy_version = version

    def _pushed(self, version: int, state: Mapping[str, torch.Tensor] | None) -> bool:
        """Push; False when the server ended under it and is to be started again.

        Raises:
            HttpFailure: it is alive, or not ours.
            EngineFailure: it refused, or has been started often enough.
            TimeoutError: it took too long.
        """
        # A start has a limit of its own (`engine.start_timeout_s`); only full weights on a CPU need one in a push.
        limit = self.config.sync_timeout_s + (self.config.start_timeout_s if self._starts_anew else 0.0)
        self._deadline = time.monotonic() + limit
        try:
            self._push(version, state)
        except HttpFailure as error:
            if self._process is None or not self._api.io.wait(self._ended(self._process)):
                raise
            self._spend_restart(error)
            return False
        return True

    def _wait(self, work: Coroutine[object, object, T]) -> T:
        """Wait for a part of a push, as long as the push may take."""
        return self._api.io.wait(work, max(0.0, self._deadline - time.monotonic()))

    def _load(self, adapter: PushedAdapter) -> None:
        self._wait(self._api.load_adapter(adapter.name, adapter.folder))

    def _unload(self, adapter: PushedAdapter) -> None:
        self._wait(self._api.unload_adapter(adapter.name))

    def _replace(self, version: int, state: Mapping[str, torch.Tensor] | None) -> None:
        """Through disk: another process reads them."""
        folder = self._save(version, state).get("")
        if folder is None:
            return
        if not self._starts_anew or self._process is None:
            self._wait(self._api.reload(str(folder.resolve())))
            self._replaced = folder
            return
        self._process.stop()
        self._process = self._managed(str(folder.resolve()))
        self._wait(self._boot())

    @property
    def _starts_anew(self) -> bool:
        """True where new weights mean a new server: vLLM's CPU build computes with packed copies of full weights, which
        a reload in place does not reach."""
        return self._process is not None and not self.names and self.setup.device == "cpu"

    def _probe(self, adapter: PushedAdapter | None) -> list[float]:
        return self._wait(self._api.probe(self._name_of(adapter), self.probe_ids))

    # -- the server ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the server if mmrl started it, and close connections."""
        if self._process is not None:
            self._process.stop()
        self._api.io.close()

    def metrics(self) -> dict[str, float]:
        """For the step's record."""
        return {"engine/restarts": float(self.restarts)}

    def _managed(self, path: str) -> ChildProcess:
        arguments = server_arguments(self.config, self.setup, path, self.mode, len(self.names), self.rank)
        python = self.config.python or sys.executable

        def command(port: int) -> list[str]:
            # The address comes last, so that no other argument can change it.
            address = ["--host", "127.0.0.1", "--port", str(port)]
            return [python, "-m", "vllm.entrypoints.openai.api_server", *arguments, *address]

        log = self.folder / "vllm.log"
        return ChildProcess(
            command,
            env=server_environment(self.config, self.setup),
            log=log,
            timeout_s=self.config.start_timeout_s,
            limit="engine.start_timeout_s",
        )

    async def _boot(self) -> int | None:
        """Start the server, or reach the given one, and read what it serves; returns the limit of its context."""
        if self._process is not None:
            await asyncio.to_thread(self._process.start)
            self._api.url = self._process.url
        try:
            cards = await self._api.models()
        except (HttpFailure, EngineFailure) as error:
            raise EngineFailure(f"engine.url: no vLLM server answers at {self._api.url}: {error}") from error
        self._base = BASE if BASE in cards else next(iter(cards), BASE)
        context: int | None = cards.get(self._base, {}).get("max_model_len")
        return context

    async def _restart(self) -> None:
        """Start a server that died, with the newest weights: calls of older ones died with it and are sent again."""
        LOG.warning("the vLLM server has ended; starting it again; %s", self._log_tail())
        self.restarts += 1
        await self._boot()
        self._loaded = self._loaded[-1:]
        for adapter in self._loaded[0] if self._loaded else ():
            await self._api.load_adapter(adapter.name, adapter.folder)
        if self._replaced is not None:
            await self._api.reload(str(self._replaced.resolve()))

    async def _recover(self, error: HttpFailure, failures: int) -> None:
        """After a request that was not answered: return when it is worth another try.

        Raises:
            EngineFailure: it is not.
        """
        process = self._process
        if process is not None:
            await self._ended(process)
            # All calls in flight fail together when a server dies; the first one here starts it again for all of them.
            async with self._recovering:
                if not process.alive and process is self._process:
                    self._spend_restart(error)
                    await self._restart()
                    return
        if failures >= TRIES:
            raise EngineFailure(f"the vLLM server failed {failures} times: {error}; {self._log_tail()}") from error
        await asyncio.sleep(2.0 ** (failures - 1))

    @staticmethod
    async def _ended(process: ChildProcess) -> bool:
        """True where a server that failed a request has ended, or does so soon."""
        deadline = time.monotonic() + DYING_S
        while process.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return not process.alive

    def _spend_restart(self, error: HttpFailure) -> None:
        if not self._restarts_left:
            raise EngineFailure(
                f"the vLLM server ended again after engine.restarts={self.config.restarts} starts; {self._log_tail()}"
            ) from error
        self._restarts_left -= 1

    def _log_tail(self) -> str:
        return self._process.log_tail() if self._process is not None else f"the server is {self._api.url}"
