"""Findings before a run trains: a step of a few rollouts is played, and checked by the rules of alarms and others.

Pure: `stages.checkup` plays the rollouts and measures, `mmrl doctor` prints what is made of it here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from mmrl.errors import MODEL_CAUSED, ParseFailure
from mmrl.report.advice import FAILURES
from mmrl.report.alarms import (
    ALL_FAILED,
    EMPTY_SEARCHES,
    NEVER_VALID,
    Alarm,
    AlarmRule,
    above,
    alarms,
    at_least,
    module_keys,
)
from mmrl.report.stats import FAILED, failure_shares
from mmrl.report.tables import facts_table, module_rows
from mmrl.report.text import align

LONGEST_QUOTE = 200
"""Characters of a message or of a reply that a finding quotes."""
TABLE = ("calls", "prompt", "prompt_max", "length", "length_max", "format_rate", "finish_length_share", "logprob_gap")
"""Metrics of modules that are shown."""
LISTED: tuple[str, ...] = (
    "reward/",
    "credit/groups",
    "credit/zero_variance_share",
    "rollouts/failed/",
    "rollouts/caught_parse",
)
LISTED += ("tool/", "corpus/", "task/gold_retrieved", "task/tool_calls")
"""Beginnings of the metrics that are listed below that table."""


# When a finding is one, beyond the limits of alarms.
SELDOM = 0.5
"""`seldom_parses`: share of replies that can be parsed."""
CUT = 0.5
"""`cut`: share of replies that are cut at the limit."""
COPIED = 0.6
"""`copies_prompt`: share of a module's replies that are the same words of its prompt."""
MANY_GROUPS = 8
"""`zero_variance`: groups; fewer that all have equal rewards may be chance, unless every reward is the same."""
BROKEN_GAP = 1.0
"""`logprob_gap`: nats from which on the engine does not serve the weights that are trained."""
COVERAGE = 0.8
"""`no_gold`: share of the training questions that the corpus can answer."""
RETRIES = 0.2
"""`endpoint_retries`: share of requests that had to be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the doctor judges: a few rollouts of a run before it trains, in numbers."""

    title: str
    examples: int
    seconds: float
    metrics: Mapping[str, float]
    """As of a step (docs/metrics.md). Also, of modules: `prompt`, `prompt_max`, `length_max` (tokens), `logprob_gap`;
    of tools and of the reward: `tool/NAME/…` with `calls`, `seconds` (of one call, on average without the longest),
    `share` (of the rollouts' time, in which it ran and nothing was generated) and `empty` (share of calls that brought
    nothing); `endpoint/retried` (share of requests); `corpus/coverage` (share of the training questions)."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Kind of failure -> the first one's message."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Module -> a reply that could not be used."""
    copied: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Module -> its most frequent reply, and the share of its replies that are that, where its prompts have it too."""
    first_reply: str = ""
    unpacked: str = ""
    """Why packed and padded updates differ; empty where they do not."""
    endpoints: bool = False
    max_tokens: int
    max_context: int | None = None
    """Prompt + completion limit; None: not known."""
    max_failed_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem that the doctor found."""

    name: str
    key: str
    useless: bool
    message: str

    def text(self) -> str:
        """Return the finding as one line."""
        location = f"{_middle(self.key)}: " if self.key.startswith("module/") else ""
        return f"{'useless' if self.useless else 'warning'}: {self.name}: {location}{self.message}"


def _middle(key: str) -> str:
    """Return the name of the module or tool in the key of a metric."""
    return key.split("/", 1)[1].rpartition("/")[0]


def find(probe: Probe) -> list[Finding]:
    """Return the findings of a played step, those first that make training useless."""
    copied = {f"module/{module}/copied": share for module, (_, share) in probe.copied.items()}
    raised = alarms([{"step": 0, **probe.metrics, **copied}], window=1, extra=tuple(_rules(probe)))
    names = {alarm.name for alarm in raised}
    # Each kind of failure has a separate sentence here, and cut replies are a finding (`cut`) from fewer on.
    explained = {"failures", "replies_cut"}
    # Without a scored rollout nothing can be said about rewards.
    shares = failure_shares(probe.metrics).items()
    if any(_stops(kind, share, probe) for kind, share in shares if kind != ParseFailure.kind):
        explained.add("zero_variance")
    constant = "zero_variance" in names - explained
    # Equal rewards of replies that never parse, or never use a tool, are no fault of the data.
    if names & {"never_parses", "no_tool_calls"}:
        explained.add("zero_variance")
    if "no_gold" in names:
        explained.add("gold_not_found")
    findings = []
    for name in sorted(names - explained):
        same_name = [alarm for alarm in raised if alarm.name == name]
        module_alarms = [alarm for alarm in same_name if alarm.key.startswith("module/")]
        for alarm in module_alarms or same_name[:1]:
            message = alarm.message
            unread = module_alarms and name in ("never_parses", "seldom_parses")
            if unread and (reply := probe.unread.get(_middle(alarm.key))):
                message += f"; for example {_quoted(reply)!r}"
            useless = _useless(alarm, probe, constant)
            findings.append(Finding(name=name, key=alarm.key, useless=useless, message=message))
    return sorted(findings, key=lambda finding: not finding.useless)


def _stops(kind: str, share: float, probe: Probe) -> bool:
    """True where failures of a kind leave nothing to train on; those that the model causes have a failure rule."""
    return share >= ALL_FAILED if kind in MODEL_CAUSED else share > probe.max_failed_share


def _useless(alarm: Alarm, probe: Probe, constant: bool) -> bool:
    value = probe.metrics.get(alarm.key, 0.0)
    if alarm.key.startswith(FAILED):
        kind = alarm.key.removeprefix(FAILED)
        return constant if kind == ParseFailure.kind else _stops(kind, failure_shares(probe.metrics)[kind], probe)
    if alarm.name == "zero_variance":
        metrics = probe.metrics
        alike = metrics.get("reward/min") == metrics.get("reward/max")
        return alike or (value == 1.0 and metrics.get("credit/groups", 0) >= MANY_GROUPS)
    return {
        "never_parses": constant,
        "no_tool_calls": constant,
        "logprob_gap": not value <= BROKEN_GAP,
        "judge_unreadable": value >= ALL_FAILED,
        "no_gold": value == 0,
        "packing": True,
    }.get(alarm.name, False)


def _rules(probe: Probe) -> Iterator[AlarmRule]:
    """Yield the rules that only the doctor has."""
    metrics, records = probe.metrics, [probe.metrics]
    for kind in FAILURES.keys() - MODEL_CAUSED:
        name = "endpoint_faults" if kind == "engine" and probe.endpoints else FAILURES[kind]
        yield AlarmRule(name, [f"{FAILED}{kind}"], above(0.0), subject=_quoted(probe.failed.get(kind, "")))
    never = NEVER_VALID
    parsed = module_keys(records, ("format_rate",))
    yield AlarmRule("seldom_parses", parsed, lambda means: ((means > never) & (means < SELDOM), means))
    cut = module_keys(records, ("finish_length_share",))
    for module, (reply, _) in probe.copied.items():
        yield AlarmRule("copies_prompt", [f"module/{module}/copied"], at_least(COPIED), subject=repr(_quoted(reply)))
    yield AlarmRule("cut", cut, at_least(CUT), subject=f"task.max_tokens={probe.max_tokens}")
    if (context := probe.max_context) is not None:
        longest = module_keys(records, ("prompt_max",))
        room = context - probe.max_tokens
        yield AlarmRule("prompt_near_limit", longest, lambda means: (means > room, np.full_like(means, context)))
    for key in metrics:
        if key.startswith("tool/") and key.endswith("/empty"):
            yield AlarmRule("empty_searches", [key], above(EMPTY_SEARCHES), subject=_middle(key))
    yield AlarmRule("endpoint_retries", ["endpoint/retried"], above(RETRIES))
    yield AlarmRule("no_gold", ["corpus/coverage"], lambda means: (means < COVERAGE, means))
    reply = repr(_quoted(probe.first_reply))
    yield AlarmRule("no_tool_calls", ["task/tool_calls"], lambda means: (means == 0, means), subject=reply)
    yield AlarmRule("gold_not_found", ["task/gold_retrieved"], lambda means: (means == 0, means))
    if probe.unpacked:
        subject = probe.unpacked.rpartition("; ")[0] or probe.unpacked
        yield AlarmRule("packing", ["rollouts/count"], at_least(0.0), subject=subject)


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_QUOTE else f"{line[:LONGEST_QUOTE]}…"


# --- for people and machines


def verdict(findings: Sequence[Finding]) -> str:
    """Return the verdict in one line: it can be trained, or not and why."""
    if stopping := dict.fromkeys(finding.name for finding in findings if finding.useless):
        return f"training would be useless: {', '.join(stopping)}"
    return "it can be trained" + (f", with {len(findings)} warning{'s'[: len(findings) > 1]}" if findings else "")


def report(probe: Probe, findings: Sequence[Finding]) -> str:
    """Return the metrics, findings and verdict as text."""
    metrics = probe.metrics
    rollouts, room = metrics["rollouts/count"], f" (context {probe.max_context})" if probe.max_context else ""
    names = [name for name in metrics if name.startswith(LISTED)]
    blocks = [
        f"{probe.title}: {rollouts:.0f} rollouts of {probe.examples} examples in {probe.seconds:.1f} s{room}",
        align(module_rows([metrics], TABLE)),
        facts_table({name: metrics[name] for name in names}),
        "\n".join([*(finding.text() for finding in findings), verdict(findings)]),
    ]
    return "\n\n".join(blocks)


def as_object(probe: Probe, findings: Sequence[Finding]) -> dict[str, object]:
    """Return the metrics, findings and verdict as JSON."""
    return {
        "version": 2,
        "can_train": not any(finding.useless for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        **asdict(probe),
    }
