"""What a few rollouts say of a run before it trains: facts by module, and findings with the setting to change.

Pure: `stages.checkup` plays the rollouts and gathers the facts, `mmrl doctor` prints what is made of them here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from mmrl.report.advice import ADVICE, FAILURES
from mmrl.report.alarms import FAULT_FACTS, NEVER_FACTS, VALIDITY_FACTS, Thresholds
from mmrl.report.stats import short
from mmrl.report.text import align

ALARMS = Thresholds()
LONGEST_QUOTE = 200
"""Characters of a message or of a reply that a finding quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a finding is one; the limits that alarms have too are theirs (`ALARMS`)."""

    seldom: float = 0.5
    """`seldom_parses`: share of replies that can be parsed."""
    cut: float = 0.5
    """`cut`: share of replies that are cut at the limit."""
    equal: float = ALARMS.zero_variance
    """`zero_variance`: share of groups with equal rewards."""
    many: int = 8
    """Groups; fewer that all have equal rewards may be chance, unless every reward is the same."""
    gap: float = ALARMS.logprob_gap
    """`logprob_gap`: mean |trainer - sampler| log-probability per token, in nats..."""
    broken_gap: float = 1.0
    """... from which on the engine does not serve the weights that are trained."""
    slow_share: float = 0.25
    """`slow_tool`, `slow_metric`: share of the rollouts' time in which nothing was generated and it ran..."""
    slow_s: float = 0.1
    """... and seconds of one call."""
    coverage: float = 0.8
    """`no_gold`: share of the training questions that the corpus can answer."""
    empty: float = ALARMS.empty_searches
    """`empty_searches`: share of a tool's calls that bring an empty list."""
    program_limits: float = ALARMS.failed_share
    """`limits`: share of rollouts that reach one of the program's own limits."""
    retries: float = 0.2
    """`endpoint_retries`: share of requests that had to be repeated."""
    useless: float = ALARMS.all_failed
    """Share of rollouts that a failure must reach so that training would be useless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """One module in the rollouts."""

    module: str
    calls: int
    prompt_mean: float
    """Tokens."""
    prompt_max: int
    completion_mean: float
    completion_max: int
    cut: float
    """Share of replies that are cut at the limit."""
    parsed: float | None
    """Share of replies that could be parsed; None where the task makes something of every text."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """The task's own facts that are shares of well-formed or faulty replies."""
    gap: float | None = None
    """Mean |trainer - sampler| log-probability per token, nats; None where the engine reports none."""
    unread: str = ""
    """A reply that could not be parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A tool, or the reward."""

    calls: int
    seconds: float
    """Of one call, on average without the longest."""
    share: float
    """Of the rollouts' time, in which it ran and nothing was generated."""
    empty: float = 0.0
    """Share of calls that brought nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a few rollouts of a run showed."""

    title: str
    examples: int
    rollouts: int
    seconds: float
    modules: Sequence[ModuleFacts]
    rewards: Sequence[float]
    """Of rollouts that have one."""
    groups: int
    """Groups of two or more members; 0 for algorithms without."""
    equal: float
    """Share of them whose rewards are all equal."""
    unpacked: str = ""
    """Why packed and padded updates differ; empty where they do not."""
    failed: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Kind of failure -> rollouts that ended so, and the first one's message."""
    caught: int = 0
    """Calls that could not be parsed and whose program went on."""
    tools: Mapping[str, Timed] = field(default_factory=dict)
    reward: Timed | None = None
    gap: float | None = None
    """As `ModuleFacts.gap`, over all modules."""
    coverage: float | None = None
    """Share of the training examples that the corpus can answer; None where that is not known."""
    gold_found: float | None = None
    """Share of gold documents that searches brought; None where the task does not say."""
    judge_fallback: float = 0.0
    """Share of rollouts that the fixed rule scores."""
    requests: float = 0.0
    """Requests to endpoints..."""
    retries: float = 0.0
    """... and how many were repeated."""
    endpoints: bool = False
    """Whether endpoints answer for modules."""
    max_tokens: int
    """`task.max_tokens`."""
    max_context: int | None = None
    """Prompt + completion limit; None: not known."""
    max_failed_share: float
    """`train.max_failed_share`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One trouble."""

    name: str
    """As in the table of advice, but for the cause of a kind that it shares with another."""
    module: str | None = None
    useless: bool = False
    """Whether training would be useless."""
    seen: str
    change: str

    def text(self) -> str:
        """As one line."""
        place = f"{self.module}: " if self.module else ""
        return f"{'useless' if self.useless else 'warning'}: {self.name}: {place}{self.seen}; {self.change}"


def find(facts: RunFacts, limits: Limits | None = None) -> list[Finding]:
    """What is wrong, what would make training useless first."""
    limits = limits or Limits()
    failures = list(_failures(facts, limits))
    # Without a rollout that says anything there is nothing to say of parsing or of rewards.
    nothing = any(finding.useless for finding in failures)
    constant = not nothing and _constant(facts, limits)
    modules = [finding for one in facts.modules for finding in _of_module(one, facts, limits, constant)]
    unparsed = any(finding.name == "never_parses" for finding in modules)
    findings = [*failures, *modules, *_times(facts, limits), *_retrieval(facts, limits), *_forwards(facts, limits)]
    if constant and not unparsed:
        alike, share = len(set(facts.rewards)) == 1, facts.equal if facts.groups else 1.0
        same = f"; every reward is {short(facts.rewards[0])}" if alike else ""
        useless = alike or (share == 1.0 and facts.groups >= limits.many)
        findings.append(_finding("zero_variance", useless=useless, now=share, more=same))
    return sorted(findings, key=lambda finding: not finding.useless)


def _constant(facts: RunFacts, limits: Limits) -> bool:
    """Whether (nearly) no group has rewards to compare."""
    if facts.groups:
        return facts.equal >= limits.equal
    return len(facts.rewards) > 1 and len(set(facts.rewards)) == 1


def _failures(facts: RunFacts, limits: Limits) -> Iterator[Finding]:
    counts: dict[str, tuple[int, str]] = {}
    for kind, (count, message) in facts.failed.items():
        name = FAILURES.get(kind, "" if kind == "parse" else "user_code")
        if name == "engine_faults" and facts.endpoints:
            name = "endpoint_faults"
        before, first = counts.get(name, (0, message))
        counts[name] = (before + count, first)
    for name, (count, message) in counts.items():
        share = count / facts.rollouts
        if not name or (name == "limits" and share < limits.program_limits):
            continue
        # What the model causes is trained with the failure rule; of the rest a run takes only so much.
        model_caused = name in ("limits", "prompt_too_long")
        useless = share >= limits.useless if model_caused else share > facts.max_failed_share
        yield _finding(name, useless=useless, now=share, what=_quoted(message))
    if facts.judge_fallback > ALARMS.judge_fallback:
        useless = facts.judge_fallback >= limits.useless
        yield _finding("judge_unreadable", useless=useless, now=facts.judge_fallback)
    if facts.requests and facts.retries / facts.requests > limits.retries:
        yield _finding("endpoint_retries", now=facts.retries / facts.requests)


def _of_module(one: ModuleFacts, facts: RunFacts, limits: Limits, constant: bool) -> Iterator[Finding]:
    never, sample = ALARMS.never_valid, f"; for example {_quoted(one.unread)!r}" if one.unread else ""
    valid = [share for name, share in one.shares.items() if name in VALIDITY_FACTS]
    valid += [one.parsed] if one.parsed is not None else []
    faulty = {name: share for name, share in one.shares.items() if name in NEVER_FACTS}
    # Two replies at least: a module that is seldom called says little.
    if one.calls > 1 and valid and min(valid) <= never:
        yield _finding("never_parses", one.module, useless=constant, now=min(valid), more=sample)
    elif one.calls > 1 and faulty and max(faulty.values()) >= 1 - never:
        what = max(faulty, key=lambda name: faulty[name])
        made = _finding("never_valid", one.module, useless=constant, now=faulty[what], what=what, more=sample)
        yield Finding(**(asdict(made) | {"name": "never_parses"}))
    elif one.calls > 1 and one.parsed is not None and one.parsed < limits.seldom:
        yield _finding("seldom_parses", one.module, now=one.parsed, more=sample)
    if one.cut >= limits.cut:
        yield _finding("cut", one.module, now=one.cut, what=f"task.max_tokens={facts.max_tokens}")
    if facts.max_context is not None and one.prompt_max + facts.max_tokens > facts.max_context:
        yield _finding("prompt_near_limit", one.module, now=one.prompt_max, then=facts.max_context)


def _times(facts: RunFacts, limits: Limits) -> Iterator[Finding]:
    def slow(timed: Timed) -> bool:
        return timed.share >= limits.slow_share and timed.seconds >= limits.slow_s

    for name, timed in facts.tools.items():
        if slow(timed):
            yield _finding("slow_tool", now=timed.seconds, then=timed.share, what=name)
    if facts.reward is not None and slow(facts.reward):
        yield _finding("slow_metric", now=facts.reward.seconds, then=facts.reward.share)


def _retrieval(facts: RunFacts, limits: Limits) -> Iterator[Finding]:
    if facts.coverage is not None and facts.coverage < limits.coverage:
        yield _finding("no_gold", useless=facts.coverage == 0, now=facts.coverage)
    elif facts.gold_found == 0:
        yield _finding("gold_not_found")
    for name, timed in facts.tools.items():
        if timed.empty > limits.empty:
            yield _finding("empty_searches", now=timed.empty, what=name)


def _forwards(facts: RunFacts, limits: Limits) -> Iterator[Finding]:
    if facts.unpacked:
        yield _finding("packing", useless=True, what=facts.unpacked.rpartition("; ")[0] or facts.unpacked)
    if facts.gap is not None and not facts.gap <= limits.gap:
        yield _finding("logprob_gap", useless=not facts.gap <= limits.broken_gap, now=facts.gap)


def _finding(
    name: str,
    module: str | None = None,
    *,
    useless: bool = False,
    now: float = 0.0,
    then: float = 0.0,
    what: str = "",
    more: str = "",
) -> Finding:
    advice = ADVICE[name]
    seen = advice.filled(now, then, what) + more
    return Finding(name=name, module=module, useless=useless, seen=seen, change=advice.change)


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_QUOTE else f"{line[:LONGEST_QUOTE]}…"


# --- for people and machines


def verdict(findings: Sequence[Finding]) -> str:
    """Whether the run can be trained, in one line."""
    if stopping := dict.fromkeys(finding.name for finding in findings if finding.useless):
        return f"training would be useless: {', '.join(stopping)}"
    return "it can be trained" + (f", with {len(findings)} warning{'s'[: len(findings) > 1]}" if findings else "")


def report(facts: RunFacts, findings: Sequence[Finding]) -> str:
    """Facts, findings and verdict as text."""
    rewards = facts.rewards
    spread = (
        f"rewards {short(sum(rewards) / len(rewards))} on average, from {short(min(rewards))} to {short(max(rewards))}"
        if rewards
        else "no rollout has a reward"
    )
    compared = f"; {facts.equal:.0%} of {facts.groups} groups have equal rewards" if facts.groups else ""
    blocks = [
        f"{facts.title}: {facts.rollouts} rollouts of {facts.examples} examples in {facts.seconds:.1f} s",
        align(_table(facts)),
        "\n".join([spread + compared, *_others(facts)]),
        "\n".join([*(finding.text() for finding in findings), verdict(findings)]),
    ]
    return "\n\n".join(blocks)


def _table(facts: RunFacts) -> list[list[str]]:
    room = f" of {facts.max_context}" if facts.max_context is not None else ""
    head = ["module", "calls", f"prompt mean, most{room}", "reply mean, most", "parsed", "cut", "gap (nats)"]
    rows = [
        [
            one.module,
            str(one.calls),
            f"{one.prompt_mean:.0f}, {one.prompt_max}",
            f"{one.completion_mean:.0f}, {one.completion_max}",
            "-" if one.parsed is None else f"{one.parsed:.0%}",
            f"{one.cut:.0%}",
            short(one.gap),
        ]
        for one in facts.modules
    ]
    return [head, *rows]


def _others(facts: RunFacts) -> list[str]:
    timed = {f"tool {name}": one for name, one in facts.tools.items()}
    timed |= {"reward": facts.reward} if facts.reward is not None and facts.reward.calls else {}
    lines = [
        f"{name}: {one.calls} calls of {one.seconds:.3f} s, {one.share:.0%} of the rollouts' time"
        for name, one in timed.items()
    ]
    faults = [
        f"{one.module}: {name} {share:.0%}"
        for one in facts.modules
        for name, share in one.shares.items()
        if name in (*FAULT_FACTS, *NEVER_FACTS, *VALIDITY_FACTS)
    ]
    if faults:
        lines.append(", ".join(faults))
    if facts.coverage is not None:
        lines.append(f"the corpus can answer {facts.coverage:.0%} of the training questions")
    if facts.gold_found is not None:
        lines.append(f"searches brought {facts.gold_found:.0%} of the gold documents")
    failed = ", ".join(f"{count} {kind}" for kind, (count, _) in facts.failed.items())
    lines += [f"failed rollouts: {failed}"] if failed else []
    return [*lines, *([f"parse failures that the program caught: {facts.caught}"] if facts.caught else [])]


def as_object(facts: RunFacts, findings: Sequence[Finding]) -> dict[str, object]:
    """The same for machines."""
    return {
        "version": 1,
        "can_train": not any(finding.useless for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "facts": asdict(facts),
    }
