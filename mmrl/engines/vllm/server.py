"""Generation by vLLM servers, started by mmrl or given by their addresses; weights follow the trainer by version.

Programs reach them by `client.HttpEngine`; `stages.rl` calls `set_version` before anything is sampled from new
weights. Requests go to the only server, or through a router to one of several; weights go to each server directly:

    request ── router ──┬── server 1 ──┐
                        └── server 2 ──┴── adapters, full weights, probes

LoRA adapters are hot-loaded under a name that is new with each version: vLLM keys its prefix cache on the adapter's
name, so an adapter reloaded in place would be served with stale prefixes. Full weights go through disk. After each
push every server's log-probabilities of a fixed text are compared with the trainer's own, and, with adapters, the
base's with what they were at the start. A server that ends is taken out of the router, its requests are sent again, and
it comes back with the newest weights, checked in the same way, before its first request.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from mmrl.config.engines import VllmServerConfig
from mmrl.engines.base import EngineSetup
from mmrl.engines.vllm.api import VllmApi
from mmrl.engines.vllm.base import PushedAdapter, PushingEngine
from mmrl.engines.vllm.client import REQUEST_TRIES, HttpEngine, Serving
from mmrl.engines.vllm.command import server_arguments, server_environment
from mmrl.engines.vllm.ray_server import RayServer, place_servers
from mmrl.engines.vllm.replica import Replica
from mmrl.engines.vllm.router import Router
from mmrl.errors import EngineFailure, SyncFailure
from mmrl.models.load import local_path
from mmrl.system.child_process import ChildProcess
from mmrl.system.http_client import HttpFailure
from mmrl.system.portal import io_loop

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger("mmrl.engines")
T = TypeVar("T")

DYING_S = 5.0
"""Time for which servers are watched for the end of one, after a request has failed."""
WATCH_S = 1.0
"""Pause between looks whether a server has ended, where other processes use the servers too."""


class VllmServerEngine(HttpEngine, PushingEngine):
    """Engine by one or several vLLM servers behind HTTP."""

    def __init__(
        self, model: nn.Module | None, tokenizer: PreTrainedTokenizerBase, config: VllmServerConfig, setup: EngineSetup
    ):
        super().__init__(model, tokenizer, config, setup)
        self.restarts = 0
        """Starts after the first one, of all servers over the whole run."""
        self._weights_folder: Path | None = None
        """Full weights that took the place of those the servers started with."""
        self._deadline = 0.0
        """When the push under way is given up."""
        count = len(config.urls) or config.replicas
        self._group = place_servers(setup.bundle, count) if setup.bundle is not None and not config.urls else None
        self.replicas = [
            Replica(
                f"vLLM server {index + 1}" if count > 1 else "the vLLM server",
                VllmApi(url.removesuffix("/").removesuffix("/v1"), config.timeout_s, config.concurrency),
                None if config.urls else self._managed(index),
                config.restarts,
            )
            for index, url in enumerate(config.urls or [""] * count)
        ]
        self._serving = [*self.replicas]
        """Servers that get requests."""
        self._reviving: set[asyncio.Task[None]] = set()
        """Starts of servers that have ended."""
        self._not_started: BaseException | None = None
        """Why the last of them, of all servers, did not start again."""
        self._watch: Future[None] | None = None
        """Looks for servers that have ended, between pushes."""
        self._routed = count > 1 or config.router is not None
        self.router = Router(config, self.folder / "router.log") if self._routed else None
        self._api = self.router.api if self.router is not None else self.replicas[0].api
        try:
            self._api.io.wait(self._first_boot())
            self._base = self.replicas[0].base
            self.rules = self._rules(self.replicas[0].context)
        except BaseException:
            self.close()
            raise

    # -- weights ---------------------------------------------------------------------------------------------------

    def set_version(self, version: int, state: Mapping[str, Tensor] | None = None) -> None:
        """Push the trainer's weights, policy `version` now, to every server, and check that it serves them.

        With several processes a collective: the others have sampled with the version before, and learn of this one.

        Args:
            state: the weights, gathered from processes that share them; they are pushed without the check, which
                would need a forward on all processes. None: the model in this process has them whole.

        Raises:
            SyncFailure: the push failed or took longer than `engine.sync_timeout_s`; with the server's message.
            RuntimeError: calls are in flight, and full weights cannot change under them.
        """
        processes = self.setup.processes
        processes.barrier()
        if self._clock.count and not self.names:
            raise RuntimeError("the policy changed while the engine was generating")
        try:
            self._serve(version, state)
        except SyncFailure as error:
            processes.first(str(error))  # so that all stop at the same point
            raise
        self.policy_version = version
        routed, replica = self._routed, self.replicas[0]
        url, adapters = self._api.url, self._newest
        processes.first(Serving(url=url, routed=routed, base=replica.base, context=replica.context, adapters=adapters))

    def _serve(self, version: int, state: Mapping[str, Tensor] | None) -> None:
        """Push a version to every server; raises `SyncFailure`."""
        self._stop_watching()
        for replica in self.replicas:
            replica.restarts_left = self.config.restarts
        try:
            self._api.io.wait(self._gather())
            while not self._pushed(version, state):
                self._api.io.wait(self._gather())
        except TimeoutError:
            raise SyncFailure(
                f"policy version {version} did not reach the vLLM server within "
                f"engine.sync_timeout_s={self.config.sync_timeout_s:g} s; {self._log_tails()}"
            ) from None
        except (HttpFailure, EngineFailure, OSError) as error:  # OSError: the weights could not be written
            raise SyncFailure(
                f"policy version {version} was not taken by the vLLM server: {error}; {self._log_tails()}"
            ) from error
        if self.setup.processes.world > 1:
            self._watch = asyncio.run_coroutine_threadsafe(self._watching(), io_loop())

    def _pushed(self, version: int, state: Mapping[str, Tensor] | None) -> bool:
        """Push; False when a server ended under it, and the push is to be repeated.

        Raises:
            HttpFailure: all are alive.
            EngineFailure: one refused, or has been started often enough.
            TimeoutError: it took too long.
        """
        self._start_clock()
        try:
            self._push(version, state)
        except HttpFailure as error:
            if not self._api.io.wait(self._take_out_lost(error)):
                raise
            return False
        return True

    @override
    def _save(self, version: int, state: Mapping[str, Tensor] | None) -> dict[str, Path]:
        saved = super()._save(version, state)
        self._start_clock()  # gigabytes to a slow folder are no server's time
        return saved

    def _start_clock(self) -> None:
        # A start has a limit of its own (`engine.start_timeout_s`); only full weights on a CPU need one in a push.
        starts = len(self.replicas) if self._starts_anew else 0
        self._deadline = time.monotonic() + self.config.sync_timeout_s + starts * self.config.start_timeout_s

    def _wait(self, work: Coroutine[object, object, T]) -> T:
        """Wait for a part of a push, as long as the push may take."""
        return self._api.io.wait(work, max(0.0, self._deadline - time.monotonic()))

    async def _on_each(self, work: Callable[[Replica], Coroutine[object, object, T]]) -> list[T]:
        return await asyncio.gather(*(work(replica) for replica in self._serving))

    def _load(self, adapter: PushedAdapter) -> None:
        self._wait(self._on_each(lambda replica: replica.load(adapter.name, adapter.folder)))

    def _unload(self, adapter: PushedAdapter) -> None:
        self._wait(self._on_each(lambda replica: replica.unload(adapter.name)))

    def _replace(self, version: int, state: Mapping[str, Tensor] | None) -> None:
        """Replace the weights through disk."""
        if version == 0 and not self.config.urls:
            return  # the servers were started with them
        folder = self._save(version, state).get("")
        if folder is None:
            return
        if not self._starts_anew:
            path = str(folder.resolve())
            self._wait(self._on_each(lambda replica: replica.api.reload(path)))
            self._weights_folder = folder
            return
        self._weights_folder = folder
        # One after the other: two that load at once need twice the memory.
        for replica in [*self._serving]:
            self._wait(self._restart(replica))

    async def _restart(self, replica: Replica) -> None:
        """Start a server again, with the newest weights."""
        self._serving.remove(replica)
        if self.router is not None:
            await self.router.remove(replica.api.url)
        await replica.boot()
        await self._put_in(replica)

    @property
    def _starts_anew(self) -> bool:
        """True if new weights mean a new server: vLLM's CPU build computes with packed copies of full weights, which
        a reload in place does not reach."""
        return not self.config.urls and not self.names and self.setup.device == "cpu"

    def _probes(self, adapter: PushedAdapter | None) -> dict[str, list[float]]:
        async def probe(replica: Replica) -> tuple[str, list[float]]:
            name = replica.base if adapter is None else adapter.name
            return replica.name, await replica.api.probe(name, self.probe_ids)

        return dict(self._wait(self._on_each(probe)))

    # -- the servers -----------------------------------------------------------------------------------------------

    @override
    def close(self) -> None:
        self._stop_watching()
        for task in self._reviving:
            task.get_loop().call_soon_threadsafe(task.cancel)
        if self.router is not None:
            self.router.close()
        for replica in self.replicas:
            if replica.process is not None:
                replica.process.stop()
            replica.api.io.close()

    @override
    def metrics(self) -> dict[str, float]:
        return {"engine/restarts": float(self.restarts), "engine/servers": float(len(self._serving))}

    def _managed(self, index: int) -> ChildProcess:
        share = len(self.setup.devices) // self.config.replicas
        setup = replace(self.setup, devices=self.setup.devices[index * share : (index + 1) * share])

        def words() -> list[str]:
            # At each start: with the full weights that were pushed last.
            pushed = self._weights_folder
            path = local_path(self.weights.path) if pushed is None else str(pushed.resolve())
            arguments = server_arguments(self.config, setup, path, self.mode, len(self.names), self.rank)
            return [self.config.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]

        log = self.folder / (f"vllm-{index + 1}.log" if self.config.replicas > 1 else "vllm.log")
        limits: dict[str, Any] = {"timeout_s": self.config.start_timeout_s, "limit": "engine.start_timeout_s"}
        env = server_environment(self.config, setup)
        if self._group is not None:
            env.pop("CUDA_VISIBLE_DEVICES", None)  # Ray says which GPUs
            return RayServer(words, self._group, index, log=log.absolute(), env=env, **limits)

        # The address comes last, so that no other argument can change it.
        return ChildProcess(
            lambda port: [*words(), "--host", "127.0.0.1", "--port", str(port)], log=log, env=env, **limits
        )

    async def _first_boot(self) -> None:
        """Start all servers; raises `EngineFailure` where one has another model, length or weights than the first."""
        first = self.replicas[0]
        # One after the other: servers that start at once need the memory of all their loading at once.
        for replica in self.replicas:
            if replica.process is not None:
                LOG.info("starting %s; its log: %s", replica.name, replica.process.log)
            await self._boot(replica)
            if (first.base, first.context) != (replica.base, replica.context):
                raise EngineFailure(
                    f"engine.urls: {first.api.url} serves {first.base} with {first.context} tokens, {replica.api.url} "
                    f"{replica.base} with {replica.context}; expected servers of one model and length"
                )
            if self.names:
                await replica.api.check_loads_adapters()
                probe = self._base_probes[replica.name] = await replica.api.probe(replica.base, self.probe_ids)
                self._check_gap(self._base_probes[first.name], {replica.name: probe}, "")
        if self.router is not None:
            await self.router.start([replica.api.url for replica in self.replicas])

    async def _boot(self, replica: Replica) -> None:
        """Start or reach a server.

        Raises:
            EngineFailure: it does not answer; or it is somebody else's and has another model than a policy whose
                weights nobody pushes (an evaluation's).
        """
        await replica.boot()
        if self.model is not None or replica.process is not None or replica.root is None:
            return
        path = local_path(self.weights.path)
        path = str(Path(path).resolve()) if Path(path).is_dir() else path
        if path not in (replica.root, str(Path(replica.root).resolve())):
            raise EngineFailure(
                f"engine.urls: {replica.api.url} serves {replica.root}, {'the base of ' * bool(self.names)}the policy "
                f"is {path}; start the server with that"
            )

    async def _put_in(self, replica: Replica) -> None:
        if self.router is not None:
            await self.router.add(replica.api.url)
        self._serving.append(replica)

    async def _watching(self) -> None:
        """Look, each second, for servers that have ended: this process may have no requests itself."""
        while True:
            await asyncio.sleep(WATCH_S)
            with suppress(HttpFailure, EngineFailure):  # of the router, which the next request finds out too
                await self._take_out_lost(HttpFailure("connection", "it has ended"), wait_s=0.0)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    @override
    async def _available(self) -> None:
        # The address is the same: a server that is not routed to would answer before it has been given its weights.
        while not self._serving and self._reviving:
            await self._revived()
        if not self._serving:
            reason = self._not_started or self._log_tails()
            raise EngineFailure(f"no vLLM server is left until the next push: {reason}") from self._not_started

    @override
    async def _recover(self, error: HttpFailure, failures: int, name: str) -> None:
        # The others answer meanwhile; where there is none, the next try waits in `_available`.
        if await self._take_out_lost(error) or (not self._serving and self._reviving):
            return
        if failures >= REQUEST_TRIES:
            raise EngineFailure(f"the vLLM server failed {failures} times: {error}; {self._log_tails()}") from error
        await asyncio.sleep(2.0 ** (failures - 1))

    async def _take_out_lost(self, error: HttpFailure, wait_s: float = DYING_S) -> bool:
        """Take servers out that have ended, or do so soon, and begin to start them again; False where there is none.

        Servers of others come back with the next push; where none is left, as soon as one listens.
        """
        deadline = time.monotonic() + wait_s
        serving = [*self._serving]
        while True:
            # All requests in flight fail together: the first one here takes the server out for all of them.
            if serving != self._serving:
                return True
            lost = [replica for replica in serving if await replica.lost()]
            if serving != self._serving:
                return True
            # Where one is being started again, this request was most likely its: the others have it soon.
            waits = time.monotonic() < deadline and not self._reviving
            if lost or not waits or all(replica.process is None for replica in serving):
                break
            await asyncio.sleep(0.1)
        for replica in lost:
            self._serving.remove(replica)
            LOG.warning("%s has ended; %s", replica.name, replica.log_tail())
        out = asyncio.create_task(self._put_out(lost))
        # Before anything is awaited: a call that finds no server has to find that one comes back.
        for replica in lost:
            if replica.process is not None or not self._serving:
                self._reviving.add(asyncio.create_task(self._revive(replica, error, out)))
        await asyncio.shield(out)
        return bool(lost)

    async def _put_out(self, replicas: Sequence[Replica]) -> None:
        if self.router is not None:
            for replica in replicas:
                await self.router.remove(replica.api.url)

    async def _revive(self, replica: Replica, error: HttpFailure, out: asyncio.Task[None] | None = None) -> None:
        """Start a server that ended, or wait for somebody else's, with the newest weights.

        Calls of older ones died with it and are sent again.

        Args:
            out: ends when it is out of the router; None: it is.
        """
        if out is not None:
            await asyncio.shield(out)
        replica.spend_restart(error, self.config.restarts)
        if replica.process is None:
            await self._returned(replica)
        else:
            LOG.warning("starting %s again", replica.name)
        self.restarts += 1
        await self._bring_up_to_date(replica)

    async def _returned(self, replica: Replica) -> None:
        """Wait until somebody listens again at an address, or another server serves."""
        limit_s = self.config.start_timeout_s
        LOG.warning("waiting for a server at %s (engine.start_timeout_s=%g)", replica.api.url, limit_s)
        deadline = time.monotonic() + limit_s
        while await replica.lost():
            if self._serving or time.monotonic() > deadline:
                raise EngineFailure(f"engine.urls: nobody listens at {replica.api.url}")
            await asyncio.sleep(WATCH_S)

    async def _bring_up_to_date(self, replica: Replica) -> None:
        await self._boot(replica)
        # With one batch ahead, calls of older weights died with it and are sent again to the newest.
        for _, adapters in self._versions if self.setup.versions > 2 else self._versions[-1:]:
            for adapter in adapters.values():
                await replica.load(adapter.name, adapter.folder)
        # What mmrl starts has them from its start on: other processes know the address, and ask there at once.
        if self._weights_folder is not None and replica.process is None:
            await replica.api.reload(str(self._weights_folder.resolve()))
        for name, expected in self._expected.items():
            served = self._newest.get(name)
            probe = await replica.api.probe(served.name if served else replica.base, self.probe_ids)
            self._check_gap(expected, {replica.name: probe}, name)
        await self._put_in(replica)

    async def _revived(self) -> None:
        """Wait for the first of the servers that are being started again.

        Raises:
            EngineFailure: it did not start, and no server is left.
        """
        done, _ = await asyncio.wait(self._reviving, return_when=asyncio.FIRST_COMPLETED)
        self._reviving -= done
        failures = [failure for task in done if (failure := task.exception()) is not None]
        if failures and not self._serving and not self._reviving:
            self._not_started = failures[0]
            raise EngineFailure(str(failures[0])) from failures[0]
        for failure in failures:
            LOG.warning("a vLLM server stays out until the next push: %s", failure)

    async def _gather(self) -> None:
        """Wait, before a push, for servers that are being restarted, and take back those that answer again.

        Raises:
            EngineFailure: no server is left.
        """
        ended = HttpFailure("connection", "it has ended")
        while self._reviving:
            await self._revived()
        out = [replica for replica in self.replicas if replica not in self._serving]
        await self._take_out_lost(ended, wait_s=0.0)
        for replica in out:
            if replica.process is None and not await replica.lost():
                await self._bring_up_to_date(replica)
            elif replica.process is not None and not replica.process.alive:
                self._reviving.add(asyncio.create_task(self._revive(replica, ended)))
        while self._reviving:
            await self._revived()
        if not self._serving:
            raise EngineFailure(f"no vLLM server is left: {self._not_started or self._log_tails()}")

    def _log_tails(self) -> str:
        return "; ".join(replica.log_tail() for replica in self.replicas)
