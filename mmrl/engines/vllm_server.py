"""Generation by a vLLM server, started by mmrl or given by its address; weights follow the trainer by version.

Programs reach it through `rollout.context`; `stages.weights` calls `set_version` before anything is sampled from new
weights. LoRA adapters are hot-loaded under a name that is new with each version: vLLM keys its prefix cache on the
adapter's name, so an adapter reloaded in place would be served with stale prefixes. Full weights go through disk. After
each push the server's log-probabilities of a fixed text are compared with the trainer's own, and, with adapters, the
base's with what they were at the start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmrl.config import EngineConfig
from mmrl.engines.base import Completion, Request, Setup, Tokenizer
from mmrl.engines.http import Background
from mmrl.engines.rows import Rules, eos_ids
from mmrl.engines.server_process import ServerProcess
from mmrl.engines.vllm_api import Refused, Unreachable, VllmApi
from mmrl.engines.vllm_launch import BASE, exact, logprobs_mode, server_arguments, server_environment, vllm_problems
from mmrl.errors import ConfigError, EngineFailure, SyncFailure
from mmrl.models import load_configs, model_path, render_prompt

LOG = logging.getLogger("mmrl.engines")

TRIES = 4
"""Tries of one request at a server that is alive but does not answer."""
DYING_S = 5.0
"""How long a server that failed a request is watched for its end."""
PROBE = "Name the capital of Portugal, then count from one to five and say good night."
"""Text whose log-probabilities tell one set of weights from another."""
KEPT_VERSIONS = 2
"""Adapter versions that stay loaded: the newest, and the one that calls in flight may still use."""


class VllmServerEngine:
    """Implements `mmrl.engines.base.Engine`.

    Args:
        model: the trainer's model, whose weights are pushed; None: the server's own weights and `setup.folders`.
        tokenizer: decodes for stop strings and names the end-of-turn token.
        config: `engine.*`.
        setup: where the server finds base weights and leaves its log.

    Raises:
        ConfigError: vLLM cannot be had as asked.
        EngineFailure: the server did not start, or does not answer.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, config: EngineConfig, setup: Setup):
        if found := vllm_problems(config):
            raise ConfigError(found)
        assert setup.weights is not None and setup.folder is not None
        self.model, self.tokenizer, self.config, self.setup = model, tokenizer, config, setup
        self.policy_version = -1
        self.busy_s = 0.0
        self.sync_s = 0.0
        """Seconds of the newest push."""
        self.restarts = 0
        """Starts after the first one, over the whole run."""
        self._mode = logprobs_mode(config, setup.samplings)
        self._folder = setup.folder / "engine"
        self._background = Background("mmrl-vllm")
        self._names = self._adapter_names()
        self._served: dict[str, str] = {}
        """Adapter name ("" for full weights) -> name at the server, newest version."""
        self._loaded: list[dict[str, Path]] = []
        """Names at the server and their folders, per version, oldest first."""
        self._nonce = secrets.token_hex(3)
        self._pushes = 0
        self._base_probe: list[float] = []
        self._restarts_left = config.restarts
        self._in_flight = 0
        self._busy_since = 0.0
        self._recovering: asyncio.Lock | None = None
        self._process = None if config.url is not None else self._managed(model_path(setup.weights))
        url = config.url.removesuffix("/").removesuffix("/v1") if config.url is not None else ""
        self._api = VllmApi(self._background, url, config.timeout_s, config.concurrency)
        self._probe_ids = render_prompt(tokenizer, [{"role": "user", "content": PROBE}])  # type: ignore[arg-type]
        self._base = BASE
        self._server_context: int | None = None
        try:
            if self._process is not None:
                LOG.info("starting vLLM; its log: %s", self._process.log)
            self._background.wait(self._first_boot())
            self.rules = self._rules()
        except BaseException:
            self.close()
            raise

    # -- what programs use -----------------------------------------------------------------------------------------

    def enter(self) -> None:
        """See `Engine.enter`; vLLM batches whatever is there."""

    def leave(self) -> None:
        """See `Engine.leave`."""

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`.

        Raises:
            LengthFailure: the prompt alone fills the context.
            EngineFailure: the request is impossible, or the server failed for good; with the server's words.
        """
        self.rules.check(request)
        if not self._in_flight:
            self._busy_since = time.perf_counter()
        self._in_flight += 1
        try:
            return await self._background.run(self._generate(request))
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self.busy_s += time.perf_counter() - self._busy_since

    async def _generate(self, request: Request) -> Completion:
        row = self.rules.row(request)
        failures = 0
        while True:
            version, name = self.policy_version, self._name_for(request.module)
            try:
                ids, logprobs, reason = await self._api.completion(
                    name, request.prompt_ids, request.sampling, row.limit, sorted(self.rules.eos_ids)
                )
                break
            except Unreachable as error:
                failures += 1
                await self._recover(error, failures)
        finish = None
        for token, logprob in zip(ids, logprobs, strict=True):
            finish = self.rules.append(row, token, logprob)
            if finish is not None:
                break
        made = self.rules.completion(row, finish or ("length" if reason == "length" else "stop"), version)
        return made if exact(self._mode, request.sampling) else replace(made, logprobs=None)

    def _name_for(self, module: str) -> str:
        if not self._names:
            return self._base
        adapter = self.setup.adapters[module] if self.setup.adapters is not None else self._names[0]
        if adapter not in self._served:
            raise EngineFailure(f"adapter '{adapter}' has not been pushed to the vLLM server")
        return self._served[adapter]

    # -- weights ---------------------------------------------------------------------------------------------------

    def set_version(self, version: int, state: Mapping[str, Any] | None = None) -> None:
        """The trainer's weights are policy `version` now: push them, and check that the server serves them.

        Args:
            state: the weights, gathered from processes that share them; they are pushed without the check, which
                would need a forward on all processes. None: the model in this process has them whole.

        Raises:
            SyncFailure: the push failed or took longer than `engine.sync_timeout_s`; with the server's words.
            RuntimeError: calls are in flight, and full weights cannot change under them.
        """
        if self._in_flight and not self._names:
            raise RuntimeError("the policy changed while the engine was generating")
        started = time.perf_counter()
        self._restarts_left = self.config.restarts
        try:
            self._background.wait(self._push(version, state), self.config.sync_timeout_s)
        except TimeoutError:
            raise SyncFailure(
                f"policy version {version} did not reach the vLLM server within "
                f"engine.sync_timeout_s={self.config.sync_timeout_s:g} s; {self._words()}"
            ) from None
        except (Unreachable, EngineFailure) as error:
            raise SyncFailure(
                f"policy version {version} was not taken by the vLLM server: {error}; {self._words()}"
            ) from error
        self.policy_version = version
        self.sync_s = time.perf_counter() - started

    async def _push(self, version: int, state: Mapping[str, Any] | None) -> None:
        if self._process is not None and not self._process.alive:
            await self._restart()
        self._pushes += 1
        folder = self._folder / "weights" / f"v{version:06d}-{self._pushes}"
        if self.model is not None:
            from mmrl.engines.snapshot import save_weights

            saved = await asyncio.to_thread(save_weights, self.model, self._names, folder, state)
        else:
            saved = {name: Path(path) for name, path in self.setup.folders.items()}
        if self._names:
            await self._push_adapters(version, saved)
        elif saved:
            await self._push_all(saved[""])
        if state is None:
            await self._check_served()
        for old in sorted(folder.parent.glob("v*"), key=lambda path: int(path.name.rpartition("-")[2]))[
            :-KEPT_VERSIONS
        ]:
            shutil.rmtree(old, ignore_errors=True)

    async def _push_adapters(self, version: int, saved: Mapping[str, Path]) -> None:
        names = {
            adapter: "-".join(filter(None, [f"v{version}", adapter, self._nonce, str(self._pushes)]))
            for adapter in saved
        }
        for adapter, folder in saved.items():
            await self._api.load_adapter(names[adapter], str(folder.resolve()))
        self._served = names
        self._loaded.append({names[adapter]: folder for adapter, folder in saved.items()})
        while len(self._loaded) > KEPT_VERSIONS:
            for name in self._loaded.pop(0):
                await self._api.unload_adapter(name)

    async def _push_all(self, folder: Path) -> None:
        if self.setup.device != "cpu" or self._process is None:
            await self._api.reload(str(folder.resolve()))
            return
        # vLLM's CPU build computes with packed copies of the weights, which a reload in place does not reach.
        await asyncio.to_thread(self._process.stop)
        self._process = self._managed(str(folder.resolve()))
        await self._boot()

    async def _check_served(self) -> None:
        """Compare what the server says of the probe with the trainer's own forward, and the base with its start."""
        if self.model is None:
            return
        from mmrl.engines.snapshot import probe_logprobs, tolerance

        allowed = tolerance(self.model)
        for adapter in self._names or [""]:
            ours = await asyncio.to_thread(probe_logprobs, self.model, self._probe_ids, adapter or None)
            theirs = await self._api.probe(self._served[adapter] if adapter else self._base, self._probe_ids)
            gap = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            if not gap <= allowed:
                what = f"adapter '{adapter}'" if adapter else "weights"
                raise EngineFailure(
                    f"the server does not serve the pushed {what}: log-probabilities of a fixed text differ by "
                    f"{gap:.3g} (tolerance {allowed:g})"
                )
        if self._names:
            now = await self._api.probe(self._base, self._probe_ids)
            drift = max(abs(a - b) for a, b in zip(now, self._base_probe, strict=True))
            if not drift <= allowed:
                raise EngineFailure(f"the server's base weights have changed: log-probabilities differ by {drift:.3g}")

    # -- the server ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the server if mmrl started it, and close connections."""
        if self._process is not None:
            self._process.stop()
        self._background.close()

    def metrics(self) -> dict[str, float]:
        """For the step's record."""
        return {"engine/sync_s": self.sync_s, "engine/restarts": float(self.restarts)}

    def _managed(self, path: str) -> ServerProcess:
        arguments = server_arguments(self.config, self.setup, path, self._mode, len(self._names), self._rank)
        python = self.config.python or sys.executable

        def command(port: int) -> list[str]:
            module = ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
            return [python, *module, *arguments]

        log = self._folder / "vllm.log"
        return ServerProcess(command, server_environment(self.config, self.setup), log, self.config.start_timeout_s)

    async def _boot(self) -> None:
        """Start the server, or find the given one, and ask what it serves."""
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
        """Start a server that died, with everything that it served."""
        LOG.warning("the vLLM server has ended; starting it again; %s", self._words())
        self.restarts += 1
        await self._boot()
        for version in self._loaded:
            for name, folder in version.items():
                await self._api.load_adapter(name, str(folder.resolve()))

    async def _recover(self, error: Unreachable, failures: int) -> None:
        """After a request that was not answered: return when it is worth another try.

        Raises:
            EngineFailure: it is not.
        """
        process = self._process
        if process is not None:
            deadline = time.monotonic() + DYING_S
            while process.alive and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            if self._recovering is None:
                self._recovering = asyncio.Lock()
            async with self._recovering:
                if not process.alive and process is self._process:
                    if not self._restarts_left:
                        raise EngineFailure(
                            f"the vLLM server ended again after engine.restarts={self.config.restarts} starts; "
                            f"{self._words()}"
                        ) from error
                    self._restarts_left -= 1
                    await self._restart()
                    return
        if failures >= TRIES:
            raise EngineFailure(f"the vLLM server failed {failures} times: {error}; {self._words()}") from error
        await asyncio.sleep(2.0 ** (failures - 1))

    def _words(self) -> str:
        return self._process.words() if self._process is not None else f"the server is {self._api.url}"

    # -- what is served --------------------------------------------------------------------------------------------

    def _adapter_names(self) -> list[str]:
        if self.model is None:
            return sorted(self.setup.folders)
        from mmrl.engines.snapshot import adapter_names

        return adapter_names(self.model, self.setup.adapters.values() if self.setup.adapters else None)

    @property
    def _rank(self) -> int:
        if self.model is not None:
            return max((self.model.peft_config[name].r for name in self._names), default=0)
        texts = [
            (Path(path) / "adapter_config.json").read_text(encoding="utf-8") for path in self.setup.folders.values()
        ]
        return max((int(json.loads(text)["r"]) for text in texts), default=0)

    def _rules(self) -> Rules:
        weights = self.setup.weights
        assert weights is not None
        if self.model is not None:
            settings, generation = self.model.config, getattr(self.model, "generation_config", None)
        else:
            settings, generation = load_configs(weights)
        if hasattr(settings, "get_text_config"):
            settings = settings.get_text_config()
        limits = [self.setup.max_context, getattr(settings, "max_position_embeddings", None), self._server_context]
        limit = min((value for value in limits if value), default=None)
        ends = eos_ids(self.tokenizer, generation)
        return Rules(self.tokenizer, ends, settings.vocab_size, limit, self.setup.adapters)
