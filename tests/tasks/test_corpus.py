"""The corpora that questions are asked of: their files, the union of the paragraphs, what is missing from them."""

import logging

import pytest

from mmrl.cli import main
from mmrl.config import DataConfig
from mmrl.errors import DataError
from mmrl.retrieval.bm25 import Bm25Retriever
from mmrl.retrieval.store import PassageStore, write_passages
from mmrl.tasks.data.corpus import Corpus, load_corpus
from mmrl.tasks.mini.teach import demonstrations
from tests.helpers.programs import saved
from tests.tasks.test_data import make, record


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c.jsonl", '{"id": "x", "title": "A", "text": "one two"}\n{"id": "y", "title": "B", "text": "three"}\n'),
        ("c.json", '[{"title": "A", "text": "one two"}, {"title": "B", "text": "three"}]'),
        ("c.json", '[["A", ["one", " two"]], ["B", "three"]]'),
        ("c.json", '[["A", ["one", "two"]], ["B", ["three"]]]'),
        ("c.tsv", "id\ttext\ttitle\nx\tone two\tA\ny\tthree\tB\n"),
        ("c.parquet", [{"title": "A", "text": "one two"}, {"title": "B", "text": "three"}]),
    ],
)
def test_corpus_forms(tmp_path, name, content):
    found = load_corpus("task.corpus", saved(tmp_path / name, content))
    assert [(d.title, d.text) for d in found] == [("A", "one two"), ("B", "three")]
    assert len({d.id for d in found}) == 2


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("c.jsonl", '{"title": "A", "text": "x"}\n{"title": "B"}\n', "line 2: text: Field required (fields: title)"),
        ("c.jsonl", '{"title": 3, "text": "x"}\n', "line 1: title: Input should be a valid string"),
        ("c.jsonl", '"text"\n', "line 1: Input should be a valid dictionary"),
        ("c.tsv", "id\ttext\n1\tx\n", "line 2: title: Field required (fields: id, text)"),
        ("c.tsv", "title\ttext\nA\tx\ty\n", "line 2: got 3 cells, the header has 2"),
        ("c.json", "[]", "has no passages"),
        ("c.json", "{}", "got dict, expected a JSON list"),
    ],
)
def test_bad_corpora(tmp_path, name, content, expected):
    with pytest.raises(DataError) as caught:
        load_corpus("task.corpus", saved(tmp_path / name, content))
    assert str(caught.value).startswith("task.corpus: ")
    assert expected in str(caught.value)


def test_the_corpus_is_the_union_of_the_paragraphs_of_the_files(tmp_path):
    first = saved(tmp_path / "a.json", [record(0)])
    second = saved(
        tmp_path / "b.json", [record(1, context=[["Thing", ["Made by Ada.", " In Porto."]], ["New", ["n"]]])]
    )
    alone = make(data=DataConfig(train=first, dev=second))
    (documents,) = alone.search_tool.corpora.values()  # no document of the mini world
    assert [d.title for d in documents] == ["Thing", "Ada", "Other", "New"] and alone.examples("test") == []
    assert "mini" not in str(alone.describe())
    task = make(data=DataConfig(train=first, dev=second, test="mini"))
    corpus = task.examples("dev")[0].inputs["corpus"]
    assert corpus == task.examples("train")[0].inputs["corpus"] != task.examples("test")[0].inputs["corpus"]
    assert [d.title for d in task.search_tool.corpora[corpus]] == ["Thing", "Ada", "Other", "New"]
    assert task.search(["porto"], corpus)[0]["title"] == "Thing"
    assert task.search(["porto"], task.examples("test")[0].inputs["corpus"]) == []
    of_files, of_mini = (demonstrations(task, task.examples(split)[0]) for split in ("train", "test"))
    assert of_files[0].completion == "### Thing; Ada ###" and len(of_mini) > 3


def test_same_title_with_other_text_is_kept(tmp_path):
    path = saved(tmp_path / "data.json", [record(0), record(1, context=[["Thing", ["Something else."]]])])
    task = make(data=DataConfig(train=path, dev=path, test=path))
    (documents,) = task.search_tool.corpora.values()
    assert [d.title for d in documents].count("Thing") == 2
    assert len({d.id for d in documents}) == len(documents)


def test_a_given_corpus_serves_every_split(tmp_path):
    corpus = saved(tmp_path / "c.json", [{"title": "Ada", "text": "Ada of Porto"}])
    own = saved(tmp_path / "data.json", [record(0)])
    task = make(data=DataConfig(train=own, dev=own), corpus=corpus)
    assert {example.inputs["corpus"] for split in ("train", "dev") for example in task.examples(split)} == {"given"}
    assert task.search(["porto"], "given")[0]["title"] == "Ada"
    mixed = make(data=DataConfig(train=own, dev=own, test="mini"), corpus=corpus)
    assert mixed.examples("test") == [], "the mini world's questions have nothing to search in it"
    assert "test" not in task.describe()["partial corpus"] + task.describe().get("corpus coverage", "")
    assert make(corpus="mini").examples("dev")[0].inputs["corpus"] == "mini"


def test_missing_gold_titles_warn_with_the_share(tmp_path, caplog):
    rows = [record(0), record(1), record(2, supporting_facts=[["Thing", 0], ["Nowhere", 0]])]
    with caplog.at_level(logging.WARNING):
        task = make(data=DataConfig(dev=saved(tmp_path / "data.json", rows)))
    assert "task.data.dev: only 66.7 % of the questions" in caplog.text
    assert "dev 66.7%" in task.describe()["partial corpus"]
    assert "train" not in task.gold_shares


def test_a_folder_is_the_same_corpus_for_a_task_and_for_an_index(tmp_path, caplog):
    """Every file below it that holds passages, of whatever split its name tells."""
    passages = [{"id": "1", "title": "A", "text": "one"}, {"id": "2", "title": "B", "text": "two"}]
    for name, rows in (
        ("train.jsonl", passages),
        (
            "test/more.jsonl",
            [passages[0] | {"title": "C"}, passages[1]],
        ),  # ids that are numbers of a file, a repetition
        ("validation.json", [record(0)]),
        ("questions.csv", [{"question": "Q?", "answer": "A"}]),
        ("info.json", {"name": "a corpus"}),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        saved(tmp_path / name, rows)
    (tmp_path / "b.jsonl.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "README.txt").write_bytes(b"How it was made, in Latin-1: \xe9")
    with caplog.at_level(logging.WARNING):
        found = load_corpus("task.corpus", str(tmp_path))
    (message,) = caplog.messages
    packed, text, info, questions = message.removeprefix("task.corpus: left out: ").split("; ", 3)
    assert (packed, text) == (f"{tmp_path}/b.jsonl.gz: is compressed", f"{tmp_path}/README.txt: is a text")
    assert f"{tmp_path}/info.json: got dict, expected a JSON list" in info
    assert f"{tmp_path}/questions.csv line 2" in questions
    titles = {d.title: d.text for d in found}
    assert titles == {
        "C": "one",
        "B": "two",
        "A": "one",
        "Thing": "Made by Ada. In Porto.",
        "Ada": "Ada lives.",
        "Other": "Else.",
    }
    assert len(found) == len({d.id for d in found}) == 6
    write_passages(tmp_path, Corpus([str(tmp_path)]).passages())
    assert list(PassageStore(tmp_path)) == found
    saved(tmp_path / "wiki-0-of-2.jsonl", passages)
    for problem in (lambda: load_corpus("task.corpus", str(tmp_path)), lambda: Corpus([str(tmp_path)])):
        with pytest.raises(DataError, match=r"corpus: .*: .*wiki-1-of-2\.jsonl is missing"):
            problem()


@pytest.mark.data
def test_passage_collection_as_corpus(data_dir):
    path = data_dir / "2wikimultihopqa" / "2wikimultihopqa_corpus.json"
    assert len(load_corpus("task.corpus", str(path))) == 6119


def test_search_r1s_passages_have_their_title_in_the_first_line(tmp_path):
    path = saved(tmp_path / "wiki18.jsonl", [{"id": "7", "contents": '"Ada"\nof\nPorto'}])
    (document,) = load_corpus("task.corpus", str(path))
    assert (document.id, document.title, document.text) == ("7", "Ada", "of\nPorto")


def test_pyserinis_passages_without_a_title_are_text(tmp_path):
    rows = [{"id": "7", "contents": "Ada of Porto"}, {"id": "8", "contents": "Tagus\n"}]
    found = load_corpus("task.corpus", saved(tmp_path / "plain.jsonl", rows))
    assert [(d.id, d.title, d.text) for d in found] == [("7", "", "Ada of Porto"), ("8", "Tagus", "")]
    assert [d.id for d in Bm25Retriever(found).search(["porto"], [2])[0]] == ["7"]


def test_files_without_passages_stand_on_lines_of_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "passages.jsonl").write_text('{"title": "a", "text": "b"}\n')
    for name in ("x", "y"):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    assert main(["index", "build", "corpus=data", "index=made"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("left out:")
    assert [line.partition(" line 1: ")[0] for line in lines[at + 1 : at + 3]] == [
        f"  corpus: data/{name}.jsonl" for name in ("x", "y")
    ]


def test_a_damaged_first_record_does_not_leave_out_a_file_of_passages(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"meta": 1}\n{"title": "T", "text": "t"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl line 1: "):
        load_corpus("task.corpus", str(tmp_path))


def test_a_build_of_sources_that_cannot_be_read_leaves_nothing_to_go_on_with(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "passages.jsonl"
    for text, says in (
        ('{"titel": "a"}\n', "has no passages; left out: corpus: data/passages.jsonl line 1"),
        ("{", "line 1: not JSON"),
    ):
        file.write_text(text)
        assert main(["index", "build", "corpus=data", "index=made"]) == 2
        assert says in capsys.readouterr().err and not (tmp_path / "made.partial").exists()
    file.write_text('{"title": "a", "text": "b"}\n')
    assert main(["index", "build", "corpus=data", "index=made"]) == 0
