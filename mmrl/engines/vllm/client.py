"""Completions by HTTP: of the engine whose servers they are (`server`), and of the processes beside the main one.

With several training processes each drives its share of the programs. The servers are the main process's: it starts,
pushes, probes and revives them, and after each push it tells the others where they are and what they serve.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from mmrl.config.engines import VllmServerConfig
from mmrl.engines.base import BusyClock, Completion, EngineSetup, Request
from mmrl.engines.vllm.api import VllmApi
from mmrl.engines.vllm.base import PushedAdapter, VllmEngine
from mmrl.engines.vllm.command import BASE, sampling_fields
from mmrl.errors import EngineFailure, SyncFailure
from mmrl.system.http_client import HttpFailure
from mmrl.system.portal import io_loop

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

REQUEST_TRIES = 4
"""Tries of one request at servers that are alive but do not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Servers of the main process after a push."""

    url: str
    """Of the router, or of the only server."""
    routed: bool
    """A router keeps sessions."""
    base: str
    """Served name of the weights without an adapter."""
    context: int | None
    """Token limit of the servers."""
    adapters: Mapping[str, PushedAdapter]
    """Adapter -> its newest version."""


class HttpEngine(VllmEngine):
    """Base of the engines that request completions by HTTP."""

    config: VllmServerConfig
    _base = BASE
    """Served name of the weights without an adapter."""
    _routed = False
    """A router keeps sessions."""

    def __init__(
        self, model: nn.Module | None, tokenizer: PreTrainedTokenizerBase, config: VllmServerConfig, setup: EngineSetup
    ):
        super().__init__(model, tokenizer, config, setup)
        self._clock = BusyClock()
        # The engine that has the servers puts theirs in its place; the others learn the address at the first version.
        self._api = VllmApi("", config.timeout_s, config.concurrency)
        """Client that completions are requested through."""

    @property
    @override
    def busy_s(self) -> float:
        return self._clock.seconds

    @override
    async def generate(self, request: Request) -> Completion:
        self.rules.check(request)
        with self._clock.running():
            return await self._api.io.run(self._generate(request))

    async def _generate(self, request: Request) -> Completion:
        row = self.rules.row(request)
        fields = sampling_fields(request.sampling, row.limit, self.rules.eos_ids)
        session = request.session if self._routed else ""
        failures = 0
        while True:
            await self._available()
            version = self.policy_version if request.version is None else request.version
            adapter = self._adapter_of(request.module, version)
            name = self._base if adapter is None else adapter.name
            try:
                ids, logprobs, reason = await self._api.completion(name, request.prompt_ids, fields, session)
                break
            except HttpFailure as error:
                failures += 1
                await self._recover(error, failures, name)
        return self._completion(row, ids, logprobs, reason, version)

    @override
    def end_session(self, session: str) -> None:
        if self._routed:  # nobody waits for it
            asyncio.run_coroutine_threadsafe(self._api.finish_session(session), io_loop())

    async def _available(self) -> None:
        """Return when a server has the weights: at once, but while the only one is started again.

        Raises:
            EngineFailure: none will have them before the next push.
        """
        return

    @abstractmethod
    async def _recover(self, error: HttpFailure, failures: int, name: str) -> None:
        """Return when a request that was not answered is worth another try.

        Args:
            failures: tries of this request so far.
            name: served name of the weights that it asks for.

        Raises:
            EngineFailure: it is not.
        """


class SharedServersEngine(HttpEngine):
    """Engine of a process beside the main one, which samples from the main one's servers."""

    _lost = False
    """The only server, somebody else's, has ended: back at its address, it may lack the pushed full weights."""

    def set_version(self, version: int, state: Mapping[str, Tensor] | None = None) -> None:
        """Learn what the main process's servers serve as policy `version`; a collective.

        Args:
            state: not used: the main process pushes.

        Raises:
            SyncFailure: the main process could not push it; with its reason.
        """
        self.setup.processes.barrier()  # nobody samples from the version before any more
        unknown: Serving | str = ""  # to this process
        served = self.setup.processes.first(unknown)
        if isinstance(served, str):
            raise SyncFailure(served)
        self._api.url, self._routed, self._base = served.url, served.routed, served.base
        self._versions = [*self._versions, (version, dict(served.adapters))][-self.setup.versions :]
        self.rules = self._rules(served.context)
        self.policy_version, self._lost = version, False

    @override
    async def _available(self) -> None:
        if self._lost:
            raise EngineFailure(f"the vLLM server at {self._api.url} has ended; it gets its weights at the next push")

    @override
    async def _recover(self, error: HttpFailure, failures: int, name: str) -> None:
        if self.config.urls and not self._routed and not self.names and not error.reached:
            self._lost = True
            return
        if failures >= REQUEST_TRIES:
            raise EngineFailure(f"the vLLM server failed {failures} times: {error}") from error
        await asyncio.sleep(2.0 ** (failures - 1))
        # The main process starts a server that has ended again, at the same address.
        for _ in range(round(self.config.start_timeout_s)):
            with suppress(HttpFailure, EngineFailure):
                if name in await self._api.models():
                    return
            await asyncio.sleep(1.0)

    @override
    def close(self) -> None:
        self._api.io.close()
