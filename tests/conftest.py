"""Shared fixtures: a really small random model, one torch thread, an index cache of the test run's own."""

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.helpers.engines")

# A loaded machine is slow, not wrong.
settings.register_profile(
    "mmrl", max_examples=int(os.environ.get("FUZZ", "100")), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("mmrl")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing in a test may wait for a network
os.environ["COLUMNS"] = "100"  # printed text is compared, whatever terminal the tests run in


LONGEST = ("test_chain", "test_stop", "test_update", "test_sft", "test_checkpoint")
"""Files that take longest: none of several workers should begin one last."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in LONGEST)


_modules = 0


def pytest_runtest_setup(item):
    """One thread for each test: an earlier one may have set more, and sums over several threads differ in last bits.

    What imports have left in memory is no garbage; walked at the end of every training run, it costs 0.4 s each.
    """
    global _modules
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    if len(sys.modules) > _modules + 200:
        _modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    os.environ["MMRL_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The public data files; tests that need them skip without."""
    folder = Path(os.environ.get("MMRL_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no public data at {folder} (set MMRL_DATA)")
    return folder


@pytest.fixture(scope="session")
def random_model(tmp_path_factory) -> str:
    """Folder of a random two-layer Qwen3 with a byte-level tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from tests.helpers.engines import model

    folder = str(tmp_path_factory.mktemp("random_model"))
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator(["Document0: the city of the film was founded in 1950"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model(scale=0.02, vocab_size=len(tokenizer), **heads, **ends).save_pretrained(folder)
    return folder


@pytest.fixture
def errors_of(capsys):
    """What a command that ends with exit code 2 has printed on stderr."""
    from mmrl.cli import main

    def errors(*words):
        capsys.readouterr()
        assert main([*words]) == 2
        printed = capsys.readouterr().err
        assert "error: " in printed and "Traceback" not in printed
        return printed

    return errors


@pytest.fixture
def output_of(capsys):
    """What a command that ends well has printed on stdout."""
    from mmrl.cli import main

    def output(*words):
        capsys.readouterr()
        assert main([*words]) == 0
        return capsys.readouterr().out

    return output


@pytest.fixture
def quick_retries(monkeypatch):
    """The client of retrieval servers tries again without a pause that a test would have to wait for."""
    monkeypatch.setattr("mmrl.retrieval.remote.WAITS_S", (0.001, 0.002))


@pytest.fixture(scope="module")
def good():
    """Address of a retrieval server that works."""
    from tests.helpers.servers import good_app, listening

    with listening(good_app()) as url:
        yield url
