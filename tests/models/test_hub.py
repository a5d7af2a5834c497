"""Encoders that cannot be had: told before a passage is read, a model loaded or a folder made."""

import json

import pytest

from mmrl.cli import main
from mmrl.config import ModelConfig
from mmrl.config.base import FETCHED
from mmrl.config.retriever import DenseConfig
from mmrl.errors import ConfigError
from mmrl.models import hub
from mmrl.models.hub import encoder_problems
from mmrl.models.load import load_tokenizer
from mmrl.retrieval.index_folder import FORMATS
from mmrl.retrieval.select import retriever_problems
from tests.helpers.servers import Scripted, serving


@pytest.fixture
def away(monkeypatch):
    monkeypatch.setattr(hub, "hub_answers", lambda: False)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("/no/such/folder", "no such folder"),
        ("a/b/c", "no such folder"),
        ("owner/none-like-this", "the hub does not answer"),
        ("{tmp}/empty", "has no config.json"),
        ("{tmp}/file", "is a file"),
    ],
)
def test_why_an_encoder_cannot_be_had(model, says, tmp_path, away):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    named = model.format(tmp=tmp_path)
    (problem,) = encoder_problems("model", named)
    assert problem.startswith(f"model: '{named}'") and says in problem
    (problem,) = retriever_problems(DenseConfig(name="dense", model=named))
    assert problem.startswith(f"task.retriever.model: '{named}'")


def test_a_folder_or_a_hub_that_answers_may_have_it(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    assert encoder_problems("model", str(tmp_path)) == []
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    assert encoder_problems("model", "owner/none-like-this") == []


def test_no_index_is_begun_without_its_encoder_nor_opened(tmp_path, away, capsys):
    corpus, index = tmp_path / "corpus.jsonl", tmp_path / "index"
    corpus.write_text('{"title": "a", "text": "b"}\n')
    build = ["index", "build", f"corpus={corpus}", f"index={index}", "retriever=dense"]
    assert main([*build, "model=/no/such/folder"]) == 2
    assert "error: mmrl index build: model: '/no/such/folder': no such folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]
    assert main([*build[:4]]) == 0
    info = json.loads((index / "index.json").read_text())
    moved = info | {
        "kind": "dense",
        "format": FORMATS["dense"],
        "settings": {"model": "/gone", "encoder": "e5", "faiss": "flat"},
    }
    (index / "index.json").write_text(json.dumps(moved))
    assert main(["serve-retriever", f"index={index}"]) == 2
    assert "index: its encoder: '/gone': no such folder" in capsys.readouterr().err
    (problem,) = retriever_problems(DenseConfig(name="dense", index=str(index)))
    assert problem.startswith("task.retriever.index: its encoder: '/gone'")


def test_a_place_that_cannot_be_written_is_told(tmp_path, capsys):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "a", "text": "b"}\n')
    assert main(["index", "build", f"corpus={corpus}", f"index={corpus}/below/index"]) == 2
    assert "error: mmrl index build: cannot build " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "answers"),
    [
        (Scripted("{}"), True),
        (Scripted("not for you", status=403), True),
        (Scripted(b"x" * (2 * hub.PAGE_BYTES)), True),
        (Scripted("{}", delay=3.0), False),
    ],
)
def test_a_hub_answers_by_any_page_in_time(page, answers, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(hub, "HUB_S", 0.4)
    with serving([page]) as (address, _):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert hub.hub_answers.__wrapped__() == answers


OFFERED = "in a clone of mmrl, python -m scripts.fetch_model {name} FOLDER makes its folder"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train", "model=smollm2_135m", "model.path=smollm2_135m", "train.batch_size=99999"], "model.path"),
        (["doctor", "model=smollm2_135m", "model.path=smollm2_135m"], "model.path"),
        (["plan", "model=smollm2_135m", "model.path=smollm2_135m"], "model.path"),
        (["eval", "policy=smollm2_135m", "task=hotpotqa"], "policy"),
        (["serve", "policy=smollm2_135m"], "policy"),
        (["train", "task.retriever.name=dense", "task.retriever.model=minilm"], "task.retriever.model"),
        (["index", "build", "corpus=a", "index=b", "retriever=dense", "model=minilm"], "mmrl index build: model"),
    ],
)
def test_a_name_that_mmrl_fetch_gave_is_refused_with_what_replaces_it(words, key, tmp_path, monkeypatch, errors_of):
    """Beside all other mistakes, and before a folder is made; a folder of that name is one."""
    monkeypatch.chdir(tmp_path)
    name = "minilm" if "minilm" in str(words) else "smollm2_135m"
    lines = errors_of(*words).splitlines()
    assert any(
        line.startswith(f"error: {key}: got '{name}'") and line.endswith(OFFERED.format(name=name)) for line in lines
    )
    assert any("train.batch_size" in line for line in lines) == ("train.batch_size=99999" in words)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / name).mkdir()
    assert OFFERED.format(name=name) not in errors_of(*words)


def test_where_the_hub_does_not_serve_a_model_its_other_source_is_named(away, monkeypatch):
    monkeypatch.setattr("mmrl.models.load.hub_answers", lambda: False)
    for name, model in FETCHED.items():
        (problem,) = encoder_problems("model", model)
        assert problem.endswith(OFFERED.format(name=name))
        with pytest.raises(
            ConfigError, match=f"cannot load the tokenizer of '{model}'.*; in a clone of mmrl, .* {name} "
        ):
            load_tokenizer(ModelConfig(name="hf", path=model))
