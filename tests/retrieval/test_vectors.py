import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.config.retriever import Bm25Config, DenseConfig
from mmrl.config.tasks import MultihopQaConfig
from mmrl.errors import ConfigError, DataError
from mmrl.retrieval import dense
from mmrl.retrieval.dense import DenseRetriever, Encoder, model_identity
from mmrl.retrieval.index_folder import (
    build_index,
    cached_index,
    open_index,
    partial_of,
    read_info,
    spec_of,
)
from mmrl.retrieval.store import PassageStore
from mmrl.tasks import TASKS
from tests.helpers.engines import DOCUMENTS, QUERIES, by_hand

pytest.importorskip("faiss")


@pytest.fixture
def own_copy(model, tmp_path):
    """The encoder in a folder that a test may change."""
    return str(shutil.copytree(model, tmp_path / "encoder"))


def dense_spec(model, encoder="contriever", faiss="flat"):
    return spec_of(DenseConfig(name="dense", model=model, encoder=encoder, faiss=faiss))


def built(folder, spec, **options):
    """The retriever of an index that is built there."""
    return open_index(folder, build_index(folder, spec, lambda: DOCUMENTS, **options), PassageStore(folder))


@pytest.mark.parametrize("encoder", ["contriever", "e5"])
def test_dense_search_equals_brute_force_before_and_after_loading(model, encoder, tmp_path):
    query, passage = ("query: ", "passage: ") if encoder == "e5" else ("", "")
    corpus = by_hand(model, [f"{passage}{d.title} {d.text}" for d in DOCUMENTS], encoder == "e5")
    scores = by_hand(model, [query + q for q in QUERIES], encoder == "e5") @ corpus.T
    folder = tmp_path / "index"
    retriever = built(folder, dense_spec(model, encoder), batch_size=7)
    assert isinstance(retriever, DenseRetriever)
    found = retriever.search(QUERIES, [5, len(DOCUMENTS) + 9, 0])
    assert [len(result) for result in found] == [5, len(DOCUMENTS), 0]
    for row, result in zip(scores, found[:2], strict=False):
        order = np.argsort(-row, kind="stable")
        assert [d.score for d in result] == pytest.approx(row[order][: len(result)].tolist(), rel=1e-4, abs=1e-5)
        place = {DOCUMENTS[n].id: row[n] for n in order}
        assert [place[d.id] for d in result] == pytest.approx([d.score for d in result], rel=1e-4, abs=1e-5)
    again = open_index(folder, read_info(folder), PassageStore(folder)).search(QUERIES, [5, 3, 0])
    assert [[d.id for d in r] for r in again[:2]] == [[d.id for d in found[0]], [d.id for d in found[1][:3]]]
    assert str(folder) in Path("/proc/self/maps").read_text()  # memory-mapped, not read


def test_a_graph_index_finds_nearly_what_the_exact_one_finds(model, tmp_path):
    one = built(tmp_path / "flat", dense_spec(model))
    two = built(tmp_path / "hnsw", dense_spec(model, faiss="hnsw"))
    for exact, near in zip(one.search(QUERIES, [10] * 3), two.search(QUERIES, [10] * 3), strict=True):
        # by score: passages of equal scores may stand for each other
        assert np.isclose([d.score for d in near], [d.score for d in exact], atol=1e-5).sum() >= 9
        assert [d.score for d in near] == sorted((d.score for d in near), reverse=True)


def test_a_killed_build_goes_on_where_it_was(model, tmp_path, monkeypatch):
    monkeypatch.setattr(dense, "SHARD", 20)
    folder, encoded = tmp_path / "index", []
    whole = Encoder.passages

    def dying(self, documents, advance):
        encoded.append(len(documents))
        if len(encoded) == 3:
            raise KeyboardInterrupt
        return whole(self, documents, advance)

    monkeypatch.setattr(Encoder, "passages", dying)
    with pytest.raises(KeyboardInterrupt):
        build_index(folder, dense_spec(model), lambda: DOCUMENTS)
    assert not folder.exists() and len(list((partial_of(folder) / "shards").glob("*.npz"))) == 2
    with pytest.raises(DataError, match="not finished"):
        read_info(folder)
    with pytest.raises(DataError, match="unfinished build with other settings"):
        build_index(folder, dense_spec(model, faiss="hnsw"), lambda: DOCUMENTS)
    plan = partial_of(folder) / "plan.json"
    written = plan.read_bytes()
    plan.write_bytes(b"\xb3" + written[1:])  # a bit of a disk
    with pytest.raises(DataError, match="unfinished build with other settings"):
        build_index(folder, dense_spec(model), lambda: DOCUMENTS)
    plan.write_bytes(written)
    info = build_index(folder, dense_spec(model), lambda: DOCUMENTS)
    assert encoded == [20, 20, 20, 20, 20, 10]  # the third one twice
    monkeypatch.setattr(Encoder, "passages", whole)
    fresh = tmp_path / "fresh"
    fresh_info = build_index(fresh, dense_spec(model), lambda: DOCUMENTS)
    assert info.files == fresh_info.files
    assert not partial_of(folder).exists() and not (folder / "shards").exists()


def test_vectors_of_other_passages_or_another_encoder_are_made_again(own_copy, tmp_path, monkeypatch):
    monkeypatch.setattr(dense, "SHARD", 20)
    folder, encoded = tmp_path / "index", []
    whole, others = Encoder.passages, list(DOCUMENTS)
    others[25] = replace(others[25], text="other text")

    def dying(self, documents, advance):
        encoded.append(documents[0].id)
        if len(encoded) == 4:
            raise KeyboardInterrupt
        return whole(self, documents, advance)

    monkeypatch.setattr(Encoder, "passages", dying)

    def attempt(documents):
        encoded.clear()
        build_index(folder, dense_spec(own_copy), lambda: documents)

    first = [DOCUMENTS[n].id for n in (0, 20, 40, 60, 80)]
    with pytest.raises(KeyboardInterrupt):
        attempt(DOCUMENTS)
    with pytest.raises(KeyboardInterrupt):
        (Path(own_copy) / "more.json").write_text("{}")  # as other weights would
        attempt(DOCUMENTS)
    assert encoded == first[:4], "all three again"
    attempt(others)
    assert encoded == [first[1], *first[3:]]
    monkeypatch.setattr(Encoder, "passages", whole)
    build_index(tmp_path / "fresh", dense_spec(own_copy), lambda: others)
    assert read_info(folder).files == read_info(tmp_path / "fresh").files


def test_a_build_killed_by_the_system_continues(model, tmp_path):
    rows = [{"title": d.title, "text": d.text} for d in DOCUMENTS]
    corpus, folder = tmp_path / "c.json", tmp_path / "index"
    corpus.write_text(json.dumps(rows))
    # letters for vectors: what an encoder makes is tested above, and each process would load it
    code = (
        "import sys, time\nimport numpy as np\nfrom mmrl.retrieval import dense\ndense.SHARD = 10\n"
        "letters = lambda documents: np.float32([[ord(c) for c in f'{d.text:32}'[:32]] for d in documents])\n"
        "dense.Encoder.passages = lambda s, part, told: (time.sleep(float(sys.argv[1])), letters(part))[1]\n"
        "from mmrl.cli import main\nsys.exit(main(sys.argv[2:]))\n"
    )
    arguments = ["index", "build", f"corpus={corpus}", f"index={folder}", "retriever=dense", f"model={model}"]
    arguments += ["encoder=contriever"]
    first = subprocess.Popen([sys.executable, "-c", code, "0.3", *arguments], stdout=subprocess.PIPE)
    shards = partial_of(folder) / "shards"
    deadline = time.monotonic() + 90
    while len(list(shards.glob("*.npz"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    kept = {path.name: path.stat().st_mtime_ns for path in shards.glob("*.npz")}
    assert len(kept) >= 2 and not folder.exists()
    second = subprocess.run([sys.executable, "-c", code, "0", *arguments], capture_output=True, text=True, timeout=120)
    assert second.returncode == 0, second.stderr
    assert "continuing the build" in second.stdout
    arguments[3] = f"index={tmp_path / 'fresh'}"
    subprocess.run([sys.executable, "-c", code, "0", *arguments], capture_output=True, check=True, timeout=120)
    assert read_info(folder).files == read_info(tmp_path / "fresh").files


def test_an_index_is_never_overwritten_and_damage_is_told(tmp_path):
    bm25 = spec_of(Bm25Config())
    folder = tmp_path / "index"
    build_index(folder, bm25, lambda: DOCUMENTS)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(DataError, match="exists, and is left as it is"):
        build_index(folder, bm25, lambda: DOCUMENTS)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(DataError, match=r"has no index\.json"):
        read_info(tmp_path)
    with pytest.raises(DataError, match="has no passages"):
        build_index(tmp_path / "none", bm25, list)
    assert not partial_of(tmp_path / "none").exists()
    passages = folder / "passages.jsonl"
    content = bytearray(passages.read_bytes())
    content[40] ^= 1
    passages.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"damaged: passages\.jsonl has not the content"):
        read_info(folder)


def test_a_folder_of_somebody_where_the_index_would_be_built_is_left_as_it_is(tmp_path):
    theirs = tmp_path / "wiki.partial"
    theirs.mkdir()
    for name in ("corpus.jsonl", "index.json"):  # a corpus; an index that is finished
        (theirs / name).write_text("theirs")
        with pytest.raises(DataError, match=rf"index: {theirs} is no unfinished build .* left as it is"):
            build_index(tmp_path / "wiki", spec_of(Bm25Config()), lambda: DOCUMENTS)
        assert [path.read_text() for path in theirs.iterdir()] == ["theirs"]
        with pytest.raises(DataError, match=r"has no index\.json"):
            read_info(tmp_path / "wiki")
        (theirs / name).unlink()
    (theirs / "plan.json").write_text("my plan")
    (theirs / "corpus.jsonl").write_text("theirs")
    with pytest.raises(DataError, match="unfinished build with other settings"):
        build_index(tmp_path / "wiki", spec_of(Bm25Config()), lambda: DOCUMENTS)
    assert (theirs / "corpus.jsonl").read_text() == "theirs"
    (theirs / "plan.json").unlink()
    (theirs / "corpus.jsonl").unlink()
    info = build_index(tmp_path / "wiki", spec_of(Bm25Config()), lambda: DOCUMENTS)  # killed before it wrote its plan
    assert info.documents == len(DOCUMENTS) and {"lock", "plan.json"}.isdisjoint(os.listdir(tmp_path / "wiki"))


def test_a_dense_task_index_is_built_once_and_rebuilt_when_model_or_file_change(model, tmp_path, caplog):
    config = DenseConfig(name="dense", model=model, encoder="contriever")
    folder = cached_index(DOCUMENTS, config, tmp_path)
    stamp = (folder / "index.json").stat().st_mtime_ns
    assert cached_index(DOCUMENTS, config, tmp_path) == folder
    assert (folder / "index.json").stat().st_mtime_ns == stamp
    (folder / "vectors.faiss").write_bytes(b"broken")
    with caplog.at_level(logging.WARNING):
        assert cached_index(DOCUMENTS, config, tmp_path) == folder
    assert "rebuilt" in caplog.text
    assert cached_index(DOCUMENTS[1:], config, tmp_path) != folder
    before = model_identity(model)
    extra = Path(model) / "more.json"
    extra.write_text("{}")
    assert model_identity(model) != before
    extra.unlink()


def test_importing_brings_no_heavy_library():
    code = (
        "import sys, mmrl.retrieval.bm25, mmrl.retrieval.dense, mmrl.retrieval.select, mmrl.retrieval.serving, "
        "mmrl.commands.index; heavy = {'torch', 'transformers', 'faiss', 'sentence_transformers', 'fastapi', "
        "'uvicorn', 'httpx', 'bm25s', 'datasets', 'jax', 'numba'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tasks_search_with_vectors_over_their_own_corpus_or_an_index(model, tmp_path):
    chosen = {"model": model, "encoder": "e5"}
    corpus = tmp_path / "corpus.json"
    corpus.write_text(json.dumps([{"title": d.title, "text": d.text} for d in DOCUMENTS[:30]]))

    def task(**retriever):
        given: dict[str, Any] = {} if "index" in retriever else {"corpus": str(corpus)}
        section = DenseConfig(name="dense", top_k=4, **retriever)
        return TASKS["hotpotqa"](MultihopQaConfig(name="hotpotqa", retriever=section, **given), 0)

    own = task(**chosen, cache_dir=str(tmp_path / "cache")).search(["city", "river"], "given")
    assert len(own) == 4
    folder = tmp_path / "index"
    spec = spec_of(DenseConfig(name="dense", **chosen))
    build_index(folder, spec, lambda: DOCUMENTS[:30])
    indexed = task(index=str(folder))
    assert [d["title"] for d in indexed.search(["city", "river"], "index")] == [d["title"] for d in own]
    with pytest.raises(ConfigError, match=r"is a dense index; set task\.retriever\.name=dense"):
        TASKS["hotpotqa"](MultihopQaConfig(name="hotpotqa", retriever=Bm25Config(name="bm25", index=str(folder))), 0)
