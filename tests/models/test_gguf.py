"""The GGUF file of `mmrl fetch` as a folder: the same model and words as before, and its own end of turn."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mmrl.models.gguf import convert
from tests.helpers.gguf import llama_like, write_gguf

TEXT = "In 1990 12 men founded the city, didn't they? <|im_end|> Müller  two"


@pytest.fixture(scope="module")
def source(random_model, tmp_path_factory):
    return llama_like(tmp_path_factory.mktemp("llama"), random_model)


def converted(source, folder, **how):
    """The folder that a GGUF file of a model becomes, its model, and the model before."""
    made = folder / "made"
    made.mkdir()
    convert(folder / write_gguf(folder / "m.gguf", source, **how), made, "<|im_end|>")
    return made, *(AutoModelForCausalLM.from_pretrained(path) for path in (made, source))


def test_the_folder_is_the_model_that_the_file_was_made_of(source, tmp_path):
    made, model, there = converted(source, tmp_path)
    weights, before = model.state_dict(), there.state_dict()
    assert weights.keys() == before.keys() and all(torch.equal(weights[name], before[name]) for name in before)
    tokenizer, other = (AutoTokenizer.from_pretrained(folder) for folder in (made, source))
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT and tokenizer.chat_template == other.chat_template
    words = "Mueller founded the city <|im_end|>"
    assert tokenizer.encode(words) == other.encode(words)
    assert len(tokenizer.encode("1990")) == 4, "digits stand alone"
    assert tokenizer.eos_token == "<|im_end|>" and model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_quantised_weights_are_near(source, tmp_path):
    _, model, there = converted(source, tmp_path, quant="Q4_1")
    for (name, made), (_, of) in zip(model.named_parameters(), there.named_parameters(), strict=True):
        assert made.dtype == torch.float32 and (made - of).abs().max() < 0.1 * of.abs().max() + 1e-6, name
