"""The shipped tiny model and its build: what it is, what it can play, and that it has not seen the world of runs."""

import json
from typing import Any

import pytest
import torch

from mmrl.config import ModelConfig
from mmrl.config.base import SHIPPED, shipped_for
from mmrl.models.chat import decode_text, encode_text
from mmrl.models.load import ASSETS, TINY, load_model, load_tokenizer
from mmrl.tasks.base import Demonstration
from scripts.tiny_model import build
from scripts.tiny_model.drills import drills
from scripts.tiny_model.mini.questions import make_questions
from scripts.tiny_model.mini.world import WORLD_SEED
from scripts.tiny_model.phrases import extend, stock_phrases
from scripts.tiny_model.recipes import RECIPES

CONFIG = ModelConfig(name="tiny", path="tiny")
MEGABYTE = 1e6


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(CONFIG)


@pytest.fixture(scope="module")
def model():
    return load_model(CONFIG, "cpu").eval()


@pytest.fixture(scope="module")
def facts():
    return json.loads((TINY / "build.json").read_text(encoding="utf-8"))


def test_it_ends_turns_and_has_a_card(model, tokenizer):
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings == 4096
    assert model.config.tie_word_embeddings
    ends = model.generation_config.eos_token_id
    assert (ends if isinstance(ends, list) else [ends]) == [tokenizer.eos_token_id]
    assert (TINY / "README.md").read_text(encoding="utf-8").startswith("# The tiny model")


def test_it_has_not_seen_the_world_that_runs_use(facts):
    assert facts["world_seed_of_runs"] == WORLD_SEED
    assert WORLD_SEED not in facts["worlds_learnt_from"]
    own = {question["inputs"]["question"] for split in ("train", "dev", "test") for question in make_questions(split)}
    for seed in facts["worlds_learnt_from"][:1]:
        other = [question["inputs"]["question"] for question in make_questions("train", seed)]
        assert sum(text in own for text in other) < 0.05 * len(other)  # names are drawn from few words, so some meet


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n a\tb ", "Zürich 東京 \U0001f600 عربى", "a\x00b", "1984", "<|im_end|>", "don't  STOP—now"]
)
def test_any_text_is_encoded_without_loss_and_without_special_tokens(tokenizer, text):
    ids = encode_text(tokenizer, text)
    assert decode_text(tokenizer, ids) == text
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_digits_are_single_tokens(tokenizer):
    assert [tokenizer.decode([token]) for token in encode_text(tokenizer, "1984")] == list("1984")


def test_a_name_is_the_same_tokens_wherever_it_stands(tokenizer):
    name = make_questions("dev")[0]["metadata"]["titles"][0]
    ids = encode_text(tokenizer, name)
    for text in (f"Who is {name}?", f"Document3: {name} | {name}, born in 1920", f"the film {name}\n"):
        found = encode_text(tokenizer, text)
        assert any(found[start : start + len(ids)] == ids for start in range(len(found))), text


@pytest.mark.parametrize(
    ("name", "path", "items", "bounds"),
    [
        ("hotpotqa", "tiny", 60, {"f1": (0.03, 0.4)}),
        ("search_agent", "tiny", 60, {"answered": (0.5, 1.01), "searches": (0.3, 1.5), "em": (0.02, 0.4)}),
        ("tool_agent", "tiny", 60, {"answered": (0.5, 1.01), "tool_calls": (0.3, 1.5), "em": (0.02, 0.4)}),
        ("banking77", "tiny_dspy", 30, {"reward": (0.1, 0.8)}),
        ("papillon", "tiny_dspy", 30, {"reward": (0.3, 0.85)}),
        ("hover", "tiny_dspy", 30, {"reward": (0.1, 0.85)}),
        ("qa_direct", "tiny_direct", 30, {"answered": (0.5, 1.01)}),
        ("search_o1", "tiny_qa", 30, {"searches": (0.3, 2.5)}),
        ("r1_searcher", "tiny_qa", 30, {"searches": (0.3, 2.5)}),
    ],
)
def test_a_shipped_model_knows_the_formats_and_leaves_room_to_learn(name, path, items, bounds):
    config = ModelConfig(name="tiny", path=path)
    torch.manual_seed(0)
    (task,) = build.build_tasks((name,), WORLD_SEED)
    found = build.play(load_model(config, "cpu").eval(), load_tokenizer(config), task, items)
    assert all(low < found[metric] < high for metric, (low, high) in bounds.items()), found
    assert found["reward"] < 0.85
    assert all(found[f"{module}_penalised"] < 0.95 for module in task.program.modules)


def test_drills_can_be_answered_from_their_documents():
    task: Any = build.build_tasks(("hotpotqa",), 1)[0]
    checked = 0
    for drill in list(drills(task, "dev", 1))[:50]:
        documents = drill.messages[-1]["content"].split("\nNow answer: ")[0]
        for part in drill.completion.split("\nNow answer: "):
            answer = part.split("\n")[-1]
            assert answer in ("yes", "no") or answer in documents
            checked += 1
    assert checked > 200


def test_other_worlds_are_other_worlds():
    for seed in (WORLD_SEED, 1):
        (task,) = build.build_tasks(("hotpotqa",), seed)
        asked = [question["inputs"]["question"] for question in make_questions("dev", seed)]
        assert [example.inputs["question"] for example in task.examples("dev")] == asked


# tests/agents plays tiny_agent, whose program needs an SDK.
@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"tiny_agent"}))
def test_every_program_of_a_recipe_has_a_share_in_the_phase_that_teaches_formats(name):
    (phase,) = (phase for phase in RECIPES[name].phases if phase.name in ("play", "prompts"))
    for task in build.build_tasks(RECIPES[name].tasks, WORLD_SEED):
        assert set(task.program.modules) <= set(phase.mix)


@pytest.mark.parametrize("argument", ["model=nothing", "steps=1,2", "stpes=1"])
def test_bad_arguments_are_refused(argument):
    with pytest.raises(SystemExit, match="expected"):
        build.main([argument])


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_model_is_small_and_says_what_it_is(name):
    facts = json.loads((ASSETS / name / "build.json").read_text(encoding="utf-8"))
    config = ModelConfig(name="tiny", path=name)
    assert sum(path.stat().st_size for path in (ASSETS / name).iterdir()) < 6 * MEGABYTE
    assert sum(p.numel() for p in load_model(config, "cpu").parameters()) == facts["parameters"] < 2e6
    assert len(load_tokenizer(config)) == facts["vocabulary"]
    assert set(facts["tasks"]) == set(RECIPES[name].tasks) >= set(SHIPPED[name]) - {"2wiki", "musique"}
    assert (facts["world_seed_of_runs"] in facts["worlds_learnt_from"]) == RECIPES[name].knows


def test_each_task_of_the_mini_world_has_one_shipped_model():
    tasks = [task for tasks in SHIPPED.values() for task in tasks]
    assert len(tasks) == len(set(tasks))
    assert {shipped_for(task) for task in ("hotpotqa", "tool_agent", "dspy", "mine")} == {"tiny"}
    assert shipped_for("banking77") == shipped_for("hover") == "tiny_dspy"
    assert shipped_for("search_agent") == shipped_for("search_o1") == "tiny_qa"
    assert shipped_for("qa_direct") == "tiny_direct"


def _asked(question):
    instructions = "Read the query of a buyer with care.\nThen say in one word what it is about."
    return Demonstration(
        module="teller",
        messages=[
            {"role": "system", "content": instructions},
            {"role": "user", "content": f"[[ ## q ## ]]\n{question}"},
        ],
        completion="[[ ## a ## ]]\nno",
    )


NAMES = ("Dakon", "Lume", "Peres")
ASKED = [_asked(f"Please send it back to {name} Works?") for name in NAMES * 12]


def test_stock_phrases_are_instructions_tags_and_runs_of_small_words_but_no_names():
    found = stock_phrases(ASKED, {*NAMES, "Works"})
    assert found[0] == ASKED[0].messages[0]["content"]
    assert {"[[ ## q ## ]]\n", "[[ ## a ## ]]\n", "Please send it back to"} >= set(found) - {found[0], "no"}
    assert "Please send it back to" not in stock_phrases(ASKED)
    assert not [phrase for phrase in found[1:] if "Dakon" in phrase or "Works" in phrase]


def test_a_grown_tokenizer_writes_stock_phrases_as_one_token_and_all_else_as_before():
    tokenizer: Any = load_tokenizer(CONFIG)
    model = load_model(CONFIG, "cpu")
    before, plain = len(tokenizer), "Who directed the film Silent Dakon?\n"
    ids = encode_text(tokenizer, plain)
    logits = model(input_ids=torch.tensor([ids])).logits
    phrases = extend(tokenizer, model, ASKED, {*NAMES, "Works"}, 0)
    assert len(tokenizer) == before + len(phrases) == model.config.vocab_size
    assert all(len(encode_text(tokenizer, phrase)) == 1 for phrase in phrases)
    assert encode_text(tokenizer, plain) == ids
    torch.testing.assert_close(model(input_ids=torch.tensor([ids])).logits[..., :before], logits)
    text = f"{phrases[0]}<|im_end|> {phrases[-1]}!"
    assert decode_text(tokenizer, encode_text(tokenizer, text)) == text
    assert not set(encode_text(tokenizer, text)) & set(tokenizer.all_special_ids)
