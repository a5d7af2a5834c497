"""Rollouts of a step on several servers, played call by call: how long, how idle, by which split of the devices.

A step's calls are a forest: a call begins when the one before it on its path has ended. The router sends all calls of
an example to one server, the least loaded one at its first call. A server decodes a number of calls side by side, each
a token per decode step, and the others wait. Times of tools and rewards are not in here.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import count, product

from mmrl import rng
from mmrl.config import TrainCommandConfig
from mmrl.plan.cost import (
    DECODE_OVERHEAD_S,
    PREFILL_UTILISATION,
    Device,
    cache_room,
    computing_width,
    trained_parameters,
)
from mmrl.plan.shapes import Shape
from mmrl.plan.workload import Lengths, Load
from mmrl.records import Call, Forest
from mmrl.report.stats import short
from mmrl.report.text import align

AT_ONCE = 256
"""Calls that a vLLM server decodes at once (its `--max-num-seqs`), where its cache has room for so many."""
CALLS_PER_S = 700.0
"""Calls a second that one driving process gets through, with a router; measured on a CPU (`make bench only=fleet`)."""
FOLDER_BANDWIDTH = 2e9
"""Bytes a second at which a shared folder is written, and read by all servers at once; assumed."""
SPREAD = 2.0
"""Shape of the gamma distribution of declared lengths: their deviation is 0.7 of the mean."""
SHARES = (1, 2, 3, 4, 5, 6, 7)
"""Eighths of the devices that may serve."""
SPLITS = 4
"""Other splits in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedCall:
    """Call of a step."""

    example: str
    parent: int | None
    """Position of the call before it on its path."""
    prefill: float
    """Prompt tokens that are not in the server's cache."""
    completion: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Speed of one server."""

    at_once: int
    """Calls decoded side by side."""
    step_s: float
    """Seconds of a decode step, for the weights."""
    row_s: float = 0.0
    """Seconds of a decode step for each call in it, for its cache."""
    prefill_s: float = 0.0
    """Seconds of a prompt token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Rollouts of a step, as played."""

    seconds: float
    """Seconds of a batch; of batches that are sampled together, all of them over their number."""
    nine_tenths: float
    """Seconds until nine tenths of the calls have ended; the rest is the tail."""
    busy_s: float
    """Seconds in which a server has a call, all servers together."""


@dataclass(slots=True)
class _Server:
    speed: Speed
    sessions: int = 0
    """Calls under way and waiting."""
    progress: float = 0.0
    """Decode steps so far, for a call that was there from the start."""
    since: float = 0.0
    """When `progress` was reckoned."""
    rows: list[tuple[float, int]] = field(default_factory=list)
    """Heap of the calls that decode: (progress at their end, call)."""
    waiting: deque[int] = field(default_factory=deque)
    prefilled: float = 0.0
    """When the prompts so far are computed, one after the other."""
    joining: int = 0
    """Calls whose prompt is being computed."""
    busy_s: float = 0.0
    changes: int = 0
    """Changes of `rows`: an end that was foreseen before the last one is none."""

    def advance(self, now: float) -> None:
        """Decode until `now`."""
        if self.rows:
            self.progress += (now - self.since) / self.step_s
        if self.rows or self.joining:
            self.busy_s += now - self.since
        self.since = now

    @property
    def step_s(self) -> float:
        """Seconds of a decode step of the calls that are there."""
        return self.speed.step_s + self.speed.row_s * len(self.rows)


def play(calls: Sequence[PlayedCall], servers: int, speed: Speed, processes: int, calls_per_s: float) -> Rollouts:
    """Play the calls of a step.

    Args:
        calls: parents before their children.
        processes: that drive, each its share of the examples.
        calls_per_s: calls a second that each of them gets through.
    """
    fleet = [_Server(speed) for _ in range(servers)]
    children: dict[int, list[int]] = defaultdict(list)
    for number, call in enumerate(calls):
        if call.parent is not None:
            children[call.parent].append(number)
    examples = {name: position for position, name in enumerate(dict.fromkeys(call.example for call in calls))}
    home: dict[str, _Server] = {}
    driven = [0.0] * processes
    """When each process has sent what it had to send so far."""
    # (time, order, what happens, call or number of changes, server)
    events: list[tuple[float, int, str, int, _Server | None]] = []
    ends: list[float] = []

    order = count()

    def happens(time: float, kind: str, number: int, server: _Server | None = None) -> None:
        heapq.heappush(events, (time, next(order), kind, number, server))

    def send(number: int, now: float) -> None:
        process = examples[calls[number].example] % processes
        driven[process] = max(now, driven[process]) + 1.0 / calls_per_s
        happens(driven[process], "arrives", number)

    def admit(server: _Server, now: float) -> None:
        while server.waiting and len(server.rows) + server.joining < server.speed.at_once:
            number = server.waiting.popleft()
            server.joining += 1
            server.prefilled = max(now, server.prefilled) + calls[number].prefill * server.speed.prefill_s
            happens(server.prefilled, "decodes", number, server)

    def changed(server: _Server) -> None:
        server.changes += 1
        if server.rows:
            # When the first of the calls that decode ends, if none joins.
            left = max(0.0, server.rows[0][0] - server.progress)
            happens(server.since + left * server.step_s, "ends", server.changes, server)

    for number, call in enumerate(calls):
        if call.parent is None:
            send(number, 0.0)
    while events:
        now, _, kind, number, server = heapq.heappop(events)
        if kind == "arrives":
            name = calls[number].example
            server = home.setdefault(name, min(fleet, key=lambda one: one.sessions))
            server.sessions += 1
            server.advance(now)
            server.waiting.append(number)
            admit(server, now)
            continue
        assert server is not None
        if kind == "decodes":
            server.advance(now)
            server.joining -= 1
            heapq.heappush(server.rows, (server.progress + calls[number].completion, number))
            changed(server)
        elif number == server.changes:
            server.advance(now)
            _, ended = heapq.heappop(server.rows)
            server.sessions -= 1
            ends.append(now)
            for child in children[ended]:
                send(child, now)
            admit(server, now)
            changed(server)
    ends.sort()
    busy_s = sum(server.busy_s for server in fleet)
    return Rollouts(seconds=ends[-1], nine_tenths=ends[int(0.9 * (len(ends) - 1))], busy_s=busy_s)


def repeated(calls: Sequence[PlayedCall], times: int) -> list[PlayedCall]:
    """Return the calls of so many equal batches."""
    batches = []
    for number, call in product(range(times), calls):
        parent = None if call.parent is None else call.parent + number * len(calls)
        batches.append(replace(call, example=f"{number}/{call.example}", parent=parent))
    return batches


def calls_of(forest: Forest, examples: int) -> list[PlayedCall]:
    """Return the calls of a step of so many examples: those of the forest's examples, repeated as often as needed."""
    played: list[PlayedCall] = []
    recorded: dict[str, list[Call]] = defaultdict(list)
    for call in forest.calls.values():
        recorded[call.example].append(call)
    names = list(recorded)
    for number in range(examples):
        positions: dict[str, int] = {}
        # Each call stands after its parent.
        for call in recorded[names[number % len(names)]]:
            before = forest.calls[call.parent] if call.parent is not None else None
            # What goes on in the context of the call before it finds that in the cache.
            cached = len(before.prompt_ids) + before.completion_tokens if before is not None and call.turn else 0
            parent = positions[before.id] if before is not None else None
            fresh, completion = max(0, len(call.prompt_ids) - cached), call.completion_tokens
            positions[call.id] = len(played)
            played.append(PlayedCall(example=str(number), parent=parent, prefill=fresh, completion=completion))
    return played


def declared_calls(
    loads: Mapping[str, Load], lengths: Mapping[str, Lengths], examples: int, seed: int
) -> list[PlayedCall]:
    """Return the calls of a step from lengths: each module's in a row on every path, completions spread by `SPREAD`."""
    played: list[PlayedCall] = []
    draw = rng.stream(seed, "fleet")
    for number in range(examples):
        before: list[int] = []
        """The last call of each path so far."""
        for module, load in loads.items():
            size = lengths[module]
            paths: list[int] = []
            # Plans that draw differ from example to example: the fraction of a path goes to some of them.
            width = load.calls / examples / size.calls
            for path in range(int(width * (number + 1) + 1e-9) - int(width * number + 1e-9)):
                parent = before[path % len(before)] if before else None
                for turn in range(size.calls):
                    fresh = size.observation if turn and size.observation else size.prompt
                    shared = load.prompt_unique / load.prompt if not turn and load.prompt else 1.0
                    drawn = draw.gammavariate(SPREAD, size.completion / SPREAD)
                    call = PlayedCall(
                        example=str(number), parent=parent, prefill=fresh * shared, completion=max(1.0, drawn)
                    )
                    parent = len(played)
                    played.append(call)
                paths.append(len(played) - 1)
            before = paths or before
    return played


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Step of a split of devices."""

    servers: int
    training: int
    staleness: int
    rollouts: Rollouts
    update_s: float
    push_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the step: batches ahead are sampled while the one before them trains."""
        sampled, updated = self.rollouts.seconds, self.update_s
        return self.push_s + (max(sampled, updated) if self.staleness else sampled + updated)

    @property
    def idle(self) -> float:
        """Share of the devices' time in which they do nothing."""
        busy = self.rollouts.busy_s + self.training * self.update_s
        return 1.0 - busy / (self.seconds * (self.servers + self.training))


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Servers of a run on devices of their own, one each."""

    calls: Sequence[PlayedCall]
    servers: int
    speed: Speed
    training: int
    """Devices that train, each with a process that drives its share."""
    staleness: int
    update_s: float
    """Seconds of the update on `training` devices."""
    push_s: float

    def step(self, servers: int, staleness: int) -> Step:
        """Play a step with so many of the devices as servers."""
        training = self.servers + self.training - servers
        # Batches that are ahead share the servers, so that one's tail is the other's beginning.
        batches = max(1, staleness)
        played = play(repeated(self.calls, batches), servers, self.speed, training, CALLS_PER_S)
        return Step(
            servers=servers,
            training=training,
            staleness=staleness,
            rollouts=replace(played, seconds=played.seconds / batches, busy_s=played.busy_s / batches),
            update_s=self.update_s * self.training / training,
            push_s=self.push_s,
        )

    @cached_property
    def configured(self) -> Step:
        """The step of the config."""
        return self.step(self.servers, self.staleness)

    def splits(self) -> list[Step]:
        """Return the steps of splits of as many devices, the fastest first."""
        devices = self.servers + self.training
        counts = {self.servers, *(devices * share // 8 for share in SHARES)} - {0, devices}
        steps = [self.step(count, staleness) for count in counts for staleness in (0, 1, 2)]
        return sorted(steps, key=lambda step: step.seconds)

    def driven(self, step: Step) -> tuple[float, float]:
        """Return the calls a second of a step's rollouts, and what the processes that drive them get through."""
        return len(self.calls) / step.rollouts.seconds, CALLS_PER_S * step.training

    def facts(self) -> dict[str, object]:
        """Return the whole as JSON-ready values."""

        def described(step: Step) -> dict[str, object]:
            return {**asdict(step), "seconds": step.seconds, "idle": step.idle}

        calls, ceiling = self.driven(self.configured)
        return {
            "step": described(self.configured),
            "calls_per_s": calls,
            "most_calls_per_s": ceiling,
            "splits": [described(step) for step in self.splits()],
        }

    def text(self) -> str:
        """Render the step that was asked for, and the fastest of other splits."""
        rollouts, splits, (calls, ceiling) = self.configured.rollouts, self.splits(), self.driven(self.configured)
        rows = [["servers", "training", "staleness", "rollouts", "update", "push", "step", "idle"]]
        for step in [self.configured, *splits[:SPLITS]]:
            seconds = (step.rollouts.seconds, step.update_s, step.push_s, step.seconds)
            counts = (step.servers, step.training, step.staleness)
            rows.append([*map(str, counts), *(f"{short(value)} s" for value in seconds), f"{step.idle:.0%}"])
        busiest = min(splits, key=lambda step: step.idle)
        return (
            f"rollouts on {self.servers} servers of a device each: {short(rollouts.seconds)} s a step, nine tenths of "
            f"{len(self.calls):,} calls after {short(rollouts.nine_tenths)} s; {calls:,.0f} calls a second, of at most "
            f"{ceiling:,.0f} that the training processes drive\n"
            + align(rows)
            + f"\nfirst as asked, then the fastest splits of {self.servers + self.training} devices; least idle: "
            f"{busiest.servers} servers, train.staleness={busiest.staleness} ({busiest.idle:.0%})"
        )


def server_speed(config: TrainCommandConfig, shape: Shape, device: Device, step: Load, token_s: float | None) -> Speed:
    """Return the speed of a vLLM server on a device.

    Args:
        step: load of a step, whose mean context fills the cache.
        token_s: measured seconds of a token of a call; None: by the device's memory traffic.
    """
    width = computing_width(config)
    context = (step.prompt + step.completion) / max(1.0, step.calls)
    weights, cache = float(shape.parameters * width), context * shape.kv_bytes(width)
    prefill_s = 2.0 * shape.parameters / (device.flops * PREFILL_UTILISATION.get(device.name, 0.5))
    vllm = config.engine.as_vllm
    room = cache_room(vllm, device, weights) if vllm is not None else 0.5 * device.memory
    at_once = max(1, min(AT_ONCE, int(room / cache)))
    step_s, row_s = token_s, 0.0
    if step_s is None:
        floor = DECODE_OVERHEAD_S.get(device.name, 0.0) * shape.layers
        step_s, row_s = weights / device.bandwidth + floor, cache / device.bandwidth
    return Speed(at_once=at_once, step_s=step_s, row_s=row_s, prefill_s=prefill_s)


def push_seconds(config: TrainCommandConfig, shape: Shape) -> float:
    """Return the seconds in which new weights are written to the shared folder, and read by all servers."""
    width = 4 if config.model.lora is not None else computing_width(config)
    return 2 * trained_parameters(config, shape) * width / FOLDER_BANDWIDTH
