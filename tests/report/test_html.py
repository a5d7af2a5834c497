"""The HTML report: one file, nothing loaded, nothing injected; and the text at the end of a run."""

import base64
import hashlib
import html
import io
import json
import re
import shlex
import sys
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from tokenizers import Tokenizer

from mmrl.models.load import ASSETS
from mmrl.records import Call
from mmrl.report.charts import LINES, SIZE, evaluation_curve, lines_over_steps, reward_curve
from mmrl.report.console import finish, show_run
from mmrl.report.html import report_run
from mmrl.report.stats import BLOCKS
from mmrl.report.trees import coloured, read_tokenizer, shade, token_texts
from mmrl.store.rundir import RunDir
from mmrl.system.files import append_jsonl
from tests.helpers.runs import CONFIG, fake_run, items, metrics

VOID = {"meta", "br", "hr", "img", "link", "input"}
EVIL = '"><script>alert(1)</script>'


class Checker(HTMLParser):
    """Collects tags and attributes; `open_tags` must be empty at the end."""

    def __init__(self):
        super().__init__()
        self.open_tags, self.tags, self.attributes, self.words = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open_tags.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def checked(page):
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open_tags == []
    return checker


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    run = fake_run(tmp_path_factory.mktemp("html") / "run")
    return report_run(run.path).read_text()


def test_the_page_is_well_formed_and_loads_nothing(page):
    found = checked(page)
    assert not {"link", "iframe", "img", "object"} & set(found.tags)
    # Scripts that run, by their digests; the others hold data.
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 2 and f"script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}'\"" in page
    assert found.tags.count("script") == 2 + page.count('<script type="application/x-mmrl"')
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    links = [value for name, value in found.attributes if name in ("href", "src", "xlink:href")]
    assert all(link.startswith("#") for link in links)
    assert "Content-Security-Policy" in page and "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    # What a model wrote is text.
    assert "<script>alert" not in page and "\x1b" not in page


def test_the_page_has_every_part(page):
    words = " ".join(checked(page).words)
    for part in ("What this run was", "mini world", "tiny model", "Before and after", "0.417 → 0.883", "Curves"):
        assert part in words
    for part in ("Modules", "Rollouts", "resolved config", "environment", "No alarm rang", "rewriter"):
        assert part in words
    assert page.count("<svg") >= 8
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    assert "svg{filter:invert(1)" in page  # drawings follow the theme


def test_a_chart_has_its_values_for_the_pointer_and_says_what_is_a_mean(page):
    charts = [chart for name, value in checked(page).attributes if name == "data-hover" for chart in json.loads(value)]
    assert len(charts) == page.count("<figure>") >= 8
    for chart in charts:
        left, right, first, last = chart["axis"]
        assert 0 < left < right <= 72 * SIZE[0] and first <= 1 and last >= 39
        assert 0 <= chart["rows"][0] < chart["rows"][1] < 72 * SIZE[1]
    by_name = {line[0]: chart["lines"] for chart in charts for line in chart["lines"][:1]}
    assert by_name["training reward"][0][2][6] == pytest.approx(metrics(7)["reward/mean"], rel=1e-3)
    lengths = [line for chart in charts for line in chart["lines"] if line[0] == "rewriter" and line[2][0] > 20]
    ((_, steps, values, means),) = lengths
    told = {step: metrics(step)["module/rewriter/length"] for step in steps}
    assert steps[6] == 7 and values[6] == pytest.approx(told[7], rel=1e-3)
    assert means[6] == pytest.approx(fmean(told[step] for step in range(3, 8)), rel=1e-3)
    assert "thick lines are means of the last 5 steps" in " ".join(page.split())


def test_only_what_should_rise_is_coloured_by_its_rise(tmp_path):
    with fake_run(tmp_path / "run", steps=0, evaluate=False) as run:
        for step in (0, 1):
            told = {"points": 1.0 - step, "quality": float(step), "leakage": float(step)}
            append_jsonl(run.eval_path(step, "dev"), [{"id": f"d{n}", "metrics": told} for n in range(30)])
            run.append_metrics(step, {f"eval/dev/{name}{end}": told[name] for name in told for end in ("", "_low")})
        run.write_summary({"main_metric": "points"})
    page = report_run(tmp_path / "run").read_text()
    colours = dict(re.findall(r'<div class="soft">(\w+) on dev</div>.*?<div class="(\w+)">\s', page, re.DOTALL))
    assert colours == {"points": "bad", "quality": "good", "leakage": "soft"}


def test_each_thing_has_one_chart(tmp_path):
    """The sampler's estimate of the entropy, and the mean over modules, are drawn where nothing better is there."""
    for entropy in (True, False):
        with fake_run(tmp_path / f"run{entropy}", steps=0) as run:
            for step in range(1, 9):
                told = {"module/a/surprise": step / 9, "train/entropy": step / 7, "train/kl": step / 5}
                run.append_metrics(step, told | ({"module/a/entropy": step / 8} if entropy else {}))
        captions = re.findall("<figcaption>(.*?)</figcaption>", report_run(run.path).read_text())
        found = [caption for caption in captions if "ntropy" in caption]
        assert found == ["Entropy, nats per token" if entropy else "Entropy estimate, nats per token"]


def test_names_cannot_inject_either(tmp_path):
    config = {**CONFIG, "run": {"name": EVIL}, "task": {"name": EVIL, "data": {"train": EVIL, "dev": EVIL}}}
    run = fake_run(tmp_path / "run", steps=3, config=config)
    with RunDir.open(run.path) as open_run:
        odd = {f"module/{EVIL}/reward": 1.0, f"module/_x$^/{EVIL}": 0.5, f"eval/dev/{EVIL}": 1.0}
        open_run.append_metrics(4, metrics(4) | odd)
        open_run.append_metrics(5, metrics(5) | {key: value / 2 for key, value in odd.items()})
    page = report_run(run.path).read_text()
    assert "<script>alert" not in page
    checked(page)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_hardly_began_has_a_page(tmp_path, steps):
    run = fake_run(tmp_path / "run", steps=steps, evaluate=False)
    checked(report_run(run.path).read_text())


def test_alarms_are_in_the_page(tmp_path):
    with fake_run(tmp_path / "run", steps=3) as run:
        for step in range(4, 20):
            run.append_metrics(step, {"credit/zero_variance_share": 1.0, "reward/mean": float("nan")})
    page = report_run(run.path).read_text()
    assert "zero_variance" in page and "not_finite" in page and "No alarm rang" not in page


def test_few_steps_for_alarms_and_a_damaged_journal_are_said_on_the_page(tmp_path):
    run = fake_run(tmp_path / "run", steps=3)
    run.journal_path(3).write_bytes(b"nonsense")
    page = report_run(run.path).read_text()
    assert "No alarm rang; most look at means over 5 steps, and this run has 3." in page and "damaged journal" in page


def test_curves_without_values_are_empty():
    assert reward_curve([]) == evaluation_curve([], "dev", ["em"]) == ""
    assert lines_over_steps([{"step": 1}], {"a": "b"}, "x") == ""


def test_what_rounding_leaves_of_zero_is_no_curve(tmp_path):
    run = fake_run(tmp_path / "run", steps=3)
    with RunDir.open(run.path) as open_run:
        for step in range(4, 9):
            values = {"train/logprob_gap_mean": (-1) ** step * 3e-7, "train/kl": step / 10}
            open_run.append_metrics(step, metrics(step) | values)
    page = report_run(run.path).read_text()
    assert "KL to the reference" in page and "trainer − sampler" not in page
    svg = lines_over_steps([{"step": step, "a": (-1) ** step * 3e-7} for step in range(9)], {"a": "a"}, "x")
    heights = [float(y) for points in re.findall(r'd="M ([^"]*)"\s+clip-path', svg)[-1:] for y in points.split()[1::3]]
    assert max(heights) - min(heights) < 15


def test_a_curve_of_few_steps_is_seen():
    """One step is a point; below one window, where no mean is drawn, the values themselves are not faint."""
    for steps in (1, 3, 9):
        svg = reward_curve([{"step": step, "reward/mean": step / 9} for step in range(1, steps + 1)])
        assert bool(re.search(r'clip-path="url[^"]*">\s*<use ', svg)) == (steps == 1)
        assert ("stroke-opacity: 0.5" in svg) == (steps == 9)
        # Steps are whole numbers, also where there is but one.
        labels = re.findall(r">([^<>\s]+)</text>", svg)
        assert all(label.isdigit() for label in labels[: labels.index("step")])


def test_the_page_shows_the_prompts_of_a_search_as_mmrl_show_does(tmp_path):
    run = fake_run(tmp_path / "run", steps=3)
    prompt = {"instructions": "Answer <b>.", "demonstrations": []}
    trial = {"trial": 1, "candidate": "x" * 9, "items": 4, "score": 0.5, "best": 0.5, "full": True, "failed": {}}
    (run.path / "prompts").mkdir()
    append_jsonl(run.path / "prompts" / "trials.jsonl", [trial | {"modules": {"a": prompt}}])
    page = report_run(run.path).read_text()
    assert "<h2>Prompts</h2>" in page and "+Answer &lt;b&gt;." in page
    assert "+Answer <b>." in show_run(run.path)


def test_a_long_curve_is_thinned():
    history = [{"step": step, "reward/mean": step % 7} for step in range(5000)]
    assert len(reward_curve(history)) < 60_000


def finished(run):
    facts = {"data": "mini world", "documents": 1200}
    return finish(run, facts, items(0), items(40), seconds=74.2, main_metric="f1")


def test_the_end_of_a_run_on_a_terminal_without_blocks(tmp_path, monkeypatch):
    run = fake_run(tmp_path / "run")
    assert "▁" in finished(run)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert not set(finished(run)) & set(BLOCKS)


def test_the_end_of_a_run(tmp_path):
    run = fake_run(tmp_path / "run")
    text = finished(run)
    lines = text.splitlines()
    assert lines[0] == "mhgpo_rr-hotpotqa-s0: 40 steps of mhgpo_rr on hotpotqa with tiny in 1 min 14 s"
    assert text.index("  f1 ") < text.index("  em ")
    assert f"report         {run.report_path}" in lines
    assert f"look further   mmrl show {run.path}" in lines
    assert "mini world" in text
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["comparison"]["em"]["before"] == pytest.approx(0.41667, abs=1e-4)
    assert summary["comparison"]["em"]["certain"] is True
    assert summary["steps"] == 40
    assert run.report_path.is_file()
    assert RunDir.read(run.path).summary == summary


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"dev": "mini", "test": "mini"}, "split=test"),
        ({"dev": "dev.json", "test": "test.json"}, "split=test"),
        ({"dev": "dev.json", "test": "mini"}, "split=dev"),
        ({"train": "train.json", "dev": None, "test": None}, "split=train"),
    ],
)
def test_the_command_that_evaluates_again_stays_on_the_users_data(tmp_path, data, says):
    run = fake_run(tmp_path / "run")
    config = run.config
    config["task"]["data"] = data
    (run.path / "config.yaml").write_text(yaml.safe_dump(config))
    assert f"evaluate       mmrl eval policy={run.path} {says}" in finished(run).splitlines()


def test_the_command_that_makes_the_run_again_can_be_pasted(tmp_path):
    words = ["mmrl", "train", "algo=distill", "algo.distill={writer: policy}", "algo.privileged={writer: 'It is {a}.'}"]
    run = RunDir.create(tmp_path / "run", CONFIG, words)
    run.close()
    page = html.unescape(report_run(run.path).read_text())
    (shown,) = re.findall(r"<h2>To run it again</h2>\n<pre>(.*?)</pre>", page)
    assert shlex.split(shown) == words


def test_the_command_that_evaluates_again_can_be_pasted(tmp_path):
    run = fake_run(tmp_path / "it's (1), ün")
    (line,) = [line for line in finished(run).splitlines() if line.startswith("evaluate")]
    assert line.endswith(" split=test")
    *_, policy, _ = shlex.split(line)
    assert OverridesParser.create().parse_override(policy).value() == str(run.path)


def test_a_failed_drawing_does_not_lose_the_summary(tmp_path, monkeypatch):
    def broken(_):
        raise RuntimeError("no fonts")

    monkeypatch.setattr("mmrl.report.html.write_report", broken)
    run = fake_run(tmp_path / "run", steps=3)
    run.report_path.write_text("the page of an evaluation under way")
    assert "report not written (RuntimeError: no fonts)" in finished(run)
    assert run.summary["steps"] == 3
    # A resume draws the page of a run that has its summary: the old page must not stand for it.
    assert not run.report_path.exists() and not RunDir.read(run.path).finished


def test_curves_that_agree_are_both_seen_and_the_legend_is_above_them():
    rows = {0: (0.2, 0.1, 0.3, 0.3, 0.2), 10: (0.5, 0.4, 0.6, 0.9, 0.5)}
    names = ("em", "em_low", "em_high", "f1", "reward")
    history = [
        {"step": step, **{f"eval/dev/{n}": v for n, v in zip(names, row, strict=True)}} for step, row in rows.items()
    ]
    svg = evaluation_curve(history, "dev", ["em", "f1", "reward"])
    drawn = re.findall(r"fill: none; stroke: (#[0-9a-f]{6}); stroke-width: ([0-9.]+)", svg)
    widths = {color: float(width) for color, width in reversed(drawn)}
    em, f1, reward = (widths[color] for color in LINES[:3])
    assert em == f1 == 1.6 and reward >= 4
    labels = [float(y) for y in re.findall(r'y="([0-9.]+)"[^>]*>(?:em|f1|reward)<', svg)]
    curves = [float(y) for y in re.findall(r'd="M [0-9.]+ ([0-9.]+) [^"]*"\s+clip-path', svg)]
    assert len(labels) == 3 and len(curves) >= 4 and max(labels) < min(curves)
    # A band is drawn where both of its ends are.
    halves = [{**history[0], "step": step, "eval/dev/em_high": None} for step in (20, 30)]
    corners = [
        len(re.findall(r'<path id="[^"]*" d="([^"]*)z\n"/>', evaluation_curve(rows, "dev", ["em"]))[0].splitlines())
        for rows in (history, [*history, *halves])
    ]
    assert corners[0] == corners[1]


def test_the_tokens_of_a_completion_are_coloured_by_their_advantage():
    texts = read_tokenizer([Path("nowhere"), ASSETS / "tiny"])
    ids = Tokenizer.from_file(str(ASSETS / "tiny" / "tokenizer.json")).encode("It may be Gr\u00fcn or 1902").ids
    pieces = token_texts(ids, texts)
    assert "".join(text for text, _ in pieces) == "It may be Gr\u00fcn or 1902" and len(pieces) > 5
    assert sum(count for _, count in pieces) == len(ids)
    fields: dict[str, Any] = {"id": "a", "example": "e", "parent": None, "module": "m"}
    call = Call(**fields, completion_tokens=len(ids), completion_ids=tuple(ids), text="x")
    values = [-0.5] * 2 + [1.0] * (len(ids) - 2)
    shown = coloured(call, [{"advantages": values}], texts, 1.0)
    assert [level for _, level in shown] == [-2, 4] and "".join(text for text, _ in shown).startswith("It may")
    # One advantage, or no tokenizer: one piece.
    assert coloured(call, [{"advantages": [0.3] * len(ids)}], texts, 1.0) == [("x", 2)]
    assert coloured(call, [{"advantages": values}], None, 1.0) == [("x", shade(fmean(values), 1.0))]
    assert coloured(call, [], texts, 1.0) == [("x", 0)]
    long = Call(**fields, completion_tokens=900, completion_ids=tuple(ids[:1] * 900))
    parts = coloured(long, [{"advantages": [0.1] * 899 + [0.9]}], texts, 0.9)
    assert [level for _, level in parts] == [1, 0, 1, 4] and parts[1][0] == " [\u2026350 tokens\u2026] "
