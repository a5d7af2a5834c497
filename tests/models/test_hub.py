"""Encoders that cannot be had: told before a passage is read, a model loaded or a folder made."""

import json

import pytest

from mmrl.cli import main
from mmrl.config.retriever import DenseConfig
from mmrl.models import hub
from mmrl.models.hub import encoder_problems
from mmrl.retrieval.select import retriever_problems


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
    moved = info | {"kind": "dense", "settings": {"model": "/gone", "encoder": "e5", "faiss": "flat"}}
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
