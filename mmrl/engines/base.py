"""What an engine is: prompt token ids and sampling settings in, token ids and log-probabilities out.

Engines know nothing of programs or rewards. Programs run concurrently and reach an engine through `rollout.context`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mmrl.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings of one request."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; log-probabilities are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion; the tokens that complete the string are kept."""
    seed: int = 0
    """128-bit counter-based key of this request: equal seeds and prompts give equal completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation asked for."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    module: str = ""
    """Names the adapter when modules have their own weights."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """The prompt as messages, for engines that take text; None where it goes on in the context of a call before."""
    order: tuple[int | str, ...] = ()
    """Deterministic sort key of the request within a batch, whatever order requests arrived in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One generation made."""

    ids: tuple[int, ...]
    """Sampled ids, the end-of-turn token included when it was sampled; length T >= 1."""
    logprobs: tuple[float, ...] | None
    """log-softmax(logits / T) over the full vocabulary, before top-p and top-k; length T. None: the engine cannot
    say under these sampling settings, so the trainer computes them."""
    finish: str
    """`eos`, `stop` or `length`."""
    policy_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What an engine is told beyond `engine.*`."""

    max_context: int | None = None
    """Most tokens of prompt and completion together, at most the model's own limit; None: that limit."""
    threads: int | None = None
    """torch threads of heavy work (`hardware.threads`)."""
    adapters: Mapping[str, str] | None = None
    """Module name -> adapter name, where modules have weights of their own."""
    initial: Any = None
    """A model, never trained, for the modules whose name in `adapters` is `mmrl.models.policy.INITIAL`."""
    weights: ModelConfig | None = None
    """What a server loads before any push."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Adapter name -> folder of the LoRA adapters to serve when there is no model in this process."""
    device: str = "cpu"
    devices: tuple[int, ...] = ()
    """GPUs of a managed server, among those that this process may see; empty: all of them."""
    folder: Path | None = None
    """The run directory: logs and pushed weights go below `engine/` in it."""
    samplings: tuple[tuple[float, float, int], ...] = ()
    """(temperature, top_p, top_k) of the calls that are trained on."""
    served: str = ""
    """The policy's name at an endpoint."""


class Engine(Protocol):
    """Async generation with continuous batching.

    `live()` tells how many programs are running, so that a deterministic schedule knows when all have asked:
    every program enters it when it starts (`enter`) and leaves it when it ends (`leave`).
    """

    policy_version: int

    async def generate(self, request: Request) -> Completion:
        """Raises `EngineFailure`."""
        ...

    def enter(self) -> None:
        """A program starts (or is about to: siblings are entered before a fork point's own request)."""
        ...

    def leave(self) -> None:
        """A program has ended."""
        ...

    def rest(self) -> None:
        """The trainer works now: nothing is asked before the next push of weights, or the next call."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """What it has to say for a step's record."""
        ...

    def close(self) -> None:
        """Free what it holds (processes, memory)."""
        ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that mmrl uses."""

    eos_token_id: int

    def apply_chat_template(self, conversation: object, **kwargs: object) -> object:
        """Messages to prompt ids."""
        ...

    def decode(self, token_ids: object, **kwargs: object) -> str:
        """Ids to text."""
        ...

    def encode(self, text: str, **kwargs: object) -> list[int]:
        """Text to ids."""
        ...


class Elsewhere:
    """Stands for the engine in processes that do not sample, since the main one samples for all from one server."""

    policy_version = -1
    busy_s = 0.0

    def set_version(self, version: int, state: Mapping[str, Any] | None = None) -> None:
        """The main process has pushed it."""
        self.policy_version = version

    def rest(self) -> None:
        """Nothing is held."""

    def metrics(self) -> Mapping[str, float]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing is held."""
