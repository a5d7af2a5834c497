"""How texts become vectors: presets by their papers, other encoders as sentence-transformers itself encodes."""

import shutil
from dataclasses import replace
from typing import cast

import pytest

from mmrl.config.retriever import DenseConfig
from mmrl.errors import DataError
from mmrl.retrieval.dense import PRESETS, Encoder, Treatment, treatment_of
from mmrl.retrieval.index_folder import IndexInfo, build_index, open_index, read_info, spec_of
from mmrl.retrieval.select import index_problems
from mmrl.retrieval.store import PassageStore
from tests.helpers.engines import DOCUMENTS, QUERIES, by_hand

pytest.importorskip("faiss")
TEXTS = [f"{d.title} {d.text}" for d in DOCUMENTS]


def dense(model, **options):
    return DenseConfig(name="dense", model=str(model), **options)


def saved(model, folder, pooling="cls", normalise=True, prompts=None, **config):
    """The small BERT as sentence-transformers saves an encoder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    network = Transformer(model)
    modules = [network, Pooling(network.get_embedding_dimension(), pooling), *([Normalize()] if normalise else [])]
    SentenceTransformer(modules=modules, device="cpu", prompts=prompts, **config).save_pretrained(str(folder))
    return str(folder)


@pytest.fixture(scope="module")
def own(model, tmp_path_factory):
    """CLS pooling, length 1, prompts."""
    folder = tmp_path_factory.mktemp("own") / "encoder"
    return saved(model, folder, prompts={"query": "query: ", "document": "passage passage: "})


def test_a_model_with_files_of_its_own_is_encoded_as_sentence_transformers_does(own):
    from sentence_transformers import SentenceTransformer

    made = treatment_of(dense(own), own)
    assert made == Treatment(encoder="own")
    encoder, reference = Encoder(own, made, batch_size=7), SentenceTransformer(own, device="cpu")
    assert encoder.queries(QUERIES) == pytest.approx(reference.encode_query(QUERIES), abs=1e-5)
    assert encoder.passages(DOCUMENTS) == pytest.approx(reference.encode_document(TEXTS), abs=1e-5)
    # and that is the network's first token with the prompt in front, with length 1
    expected = by_hand(own, ["passage passage: " + text for text in TEXTS[:5]], normalised=True, pooling="cls")
    assert encoder.passages(DOCUMENTS[:5]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("normalise", "similarity", "length"), [(True, "dot", True), (False, "dot", False), (False, None, True)]
)
def test_vectors_have_length_1_where_the_model_is_compared_by_cosine(model, tmp_path, normalise, similarity, length):
    made = saved(model, tmp_path / "m", "mean", normalise=normalise, similarity_fn_name=similarity)
    vectors = Encoder(made, treatment_of(dense(made), made)).passages(DOCUMENTS[:4])
    assert vectors == pytest.approx(by_hand(model, TEXTS[:4], normalised=length), abs=1e-5)


def test_a_model_that_says_nothing_is_averaged_and_keys_say_the_rest(model, own):
    keys = {"normalise": False, "query_prompt": "query ", "passage_prompt": "passage "}
    encoder = Encoder(model, treatment_of(dense(model, **keys), model))
    assert encoder.queries(QUERIES) == pytest.approx(by_hand(model, [f"query {q}" for q in QUERIES]), abs=1e-5)
    expected = by_hand(model, [f"passage {text}" for text in TEXTS[:4]])
    assert encoder.passages(DOCUMENTS[:4]) == pytest.approx(expected, abs=1e-5)
    changed = treatment_of(dense(model, encoder="e5", query_prompt=""), model)
    assert (changed.query_prompt, changed.passage_prompt) == ("", "passage: ")
    without = Encoder(own, treatment_of(dense(own, query_prompt=""), own))
    assert without.queries(QUERIES) == pytest.approx(by_hand(own, QUERIES, normalised=True, pooling="cls"), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        ({}, "facebook/contriever", "contriever"),
        ({}, "facebook/contriever-msmarco", "contriever"),
        ({}, "intfloat/e5-base-v2", "e5"),
        ({}, "intfloat/multilingual-e5-large", "e5"),
        ({}, "folder/e5-base-v2", "e5"),
        ({}, "/hub/models--intfloat--e5-base-v2/snapshots/f52bf8ec8c7124536f0efb74aca902b2995e5bcd", "e5"),
        ({}, "/hub/models--facebook--contriever/snapshots/2bd46a25019aeea091fd42d1f0fd4801675cf699/", "contriever"),
        ({}, "contriever/all-MiniLM-L6-v2", "own"),
        ({}, "snapshots/mine", "own"),
        ({}, "intfloat/e5-mistral-7b-instruct", "own"),
        ({}, "me/my-contriever-like", "own"),
        ({"encoder": "e5"}, "me/mine", "e5"),
        ({"encoder": "own"}, "intfloat/e5-base-v2", "own"),
    ],
)
def test_models_of_known_families_have_their_preset(options, name, expected):
    assert treatment_of(dense(name, **options), name) == PRESETS.get(expected, Treatment(encoder="own"))


def test_a_folder_is_kept_as_every_other_folder_reads_it(own, tmp_path, monkeypatch):
    (tmp_path / "e5-base-v2").symlink_to(own)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for typed in ("~/e5-base-v2", "e5-base-v2", "./e5-base-v2"):
        settings = spec_of(dense(typed)).settings
        assert settings["model"] == str(tmp_path / "e5-base-v2") and settings["encoder"] == "e5"
    (tmp_path / "e5-small").mkdir()
    monkeypatch.chdir(tmp_path / "e5-small")
    assert spec_of(dense(".")).settings["encoder"] == "e5"
    assert spec_of(dense("intfloat/e5-base-v2")).settings["model"] == "intfloat/e5-base-v2"
    build_index(tmp_path / "index", spec_of(dense("~/e5-base-v2")), lambda: DOCUMENTS[:20])
    monkeypatch.chdir("/")
    info = read_info(tmp_path / "index")
    assert index_problems("index", info) == []
    assert open_index(tmp_path / "index", info, PassageStore(tmp_path / "index")).search(["river"], [1])[0]


def test_an_index_of_a_hub_encoder_opens_where_nothing_of_it_was_fetched(monkeypatch, tmp_path):
    """`cached`: what the hub's local cache has of the encoder, by commit."""
    at = "owner/enc@0a1b"
    monkeypatch.setattr("mmrl.models.hub.hub_answers", lambda: True)
    info = IndexInfo(
        kind="dense", settings=spec_of(dense("owner/enc")).settings, format=4, documents=1, duplicates=0, text_bytes=1,
        digest="", sources=(), build_seconds=0.0, encoder=at,
    )  # fmt: skip
    for cached, made, problems in (
        (None, at, 0), ("0a1b", at, 0), ("0a1b", "owner/enc@main", 0), ("2c3d", at, 1), ("0a1b", "hash of a folder", 1),
    ):  # fmt: skip
        monkeypatch.setattr(
            "huggingface_hub.try_to_load_from_cache",
            lambda model, name, cached=cached: cached and f"/hub/{model}/snapshots/{cached}/{name}",
        )
        assert len(index_problems("index", replace(info, encoder=made))) == problems
    asked, passages = [], cast("PassageStore", ())
    monkeypatch.setattr("mmrl.retrieval.dense.DenseRetriever", lambda folder, passages, encoder: asked.append(encoder))
    open_index(tmp_path, info, passages)
    open_index(tmp_path, replace(info, encoder="owner/enc@main"), passages)
    assert [encoder.revision for encoder in asked] == ["0a1b", None]


def test_what_cannot_be_searched_by_inner_product_is_refused_by_name(model, own, tmp_path):
    euclidean = saved(model, tmp_path / "euclidean", similarity_fn_name="euclidean")
    broken = tmp_path / "broken"
    shutil.copytree(own, broken)
    (broken / "modules.json").write_text("{")
    for path, options, says in (
        (euclidean, {}, "is compared by euclidean"),
        (own, {"normalise": False}, "normalise=false has no effect"),
        (str(broken), {}, "cannot be loaded by sentence-transformers"),
    ):
        with pytest.raises(DataError, match=says):
            Encoder(path, treatment_of(dense(path, **options), path)).load()


def test_an_index_keeps_its_treatment_and_is_refused_when_its_encoder_has_changed(own, tmp_path):
    folder, encoder = tmp_path / "index", tmp_path / "encoder"
    shutil.copytree(own, encoder)
    build_index(folder, spec_of(dense(encoder, query_prompt="passage ")), lambda: DOCUMENTS[:20])
    info = read_info(folder)
    assert index_problems("index", info) == []
    (found,) = open_index(folder, info, PassageStore(folder)).search(["river"], [1])
    query = by_hand(own, ["passage river"], normalised=True, pooling="cls")[0]
    passages = by_hand(own, [f"passage passage: {text}" for text in TEXTS[:20]], normalised=True, pooling="cls")
    assert found[0].score == pytest.approx(float((passages @ query).max()), abs=1e-5)
    pooling = encoder / "1_Pooling" / "config.json"
    pooling.write_text(pooling.read_text().replace("cls", "mean"))
    (problem,) = index_problems("index", info)
    assert problem.startswith("index: its encoder '") and "has changed since it was made" in problem
