"""Data sets of the hub: columns, splits, a hub that does not answer; local parquet stands for what is fetched."""

from typing import Any

import pyarrow.parquet
import pytest

from mmrl.config import DataConfig
from mmrl.config.tasks import Banking77Config
from mmrl.errors import ConfigError, DataError
from mmrl.tasks import TASKS
from mmrl.tasks.data.layouts import LAYOUTS
from mmrl.tasks.data.rows import Source
from tests.helpers.programs import default_config, saved
from tests.tasks.test_data import hub_columns, load, record


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory: `datasets` takes a local folder by the same call as a hub id; nothing is fetched."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    return tmp_path


def test_hub_data_set_through_local_parquet_of_the_same_schema(here):
    for split, rows in (("train", [record(0), record(1)]), ("validation", [record(2)])):
        saved(here / f"hotpotqa/hotpot_qa/{split}.parquet", [hub_columns(row) for row in rows])
    assert [r.id for r in load("hotpotqa/hotpot_qa", split="train")] == ["r0", "r1"]
    assert load("hotpotqa/hotpot_qa", split="dev")[0] == load(saved(here / "data.json", [record(2)]))[0]
    assert [r.id for r in load("hotpotqa/hotpot_qa:default:train", split="dev")] == ["r0", "r1"]
    with pytest.raises(DataError, match=r"split test\) from the hub"):
        load("hotpotqa/hotpot_qa::test", split="dev")
    with pytest.raises(DataError, match="holds files of dev, train, none of test"):
        load("hotpotqa/hotpot_qa", split="test")
    with pytest.raises(DataError, match="paragraphs: Field required"):
        load("hotpotqa/hotpot_qa", "musique")


def test_a_date_beyond_the_year_9999_is_told_with_its_row(here):
    path = here / "own" / "set" / "validation.parquet"
    path.parent.mkdir(parents=True)
    when = pyarrow.array([0, 2**62], pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table({"question": ["q", "r"], "answer": ["a", "b"], "when": when}), path)
    with pytest.raises(DataError, match=r"^task\.data\.dev: own/set/validation\.parquet row 1: cannot be read: "):
        load("own/set", "nq")


TRIVIA: dict[str, Any] = {"question": "Q?", "question_id": "t1", "question_source": "s"}
TRIVIA |= {"answer": {"value": "Ada", "aliases": ["Ada", "A."], "normalized_aliases": ["ada", "a"]}}
POPQA = {"id": 7, "subj": "S", "prop": "capital", "question": "Q?", "possible_answers": '["Ada", "A."]'}
FLASHRAG = {"id": "dev_0", "question": "Q?", "golden_answers": ["Ada", "A."]}
MUSIQUE: dict[str, Any] = {"id": "2hop__1", "question": "Q?", "answer": "Ada", "answer_aliases": ["A."]}
MUSIQUE |= {"paragraphs": [{"idx": 0, "title": "T", "paragraph_text": "x", "is_supporting": True}]}
HUB = [
    # id, split of the repository, layout, a row with its columns
    ("google-research-datasets/nq_open", "validation", "nq", {"question": "Q?", "answer": ["Ada", "A."]}),
    ("mandarjoshi/trivia_qa", "validation", "triviaqa", TRIVIA),
    ("akariasai/PopQA", "test", "popqa", POPQA),
    *(("RUC-NLPIR/FlashRAG_datasets", "test", layout, FLASHRAG) for layout in LAYOUTS),
    ("dgslibisey/MuSiQue", "validation", "musique", MUSIQUE),
]


@pytest.mark.parametrize(("name", "split", "layout", "row"), HUB)
def test_columns_of_the_hub_data_sets_through_local_parquet(here, name, split, layout, row):
    saved(here / f"{name}/{split}.parquet", [row])
    (found,) = load(f"{name}::{split}", layout)
    assert (found.question, found.answers[:2]) == ("Q?", ("Ada", "A."))
    assert bool(found.paragraphs) == ("paragraphs" in row)


@pytest.mark.parametrize("punctuation", ["delete", "space"])
def test_triviaqas_own_answers_are_right_though_its_script_put_spaces_for_punctuation(here, punctuation):
    row = TRIVIA | {"answer": {"value": "L.H.O.", "aliases": ["L.H.O."], "normalized_aliases": ["l h o"]}}
    data = DataConfig(dev=saved(here / "t.parquet", [row]))
    task: Any = TASKS["qa_direct"](
        default_config("qa_direct", dataset="triviaqa", data=data, punctuation=punctuation), 0
    )
    (example,) = task.examples("dev")
    assert [task.answer_metrics(said, example)["em"] for said in ("L.H.O.", "l h o", "L. H. O.", "H.O.")] == [
        1,
        1,
        1,
        0,
    ]


def test_an_unreachable_hub_id_is_one_clear_error(monkeypatch):
    import datasets

    def refuse(*_args, **_options):
        raise ConnectionError("Couldn't\nreach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    said = "task.data.dev: cannot load 'hotpotqa/hotpot_qa:distractor' (split validation) from the hub: "
    for answers, why in (
        (True, "ConnectionError: Couldn't reach the Hub"),
        (False, "the hub does not answer, and it is"),
    ):
        monkeypatch.setattr("mmrl.tasks.data.rows.hub_answers", lambda answers=answers: answers)
        with pytest.raises(DataError) as caught:
            load("hotpotqa/hotpot_qa:distractor")
        assert str(caught.value).startswith(said + why)


def test_a_hub_that_does_not_answer_is_not_asked_again_and_again(monkeypatch, capfd):
    from huggingface_hub import constants

    monkeypatch.setattr("mmrl.tasks.data.rows.hub_answers", lambda: False)
    before = constants.HF_HUB_OFFLINE
    with pytest.raises(DataError, match="the hub does not answer"):
        load("nobody/none-like-this")
    assert "Retrying" not in capfd.readouterr().err and before == constants.HF_HUB_OFFLINE


def test_splits_of_one_hub_id_are_sources_of_their_own(tmp_path, monkeypatch):
    def identities(*specs):
        return [Source("x", spec).identities(split) for split, spec in zip(("train", "test"), specs, strict=True)]

    one, other = identities("mteb/banking77", "mteb/banking77")
    assert one != other
    one, other = identities("mteb/banking77", "mteb/banking77::train")
    assert one == other, "whatever way it is typed"
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path / "data.json", [{"text": "hi", "label": "a"}])
    one, other = identities(path, "data.json")
    assert one == other
    with pytest.raises(ConfigError, match=r"task\.data: train and test are all of .*data\.json"):
        TASKS["banking77"](Banking77Config(name="banking77", data=DataConfig(train=path, test="./data.json")), 0)
