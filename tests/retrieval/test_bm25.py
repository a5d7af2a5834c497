import json
import math
import re
import unicodedata
from collections import Counter
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.config import retriever as retriever_config
from mmrl.config.retriever import Bm25Config
from mmrl.errors import DataError
from mmrl.retrieval.base import Document, unquoted
from mmrl.retrieval.bm25 import Bm25Retriever, Bm25Settings, tokenize, top_indices
from mmrl.retrieval.index_folder import build_index, open_index, read_info, spec_of
from mmrl.retrieval.select import cache_root
from mmrl.retrieval.store import PassageStore
from mmrl.retrieval.words import first_words, words
from mmrl.system.bar import progress

TEXTS = ["red kettle on the stove", "blue kettle", "a red red door", "green lamp by the door", "kettle kettle lamp"]


def corpus(texts=TEXTS):
    return [Document(id=str(n), title=f"t{n}", text=text) for n, text in enumerate(texts)]


def reference(documents, query, k1=0.9, b=0.4):
    """Lucene's BM25 written out from its formula."""
    stop = frozenset({"the", "a", "on", "by"})
    bags = [Counter(tokenize(f"{d.title} {d.text}", stop)) for d in documents]
    mean = sum(sum(bag.values()) for bag in bags) / len(bags)
    scores = []
    for bag in bags:
        length = sum(bag.values())
        score = 0.0
        for word in tokenize(query, stop):
            n = sum(word in other for other in bags)
            idf = math.log(1 + (len(bags) - n + 0.5) / (n + 0.5))
            score += idf * bag[word] / (bag[word] + k1 * (1 - b + b * length / mean))
        scores.append(score)
    return scores


@pytest.mark.parametrize("query", ["red kettle", "the door", "lamp lamp kettle", "t3", "RED, (door)!"])
@pytest.mark.parametrize("settings", [{}, {"k1": 2.0, "b": 0.9}])
def test_scores_and_order_are_those_of_the_formula(query, settings):
    expected = reference(corpus(), query, **settings)
    found = Bm25Retriever(corpus(), Bm25Settings(**settings)).search([query], [5])[0]
    order = sorted((i for i in range(5) if expected[i] > 0), key=lambda i: (-round(expected[i], 5), i))
    assert [int(d.id) for d in found] == order
    assert [d.score for d in found] == pytest.approx([expected[i] for i in order], rel=1e-5)


@pytest.mark.parametrize("query", ["", "zebra", "the a of", "###", "?!"])
@pytest.mark.filterwarnings("error")
def test_a_query_without_a_known_word_finds_nothing(query):
    for documents in (corpus(), [Document(id="0", title="the", text="of a")]):
        assert Bm25Retriever(documents).search([query], [3]) == [[]]


def test_fewer_documents_than_asked_and_none_asked():
    retriever = Bm25Retriever(corpus())
    assert len(retriever.search(["door"], [10])[0]) == 2
    assert retriever.search(["door", "lamp"], [0, 1])[0] == []
    assert retriever.search([], []) == []


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=40), st.integers(1, 45))
def test_top_indices_equal_a_full_sort(scores, k):
    expected = sorted((i for i, s in enumerate(scores) if s > 0), key=lambda i: (-scores[i], i))[:k]
    assert top_indices(np.array(scores, dtype=np.float32), k) == expected


def test_cache_root(monkeypatch, tmp_path):
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "env"))
    assert cache_root(None) == tmp_path / "env"
    assert cache_root(str(tmp_path / "own")) == tmp_path / "own"
    monkeypatch.delenv("MMRL_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root(None) == tmp_path / ".cache" / "mmrl"


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.text(alphabet="ab cd", max_size=12), min_size=1, max_size=8),
    st.text(alphabet="ab cd", max_size=8),
    st.integers(1, 9),
)
def test_results_are_sorted_unique_and_share_a_word(texts, query, k):
    documents = corpus(texts)
    found = Bm25Retriever(documents).search([query], [k])[0]
    scores = [d.score for d in found]
    assert scores == sorted(scores, reverse=True)
    assert len({d.id for d in found}) == len(found) <= k
    stop = frozenset({"a"})
    for document in found:
        assert set(tokenize(query, stop)) & set(tokenize(f"{document.title} {document.text}", stop))


# Latin letters, but for those that are one sign for two or the form of a plain one; İ loses its dot as it
# becomes small, which Python keeps apart.
LATIN = [c for n in range(0x250) if unicodedata.normalize("NFKC", c := chr(n)) == c != "İ"]


@given(st.text(alphabet=[*LATIN, *"\u2013\u2014\u2018\u2019\u201c\u201d\u2022"], max_size=60))
def test_words_of_latin_text_are_runs_of_letters_and_digits(text):
    assert words(text) == words(f"{text} \u3002")[: len(words(text))] == re.findall(r"\w+", text.lower())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("東京タワーは1958年", ["東", "京", "タ", "ワ", "ー", "は", "1958", "年"]),
        ("ＴＯＫＹＯ　タワー, ﾀﾜｰ", ["tokyo", "タ", "ワ", "ー", "タ", "ワ", "ー"]),
        ("ที่นี่", ["ที่", "นี่"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("서울 타워", ["서울", "타워"]),
        ("E\u0301lan \u00c9LAN", ["\u00e9lan", "\u00e9lan"]),
        ("km² ﬁn", ["km2", "fin"]),
        ("Ἀθῆναι, Москва", ["ἀθῆναι", "москва"]),
        ("İstanbul istanbul", ["istanbul", "istanbul"]),
    ],
)
def test_words_of_other_scripts(text, expected):
    assert words(text) == expected == words(unicodedata.normalize("NFD", text))


@pytest.mark.parametrize(
    ("text", "query"),
    [("東京タワーは港区にある。", "港区"), ("कोच्चि शहर", "कोच्चि"), ("กรุงเทพมหานคร", "กรุงเทพ"), ("E\u0301lan", "élan")],
)
def test_what_is_written_without_spaces_or_with_signs_is_found(text, query):
    found = Bm25Retriever(corpus(["nothing", text])).search([query], [2])[0]
    assert [d.id for d in found] == ["1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" one  two\nthree four", "one two three"),
        (" one  two\nthree", " one  two\nthree"),
        ("東京 タワー", "東京 タ"),
        ("東、京。x y", "東、京。x"),
        ("ที่นี่ดี", "ที่นี่ดี"),
        ("ที่นี่ดีดี", "ที่นี่ดี"),
    ],
)
def test_the_first_words_of_a_text(text, expected):
    assert first_words(text, 3) == expected and first_words(text, None) == text


STEMMED = ["Running kettles", "A kettle runs", "cities of the river", "city by a river"]


@pytest.mark.parametrize("stemmer", ["porter", "english"])
def test_stemming_is_bm25s_own_with_pystemmer(stemmer):
    import bm25s
    import Stemmer

    documents = corpus(STEMMED)
    texts = [f"{d.title} {d.text}" for d in documents]
    snowball = Stemmer.Stemmer(stemmer)
    read = {"stemmer": snowball, "stopwords": "english", "token_pattern": r"\w+", "show_progress": False}
    reference = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
    reference.index(bm25s.tokenize(texts, **read), show_progress=False)
    retriever = Bm25Retriever(documents, Bm25Settings(stemmer=stemmer))
    for query in ("city", "the kettle is running", "rivers"):
        words = bm25s.tokenize([query], return_ids=False, **read)[0]
        expected = {str(n): s for n, s in enumerate(reference.get_scores(words)) if s > 0}
        found = retriever.search([query], [4])[0]
        assert {d.id: d.score for d in found} == pytest.approx(expected, rel=1e-5) and len(found) == 2
    assert len(Bm25Retriever(documents).search(["city"], [4])[0]) == 1  # as before, without stemming


def test_stop_words_of_a_language_and_none():
    documents = corpus(["der Fluss und die Stadt", "the river and the city"])
    german = Bm25Retriever(documents, Bm25Settings(stopwords="german"))
    assert [d.id for d in german.search(["und the"], [2])[0]] == ["1"]
    none = Bm25Retriever(documents, Bm25Settings(stopwords="none"))
    assert [d.id for d in none.search(["und"], [2])[0]] == ["0"]
    assert [d.id for d in none.search(["the"], [2])[0]] == ["1"]


def test_every_stemmer_and_every_list_of_stop_words_is_there():
    import Stemmer

    stemmers, languages = get_args(retriever_config.Stemmer), get_args(retriever_config.Stopwords)
    assert set(Stemmer.algorithms()) - set(stemmers) == {"dutch_porter"} and set(stemmers) - {"none"} <= set(
        Stemmer.algorithms()
    )
    of_each = {"english": "the", "danish": "og", "dutch": "het", "french": "les", "german": "und", "italian": "della"}
    of_each |= {"norwegian": "og", "portuguese": "uma", "russian": "и", "spanish": "los", "swedish": "och"}
    of_each |= {"turkish": "ve"}
    assert set(of_each) == set(languages) - {"none"}
    for language, word in of_each.items():
        assert Bm25Settings(stopwords=language).tokenizer()(f"{word} Tejo") == ["tejo"]
        assert Bm25Settings(stopwords="none").tokenizer()(f"{word} Tejo") == [word, "tejo"]


def test_an_index_folder_keeps_how_words_are_read(tmp_path):
    config = Bm25Config(name="bm25", stemmer="english", stopwords="none")
    info = build_index(tmp_path / "index", spec_of(config), lambda: corpus(STEMMED))
    assert info.settings == {"k1": 0.9, "b": 0.4, "stemmer": "english", "stopwords": "none"}
    opened = open_index(tmp_path / "index", read_info(tmp_path / "index"), PassageStore(tmp_path / "index"))
    expected = Bm25Retriever(corpus(STEMMED), Bm25Settings(stemmer="english", stopwords="none"))
    assert opened.search(["the cities"], [4]) == expected.search(["the cities"], [4])


def test_long_work_says_how_far_it_is(monkeypatch, capfd):
    monkeypatch.setattr("mmrl.system.bar.EVERY_S", 0.0)
    with progress("encoding", 4000) as advance:
        advance(1000)
    assert "encoding:  25%" in (said := capfd.readouterr().err) and "1000/4000" in said
    with progress("writing") as advance:
        advance(7)
    assert "writing: 7 passages" in capfd.readouterr().err


def test_building_tells_progress(monkeypatch, capfd):
    Bm25Retriever(corpus())
    assert capfd.readouterr().err == ""
    monkeypatch.setattr("mmrl.system.bar.EVERY_S", 0.0)
    Bm25Retriever(corpus())
    assert "reading words for BM25:  20%" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("written", "title"),
    [
        ('"Lisbon"', "Lisbon"),
        ('"Heroes" (album)', '"Heroes" (album)'),
        ('The "Fish"', 'The "Fish"'),
        ('""Heroes""', '"Heroes"'),
        ('"', '"'),
    ],
)
def test_quotes_around_a_title_are_no_part_of_it(written, title):
    assert unquoted(f" {written} ") == title


def test_an_index_of_another_version_is_no_damaged_one(tmp_path):
    folder = tmp_path / "index"
    build_index(folder, spec_of(Bm25Config(name="bm25")), lambda: corpus(["some text"]))
    content = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**content, "format": content["format"] - 1}))
    with pytest.raises(DataError, match="was built by another version of mmrl"):
        read_info(folder)
