"""`report.html`: a run in one file for people. No script, no network; readable on a phone and in the dark.

Part of `report`. Everything that comes from a config, a model or a data set goes through `text`, which escapes it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean, median
from string import Template
from typing import Any

import yaml

from mmrl.errors import MmrlError
from mmrl.records import Forest, Rollout
from mmrl.report.journal import read_step
from mmrl.report.overview import Overview
from mmrl.report.plots import evaluation_curve, lines_over_steps, reward_curve
from mmrl.report.rundir import RunDir
from mmrl.report.series import duration, number, series, short
from mmrl.report.tables import Difference
from mmrl.report.trees import Node, abridged, call_name, clean, credit_line, rollout_line, trees
from mmrl.system.files import atomic_write

EXAMPLES = 3
"""Examples shown of a step."""
PROMPT_LIMIT = 6000
"""Characters of a prompt that go into the page."""
NODE_LIMIT = 40
"""Calls shown of one example."""
MODULE_LABELS = {
    "reward": "reward of the module's calls",
    "penalty": "module penalty",
    "format_rate": "share of completions that parse",
    "entropy": "entropy, nats per token",
    "surprise": "entropy estimate, nats per token",
    "length": "completion length, tokens",
    "kl": "KL to the reference, nats per token",
    "finish_length_share": "share cut at the length limit",
}
HEALTH = {
    "credit/zero_variance_share": "groups with equal rewards, share",
    "train/kl": "KL to the reference, nats per token",
    "train/entropy": "entropy, nats per token",
    "train/grad_norm": "gradient norm",
    "train/clip_share": "clipped tokens, share",
    "train/logprob_gap_mean": "trainer − sampler, nats per token",
    "rollouts/failed_share": "failed rollouts, share",
}
TIMES = ("generate", "retrieve", "credit", "update", "overhead")


def text(value: Any) -> str:
    """Anything as HTML text that cannot be markup."""
    return html.escape(str(value).encode("utf-8", "replace").decode(), quote=True)


def write_report(seen: Overview) -> Path:
    """Write `report.html` into the run directory; returns its path."""
    page = Template(resources.files("mmrl.report").joinpath("page.html").read_text(encoding="utf-8"))
    atomic_write(seen.run.report_path, page.substitute(title=text(seen.name), body=body(seen)))
    return seen.run.report_path


def report(path: Path | str) -> Path:
    """Write (again) the report of the run at `path`, finished or not.

    Raises:
        CheckpointError: not a run.
    """
    return write_report(Overview.of(RunDir.read(path)))


def body(seen: Overview) -> str:
    """The page's content."""
    parts = [
        _head(seen),
        _comparison(seen.differences, seen.split),
        _alarms(seen),
        _section("Curves", _figures(_curves(seen))),
        _section("Modules", _figures(_module_figures(seen)) + _module_table(seen)),
        _section("Health", _figures(_health_figures(seen))),
        _section("What the program did", _examples(seen)),
        _section("Where a step's time went", _times(seen)),
        _section("To run it again", _again(seen)),
    ]
    return "\n".join(part for part in parts if part)


def _section(title: str, content: str) -> str:
    return f"<h2>{text(title)}</h2>\n{content}" if content else ""


def _head(seen: Overview) -> str:
    facts = [seen.what, f"{seen.done} of {seen.total} steps" if seen.total else f"{seen.done} steps"]
    if number(seen.summary.get("seconds")) is not None:
        facts.append(duration(seen.summary["seconds"]))
    facts += [f"seed {seen.get('seed')}", seen.state]
    kind = "".join(f"<p>{text(sentence)}</p>" for sentence in seen.kind)
    details = seen.summary.get("facts") or {}
    shown = table(["", ""], [[name, value] for name, value in details.items()], words=True) if details else ""
    more = f"<details><summary>data and tools</summary>{shown}</details>" if shown else ""
    return (
        f"<h1>{text(seen.name)}</h1><p class=soft>{text(' · '.join(facts))}</p>"
        f'<div class="card"><b>What this run was</b>{kind}{more}</div>'
    )


def _comparison(differences: Mapping[str, Difference], split: str) -> str:
    if not differences:
        return ""
    tiles = []
    for name, found in list(differences.items())[:3]:
        tone = "good" if found.low > 0 else "bad" if found.high < 0 else "soft"
        sure = f", {found.verdict}" if found.verdict else ""
        tiles.append(
            f"<div class=card><div class=soft>{text(name)} on {text(split)}</div>"
            f"<div class=big>{found.before:.3f} → {found.after:.3f}</div>"
            f"<div class={tone}>{found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]{sure}</div></div>"
        )
    rows = []
    for name, found in differences.items():
        interval = f"{found.low:+.3f} to {found.high:+.3f}"
        numbers = (f"{found.before:.3f}", f"{found.after:.3f}", f"{found.difference:+.3f}")
        rows.append([name, found.n, *numbers, interval])
    head = ["metric", "items", "before", "after", "difference", "95 % interval"]
    rest = f"<details><summary>all metrics</summary>{table(head, rows)}</details>" if len(rows) > 3 else ""
    note = (
        "<p class='small soft'>Difference with its 95 % interval: a paired bootstrap over items. "
        "An interval that includes 0 may be chance.</p>"
    )
    return f"<h2>Before and after</h2><div class=tiles>{''.join(tiles)}</div>{note}{rest}"


def _alarms(seen: Overview) -> str:
    if not seen.training:
        return ""
    if not seen.alarms:
        return "<p class=soft>No alarm rang.</p>"
    lines = []
    for alarm in seen.alarms:
        until = "on to the end" if alarm.until is None else f"to step {alarm.until}"
        lines.append(
            f"<p><b>{text(alarm.name)}</b> from step {alarm.step} {until} "
            f"(<code>{text(alarm.key)}</code>): {text(alarm.message)}</p>"
        )
    return f'<div class="card warn">{"".join(lines)}</div>'


def _curves(seen: Overview) -> dict[str, str]:
    names = [seen.main_metric, "em", "f1", "accuracy", "reward"]
    offered = seen.metric_names(seen.split)
    wanted = [name for name in dict.fromkeys(names) if name is not None and name in offered][:4]
    curves = {name: seen.evaluations(seen.split, name) for name in wanted}
    return {
        "Reward in training": reward_curve(seen.training),
        f"Evaluation on {seen.split} (band: 95 % interval of {wanted[0] if wanted else ''})": evaluation_curve(
            curves, seen.split
        ),
    }


def _module_figures(seen: Overview) -> dict[str, str]:
    last = {key for record in seen.training for key in record}
    facts = {key.rsplit("/", 1)[1] for key in last if key.startswith("module/")}
    ordered = [fact for fact in MODULE_LABELS if fact in facts]
    ordered += sorted(facts - set(MODULE_LABELS) - {"calls", "attempts", "clip_share"})
    figures = {}
    for fact in ordered:
        keys = {name: f"module/{name}/{fact}" for name in seen.modules}
        having = [name for name, key in keys.items() if len(series(seen.training, key)[1])]
        if any(_moves(seen, key) for key in keys.values()):
            label = MODULE_LABELS.get(fact, fact.replace("_", " "))
            label += f" ({having[0]})" if len(having) == 1 < len(keys) else ""
            figures[label[0].upper() + label[1:]] = lines_over_steps(seen.training, keys, label)
    return figures


def _moves(seen: Overview, key: str) -> bool:
    """Whether a metric changed by more than rounding."""
    _, values = series(seen.training, key)
    return len(values) > 1 and bool(values.max() - values.min() > 1e-4 * abs(values).max())


def _health_figures(seen: Overview) -> dict[str, str]:
    figures = {}
    for key, label in HEALTH.items():
        if _moves(seen, key):
            figures[label[0].upper() + label[1:]] = lines_over_steps(seen.training, {key: key}, label)
    return figures


def _figures(figures: Mapping[str, str]) -> str:
    shown = [f"<figure><figcaption>{text(title)}</figcaption>{svg}</figure>" for title, svg in figures.items() if svg]
    return f"<div class=figures>{''.join(shown)}</div>" if shown else ""


def _module_table(seen: Overview) -> str:
    if not seen.modules:
        return ""
    first, last = seen.training[0], seen.training[-1]
    facts = dict.fromkeys(
        key.rsplit("/", 1)[1] for record in (first, last) for key in record if key.startswith("module/")
    )
    rows = []
    for name in seen.modules:
        cells = []
        for fact in facts:
            old, new = (short(record.get(f"module/{name}/{fact}")) for record in (first, last))
            cells.append(new if old == new else f"{old} → {new}")
        rows.append([name, *cells])
    numbers = table(["module", *facts], rows)
    return f"<details><summary>all numbers, step {first['step']} → step {last['step']}</summary>{numbers}</details>"


def _times(seen: Overview) -> str:
    rows = []
    _, steps = series(seen.training, "time/step")
    if not len(steps):
        return ""
    whole = median(steps)
    for name in TIMES:
        _, values = series(seen.training, f"time/{name}")
        if len(values):
            rows.append([name, duration(median(values)), f"{sum(values) / max(sum(steps), 1e-12):.0%}"])
    rows.append(["step", duration(whole), ""])
    return table(["part", "median", "share"], rows)


def _again(seen: Overview) -> str:
    command = " ".join(map(str, seen.environment.get("command", [])))
    config = yaml.safe_dump(dict(seen.config), sort_keys=False, allow_unicode=True)
    environment = yaml.safe_dump(dict(seen.environment), sort_keys=False, allow_unicode=True)
    return (
        f"<pre>{text(clean(command))}</pre>"
        f"<details><summary>resolved config</summary><pre>{text(config)}</pre></details>"
        f"<details><summary>environment</summary><pre>{text(environment)}</pre></details>"
        f"<p class=soft>Run directory: <code>{text(seen.run.path)}</code>. "
        "Each metric is explained in docs/metrics.md.</p>"
    )


# --- examples


def _examples(seen: Overview) -> str:
    steps = seen.run.journal_steps()
    if not steps:
        return ""
    content = []
    for step in dict.fromkeys((steps[0], steps[-1])):
        try:
            forest, entries = read_step(seen.run, step)
        except MmrlError as error:
            content.append(f"<p class=bad>{text(error)}</p>")
            continue
        content.append(f"<h3>Step {step}</h3>")
        for index, example in enumerate(telling_examples(forest, EXAMPLES)):
            content.append(_example(forest, entries, example, is_open=step == steps[-1] and index == 0))
    path = text(seen.run.path)
    content.append(f"<p class=small>More: <code>mmrl show {path} step={steps[-1]} example=…</code></p>")
    return "".join(content)


def telling_examples(forest: Forest, count: int) -> list[str]:
    """Examples worth reading first: rewards that differ between rollouts, then a failure, then any."""
    rewards: dict[str, list[float]] = {}
    failed: dict[str, int] = {}
    for rollout in forest.rollouts:
        rewards.setdefault(rollout.example, []).append(rollout.reward or 0.0)
        failed[rollout.example] = failed.get(rollout.example, 0) + (rollout.error is not None)
    spread = {example: max(found) - min(found) for example, found in rewards.items()}
    order = {example: index for index, example in enumerate(forest.examples)}
    by_spread = sorted(order, key=lambda example: (-spread[example], order[example]))
    by_failure = sorted((e for e in order if failed[e]), key=lambda example: (-failed[example], order[example]))
    return list(dict.fromkeys([*by_spread[: max(count - 1, 1)], *by_failure[:1], *by_spread]))[:count]


def _example(forest: Forest, entries: Sequence[Mapping[str, Any]], example: str, is_open: bool) -> str:
    rollouts = [rollout for rollout in forest.rollouts if rollout.example == example]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    mean = f"mean reward {short(fmean(rewards))}" if rewards else "no reward"
    left = [NODE_LIMIT]
    nodes = "".join(_node(node, left) for node in trees(forest, entries, example))
    if left[0] < 0:
        nodes += f"<li class=soft>{-left[0]} more calls: mmrl show</li>"
    lost = "".join(_outcome(rollout) for rollout in rollouts if rollout.leaf is None)
    return (
        f"<details{' open' if is_open else ''}><summary><b>{text(clean(example))}</b> "
        f"<span class=soft>{len(rollouts)} rollouts, {mean}</span></summary>"
        f"<ul class=tree>{nodes}</ul>{lost}</details>"
    )


def _node(node: Node, left: list[int]) -> str:
    """One call and what follows it; `left` counts down the calls that may still be shown."""
    left[0] -= 1
    below = [_node(child, left) for child in node.children]
    if left[0] < 0 and not any(below):
        return ""
    call = node.call
    name = call_name(call)
    facts = [f"{call.completion_tokens} tokens", call.finish]
    facts += [f"penalty {short(call.penalty)}"] if call.penalty else []
    facts += [f"{key} {short(value)}" for key, value in call.facts.items() if number(value) is not None]
    broken = "" if call.ok else " <span class=bad>could not be parsed</span>"
    asked = ""
    if call.prompt_text:
        shown = abridged(visible(call.prompt_text), PROMPT_LIMIT // 4, PROMPT_LIMIT * 3 // 4)
        asked = f"<details class=small><summary class=soft>prompt</summary><pre>{text(shown)}</pre></details>"
    credit = "".join(f"<div class='small soft'>{text(credit_line(entry))}</div>" for entry in node.entries)
    ends = "".join(_outcome(rollout) for rollout in node.rollouts)
    inner = f"<ul>{''.join(below)}</ul>" if any(below) else ""
    return (
        f"<li><div class=call><b>{text(name)}</b><span class='small soft'>{text(' · '.join(facts))}</span>{broken}"
        f"{asked}<div class=said>{text(abridged(clean(call.text), 1200, 400)) or '(nothing)'}</div>"
        f"{credit or '<div class=small>no credit</div>'}{ends}</div>{inner}</li>"
    )


def _outcome(rollout: Rollout) -> str:
    return f"<div class='outcome small'>{text(rollout_line(rollout))}</div>"


def visible(value: str) -> str:
    """Text with its line ends, other control characters made visible."""
    return "\n".join(clean(line) for line in value.replace("\r\n", "\n").split("\n"))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], words: bool = False) -> str:
    """An HTML table; `words`: cells hold sentences."""
    kind = " class=words" if words else ""
    top = f"<tr>{''.join(f'<th>{text(cell)}</th>' for cell in head)}</tr>" if any(head) else ""
    lines = "".join(f"<tr>{''.join(f'<td{kind}>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=scroll><table>{top}{lines}</table></div>"
