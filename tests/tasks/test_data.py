import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from mmrl.config import DataConfig
from mmrl.config.tasks import MultihopQaConfig
from mmrl.errors import ConfigError, DataError
from mmrl.tasks import TASKS
from mmrl.tasks.data.corpus import Corpus
from mmrl.tasks.data.layouts import LAYOUTS, load_records, subset, to_example
from mmrl.tasks.data.rows import Source
from tests.helpers.programs import saved


def record(number=0, **changes):
    base = {
        "_id": f"r{number}",
        "question": f"Who made thing {number}?",
        "answer": "Ada",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [["Thing", 0], ["Thing", 1], ["Ada", 0]],
        "context": [["Thing", ["Made by Ada.", " In Porto."]], ["Ada", ["Ada lives."]], ["Other", ["Else."]]],
    }
    return {key: value for key, value in {**base, **changes}.items() if value is not ...}


def hub_columns(row):
    """A record as the hub's `hotpotqa/hotpot_qa` writes it."""
    titles, sentences = zip(*row["context"], strict=True)
    names, numbers = zip(*row["supporting_facts"], strict=True)
    return {
        "id": row["_id"],
        **{key: row[key] for key in ("question", "answer", "type", "level")},
        "supporting_facts": {"title": list(names), "sent_id": list(numbers)},
        "context": {"title": list(titles), "sentences": [list(s) for s in sentences]},
    }


def make(**options):
    return TASKS["hotpotqa"](MultihopQaConfig(name="hotpotqa", **options), 0)


def load(spec, layout="hotpotqa", split="dev"):
    return load_records(Source(f"task.data.{split}", spec), split, LAYOUTS[layout])


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.parquet"])
def test_official_records(tmp_path, name):
    rows = [record(0), record(1)]
    found = load(saved(tmp_path / name, rows if name != "a.parquet" else [hub_columns(row) for row in rows]))
    assert [r.id for r in found] == ["r0", "r1"]
    assert found[0].titles == ("Thing", "Ada")
    assert found[0].answers == ("Ada",)
    assert found[0].paragraphs[0] == ("Thing", "Made by Ada. In Porto.")
    example = to_example(found[0], "c")
    assert example.inputs == {"question": "Who made thing 0?", "corpus": "c"}
    assert example.metadata == {"answers": ["Ada"], "titles": ["Thing", "Ada"], "type": "bridge"}


DEEP = "[" * 100_000 + "]" * 100_000
PARAGRAPH = {"title": "Thing", "paragraph_text": "Made by Ada.", "is_supporting": True}
MUSIQUE: dict[str, Any] = {"id": "2hop__1", "question": "Who made it?", "answer": "Ada", "answer_aliases": ["A. L."]}
MUSIQUE |= {"paragraphs": [PARAGRAPH]}
POPQA = {"id": 1, "question": "Who?", "possible_answers": '["Ada"]', "paragraphs": [{"title": "Thing", "text": "x"}]}


@pytest.mark.parametrize(
    ("layout", "rows", "expected"),
    [
        ("nq", [{"question": "Q?"}], "record 0: answers: Field required"),
        ("nq", [{"answer": "a"}], "record 0: question: Field required"),
        ("nq", [{"question": "Q?", "answer": []}], "record 0: answers: List should have at least 1 item"),
        ("nq", [{"question": "Q?", "answer": 1.5}], "record 0: answers: Input should be a valid list"),
        ("nq", [{"question": "Q?", "answer": ["a", math.nan]}], "record 0: answers.1: got nan, expected a text"),
        ("nq", [{"question": math.nan, "answer": "a"}], "record 0: question: got nan, expected a text"),
        ("musique", [MUSIQUE | {"answer_aliases": [math.inf]}], "answer_aliases.0: got inf, expected a text"),
        ("nq", [{"question": "Q?", "answer": [None]}], "record 0: answers.0: Input should be a valid string"),
        (
            "nq",
            [{"question": "Q?", "answer": "['a' 'b']"}],
            "answers: got \"['a' 'b']\", expected an answer, or a list of",
        ),
        ("nq", [{"question": "Q?", "answer": '["a", oops]'}], "answers: got '[\"a\", oops]', expected an answer, or a"),
        ("nq", [{"question": "Q?", "answer": "[]"}], "record 0: answers: List should have at least 1 item"),
        ("triviaqa", [{"question": "Q?", "answer": {"aliases": "Ada"}}], "answers: expected lists in aliases and norm"),
        # an empty alias would be matched by every answer that normalises to nothing, a text by its letters
        ("musique", [MUSIQUE | {"answer_aliases": [""]}], "answer_aliases.0: is empty"),
        ("musique", [MUSIQUE | {"answer_aliases": "Ada"}], "answer_aliases: Input should be a valid list"),
        ("musique", [MUSIQUE | {"paragraphs": [PARAGRAPH | {"title": None}]}], "paragraphs.0.title: Input should"),
        ("musique", [MUSIQUE | {"paragraphs": [PARAGRAPH | {"paragraph_text": None}]}], "paragraphs.0.paragraph_text"),
        ("popqa", [POPQA | {"possible_answers": f'["a", {DEEP}]'}], 'answers: got \'["a", [[['),
        ("hotpotqa", [record(context=[[None, ["x"]]])], "context.0.0: Input should be a valid string"),
        ("hotpotqa", [record(context=[["Thing", [None]]])], "context.0.1.0: Input should be a valid string"),
        ("hotpotqa", [record(context=[["T", "text"]])], "context.0.1: Input should be a valid list"),
        ("hotpotqa", [record(supporting_facts=...)], "record 0: supporting_facts: Field required"),
        ("hotpotqa", [record(supporting_facts=[[None, 0]])], "supporting_facts.0.0: Input should be a valid string"),
        (
            "hotpotqa",
            [record(supporting_facts={"title": "AB", "sent_id": "01"})],
            "record 0: supporting_facts: expected lists in its columns title and sent_id",
        ),
        ("hotpotqa", [record(0), record(1, answer=...)], "record 1: answers: Field required"),
        ("hotpotqa", [record(0), record(0, question="other")], "record 1: duplicate id 'r0'"),
        ("hotpotqa", [record(answer=" ")], "record 0: answers.0: is empty"),
        ("hotpotqa", [record(question="")], "record 0: question: is empty"),
        ("hotpotqa", [["not", "a", "record"]], "record 0: Input should be a valid dictionary"),
        ("hotpotqa", [], "has no records"),
        ("hotpotqa", {"data": []}, "got dict, expected a JSON list"),
    ],
)
def test_bad_records_name_file_and_record_and_nothing_becomes_the_text_none(tmp_path, layout, rows, expected):
    path = saved(tmp_path / "data.json", rows)
    with pytest.raises(DataError) as caught:
        load(path, layout)
    message = str(caught.value)
    assert message.startswith(f"task.data.dev: {path}") and expected in message and "\n" not in message


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", b'[\n{"a": 1},\n{"b" 2}]', "a.json: not JSON (Expecting ':' delimiter: line 3"),
        ("a.json", b"", "a.json: not JSON (Expecting value: line 1"),
        ("a.jsonl", b'{"a": 1}\n\n{oops}\n', "a.jsonl line 3: not JSON"),
        ("a.jsonl", b'{"a": {"b": 1, "c": 1, "b": 2}}\n', "a.jsonl line 1: not JSON (the key 'b' stands twice in an"),
        ("a.jsonl", b"\n \n", "has no records"),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "a.json: not JSON (Extra data: line 2 column 1 (char 9)); records line by"),
        ("a.jsonl", b'[{"a": 1}]', "a.jsonl line 1: got a list, expected a record; a list of records is a .json"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid x", "a.jsonl is a pointer of Git LFS"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid x", "a.parquet is a pointer of Git LFS"),
        ("a.json", b'["\xff"]', "is not UTF-8"),
        ("a.parquet", b"PAR1 not", "a.parquet is not a parquet file"),
        pytest.param("a.json", DEEP.encode(), "a.json: not JSON", id="brackets"),
        pytest.param("a.json", b'[{"_id": ' + b"9" * 5000 + b"}]", "a.json: not JSON", id="digits"),
        # either column could be meant, and reading one of them would train on a guess
        ("a.csv", b"text,category,text\na,card_arrival,b\n", "a.csv line 1: more than one column is called 'text'"),
        ("a.txt", b"q\t['a']\nno tab\n", "a.txt line 2: expected a question, a tab and a list of answers"),
        ("a.txt", b"q\t['a']\nq\t[oops\n", "a.txt line 2: expected a question, a tab and a list of answers"),
        ("a.txt", b"q\t['a']\nq\t__import__('os')\n", "a.txt line 2: expected a question, a tab and a list of"),
        # else the cell would take the records after it
        ("a.tsv", b'question\tanswer\nq\ta\nr\t"Heroes\ns\tb\n', "a.tsv line 3: unexpected end of data; a cell that"),
        ("a.csv", b'question,answer\nq,"Heroes\nr,"b"\n', "a.csv line 2: ',' expected after '\"'; a cell that begins"),
        ("a.txt", b"q\t['a']\n\"Who\" is it?\t['b']\n", "a.txt line 2: '\t' expected after '\"'; a cell that"),
        ("a.xls", b"x", "has another format; expected .json, .jsonl, .csv, .tsv, .parquet, .arrow, .txt"),
    ],
)
def test_malformed_files_name_the_line(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(str(tmp_path / name), "nq")
    assert expected in str(caught.value) and "task.data.dev: " in str(caught.value)


@pytest.mark.parametrize("spec", ["nothing.json", "./nothing", "/no/such/dir/file", "minni", "a/b/c"])
def test_neither_file_nor_hub_id(spec):
    with pytest.raises(DataError, match=r"task\.data\.dev: .*: no such file; expected .*, or mini"):
        load(spec)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(DataError, match="is a folder without a"):
        load(str(tmp_path))


def test_ids_of_several_sets_in_one_are_told_apart(tmp_path):
    rows = [{"id": "train_0", "data_source": name, "question": "Q?", "golden_answers": ["A"]} for name in ("nq", "h")]
    assert [r.id for r in load(saved(tmp_path / "mix.parquet", rows), "nq")] == ["nq-train_0", "h-train_0"]


def test_ids_that_files_of_one_source_share_are_told_apart_by_the_file(tmp_path, monkeypatch):
    """FlashRAG's data sets all have `train_0`; a record twice stays an error."""
    monkeypatch.chdir(tmp_path)
    for name in ("nq", "hotpotqa"):
        rows = [{"id": f"train_{n}", "question": f"{name} {n}?", "answer": "A"} for n in range(2)]
        saved(tmp_path / name / "train.jsonl", rows)
    mixed = load(f"nq/train.jsonl,{tmp_path}/hotpotqa/train.jsonl", "nq", "train")
    assert [(r.id, r.question) for r in mixed] == [
        (f"{name}/train.jsonl:train_{n}", f"{name} {n}?") for name in ("nq", "hotpotqa") for n in range(2)
    ]
    assert [r.id for r in load("nq/train.jsonl", "nq", "train")] == ["train_0", "train_1"]
    saved(tmp_path / "other.jsonl", [{"id": "x", "question": "x?", "answer": "A"}])
    assert [r.id for r in load("nq/train.jsonl,other.jsonl", "nq", "train")] == ["train_0", "train_1", "x"]
    saved(tmp_path / "other.jsonl", [{"id": "train_1", "question": "nq 1?", "answer": "A"}])
    with pytest.raises(DataError, match=r"other\.jsonl line 1: duplicate id 'train_1'"):
        load("nq/train.jsonl,other.jsonl", "nq", "train")


def test_a_parquet_file_with_what_python_has_no_value_for_or_with_two_columns_of_one_name_is_refused(tmp_path):
    late, path = pyarrow.array([2**62], pyarrow.timestamp("us")), tmp_path / "a.parquet"
    table = pyarrow.Table.from_pylist([{"question": "Q?", "answer": "A", "id": 0}])
    for name, says in (("when", "a.parquet row 0: cannot be read"), ("question", "more than one column is called 'qu")):
        pyarrow.parquet.write_table(table.append_column(name, late), path)
        with pytest.raises(DataError, match=says):
            load(str(path), "nq")


def test_messages_of_a_table_have_their_own_keys_alone(tmp_path, monkeypatch):
    """It gives each the keys of all, and each call the arguments of all; other nulls are the record's."""
    calls = [{"function": {"name": "go", "arguments": {"to": "Rome"}}}, {"function": {"name": "look", "arguments": {}}}]
    talk = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": None, "tool_calls": calls}]
    rows = [{"prompt": talk, "notes": [{"a": 1}, {"b": 2}], "k": None}, {"prompt": talk[:1], "notes": [], "k": 1}]
    path = saved(tmp_path / "a.parquet", rows)
    read = pyarrow.parquet.read_table(path).to_pylist()
    assert read[0]["prompt"][1]["tool_calls"][1]["function"]["arguments"] == {"to": None}
    module = ModuleType("hub_rows")
    vars(module)["made"] = datasets.Dataset.from_list(rows)
    monkeypatch.setitem(sys.modules, "hub_rows", module)
    for spec in (path, "hub_rows:made"):
        found = [row.values for row in Source("task.data.train", spec).rows("train")]
        assert [values["prompt"] for values in found] == [talk, talk[:1]]
        assert found[0] | {"prompt": talk} == read[0] | {"prompt": talk} and found[1]["notes"] == []


def test_what_pyarrow_cannot_decode_is_told_with_its_row(tmp_path):
    path = Path(saved(tmp_path / "a.parquet", [{"question": "Q?" * 2000, "answer": "A", "id": n} for n in range(2000)]))
    data = bytearray(path.read_bytes())
    data[200:1200] = bytes(1000)
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"task\.data\.dev: {path} row 0: cannot be read: "):
        load(str(path), "nq")


@pytest.mark.parametrize("layout", ["hotpotqa", "nq"])
def test_an_id_of_zero_is_an_id(tmp_path, layout):
    rows = [record(_id=0), record(1)] if layout == "hotpotqa" else [{"id": 0, "question": "Q?", "answer": "A"}]
    assert load(saved(tmp_path / "data.json", rows), layout)[0].id == "0"
    bare = [{"id": "", "question": "Q?", "answer": "A"}, {"id": None, "question": "R?", "answer": "A"}]
    assert [r.id for r in load(saved(tmp_path / "data.json", bare), "nq")] == ["dev-0", "dev-1"]


def test_subset_is_stable_and_seeded():
    examples = make().examples("train")[:50]
    chosen = subset(examples, 10, "train", 1)
    assert chosen == subset(list(reversed(examples)), 10, "train", 1)
    assert chosen != subset(examples, 10, "train", 2)
    assert subset(examples, 20, "train", 1)[:10] == chosen
    assert subset(examples, None, "train", 1) == examples


@pytest.mark.parametrize(
    ("layout", "row", "answers"),
    [
        ("nq", {"question": "Q?", "answer": ["a", "b", "a"]}, ("a", "b")),
        ("nq", {"question": "Q?", "answer": "a"}, ("a",)),
        ("nq", {"question": "Q?", "answers": ["a"]}, ("a",)),
        ("triviaqa", {"question": "Q?", "answer": {"aliases": ["A"], "normalized_aliases": ["a"]}}, ("A", "a")),
        ("triviaqa", {"question": "Q?", "answer": {"aliases": ["The The"], "normalized_aliases": [""]}}, ("The The",)),
        ("popqa", {"question": "Q?", "possible_answers": '["a", "b"]'}, ("a", "b")),
        ("hotpotqa", {"question": "Q?", "answer": "yes", "type": "comparison"}, ("yes",)),
        ("musique", {"question": "Q?", "answer": ["a"]}, ("a",)),
        ("musique", {"question": "Q?", "answer": "a", "answer_aliases": ["b", "a"]}, ("a", "b")),
    ],
)
def test_records_of_questions_alone_are_read_under_any_layout(tmp_path, layout, row, answers):
    found = load(saved(tmp_path / "q.jsonl", [row, row]), layout)
    assert [r.id for r in found] == ["dev-0", "dev-1"]
    assert (found[0].question, found[0].answers, found[0].titles, found[0].paragraphs) == ("Q?", answers, (), ())


@pytest.mark.parametrize(
    ("cell", "answers"),
    [
        ('["Paris", "City of Paris"]', ("Paris", "City of Paris")),
        ("['Bob']", ("Bob",)),
        (" ['It\\'s', \"Reba's\",\n 'a'] ", ("It's", "Reba's", "a")),
        ("[u'Paris']", ("Paris",)),
        ("Paris", ("Paris",)),
        # answers as they stand: an interval, a word in brackets, a list within a text
        ("[0, 1]", ("[0, 1]",)),
        ("[sic]", ("[sic]",)),
        ('see ["a"]', ('see ["a"]',)),
    ],
)
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.parquet"])
def test_a_list_of_answers_may_be_text_in_one_column(tmp_path, name, cell, answers):
    path = tmp_path / name
    table = pandas.DataFrame([{"question": "Q?", "answer": cell}])
    table.to_parquet(path) if name == "a.parquet" else table.to_csv(
        path, sep="\t" if "tsv" in name else ",", index=False
    )
    assert load(str(path), "nq")[0].answers == answers


def test_records_with_paragraphs(tmp_path):
    both = [("T", True), ("U", False)]
    musique: dict[str, Any] = {"id": "2hop__1_2", "question": "Q?", "answer": "Ada", "answer_aliases": ["Ada L."]}
    popqa: dict[str, Any] = {"id": 7, "question": "Q?", "possible_answers": '["a"]', "prop": "author"}
    for layout, row, text, expected in (
        ("musique", musique, "paragraph_text", ("2hop__1_2", ("Ada", "Ada L."), "2hop")),
        ("popqa", popqa, "text", ("7", ("a",), "author")),
    ):
        row["paragraphs"] = [{"title": title, text: title * 2, "is_supporting": gold} for title, gold in both]
        (found,) = load(saved(tmp_path / "data.jsonl", [row]), layout)
        assert (found.id, found.answers, found.kind) == expected
        assert (found.titles, found.paragraphs) == (("T",), (("T", "TT"), ("U", "UU")))
    with pytest.raises(DataError, match=r"supporting_facts: Field required"):
        load(saved(tmp_path / "m.jsonl", [MUSIQUE]), "hotpotqa")


def test_sentences_without_spaces_of_their_own_are_joined_by_them(tmp_path):
    """2WikiMultihopQA's; a paragraph of HotpotQA whose sentences have none is left as it is, for others have."""
    of_2wiki = [["Thing", ["Made by Ada.", "In Porto."]], ["Ada", ["Ada lives."]]]
    of_hotpot = [["Thing", ["Made by Ada.", " In Porto."]], ["Ada", ["Who?", '".']]]
    (found, other) = load(saved(tmp_path / "a.json", [record(0, context=of_2wiki), record(1, context=of_hotpot)]))
    assert found.paragraphs == (("Thing", "Made by Ada. In Porto."), ("Ada", "Ada lives."))
    assert other.paragraphs == (("Thing", "Made by Ada. In Porto."), ("Ada", 'Who?".'))


def test_tables_of_several_sets_have_null_for_the_fields_of_others(tmp_path):
    """As `datasets.concatenate_datasets` joins them."""
    sets = [[hub_columns(record(0))], [{"id": "n", "question": "Q?", "golden_answers": ["a"]}]]
    joined = datasets.concatenate_datasets(list(map(datasets.Dataset.from_list, sets)))
    path = str(tmp_path / "a.parquet")
    joined.to_parquet(path)
    assert joined[1]["context"] is None and joined[0]["golden_answers"] is None
    found = load(path)
    assert [(r.id, r.answers, r.titles) for r in found] == [("r0", ("Ada",), ("Thing", "Ada")), ("n", ("a",), ())]
    rows = [
        hub_columns(record(0)) | {"text": None},
        dict.fromkeys(hub_columns(record(0))) | {"title": "T", "text": "t"},
    ]
    paragraphs = saved(tmp_path / "c.parquet", [{"title": None} | row for row in rows])
    assert [d.title for d in Corpus([paragraphs]).passages()] == ["Thing", "Ada", "Other", "T"]


def test_gold_titles_may_come_without_their_paragraphs(tmp_path):
    """For a corpus of one's own."""
    (found,) = load(saved(tmp_path / "data.json", [record(context=...)]))
    assert (found.answers, found.titles, found.kind, found.paragraphs) == (("Ada",), ("Thing", "Ada"), "bridge", ())
    corpus = saved(tmp_path / "c.json", [{"title": "Ada", "text": "Ada"}, {"title": "Thing", "text": "In Porto"}])
    data = DataConfig(dev=str(tmp_path / "data.json"))
    assert make(data=data, corpus=corpus).gold_shares == {"dev": 1.0}
    with pytest.raises(
        ConfigError, match=r"task\.corpus: got null, and the questions of task\.data\.dev bring no para"
    ):
        make(data=data)


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.tsv", "\t")])
def test_a_cell_may_be_as_long_as_an_article(tmp_path, name, mark):
    """Longer than 131,072 characters, where Python's reader stops by itself."""
    text = "word " * 30_000
    rows = Source("corpus", saved(tmp_path / name, f'title{mark}text\nA{mark}"{text}"\nB{mark}b\n')).rows("train")
    assert [row.values for row in rows] == [{"title": "A", "text": text}, {"title": "B", "text": "b"}]


def test_dpr_topics(tmp_path):
    path = saved(tmp_path / "topics.txt", 'who sings it\t[\'Linda\', "Reba\'s"]\n"a ""quoted"" one"\t[\'x\']\n')
    found = load(path, "nq")
    assert [r.question for r in found] == ["who sings it", 'a "quoted" one']
    assert found[0].answers == ("Linda", "Reba's")


@pytest.mark.data
@pytest.mark.parametrize(
    ("layout", "name", "rows"),
    [
        ("nq", "nq_open/topics.dpr.nq.dev.txt", 8757),
        ("triviaqa", "triviaqa/topics.dpr.trivia.dev.txt", 8837),
        ("popqa", "popqa/test.jsonl", 14267),
        ("hotpotqa", "hotpotqa/hotpot_train_sample.json", 800),
        ("hotpotqa", "hotpotqa/hotpot_dev_fullwiki_sample.json", 916),
        ("hotpotqa", "hotpotqa/hotpot_dev_v1_simplified.json", 7105),
        ("2wiki", "2wikimultihopqa/dev_qa.jsonl", 12576),
        ("musique", "musique/dev_qa.jsonl", 2417),
    ],
)
def test_public_question_files(data_dir, layout, name, rows):
    found = load(str(data_dir / name), layout)
    assert len(found) == rows
    assert all(record.question.strip() and record.answers for record in found)
