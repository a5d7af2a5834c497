import pytest

from mmrl.records import Example
from mmrl.tasks import TASKS
from tests.helpers.programs import default_config, saved
from tests.helpers.programs import play as played
from tests.tasks.test_data import record

EXAMPLE = Example(
    id="e", inputs={"question": "Who is older, Ada or Bob?", "corpus": "none"}, metadata={"answers": ["Ada"]}
)


def make(**options):
    return TASKS["qa_direct"](default_config("qa_direct", **options), 0)


def play(task, text):
    return played(task, [text], "outcome", EXAMPLE)


def test_it_is_a_task_without_search():
    task = make()
    assert (task.program.modules, dict(task.tools)) == (("solver",), {})
    assert "corpus" not in task.describe()
    assert "retriever" not in task.describe()


@pytest.mark.parametrize(
    ("text", "em", "reward"),
    [
        ("Ada", 1, 1.0),
        ("It may be Ada or Bob", 0, pytest.approx(2 / 7)),
        ("Bob", 0, 0.0),
        ("", 0, 0.0),
        ("I think so.\nAnswer: Ada", 1, 1.0),
    ],
)
def test_rewards(text, em, reward):
    rollout, calls, _ = play(make(), text)
    assert len(calls) == 1
    assert (rollout.metrics["em"], rollout.reward) == (em, reward)
    assert rollout.metrics["answered"] == float(bool(text))


def test_it_reads_files_without_a_corpus(tmp_path, caplog):
    path = saved(tmp_path / "data.json", [record(0)])
    task = make(data={"train": path, "dev": path, "test": path})
    assert task.examples("dev")[0].inputs["question"] == record(0)["question"]
    assert not [record for record in caplog.records if "corpus" in record.message]
    bare = saved(tmp_path / "bare.jsonl", [{"question": "Q?", "answer": ["A"]}])
    assert make(dataset="nq", data={"train": bare, "dev": bare, "test": bare}).examples("train")


def test_mini_questions_follow_the_data_set():
    assert {e.metadata["type"] for e in make(dataset="nq").examples("dev")} == {"single"}
    assert {e.metadata["type"] for e in make().examples("dev")} == {"bridge", "comparison"}
