"""A vLLM server of an engine: its process or its address, and the adapters that it holds.

`VllmServerEngine` has one, or several behind a router; all weights go to each of them directly.
"""

from __future__ import annotations

import asyncio

from mmrl.engines.vllm.api import VllmApi
from mmrl.engines.vllm.command import BASE
from mmrl.errors import EngineFailure
from mmrl.system.child_process import ChildProcess
from mmrl.system.http_client import HttpFailure


class Replica:
    """A server of `mmrl`'s (`process`), or one that runs already.

    Args:
        name: for sentences ("the vLLM server", "vLLM server 2").
        process: None: the server at `api.url` is somebody else's.
        restarts: starts after the first one, per policy version.
    """

    def __init__(self, name: str, api: VllmApi, process: ChildProcess | None, restarts: int):
        self.name, self.api, self.process = name, api, process
        self.restarts_left = restarts
        self.base = BASE
        """Served name of the weights without an adapter."""
        self.root: str | None = None
        """Folder or hub id of the weights that the server was started with; None: it does not say."""
        self.context: int | None = None
        """Token limit of the server."""
        self._adapters: set[str] = set()

    async def boot(self) -> None:
        """Start the process, or reach the address, and read what it serves.

        Raises:
            EngineFailure: nobody answers.
        """
        if self.process is not None:
            await asyncio.to_thread(self.process.start)
            self.api.url = self.process.url
        try:
            cards = await self.api.models()
        except (HttpFailure, EngineFailure) as error:
            key = "engine.urls: " if self.process is None else ""
            raise EngineFailure(f"{key}no vLLM server answers at {self.api.url}: {error}") from error
        # One that could not be reached for a while still has its adapters, and vLLM refuses a name twice.
        self._adapters = set(cards)
        self.base = BASE if BASE in cards else next(iter(cards), BASE)
        card = cards.get(self.base, {})
        self.root, self.context = card.get("root"), card.get("max_model_len")

    async def load(self, name: str, folder: str) -> None:
        """Serve the LoRA adapter in `folder` under `name`, which no other adapter has had."""
        if name in self._adapters:
            return
        await self.api.request("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        self._adapters.add(name)

    async def unload(self, name: str) -> None:
        """Forget an adapter; one that was started again since may not have it."""
        if name in self._adapters:
            self._adapters.discard(name)
            await self.api.request("/v1/unload_lora_adapter", {"lora_name": name})

    async def lost(self) -> bool:
        """Return True if the process has ended, or nobody listens at the address."""
        if self.process is not None:
            return not self.process.alive
        return not await self.api.listens()

    def spend_restart(self, error: HttpFailure, allowed: int) -> None:
        """Count one more start of this policy version.

        Raises:
            EngineFailure: there were enough.
        """
        if not self.restarts_left:
            raise EngineFailure(
                f"{self.name} ended again after engine.restarts={allowed} starts; {self.log_tail()}"
            ) from error
        self.restarts_left -= 1

    def log_tail(self) -> str:
        """Return the end of its log, or where it is."""
        return self.process.log_tail() if self.process is not None else f"the server is {self.api.url}"
