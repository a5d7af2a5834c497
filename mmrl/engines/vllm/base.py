"""Bases of the vLLM engines: the policy and its adapters, ends of completions; the steps of a push, and its check.

Between the trainer's model, or the folders of a policy, and the engines, which say how vLLM is asked for completions,
loads weights, and answers the probe.
"""

from __future__ import annotations

import json
import secrets
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mmrl.config.engines import VllmConfig
from mmrl.engines.base import Completion, Engine, EngineSetup
from mmrl.engines.embedded.batch_rows import (
    HALF_TOLERANCE,
    TOLERANCE,
    BatchRow,
    Rules,
    difference,
    engine_context,
)
from mmrl.engines.vllm.command import exact, logprobs_mode, served_dtype, vllm_problems
from mmrl.errors import EngineFailure, refuse
from mmrl.models.chat import eos_ids, render_prompt
from mmrl.models.load import load_configs, name_in_whole, processor_files

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from torch import Tensor, nn
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

PROBE = "Name the capital of Portugal, then count from one to five and say good night."
"""Text whose log-probabilities tell one set of weights from another."""
PEFT = "base_model.model."
"""Beginning of the names in an adapter."""


@dataclass(frozen=True, slots=True)
class PushedAdapter:
    """Version of a LoRA adapter, as vLLM knows it."""

    name: str
    """Unique among all adapters that this server ever had: vLLM keys its prefix cache on it."""
    number: int
    folder: str


class VllmEngine(Engine):
    """Base of the vLLM engines: serves one policy, its weights or the adapters beside them.

    Args:
        model: the trainer's model, whose weights are pushed; None: vLLM's own weights and `setup.folders`.
        tokenizer: decodes for stop strings and names the end-of-turn token.
        config: `engine.*`.
        setup: where vLLM finds base weights, and where logs and pushed weights go.

    Raises:
        ConfigError: vLLM cannot be used as configured.
        EngineFailure: it did not start, or does not answer.
    """

    policy_version = -1
    rules: Rules

    def __init__(
        self, model: nn.Module | None, tokenizer: PreTrainedTokenizerBase, config: VllmConfig, setup: EngineSetup
    ):
        refuse(vllm_problems(config, setup.device, 0, setup.folders.values()))
        assert setup.weights is not None and setup.folder is not None
        # A wrapper of peft passes attributes on to the model inside.
        self.model = cast("PreTrainedModel | None", model)
        self.tokenizer, self.config, self.setup, self.weights = tokenizer, config, setup, setup.weights
        self.mode = logprobs_mode(config, setup.samplings)
        self.folder = setup.folder / "engine"
        self.names = self._adapter_names()
        """Adapters that speak, by name; empty: the weights themselves are the policy."""
        self._versions: list[tuple[int, dict[str, PushedAdapter]]] = []
        """Versions of the policy that vLLM holds, oldest first, each with its adapters by name."""

    @property
    def rank(self) -> int:
        """The largest rank of the adapters; 0 without any."""
        if self.model is not None:
            configs = cast("PeftModel", self.model).peft_config if self.names else {}
            return max((cast("LoraConfig", configs[name]).r for name in self.names), default=0)
        texts = [
            (Path(path) / "adapter_config.json").read_text(encoding="utf-8") for path in self.setup.folders.values()
        ]
        return max((int(json.loads(text)["r"]) for text in texts), default=0)

    def _rules(self, served_context: int | None) -> Rules:
        """Return the limits of requests and the ends of completions.

        Args:
            served_context: the limit of vLLM's own.
        """
        generation: GenerationConfig | None
        if self.model is not None:
            config, generation = self.model.config, self.model.generation_config
        else:
            config, generation = load_configs(self.weights)
        settings = config.get_text_config()
        limit = engine_context(settings, self.setup.max_context, served_context)
        ends = eos_ids(self.tokenizer, generation)
        return Rules(self.tokenizer, ends, settings.vocab_size, limit, self.setup.adapters)

    def _adapter_of(self, module: str, version: int) -> PushedAdapter | None:
        """Return the adapter that `module` speaks with in a version of the policy; None: the weights themselves."""
        if not self.names:
            return None
        name = self.setup.adapters[module] if self.setup.adapters is not None else self.names[0]
        for number, adapters in reversed(self._versions):
            if number == version:
                return adapters[name]
        raise EngineFailure(f"version {version} of adapter '{name}' is not served by vLLM")

    @property
    def _newest(self) -> Mapping[str, PushedAdapter]:
        return self._versions[-1][1] if self._versions else {}

    def _completion(
        self, row: BatchRow, ids: Sequence[int], logprobs: Sequence[float], reason: str, version: int
    ) -> Completion:
        """Convert vLLM's reply to a completion: cut where ours ends, without log-probabilities that are not exact."""
        # Our own rules decide the end, so that a completion means the same with every engine: vLLM compares stop
        # strings with its own detokenised text, which may end some tokens later.
        finish = None
        for token, logprob in zip(ids, logprobs, strict=True):
            finish = self.rules.append(row, token, logprob)
            if finish is not None:
                break
        completion = self.rules.completion(row, finish or ("length" if reason == "length" else "stop"), version)
        return completion if exact(self.mode, row.request.sampling) else replace(completion, logprobs=None)

    def _adapter_names(self) -> list[str]:
        """Return the adapters that modules speak with, or the active one; empty without peft."""
        if self.model is None:
            return sorted(self.setup.folders)
        if not hasattr(self.model, "peft_config"):
            return []
        if self.setup.adapters:
            return sorted(set(self.setup.adapters.values()))
        return [cast("PeftModel", self.model).active_adapters[0]]


class PushingEngine(VllmEngine):
    """Base of the engines that hold vLLM: the weights of each version are pushed to it, and checked."""

    def __init__(
        self, model: nn.Module | None, tokenizer: PreTrainedTokenizerBase, config: VllmConfig, setup: EngineSetup
    ):
        super().__init__(model, tokenizer, config, setup)
        self.probe_ids = render_prompt(tokenizer, [{"role": "user", "content": PROBE}])
        # After those of the process before, whose folders may be there: the newest are those with the largest numbers.
        self._pushes = max((number for number, _ in self._pushed_folders()), default=0)
        self._nonce = secrets.token_hex(3)
        self._base_probes: dict[str, list[float]] = {}
        """Server -> log-probabilities of the probe by the weights that it was started with."""
        self._expected: dict[str, list[float]] = {}
        """Adapter ("": the weights themselves) -> the trainer's log-probabilities of the probe now."""

    # -- how vLLM does it ------------------------------------------------------------------------------------------

    @abstractmethod
    def _load(self, adapter: PushedAdapter) -> None:
        """Serve an adapter from now on."""

    @abstractmethod
    def _unload(self, adapter: PushedAdapter) -> None:
        """Forget an adapter."""

    @abstractmethod
    def _replace(self, version: int, state: Mapping[str, Tensor] | None) -> None:
        """Serve the model's full weights in place of those before; nothing where there is no model."""

    @abstractmethod
    def _probes(self, adapter: PushedAdapter | None) -> Mapping[str, Sequence[float]]:
        """Return server -> log-probability of each token of `probe_ids` but the first; None: without an adapter."""

    # -- a push --------------------------------------------------------------------------------------------------------

    def _push(self, version: int, state: Mapping[str, Tensor] | None) -> None:
        """Have vLLM serve the weights of `version`, and check that it does."""
        if self.names:
            saved = self._save(version, state)
            pushed = {}
            for index, (name, folder) in enumerate(saved.items()):
                full = "-".join(filter(None, [f"v{version}", name, self._nonce, str(self._pushes)]))
                number = self._pushes * len(saved) + index + 1
                pushed[name] = PushedAdapter(full, number, str(folder.resolve()))
                self._load(pushed[name])
            self._versions.append((version, pushed))
            # Versions before stay loaded, for calls that are still in flight or to come.
            while len(self._versions) > self.setup.versions:
                for old in self._versions.pop(0)[1].values():
                    self._unload(old)
        else:
            self._replace(version, state)
        # Sharded weights are whole on no process, and the check would need a forward on all of them at once.
        if self.model is not None and state is None:
            self._check_served()
        # The folders of versions that nobody uses any more.
        for _, folder in self._pushed_folders()[: -self.setup.versions]:
            shutil.rmtree(folder, ignore_errors=True)

    def _save(self, version: int, state: Mapping[str, Tensor] | None) -> dict[str, Path]:
        """Write the weights of a new version, for vLLM to load; adapter name ("" for full weights) -> folder."""
        self._pushes += 1
        folder = self.folder / "weights" / f"v{version:06d}-{self._pushes}"
        if self.model is None:
            saved = {name: Path(path) for name, path in self.setup.folders.items()}
            return self._renamed(saved, folder)
        dtype = served_dtype(self.weights, self.setup.device)
        # vLLM may be started anew with full weights.
        beside = () if self.names else processor_files(self.weights, self.model.config)
        saved = save_weights(self.model, self.names, folder, state, dtype, beside)
        return self._renamed(saved, folder) if self.names else saved

    @cached_property
    def _name_in_whole(self) -> Callable[[str], str] | None:
        return name_in_whole(self.weights)

    def _renamed(self, saved: dict[str, Path], folder: Path) -> dict[str, Path]:
        """Return adapters by the names of the model that vLLM loads, below `folder` where these are others.

        vLLM loads the whole of a model of images, of which the text part is trained, and leaves out without an error
        what an adapter has for layers that are not there.
        """
        if not saved or (rename := self._name_in_whole) is None:
            return saved
        targets = {name: folder / "whole" / name for name in saved}
        for name, target in targets.items():
            rename_adapter(saved[name], target, rename)
        return targets

    def _pushed_folders(self) -> list[tuple[int, Path]]:
        """Return number and folder, `v<version>-<push>`, of each push; not what a kill left half-written (`.tmp`)."""
        return sorted((int(path.name.rpartition("-")[2]), path) for path in (self.folder / "weights").glob("v*[0-9]"))

    def _check_served(self) -> None:
        """Compare what vLLM says of the probe with the trainer's own forward, and the base with its start.

        Raises:
            EngineFailure: they differ.
        """
        assert self.model is not None
        for name in self.names or [""]:
            self._expected[name] = probe_logprobs(self.model, self.probe_ids, name or None)
            self._check_gap(self._expected[name], self._probes(self._newest.get(name)), name)
        if self.names:
            for server, probe in self._probes(None).items():
                if not (drift := difference(probe, self._base_probes[server], half=self._half)) <= self._tolerance:
                    raise EngineFailure(
                        f"the base weights of {server} have changed: log-probabilities differ by {drift:.3g}"
                    )

    def _check_gap(self, expected: Sequence[float], probes: Mapping[str, Sequence[float]], name: str) -> None:
        """Compare each server's log-probabilities of the probe with the trainer's.

        Args:
            name: of the adapter; "": the weights themselves.

        Raises:
            EngineFailure: they differ.
        """
        for server, probe in probes.items():
            if not (gap := difference(expected, probe, half=self._half)) <= self._tolerance:
                weights = f"adapter '{name}'" if name else "weights"
                raise EngineFailure(
                    f"{server} does not serve the pushed {weights}: log-probabilities of a fixed text differ by "
                    f"{gap:.3g} (tolerance {self._tolerance:g})"
                )

    @cached_property
    def _half(self) -> bool:
        # Parameters that are trained are float32 here whatever vLLM serves.
        model, served = self.model, served_dtype(self.weights, self.setup.device)
        return model is None or served != "float32" or any(p.element_size() == 2 for p in model.parameters())

    @property
    def _tolerance(self) -> float:
        return HALF_TOLERANCE if self._half else TOLERANCE


def save_weights(
    model: PreTrainedModel,
    names: Sequence[str],
    folder: Path,
    state: Mapping[str, Tensor] | None,
    dtype: str,
    beside: Iterable[Path] = (),
) -> dict[str, Path]:
    """Write the adapters `names`, or all weights when there are none, below `folder`, atomically.

    Args:
        state: the model's weights by name, where it does not hold them whole itself.
        dtype: in which they are served; trained weights are float32, and as files twice as large.
        beside: files of the base that are copied into the folder.

    Returns:
        Adapter name -> its folder; "" -> `folder` for full weights.
    """
    state_dict = dict(state) if state is not None else None
    if not names:
        # Tied weights are one tensor under two names, and stay one.
        cast: dict[tuple[int, object], Tensor] = {}
        whole = model.state_dict() if state is None else state
        state_dict = {
            name: cast.setdefault((weight.data_ptr(), weight.shape), _as_served(weight, dtype))
            for name, weight in whole.items()
        }
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    # peft looks on the hub for the base's vocabulary unless save_embedding_layers says that none was trained.
    of_peft: dict[str, Any] = {"selected_adapters": list(names), "save_embedding_layers": False} if names else {}
    model.save_pretrained(str(temporary), state_dict=state_dict, **of_peft)
    for file in beside:
        shutil.copyfile(file, temporary / file.name)
    temporary.rename(folder)
    return {name: folder if name in ("", "default") else folder / name for name in names or [""]}


def rename_adapter(source: Path, target: Path, rename: Callable[[str], str]) -> None:
    """Copy an adapter with other names of the layers that it is for."""
    from peft import load_peft_weights
    from safetensors.torch import save_file

    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / "adapter_config.json", target / "adapter_config.json")
    weights = load_peft_weights(str(source), device="cpu")
    renamed = {PEFT + rename(name.removeprefix(PEFT)): weight for name, weight in weights.items()}
    save_file(renamed, target / "adapter_model.safetensors", {"format": "pt"})


def _as_served(weight: Tensor, dtype: str) -> Tensor:
    import torch

    return weight.to(getattr(torch, dtype)) if weight.is_floating_point() else weight


def probe_logprobs(model: PreTrainedModel, ids: Sequence[int], adapter: str | None) -> list[float]:
    """Compute the log-softmax of each of `ids` but the first, given those before it; length T - 1."""
    # Here and not above: an evaluation by a server never loads torch's models in this process.
    from mmrl.engines.embedded.hf_loop import HFLoop
    from mmrl.models.selfcheck import CheckRow, plain_logprobs

    with HFLoop(model, adapter).using_adapter():
        return plain_logprobs(model, [CheckRow(tuple(ids[:1]), tuple(ids[1:]))])[0]
