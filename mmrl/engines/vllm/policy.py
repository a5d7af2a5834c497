"""What both vLLM engines know of the policy: adapters and where they lie, rules of completions, the probe of a push.

Between the trainer's model, or the folders of a policy, and `vllm_server` and `vllm_colocated`.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.config.engine import VllmConfig
from mmrl.engines.base import Completion, EngineSetup, Request
from mmrl.engines.embedded.rows import BatchRow, Rules, eos_ids
from mmrl.engines.vllm.launch import exact, logprobs_mode
from mmrl.errors import EngineFailure
from mmrl.models.chat import render_prompt
from mmrl.models.load import load_configs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "Name the capital of Portugal, then count from one to five and say good night."
"""Text whose log-probabilities tell one set of weights from another."""
KEPT_VERSIONS = 2
"""Versions of pushed weights that stay: the newest, and the one that calls in flight may still use."""


class ServedPolicy:
    """One policy and what vLLM is to serve of it.

    Args:
        model: the trainer's model, whose weights are pushed; None: the base weights and `setup.folders`.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, config: VllmConfig, setup: EngineSetup):
        assert setup.weights is not None and setup.folder is not None
        self.model, self.tokenizer, self.setup = model, tokenizer, setup
        self.mode = logprobs_mode(config, setup.samplings)
        self.folder = setup.folder / "engine"
        self.names = self._adapter_names()
        """Adapters that speak, by name; empty: the weights themselves are the policy."""
        self.probe_ids = render_prompt(tokenizer, [{"role": "user", "content": PROBE}])  # type: ignore[arg-type]
        self.pushes = 0
        self._nonce = secrets.token_hex(3)

    @property
    def rank(self) -> int:
        """The largest rank of the adapters; 0 without any."""
        if self.model is not None:
            return max((self.model.peft_config[name].r for name in self.names), default=0)
        texts = [
            (Path(path) / "adapter_config.json").read_text(encoding="utf-8") for path in self.setup.folders.values()
        ]
        return max((int(json.loads(text)["r"]) for text in texts), default=0)

    def rules(self, served_context: int | None) -> Rules:
        """When completions end, and what may be asked for.

        Args:
            served_context: the limit of vLLM's own.
        """
        weights = self.setup.weights
        assert weights is not None
        if self.model is not None:
            settings, generation = self.model.config, getattr(self.model, "generation_config", None)
        else:
            settings, generation = load_configs(weights)
        if hasattr(settings, "get_text_config"):
            settings = settings.get_text_config()
        limits = [self.setup.max_context, getattr(settings, "max_position_embeddings", None), served_context]
        limit = min((value for value in limits if value), default=None)
        ends = eos_ids(self.tokenizer, generation)
        return Rules(self.tokenizer, ends, settings.vocab_size, limit, self.setup.adapters)

    def adapter(self, module: str) -> str:
        """The adapter that `module` speaks with."""
        return self.setup.adapters[module] if self.setup.adapters is not None else self.names[0]

    def save(self, version: int, state: Mapping[str, Any] | None) -> dict[str, Path]:
        """Write the weights of a new version, for vLLM to load; adapter name ("" for full weights) -> folder."""
        self.pushes += 1
        if self.model is None:
            return {name: Path(path) for name, path in self.setup.folders.items()}
        from mmrl.engines.vllm.snapshot import save_weights

        folder = self.folder / "weights" / f"v{version:06d}-{self.pushes}"
        return save_weights(self.model, self.names, folder, state)

    def forget_old(self) -> None:
        """Delete the folders of versions that nobody uses any more."""
        folders = sorted((self.folder / "weights").glob("v*"), key=lambda path: int(path.name.rpartition("-")[2]))
        for old in folders[:-KEPT_VERSIONS]:
            shutil.rmtree(old, ignore_errors=True)

    def served_name(self, adapter: str, version: int) -> str:
        """A name that no adapter of this server ever had: vLLM keys its prefix cache on it."""
        return "-".join(filter(None, [f"v{version}", adapter, self._nonce, str(self.pushes)]))

    def compare(self, adapter: str, theirs: Sequence[float]) -> None:
        """Raises `EngineFailure` when the server's probe is not the trainer's own forward."""
        from mmrl.engines.vllm.snapshot import probe_logprobs, tolerance

        ours = probe_logprobs(self.model, self.probe_ids, adapter or None)
        gap, allowed = max(abs(a - b) for a, b in zip(ours, theirs, strict=True)), tolerance(self.model)
        if not gap <= allowed:
            what = f"adapter '{adapter}'" if adapter else "weights"
            raise EngineFailure(
                f"the server does not serve the pushed {what}: log-probabilities of a fixed text differ by {gap:.3g} "
                f"(tolerance {allowed:g})"
            )

    def compare_base(self, before: Sequence[float], now: Sequence[float]) -> None:
        """Raises `EngineFailure` when the base weights are not what they were at the start."""
        from mmrl.engines.vllm.snapshot import tolerance

        drift = max(abs(a - b) for a, b in zip(now, before, strict=True))
        if not drift <= tolerance(self.model):
            raise EngineFailure(f"the server's base weights have changed: log-probabilities differ by {drift:.3g}")

    def completed(
        self,
        rules: Rules,
        row: BatchRow,
        request: Request,
        ids: Sequence[int],
        logprobs: Sequence[float],
        reason: str,
        version: int,
    ) -> Completion:
        """vLLM's reply as a completion: cut where ours ends, without log-probabilities where they are not exact."""
        finish = None
        for token, logprob in zip(ids, logprobs, strict=True):
            finish = rules.append(row, token, logprob)
            if finish is not None:
                break
        made = rules.completion(row, finish or ("length" if reason == "length" else "stop"), version)
        return made if exact(self.mode, request.sampling) else replace(made, logprobs=None)

    def _adapter_names(self) -> list[str]:
        if self.model is None:
            return sorted(self.setup.folders)
        from mmrl.engines.vllm.snapshot import adapter_names

        return adapter_names(self.model, self.setup.adapters.values() if self.setup.adapters else None)
