"""The GGUF file of `mmrl fetch` as a folder: the same model and words as before, and its own end of turn."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mmrl.errors import ConfigError
from mmrl.models.gguf import convert
from tests.helpers.gguf import llama_like, write_gguf

TEXT = "In 1990 12 men founded the city, didn't they? <|im_end|> Müller  two"


@pytest.fixture(scope="module")
def source(random_model, tmp_path_factory):
    return llama_like(tmp_path_factory.mktemp("llama"), random_model)


def test_the_folder_is_the_model_that_the_file_was_made_of(source, tmp_path):
    (tmp_path / "made").mkdir()
    convert(tmp_path / write_gguf(tmp_path / "m.gguf", source), tmp_path / "made", "<|im_end|>")
    model, there = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "made", source))
    weights, before = model.state_dict(), there.state_dict()
    assert weights.keys() == before.keys() and all(torch.equal(weights[name], before[name]) for name in before)
    tokenizer, other = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "made", source))
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT and tokenizer.chat_template == other.chat_template
    words = "Mueller founded the city <|im_end|>"
    assert tokenizer.encode(words) == other.encode(words)
    assert len(tokenizer.encode("1990")) == 4, "digits stand alone"
    assert tokenizer.eos_token == "<|im_end|>" and model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_quantised_weights_are_near(source, tmp_path):
    (tmp_path / "made").mkdir()
    convert(tmp_path / write_gguf(tmp_path / "m.gguf", source, quant="Q4_1"), tmp_path / "made", "<|im_end|>")
    model, there = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "made", source))
    for (name, made), (_, of) in zip(model.named_parameters(), there.named_parameters(), strict=True):
        assert made.dtype == torch.float32 and (made - of).abs().max() < 0.1 * of.abs().max() + 1e-6, name


@pytest.mark.parametrize("change", [{"pre": "gpt-2"}, {"template": False}])
def test_another_file_is_refused_in_a_sentence(change, source, tmp_path):
    (tmp_path / "made").mkdir()
    file = tmp_path / write_gguf(tmp_path / "m.gguf", source, **change)
    with pytest.raises(ConfigError, match=r"no model can be made of m\.gguf"):
        convert(file, tmp_path / "made", "<|im_end|>")


def test_a_damaged_file_is_refused_in_a_sentence(source, tmp_path):
    (tmp_path / "made").mkdir()
    file = tmp_path / write_gguf(tmp_path / "m.gguf", source)
    raw = file.read_bytes()
    for cut in (0, 4, 100, len(raw) // 2):
        file.write_bytes(raw[:cut])
        with pytest.raises(ConfigError, match=r"no model can be made of m\.gguf"):
            convert(file, tmp_path / "made", "<|im_end|>")
