"""vllm-router before several servers: requests of one session go to the same server, sessions to the least loaded one.

Started by mmrl, or somebody else's. It carries completions only: weights go to each server directly.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from mmrl.config.engines import VllmConfig, VllmServerConfig
from mmrl.engines.vllm.api import VllmApi
from mmrl.errors import EngineFailure
from mmrl.system.child_process import ChildProcess, free_port
from mmrl.system.http_client import HttpFailure

PACKAGE = "vllm_router"
CHANGE_TRIES = 3
"""Tries of a change of the servers behind it."""
NO_PROXIES = dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"), "")
"""Variables for it: it would ask the environment's proxy for servers on this machine or in this cluster."""
START_S = 60.0
"""Until the router answers."""


def router_problems(config: VllmConfig) -> list[str]:
    """Return reasons why no router can be started before several servers."""
    if not isinstance(config, VllmServerConfig) or config.router is not None:
        return []
    if max(len(config.urls), config.replicas) == 1:
        return []
    if importlib.util.find_spec(PACKAGE) is None:
        return [
            f"engine.router: several servers need vllm-router, which {sys.executable} does not have; install it "
            "(pip install 'mmrl[fleet]'), or name a running one"
        ]
    return []


class Router:
    """The router's process or address, and the servers behind it.

    Args:
        log: where the output of one that mmrl starts goes.
    """

    def __init__(self, config: VllmServerConfig, log: Path):
        self._process: ChildProcess | None = None
        if config.router is None:
            self._process = ChildProcess(_command, log=log, timeout_s=START_S, env=NO_PROXIES)
        self.api = VllmApi((config.router or "").removesuffix("/"), config.timeout_s, config.concurrency)

    async def start(self, servers: Sequence[str]) -> None:
        """Start or reach it, with these servers behind it.

        Raises:
            EngineFailure: it does not answer, or is no router that keeps sessions.
        """
        if self._process is not None:
            await asyncio.to_thread(self._process.start)
            self.api.url = self._process.url
        try:
            workers = await self._workers()
            # A session that nobody began: a router without sessions does not know the page.
            await self.api.finish_session("none")
        except (HttpFailure, EngineFailure, LookupError, TypeError) as error:
            raise EngineFailure(f"engine.router: no vllm-router with sessions at {self.api.url}: {error}") from error
        for server in servers:
            if server not in workers:
                await self.add(server)

    async def add(self, server: str) -> None:
        """Send requests to a server from now on."""
        await self._have(server, True, "/add_worker")

    async def remove(self, server: str) -> None:
        """Send no more requests to a server; its sessions go on at another one."""
        await self._have(server, False, "/remove_worker")

    async def _have(self, server: str, there: bool, page: str) -> None:
        """Change the servers behind it; a reply that is lost may have come after the change."""
        for left in reversed(range(CHANGE_TRIES)):
            try:
                await self.api.request(f"{page}?url={quote(server, safe='')}", {})
                return
            except HttpFailure as error:
                if not left:
                    raise EngineFailure(f"engine.router: {self.api.url}{page} fails for {server}: {error}") from error
                if (server in await self._workers()) == there:
                    return

    async def _workers(self) -> list[str]:
        workers: list[str] = (await self.api.request("/list_workers"))["urls"]
        return workers

    def close(self) -> None:
        """Stop it if mmrl started it, and close connections."""
        if self._process is not None:
            self._process.stop()
        self.api.io.close()


def _command(port: int) -> list[str]:
    return [
        *(sys.executable, "-m", f"{PACKAGE}.launch_router"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
        *("--policy", "sticky_least_loaded"),
        # The engine asks again itself, and knows which servers have ended: a breaker would keep healthy ones out.
        *("--disable-retries", "--disable-circuit-breaker"),
    ]
