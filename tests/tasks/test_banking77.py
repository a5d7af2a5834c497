"""Intent classification: data, the paper's sample, exact match, parse failures, the mini world's queries."""

import json

import pytest

from mmrl.records import Example
from mmrl.tasks.mini.teach import demonstrations
from scripts.tiny_model.mini.messages import INTENTS, make_support
from scripts.tiny_model.mini.world import make_world
from tests.helpers.programs import filled, problems, saved
from tests.helpers.programs import make_dspy as make
from tests.helpers.programs import play_dspy as play


def rows(count, labels=("a", "b"), start=0):
    return [{"text": f"query {start + n}", "category": labels[n % len(labels)]} for n in range(count)]


def test_mini_splits_share_no_query_and_no_product_and_are_balanced():
    products = {p.name: p.part for p in make_world().entities.values() if p.kind == "product"}
    texts = {}
    assert make("banking77").describe()["labels"] == len(INTENTS)
    for split in ("train", "dev", "test"):
        queries = make_support(split)
        assert all(products[query.metadata["reason"].partition(":")[0]] == split for query in queries)
        counts = [sum(query.metadata["label"] == label for query in queries) for label in INTENTS]
        assert max(counts) - min(counts) <= 1
        texts[split] = {query.inputs["text"] for query in queries}
        assert len(texts[split]) == len(queries)
        assert not any(name in text for text in texts[split] for name, part in products.items() if part != split)
    assert not texts["train"] & texts["dev"] and not texts["dev"] & texts["test"]


@pytest.mark.parametrize(
    ("label", "error", "reward"),
    [
        ("refund", None, 1.0),
        ("exchange", None, 0.0),
        ("refunds", "parse", 0.0),
        ("", "parse", 0.0),
        ("'refund'", None, 1.0),  # DSPy takes quotes off a Literal
        # What DSPy's readers of values hang on, overflow or give up at is the policy's doing, too.
        ("{" * 5000, "parse", 0.0),
        ("[" * 5000, "parse", 0.0),
        ("[1]" * 5000, "parse", 0.0),
        ("-" * 5000, "parse", 0.0),
        ("(" * 5000, "parse", 0.0),
    ],
)
def test_exact_match_and_labels_outside_the_set(label, error, reward):
    task = make("banking77")
    example = Example(id="e", inputs={"text": "money back"}, metadata={"label": "refund"})
    forest = play(task, lambda request: filled(reasoning="so", label=label), [example])
    (rollout,) = forest.rollouts
    assert (rollout.error, rollout.reward) == (error, reward)
    if error:
        (call,) = forest.path(rollout)
        assert (call.present_fields, call.expected_fields) == (0, 2), "a value outside the set counts as nothing read"


def test_the_papers_sample_of_files_is_the_same_for_every_seed(tmp_path):
    train = saved(tmp_path / "train.csv", rows(600))
    dev = saved(tmp_path / "test.csv", rows(800, start=600))
    tasks = [make("banking77", seed, data={"train": train, "dev": dev}, sample="paper") for seed in (0, 1)]
    for task in tasks:
        assert [len(task.examples(split)) for split in ("train", "dev", "test")] == [250, 500, 0]
        assert task.describe()["sample"] == "the paper's, drawn with seed 0"
    assert [e.id for e in tasks[0].examples("train")] == [e.id for e in tasks[1].examples("train")]
    whole = make("banking77", data={"train": train, "dev": dev, "dev_items": 20})
    assert [len(whole.examples(split)) for split in ("train", "dev")] == [600, 20]
    assert "sample" not in whole.describe()


def test_one_file_for_train_and_dev_is_shared_out(tmp_path):
    path = saved(tmp_path / "all.csv", rows(800))
    task = make("banking77", data={"train": path, "dev": path}, sample="paper")
    train, dev = ({e.inputs["text"] for e in task.examples(split)} for split in ("train", "dev"))
    assert (len(train), len(dev)) == (250, 500) and not train & dev
    alone = make("banking77", data={"dev": path}, sample="paper")
    assert {e.inputs["text"] for e in alone.examples("dev")} == dev, "the same items when only dev is asked for"
    told = problems("banking77", data={"train": path, "dev": path})
    assert "train and dev are all of" in told and "task.sample=paper" in told
    assert "train and test are all of" in problems("banking77", data={"train": path, "test": path})
    few = saved(tmp_path / "few.csv", rows(20))
    assert "has 20 rows" in problems("banking77", data={"dev": few}, sample="paper")


def test_columns_of_the_hubs_copy(tmp_path):
    table = {"text": ["x", "y"], "label": [11, 12], "label_text": ["card_arrival", "card_linking"]}
    columns = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    task = make("banking77", data={"train": saved(tmp_path / "hub.parquet", columns)})
    assert sorted(e.metadata["label"] for e in task.examples("train")) == ["card_arrival", "card_linking"]


def test_given_labels_are_in_the_prompt_in_their_order(tmp_path):
    train = saved(tmp_path / "train.csv", rows(4))
    labels = saved(tmp_path / "labels.json", ["z", "b", "a"])
    task = make("banking77", data={"train": train}, labels=labels)
    forest = play(task, lambda request: filled(reasoning="so", label="z"), task.examples("train")[:1])
    (rollout,) = forest.rollouts
    assert rollout.error is None
    assert "one of: z; b; a" in forest.path(rollout)[0].prompt_text


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "a.csv",
            [{"text": "x", "kind": "a"}],
            "line 2: category: Field required (fields: text, kind)",
        ),
        ("a.csv", [{"text": " ", "category": "a"}], "line 2: text: is empty"),
        ("a.csv", [{"text": "x", "category": ""}], "line 2: category: is empty"),
        ("a.csv", [{"id": "q", "text": text, "category": "a"} for text in "xy"], "line 3: duplicate id 'q'"),
        ("a.json", [{"text": "x", "label": 3}], "label: Input should be a valid string"),
        ("a.jsonl", "[1]\n", "line 1: got a list, expected a record"),
    ],
)
def test_bad_data_is_told_by_file_and_row(tmp_path, name, content, says):
    path = saved(tmp_path / name, content)
    told = problems("banking77", data={"train": path})
    assert path in told and says in told


def test_labels_that_the_label_set_lacks_are_refused(tmp_path):
    train = saved(tmp_path / "train.csv", rows(4))
    dev = saved(tmp_path / "dev.csv", rows(4, labels=("a", "c")))
    assert "task.data.dev: 1 labels are not among the 2 of task.data.train: 'c'" in problems(
        "banking77", data={"train": train, "dev": dev}
    )
    labels = saved(tmp_path / "labels.json", ["a"])
    assert "not among the 1 of task.labels: 'b'" in problems("banking77", data={"train": train}, labels=labels)
    bad = saved(tmp_path / "bad.json", {"a": 1})
    assert "task.labels" in problems("banking77", data={"train": train}, labels=bad)


def test_prompts_from_files(tmp_path):
    path = saved(tmp_path / "prompts.yaml", {"classify.predict": {"instructions": "Name the intent of {text}."}})
    task = make("banking77", prompts=path)
    prompt = demonstrations(task, task.examples("dev")[0])[0].messages[0]["content"]
    assert "Name the intent of {text}." in prompt


def test_prompts_that_dspy_saved(tmp_path):
    path = tmp_path / "program.json"
    program = make("banking77").program.module
    program.classify.predict.demos = [{"text": "t", "reasoning": "r", "label": "refund"}]
    program.classify.predict.signature = program.classify.predict.signature.with_instructions("Be exact.")
    program.save(path)
    task = make("banking77", prompts=str(path))
    messages = demonstrations(task, task.examples("dev")[0])[0].messages
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert "Be exact." in messages[0]["content"]
    path.write_text(json.dumps({"other": {}}))
    assert "holds other, expected the state of classify.predict" in problems("banking77", prompts=str(path))
    path.write_text("{")
    assert "is not JSON" in problems("banking77", prompts=str(path))


def test_real_files(data_dir):
    folder = data_dir / "banking77"
    if not folder.is_dir():
        pytest.skip(f"no banking77 in {data_dir}")
    data = {"train": str(folder / "train.csv"), "dev": str(folder / "test.csv")}
    task = make("banking77", data=data, labels=str(folder / "categories.json"), sample="paper")
    assert task.describe()["labels"] == 77
    assert [len(task.examples(split)) for split in ("train", "dev")] == [250, 500]
    derived = make("banking77", data=data, sample="paper")
    assert derived.describe()["labels"] == 77
    gold = {e.inputs["text"]: e.metadata["label"] for e in derived.examples("dev")}

    def answer(request):
        text = "".join(map(chr, request.prompt_ids)).rpartition("[[ ## text ## ]]\n")[2]
        text = text.partition("\n\nRespond with the corresponding")[0]
        return filled(reasoning="so", label=gold[text])

    forest = play(derived, answer, derived.examples("dev")[:100])
    assert [rollout.reward for rollout in forest.rollouts] == [1.0] * 100
