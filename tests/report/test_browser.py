"""The report's rollout browser: what goes into the page, within bounds, and what Chromium makes of it."""

import base64
import gzip
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from mmrl import secrets
from mmrl.records import Example
from mmrl.report import browser
from mmrl.report.console import show_run
from mmrl.report.html import report_run
from mmrl.report.overview import Overview
from mmrl.report.trees import input_lines
from mmrl.store.journal import write_step
from mmrl.store.rundir import RunDir
from tests.helpers.runs import CONFIG, fake_run, forest, items

PLAIN = None
"""No tokenizer: a completion is one piece."""


def content(block):
    return json.loads(gzip.decompress(base64.b64decode(block.data)))


def test_a_block_has_every_example_and_call_of_its_step():
    made, entries = forest(3)
    one = browser.block(made, entries, PLAIN, {}, "train-3", "step 3")
    assert one.key == "train-3" and one.label.startswith(f"step 3: {len(made.examples)} examples")
    seen = content(one)
    assert [example["id"] for example in seen["examples"]] == list(made.examples) == json.loads(one.examples)
    calls = [call for example in seen["examples"] for call in example["calls"]]
    assert len(calls) == len(made.calls)
    roots = sum(call.parent is None for call in made.calls.values())
    assert sum(call["depth"] == 0 for call in calls) == roots
    assert [r for example in seen["examples"] for r in example["rewards"]] == [r.reward for r in made.rollouts]
    # A prompt that several calls share is there once.
    assert len(seen["prompts"]) == len(set(seen["prompts"])) <= len(calls)
    assert all(0 <= call["prompt"] < len(seen["prompts"]) for call in calls)
    grouped = [call for call in calls if call["groups"]]
    assert grouped and all("advantage" in " ".join(call["credit"]) for call in grouped)
    assert browser.block(made, entries, PLAIN, {}, "train-3", "step 3") == one


def test_secrets_are_hidden_before_they_are_compressed(monkeypatch):
    made, entries = forest(1)
    text = next(call.text for call in made.calls.values() if len(call.text) > 8)
    assert vars(browser)["hide"] is secrets.hide
    monkeypatch.setattr(browser, "hide", lambda shown: shown.replace(json.dumps(text)[1:-1], "HIDDEN"))
    assert "HIDDEN" in json.dumps(content(browser.block(made, entries, PLAIN, {}, "train-1", "step 1")))


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "run", CONFIG, []) as run:
        yield run


def test_a_page_has_at_most_so_many_steps_and_says_so(run, monkeypatch):
    for step in range(1, 10):
        write_step(run, *forest(step))
    size = sum(file.stat().st_size for file in (run.path / "journal").iterdir())
    monkeypatch.setattr(browser, "SIZE", size // 4 + 9)
    page = report_run(run.path).read_text()
    assert re.findall(r'data-block="train-([0-9]+)"', page) == ["1", "5", "9"]
    assert "3 of 9 steps and evaluations are in this page" in page


def test_ids_that_would_look_the_same_stay_apart():
    made, _ = forest(1)
    first, second, *others = made.examples
    renamed = {first: "a\nb", second: "a \u23ce b", others[0]: ""}
    calls = {name: replace(call, example=renamed.get(call.example, call.example)) for name, call in made.calls.items()}
    rollouts = tuple(replace(one, example=renamed.get(one.example, one.example)) for one in made.rollouts)
    odd = replace(made, calls=calls, rollouts=rollouts)
    ids = [example["id"] for example in content(browser.block(odd, [], PLAIN, {}, "train-1", "step 1"))["examples"]]
    assert ids[:3] == ["a \u23ce b #1", "a \u23ce b #2", "(empty)"] and len(set(ids)) == len(ids)


def test_the_ends_are_there_whatever_their_size_and_damaged_steps_are_left_out(run, monkeypatch):
    for step in range(1, 6):
        write_step(run, *forest(step))
    run.journal_path(3).write_bytes(b"no gzip")
    damaged = []
    keys = [block.key for block in browser.blocks(Overview.from_run(run), PLAIN, damaged)]
    assert keys == ["train-1", "train-2", "train-4", "train-5"]
    assert len(damaged) == 1 and "step-000003" in damaged[0]
    monkeypatch.setattr(browser, "SIZE", 10)
    assert [block.key for block in browser.blocks(Overview.from_run(run), PLAIN, [])] == ["train-1", "train-5"]


def test_parts_of_an_evaluation_have_names_of_their_own(tmp_path):
    with RunDir.create(tmp_path / "run", {**CONFIG, "policy": "tiny", "split": "dev"}, []) as run:
        for part in range(2):
            write_step(run, forest(1)[0], evaluation="dev", step=part)
    made = {block.key: block.label.split(":")[0] for block in browser.blocks(Overview.from_run(run), PLAIN, [])}
    assert made == {"dev-0": "dev, part 1", "dev-1": "dev, part 2"}


def test_what_was_asked_and_what_is_right_stands_at_an_example(run):
    """Written once for each, whatever is trained or evaluated again; a corpus and what is no text is left out."""
    asked = {"question": "Who wrote\nit?", "corpus": "mini", "index": object()}
    gold = {"answers": ["Ada", "A. L."], "hops": 2, "label": "", "long": "x" * 700}
    made = [Example(id=name, inputs=asked, metadata=gold) for name in ("q0", "q1")]
    run.note_examples("train", made[:1])
    run.note_examples("train", made)
    RunDir.read(run.path).note_examples("dev", made[:1])
    assert [*run.examples] == [("train", "q0"), ("train", "q1"), ("dev", "q0")]
    assert run.examples["train", "q0"]["asked"] == {"question": "Who wrote\nit?"}
    question, right = input_lines(run.examples["train", "q0"])
    assert question == "question: Who wrote \u23ce it?"
    assert right.startswith("gold: answers Ada; A. L. · hops 2 · long xxx") and right.endswith("[…100 characters…]")
    write_step(run, *forest(1))
    one = browser.blocks(Overview.from_run(run), PLAIN, [])[0]
    assert content(one)["examples"][0]["asked"] == [question, right]
    assert "question: Who wrote" in show_run(run.path, example="q0", step=1)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:20], lambda data: b"{" + data, lambda data: data.replace(b"q", b"p")]
)
def test_lost_and_damaged_examples_are_noted_again(run, damage):
    made = [Example(id=name, inputs={"question": "Who wrote it?"}, metadata={"answer": "Ada"}) for name in ("q0", "q1")]
    with run:
        run.note_examples("train", made)
        whole, file = run.examples, run.path / "examples.jsonl"
        file.write_bytes(damage(file.read_bytes()))
    with RunDir.open(run.path) as again:
        again.note_examples("train", made)
        assert {key: again.examples[key] for key in whole} == whole


def test_items_of_evaluations_are_in_the_page_with_scores_and_predictions(tmp_path):
    run = fake_run(tmp_path / "run")
    made = {block.key: block for block in browser.blocks(Overview.from_run(run), PLAIN, [])}
    steps = sorted(Overview.from_run(run).items["dev"])
    assert [key for key in made if key.startswith("dev")] == [f"dev-{step}" for step in steps]
    assert made["dev-0"].label.startswith("dev before training: 60 items")
    first = content(made["dev-0"])["examples"][0]
    item = Overview.from_run(run).items["dev"][0][0]
    assert (first["id"], first["scored"], first["rewards"]) == (item["id"], "em", [item["metrics"]["em"]])
    assert first["calls"] == [] and any("em " in line for line in first["lost"])


def test_a_run_without_journals_has_no_browser(tmp_path):
    run = fake_run(tmp_path / "run", steps=0, evaluate=False)
    page = report_run(run.path).read_text()
    assert "<h2>Rollouts</h2>" not in page and "<script" not in page and "script-src" not in page


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")
def test_chromium_shows_an_example_of_two_steps_side_by_side(tmp_path):
    run = fake_run(tmp_path / "run")
    steps = run.journal_steps()
    asked = Example(id="q0", inputs={"question": "Who <b>?"}, metadata={"answers": ["Ada"]})
    run.note_examples("train", [asked])
    write_step(run, replace(forest(1)[0], calls={}, rollouts=()))
    page = report_run(run.path)
    example = next(iter(forest(steps[0])[0].examples))

    def shown(place):
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        command = [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000"]
        done = subprocess.run(
            [*command, "--dump-dom", f"{page.as_uri()}#{place}"], capture_output=True, text=True, timeout=120
        )
        return done.stdout.partition('<section id="browser"')[2].partition("</section>")[0]

    both = shown(f"step=train-{steps[-1]}&example={example}&beside=train-{steps[0]}")
    left, _, right = both.partition('<div id="b-right"')
    assert not both.startswith(" hidden")
    assert f"<h3>step {steps[0]}</h3>" in left and f"<h3>step {steps[-1]}</h3>" in right, "the earlier one first"
    assert left.count('class="call"') == right.count('class="call"') > 0
    assert re.search(r'<span class="(up|down)[1-4]">', left)
    # What was asked and what is right stands once, above both.
    assert both.count("question: Who &lt;b&gt;?") == both.count("gold: answers Ada") == 1
    assert "No example of this step passes the filters." in shown("step=train-1")
    # What a model wrote is text here too.
    assert "<script>alert" not in both
    # An address that names nothing shows the last step, and an example whose rollouts differ.
    nothing = shown("step=train-99&example=none")
    assert f"<h3>step {steps[-1]}</h3>" in nothing and "train-99 is not in this page" in nothing
    # Items whose score has changed since the first evaluation, those that gained most first.
    gains = {
        one["id"]: one["metrics"]["em"] - old["metrics"]["em"] for one, old in zip(items(40), items(0), strict=True)
    }
    for change in (1, -1):
        listed = shown(f"step=dev-40&change={change}")
        expected = [name for name, gain in gains.items() if gain * change > 0]
        assert f"{len(expected)} of {len(gains)} examples" in listed
        assert all(f'<option value="{name}"' in listed for name in expected)
    assert any(gain > 0 for gain in gains.values())
    # An item of an evaluation stands beside itself before training.
    left, _, right = shown("step=dev-40&example=item-3").partition('<div id="b-right"')
    assert "<h3>dev before training</h3>" in left and "<h3>dev after step 40</h3>" in right
