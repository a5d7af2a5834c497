"""Prompts that vary for a tiny model: demonstrations of other examples, other instructions, habits that follow them."""

import pytest

from mmrl import rng
from mmrl.tasks.mini.teach import demonstrations
from scripts.tiny_model import build
from scripts.tiny_model.recipes import RECIPES
from scripts.tiny_model.shots import instructions, varied


@pytest.fixture(scope="module")
def task():
    (task,) = build.build_tasks(("banking77",), 1)
    return task


@pytest.fixture(scope="module")
def shown(task):
    return {habits: list(varied(task, "dev", 1, habits)) for habits in (False, True)}


def test_prompts_vary_and_are_the_programs_own_again_afterwards(task, shown):
    plain = [demonstrations(task, example)[0] for example in task.examples("dev")]
    assert [d.messages[-1] for d in shown[False]] == [d.messages[-1] for d in plain]
    assert [d.completion for d in shown[False]] == [d.completion for d in plain]
    own = sum(d.messages[0] == p.messages[0] for d, p in zip(shown[False], plain, strict=True)) / len(plain)
    without = sum(len(d.messages) == 2 for d in shown[False]) / len(plain)
    assert 0.4 < own < 0.6
    assert 0.4 < without < 0.6
    assert max(len(d.messages) for d in shown[False]) == 10, "four demonstrations"
    assert len({d.messages[0]["content"] for d in shown[False]}) > 50
    assert shown[False] == list(varied(task, "dev", 1))


def test_no_prompt_shows_its_own_example(task, shown):
    for example, d in zip(task.examples("dev"), shown[False], strict=True):
        assert not any(example.inputs["text"] + "\n" in m["content"] for m in d.messages[:-1])


def test_habits_follow_the_demonstrations(task, shown):
    labels = {e.inputs["text"]: e.metadata["label"] for e in task.examples("dev")}
    poor = {True: [], False: [], None: []}
    for good, d in zip(shown[False], shown[True], strict=True):
        users, replies = d.messages[1:-1:2], d.messages[2:-1:2]
        texts = [u["content"].split("[[ ## text ## ]]\n")[1].split("\n")[0] for u in users]
        right = [f"[[ ## label ## ]]\n{labels[text]}\n" in r["content"] for text, r in zip(texts, replies, strict=True)]
        assert len(set(right)) < 2, "demonstrations of a prompt are all good or all poor"
        poor[right[0] if right else None].append(d.completion != good.completion)
    shares = {kind: sum(found) / len(found) for kind, found in poor.items()}
    assert shares[True] < 0.2 < 0.5 < shares[None] < 0.7 < 0.8 < shares[False]


def test_instructions_name_the_fields(task):
    (predictor,) = task.predictors.values()
    made = {instructions(predictor.signature, rng.stream(0, number)) for number in range(200)}
    assert len(made) > 80
    assert all("`text`" in text and "`label`" in text and "reasoning" not in text for text in made)


def test_a_phase_shows_what_it_says(monkeypatch):
    phases = {phase.name: phase for phase in RECIPES["tiny_prompts"].phases}
    asked = []
    monkeypatch.setattr(build, "varied", lambda task, split, seed, habits: asked.append((seed, habits)) or ["v"])
    monkeypatch.setattr(build, "habits", lambda task, split, seed: ["h"])
    assert build.shown_in(phases["prompts"], ("banking77",), [1, 2]) == ["v", "v"]
    assert build.shown_in(phases["habits"], ("banking77",), [1]) == ["v"]
    assert asked == [(1, False), (2, False), (1, True)]
    (play, _, habits) = RECIPES["tiny_dspy"].phases
    assert (build.shown_in(play, ("banking77",), [1]), build.shown_in(habits, ("banking77",), [1])) == ([], ["h"])
