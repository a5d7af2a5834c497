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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.config.engines import VllmServerConfig
from mmrl.engines.base import Completion, Engine, EngineSetup, Request
from mmrl.engines.vllm.api import Refused, Unreachable, VllmApi
from mmrl.engines.vllm.base import STORED_VERSIONS, ServedPolicy
from mmrl.engines.vllm.command import BASE, server_arguments, server_environment, vllm_problems
from mmrl.errors import ConfigError, EngineFailure, SyncFailure
from mmrl.models.load import model_path
from mmrl.system.child_process import ChildProcess

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger("mmrl.engines")

TRIES = 4
"""Tries of one request at a server that is alive but does not answer."""
DYING_S = 5.0
"""How long a server that failed a request is watched for its end."""


class VllmServerEngine(Engine):
    """One vLLM server behind HTTP.

    Args:
        model: the trainer's model, whose weights are pushed; None: the server's own weights and `setup.folders`.
        tokenizer: decodes for stop strings and names the end-of-turn token.
        config: `engine.*`.
        setup: where the server finds base weights and leaves its log.

    Raises:
        ConfigError: vLLM cannot be used as configured.
        EngineFailure: the server did not start, or does not answer.
    """

    policy_version = -1
    busy_s: float = 0.0

    def __init__(
        self,
        model: torch.nn.Module | None,
        tokenizer: PreTrainedTokenizerBase,
        config: VllmServerConfig,
        setup: EngineSetup,
    ):
        if problems := vllm_problems(config):
            raise ConfigError(problems)
        self.policy = ServedPolicy(model, tokenizer, config, setup)
        self.model, self.config, self.setup = model, config, setup
        self.restarts = 0
        """Starts after the first one, over the whole run."""
        self._folder = self.policy.folder
        self._names = self.policy.names
        self._served: dict[str, str] = {}
        """Adapter name ("" for full weights) -> name at the server, newest version."""
        self._loaded: list[dict[str, Path]] = []
        """Names at the server and their folders, per version, oldest first."""
        self._replaced: Path | None = None
        """Full weights that took the place of those the server started with."""
        self._base_probe: list[float] = []
        self._restarts_left = config.restarts
        self._in_flight = 0
        self._busy_since = 0.0
        self._recovering: asyncio.Lock | None = None
        assert setup.weights is not None
        self._process = None if config.url is not None else self._managed(model_path(setup.weights))
        url = config.url.removesuffix("/").removesuffix("/v1") if config.url is not None else ""
        self._api = VllmApi(url, config.timeout_s, config.concurrency)
        self._probe_ids = self.policy.probe_ids
        self._base = BASE
        self._server_context: int | None = None
        try:
            if self._process is not None:
                LOG.info("starting vLLM; its log: %s", self._process.log)
            self._api.io.wait(self._first_boot())
            self.rules = self.policy.rules(self._server_context)
        except BaseException:
            self.close()
            raise

    # -- what programs use -----------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`.

        Raises:
            LengthFailure: the prompt alone fills the context.
            EngineFailure: the request is impossible, or the server failed for good; with the server's message.
        """
        self.rules.check(request)
        if not self._in_flight:
            self._busy_since = time.perf_counter()
        self._in_flight += 1
        try:
            return await self._api.io.run(self._generate(request))
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self.busy_s += time.perf_counter() - self._busy_since

    async def _generate(self, request: Request) -> Completion:
        row = self.rules.row(request)
        failures = 0
        while True:
            # Read anew with each try: a server that was started again knows the newest adapters only.
            version, name = self.policy_version, self._name_for(request.module)
            try:
                ids, logprobs, reason = await self._api.completion(
                    name, request.prompt_ids, request.sampling, row.limit, sorted(self.rules.eos_ids)
                )
                break
            except Unreachable as error:
                failures += 1
                await self._recover(error, failures)
        return self.policy.completed(self.rules, row, request, ids, logprobs, reason, version)

    def _name_for(self, module: str) -> str:
        if not self._names:
            return self._base
        adapter = self.policy.adapter(module)
        if adapter not in self._served:
            raise EngineFailure(f"adapter '{adapter}' has not been pushed to the vLLM server")
        return self._served[adapter]

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
        if self._in_flight and not self._names:
            raise RuntimeError("the policy changed while the engine was generating")
        self._restarts_left = self.config.restarts
        # A start has a limit of its own (`engine.start_timeout_s`); only full weights on a CPU need one in a push.
        limit = self.config.sync_timeout_s + (self.config.start_timeout_s if self._starts_anew else 0.0)
        try:
            if self._process is not None and not self._process.alive:
                self._api.io.wait(self._restart())
            while not self._api.io.wait(self._pushed(version, state), limit):
                self._api.io.wait(self._restart())
        except TimeoutError:
            raise SyncFailure(
                f"policy version {version} did not reach the vLLM server within "
                f"engine.sync_timeout_s={self.config.sync_timeout_s:g} s; {self._log_tail()}"
            ) from None
        except (Unreachable, EngineFailure, OSError) as error:  # OSError: the weights could not be written
            raise SyncFailure(
                f"policy version {version} was not taken by the vLLM server: {error}; {self._log_tail()}"
            ) from error
        self.policy_version = version

    async def _pushed(self, version: int, state: Mapping[str, torch.Tensor] | None) -> bool:
        """Push; False when the server ended under it and is to be started again.

        Raises:
            Unreachable: it is alive, or not ours.
            EngineFailure: it refused, or has been started often enough.
        """
        try:
            await self._push(version, state)
        except Unreachable as error:
            if self._process is None or not await self._ended(self._process):
                raise
            self._spend_restart(error)
            return False
        return True

    async def _push(self, version: int, state: Mapping[str, torch.Tensor] | None) -> None:
        # In a thread: the I/O loop also serves judges and retrieval, and writing weights takes seconds.
        saved = await asyncio.to_thread(self.policy.save, version, state)
        if self._names:
            await self._push_adapters(version, saved)
        elif saved:
            await self._push_all(saved[""])
        # Sharded weights are whole on no process, and the check would need a forward on all of them at once.
        if state is None:
            await self._check_served()
        self.policy.forget_old()

    async def _push_adapters(self, version: int, saved: Mapping[str, Path]) -> None:
        names = {adapter: self.policy.served_name(adapter, version) for adapter in saved}
        for adapter, folder in saved.items():
            await self._api.load_adapter(names[adapter], str(folder.resolve()))
        self._served = names
        self._loaded.append({names[adapter]: folder for adapter, folder in saved.items()})
        # The version before stays loaded, for calls that are still in flight.
        while len(self._loaded) > STORED_VERSIONS:
            for name in self._loaded.pop(0):
                await self._api.unload_adapter(name)

    async def _push_all(self, folder: Path) -> None:
        if not self._starts_anew or self._process is None:
            await self._api.reload(str(folder.resolve()))
            self._replaced = folder
            return
        await asyncio.to_thread(self._process.stop)
        self._process = self._managed(str(folder.resolve()))
        await self._boot()

    @property
    def _starts_anew(self) -> bool:
        """Whether new weights mean a new server: vLLM's CPU build computes with packed copies of full weights, which a
        reload in place does not reach."""
        return self._process is not None and not self._names and self.setup.device == "cpu"

    async def _check_served(self) -> None:
        """Compare what the server says of the probe with the trainer's own forward, and the base with its start."""
        if self.model is None:
            return
        for adapter in self._names or [""]:
            name = self._served[adapter] if adapter else self._base
            await asyncio.to_thread(self.policy.compare, adapter, await self._api.probe(name, self._probe_ids))
        if self._names:
            self.policy.compare_base(self._base_probe, await self._api.probe(self._base, self._probe_ids))

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
        arguments = server_arguments(
            self.config, self.setup, path, self.policy.mode, len(self._names), self.policy.rank
        )
        python = self.config.python or sys.executable

        def command(port: int) -> list[str]:
            # The address comes last, so that no other argument can change it.
            address = ["--host", "127.0.0.1", "--port", str(port)]
            return [python, "-m", "vllm.entrypoints.openai.api_server", *arguments, *address]

        log = self._folder / "vllm.log"
        return ChildProcess(
            command,
            env=server_environment(self.config, self.setup),
            log=log,
            timeout_s=self.config.start_timeout_s,
            limit="engine.start_timeout_s",
        )

    async def _boot(self) -> None:
        """Start the server, or reach the given one, and read what it serves."""
        if self._process is not None:
            await asyncio.to_thread(self._process.start)
            self._api.url = self._process.url
        try:
            cards = await self._api.models()
        except (Unreachable, Refused) as error:
            raise EngineFailure(f"engine.url: no vLLM server answers at {self._api.url}: {error}") from error
        self._base = BASE if BASE in cards else next(iter(cards), BASE)
        self._server_context = cards.get(self._base, {}).get("max_model_len")

    async def _first_boot(self) -> None:
        await self._boot()
        if self._names:
            self._base_probe = await self._api.probe(self._base, self._probe_ids)

    async def _restart(self) -> None:
        """Start a server that died, with the newest weights: calls of older ones died with it and are sent again."""
        LOG.warning("the vLLM server has ended; starting it again; %s", self._log_tail())
        self.restarts += 1
        await self._boot()
        self._loaded = self._loaded[-1:]
        for version in self._loaded:
            for name, folder in version.items():
                await self._api.load_adapter(name, str(folder.resolve()))
        if self._replaced is not None:
            await self._api.reload(str(self._replaced.resolve()))

    async def _recover(self, error: Unreachable, failures: int) -> None:
        """After a request that was not answered: return when it is worth another try.

        Raises:
            EngineFailure: it is not.
        """
        process = self._process
        if process is not None:
            await self._ended(process)
            # All calls in flight fail together when a server dies; the first one here starts it again for all of them.
            if self._recovering is None:
                self._recovering = asyncio.Lock()
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
        """Whether a server that failed a request has ended, or does so soon."""
        deadline = time.monotonic() + DYING_S
        while process.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return not process.alive

    def _spend_restart(self, error: Unreachable) -> None:
        if not self._restarts_left:
            raise EngineFailure(
                f"the vLLM server ended again after engine.restarts={self.config.restarts} starts; {self._log_tail()}"
            ) from error
        self._restarts_left -= 1

    def _log_tail(self) -> str:
        return self._process.log_tail() if self._process is not None else f"the server is {self._api.url}"
