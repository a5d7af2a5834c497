"""Interface of the engines: prompt token ids and sampling settings in, token ids and log-probabilities out.

Engines know nothing of programs or rewards. Programs run concurrently and reach an engine through `rollout.context`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mmrl.config import ModelConfig
from mmrl.system.processes import ALONE, Processes

if TYPE_CHECKING:
    from torch import Tensor, nn


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
    """Strings that end the completion; the tokens that complete the string stay in the text."""
    seed: int = 0
    """128-bit counter-based key of this request: equal seeds and prompts give equal completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request for a generation."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    module: str = ""
    """Names the adapter when modules have their own weights."""
    session: str = ""
    """Requests that share prefixes have the same: all of an example."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """The prompt as messages, for engines that take text; None where it goes on in the context of a call before."""
    version: int | None = None
    """Version of the policy that samples, of those that are served; None: the newest."""
    order: tuple[int | str, ...] = ()
    """Deterministic sort key of the request within a batch, whatever order requests arrived in."""
    on_token: Callable[[int], None] | None = None
    """Called with each sampled id as it comes, in any thread; never by an engine that knows whole completions alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Result of a request: token ids and log-probabilities."""

    ids: tuple[int, ...]
    """Sampled ids, the end-of-turn token included when it was sampled; length T >= 1."""
    logprobs: tuple[float, ...] | None
    """log-softmax(logits / T) over the full vocabulary, before top-p and top-k; length T. None: the engine has none
    under these sampling settings, so the trainer computes them."""
    finish: str
    """`eos`, `stop` or `length`."""
    policy_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Settings of an engine beyond `engine.*`."""

    max_context: int | None = None
    """Most tokens of prompt and completion together, at most the model's own limit; None: that limit."""
    threads: int | None = None
    """torch threads of heavy work (`hardware.threads`)."""
    adapters: Mapping[str, str] | None = None
    """Module name -> adapter name, where modules have weights of their own."""
    initial: nn.Module | None = None
    """A model, never trained, for the modules whose name in `adapters` is `mmrl.store.policy.INITIAL`."""
    weights: ModelConfig | None = None
    """Model that a server loads before any push."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Adapter name -> folder of the LoRA adapters to serve when there is no model in this process."""
    device: str = "cpu"
    devices: tuple[int, ...] = ()
    """GPUs of a managed server, among those that this process may see; empty: all of them."""
    bundle: Mapping[str, float] | None = None
    """Resources of a managed server on the Ray cluster; None: servers run on this machine."""
    folder: Path | None = None
    """The run directory: logs and pushed weights go below `engine/` in it."""
    samplings: tuple[tuple[float, float, int], ...] = ()
    """(temperature, top_p, top_k) of the calls that are trained on."""
    served: str = ""
    """The policy's name at an endpoint."""
    versions: int = 2
    """Versions of the policy that calls ask for at once: the newest, and those of batches that are sampled ahead."""
    processes: Processes = ALONE
    """Processes of the run: servers are the main one's, the others use them."""


class Engine(ABC):
    """Async generation with continuous batching, for stages, evaluations and programs.

    Only `generate` has to be written; the other members have defaults that fit an engine which holds nothing, serves
    fixed weights and need not know which programs run.

    An engine with a deterministic schedule decodes when every running program has a request in it: `enter` and `leave`
    tell it how many there are.
    """

    # An attribute, not a method: the stage compares it before every batch to see whether a push is due.
    policy_version: int = 0
    """Number of optimiser steps behind the weights that are served; -1: none pushed yet."""
    max_context: int | None = None
    """Most tokens of prompt and completion together; None: not known here."""
    repeats_greedy: bool = False
    """What `repeats` says of every module."""

    @property
    def busy_s(self) -> float:
        """Seconds so far during which something was being generated."""
        return 0.0

    @property
    def computing_s(self) -> float:
        """Seconds up to now in which this process itself made tokens: no rollout's limit of time counts them."""
        return 0.0

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """Generate a completion.

        Raises:
            LengthFailure: the prompt alone fills the context.
            EngineFailure: the request is impossible, or the engine failed.
        """

    def enter(self) -> None:  # noqa: B027 - a default, not an omission
        """Note that a program starts (or is about to: siblings are entered before a fork point's own request)."""

    def leave(self) -> None:  # noqa: B027
        """Note that a program has ended."""

    def repeats(self, module: str) -> bool:
        """Return whether the same greedy request of a module gets the same tokens again, whatever is beside it."""
        return self.repeats_greedy

    async def rest(self) -> None:  # noqa: B027
        """Return when nothing is under way any more for programs that have left, unless others are live."""

    @contextmanager
    def prefix_cache_kept(self) -> Iterator[None]:
        """Keep what is cached of prompts while no program is live, for requests that come one after the other."""
        yield

    def end_session(self, session: str) -> None:  # noqa: B027
        """Note that no more requests of a session come for now."""

    def set_version(self, version: int, state: Mapping[str, Tensor] | None = None) -> None:
        """Serve the trainer's weights, policy `version` now, from the next request on.

        Args:
            state: the weights by name, where processes share them and none holds them whole; None: they are whole in
                the model that the engine was built with.

        Raises:
            SyncFailure: the engine did not take them.
            RuntimeError: requests are in flight; their tokens would come from two policies.
        """
        self.policy_version = version

    # A hint, so that a program which calls a sleeping engine gets its completion and no error.
    def sleep(self) -> None:  # noqa: B027
        """Free what can be freed: the trainer works now. The next push of weights or request wakes the engine."""

    def metrics(self) -> Mapping[str, float]:
        """Return metrics for a step's record, by name."""
        return self.endpoint_usage()

    def endpoint_usage(self) -> Mapping[str, float]:
        """Return the `endpoint/*` part of `metrics`: counts of requests to endpoints, which add up over engines."""
        return {}

    def describe(self) -> dict[str, str]:
        """Return facts for a run's summary: the endpoints in use, their requests and their cost."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Free what it holds (processes, memory, connections); may be called twice."""


class BusyClock:
    """Seconds during which a request is in flight, less those that another engine is busy meanwhile."""

    def __init__(self, other_busy_s: Callable[[], float] = lambda: 0.0):
        self.seconds = 0.0
        self.count = 0
        """Requests in flight."""
        self._other = other_busy_s
        self._since = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count one more request as in flight inside."""
        if not self.count:
            self._since = time.perf_counter() - self._other()
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                self.seconds += max(0.0, time.perf_counter() - self._other() - self._since)


class HasUsage(Protocol):
    """A user of endpoints: an engine, or a task with a judge."""

    def endpoint_usage(self) -> Mapping[str, float]:
        """Return requests so far, by metric name."""
        ...


def total_usage(engines: Iterable[HasUsage]) -> dict[str, float]:
    """Sum `endpoint_usage` over engines and the like."""
    totals: dict[str, float] = {}
    for engine in engines:
        for name, count in engine.endpoint_usage().items():
            totals[name] = totals.get(name, 0.0) + count
    return totals
