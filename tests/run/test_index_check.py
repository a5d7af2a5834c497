import json

import pytest

from mmrl.cli import main
from mmrl.errors import DataError
from mmrl.retrieval.base import Document
from mmrl.retrieval.index_folder import IndexSpec, build_index
from mmrl.run.index import questions_of

TITLES = ["Lisbon", "Porto", "Tagus", "Douro"]
HOTPOT = [
    {
        "_id": "a",
        "question": "lisbon tagus",
        "answer": "x",
        "type": "bridge",
        "supporting_facts": [["Lisbon", 0], ["Lisbon", 1], ["Tagus", 0]],
        "context": [["Lisbon", ["one."]], ["Tagus", ["two."]]],
    },
    {
        "_id": "b",
        "question": "porto",
        "answer": "y",
        "supporting_facts": [["Porto", 0], ["Not\there", 0]],
        "context": [["Porto", ["one."]]],
    },
]
MUSIQUE = [
    {
        "id": "2hop__1",
        "question": "lisbon",
        "answer": "x",
        "paragraphs": [
            {"title": "Lisbon", "paragraph_text": "t", "is_supporting": True},
            {"title": "Porto", "paragraph_text": "t", "is_supporting": False},
        ],
    }
]
HOVER = [{"uid": "u", "claim": "douro", "supporting_facts": [["Douro", 0]], "num_hops": 2, "hpqa_id": "h"}]
POPQA = [
    {
        "id": 1,
        "question": "lisbon",
        "possible_answers": '["x"]',
        "paragraphs": [{"title": "Lisbon", "text": "t", "is_supporting": True}],
    }
]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "bm25"
    documents = [Document(id=str(n), title=title, text="in Portugal " * n) for n, title in enumerate(TITLES)]
    documents.append(Document(id="9", title="Porto", text="porto porto porto"))
    build_index(folder, IndexSpec(kind="bm25", settings={"k1": 0.9, "b": 0.4}), lambda: documents)
    return folder


def file(folder, records):
    path = folder / "data.json"
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


def test_recall_and_coverage_of_gold_titles(index, tmp_path, capsys):
    assert main(["index", "check", f"index={index}", f"data={file(tmp_path, HOTPOT)}", "top_k=2,1"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["questions"] == "questions  2 with 4 gold titles"
    assert "75.0% of the gold titles" in lines["coverage"] and "50.0% of the questions" in lines["coverage"]
    assert lines["missing"] == "missing    Not here"  # nothing that a terminal would obey
    # of the first question 1 of 2 titles is first and both are among two; of the second one title is not there
    assert lines["passages"].split() == ["passages", "first", "1", "first", "2"]
    assert lines["recall"].split()[1:] == ["0.500", "0.750"]
    assert lines["all"].split()[2:] == ["0.000", "0.500"]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (HOTPOT, [("lisbon tagus", ("Lisbon", "Tagus")), ("porto", ("Porto", "Not\there"))]),
        (MUSIQUE, [("lisbon", ("Lisbon",))]),
        (HOVER, [("douro", ("Douro",))]),
        (POPQA, [("lisbon", ("Lisbon",))]),
    ],
)
def test_official_records_are_read(records, expected, tmp_path):
    path = str(file(tmp_path, records))
    assert [(q.text, q.titles) for q in questions_of(path, None)] == expected
    assert len(questions_of(path, 1)) == 1


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([{"question": "a", "answer": "b"}], "names no gold titles; expected a record of HotpotQA"),
        ([HOTPOT[0], {"question": "a"}], "record 2.*not a record of hotpotqa|not a record of hotpotqa"),
        ([5], "names no gold titles"),
    ],
)
def test_other_records_are_refused(records, says, index, tmp_path, capsys):
    path = file(tmp_path, records)
    with pytest.raises(DataError, match=says):
        questions_of(str(path), None)
    assert main(["index", "check", f"index={index}", f"data={path}", "top_k=0"]) == 2
    assert "top_k" in capsys.readouterr().err
    assert main(["index", "check", f"index={index}", f"data={path}"]) == 2
    assert "data: " in capsys.readouterr().err
