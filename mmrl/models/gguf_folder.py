"""A GGUF file as the folder of a model: weights de-quantised, tokenizer, template and end of turn checked.

Made once for each content of a file, in mmrl's cache; every loader then takes the folder. transformers has a loader of
its own, which takes the first token of a text for the end of one where the tokenizer is Llama's, and converts again at
every start.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import ConfigError
from mmrl.models.gguf import FACTS, TYPES, Header, Tensor, gguf_problems, layout, read_header, tokens_of
from mmrl.system.artifacts import cache_root
from mmrl.system.bar import progress
from mmrl.system.files import atomic_dir, user_path

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

SHARD_NUMBERS = 500_000_000
"""Numbers of one file of weights, all of which are in memory at once: 2 GB."""
LARGE = 1_000_000_000
"""From so many parameters on, float16 is written: at float32 the cache would be eight times the file."""
_END = "mmrl ends here"
_CONTROL, _USER = 3, 4
"""Kinds of tokens: special ones, and words that are never cut."""
# llama.cpp's and the models' own; GPT-2's is the library's default
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CUTS = {"qwen2": _WORDS + r"\p{N}" + _REST, "llama-bpe": _WORDS + r"\p{N}{1,3}" + _REST}


def gguf_folder(path: str) -> Path:
    """The folder of the model in a GGUF file; it is there once `converted` has made it."""
    file = user_path(path)
    status = file.stat()
    return cache_root(None) / "models" / f"{file.stem}-{_digest(file, status.st_size, status.st_mtime_ns)[:16]}"


@lru_cache(maxsize=8)
def _digest(file: Path, size: int, changed_ns: int) -> str:
    # Size and time are arguments so that a file that was replaced is read again.
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def converted(path: str, say: Callable[[str], None] | None = None) -> Path:
    """The folder of the model in a GGUF file, made where it is not there yet.

    Args:
        path: as typed after `model.path=`.
        say: takes the line on what was made; None: stderr.

    Raises:
        ConfigError: it cannot be converted.
    """
    from filelock import FileLock

    if problems := gguf_problems("model.path", path):
        raise ConfigError(problems)
    folder = gguf_folder(path)
    if (folder / FACTS).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Of several processes one converts, and the others wait for it.
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not (folder / FACTS).is_file():
            with atomic_dir(folder) as work:
                convert(user_path(path), work)
            (say or _to_stderr)(f"{path}: {describe(folder)}; kept in {folder}")
    return folder


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def describe(folder: Path) -> str:
    """One sentence on a converted folder: its weights, tokenizer, template and end of turn."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    return str(facts["said"])


def convert(file: Path, folder: Path) -> None:
    """Write the model in a GGUF file into an empty folder, as transformers, vLLM and peft load it.

    Raises:
        ConfigError: the tokenizer cannot be built, or a weight is no number.
    """
    header = read_header(file)
    width = "float32" if header.parameters < LARGE else "float16"
    _write_weights(file, header, folder, width)
    (folder / "config.json").write_text(json.dumps(config_of(header) | {"dtype": width}, indent=1), encoding="utf-8")
    try:
        end, template = _write_tokenizer(header, folder)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ConfigError(f"model.path: no tokenizer can be made of '{file}': {error}") from None
    kind = header.quantisation
    weights = f"{width}, de-quantised from {kind}" if kind not in ("F32", "F16", "BF16") else f"{width}, from {kind}"
    facts = {
        "source": file.name,
        "quantisation": kind,
        "said": f"{header.architecture} of {header.parameters / 1e6:.1f} M parameters ({weights}), vocabulary "
        f"{len(tokens_of(header)):,}, {template}, end of turn {end}",
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def config_of(header: Header) -> dict[str, Any]:
    """The `config.json` of the model that a header describes."""
    heads, hidden = int(header.number("attention.head_count")), int(header.number("embedding_length"))
    theta = float(header.number("rope.freq_base", 10_000.0))
    kind = header.architecture
    return {
        "architectures": [
            {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
        ],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": int(header.number("feed_forward_length")),
        "num_hidden_layers": int(header.number("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(header.number("attention.head_count_kv", heads)),
        "head_dim": int(header.number("attention.key_length", hidden // heads)),
        "max_position_embeddings": int(header.number("context_length")),
        "rms_norm_eps": float(header.number("attention.layer_norm_rms_epsilon")),
        "vocab_size": len(tokens_of(header)),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "hidden_act": "silu",
        # the first for libraries of before transformers 5
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def header_config(path: str) -> dict[str, Any]:
    """The `config.json` of the model in a GGUF file, without converting it.

    Raises:
        ConfigError: it cannot be converted.
    """
    if problems := gguf_problems("model.path", path):
        raise ConfigError(problems)
    return config_of(read_header(user_path(path)))


@contextmanager
def plain_gguf() -> Iterator[Any]:
    """The package `gguf`, which takes along another one, where that is installed, and fails with it."""
    present = "mistral_common" in sys.modules
    if not present:
        sys.modules["mistral_common"] = None  # type: ignore[assignment]  # as importlib has it: not to be imported
    try:
        import gguf

        yield gguf
    finally:
        if not present:
            del sys.modules["mistral_common"]


def _write_weights(file: Path, header: Header, folder: Path, width: str) -> None:
    """All tensors as safetensors, in files of at most `SHARD_NUMBERS` where there are more."""
    from safetensors.numpy import save_file

    shards: list[dict[str, Tensor]] = [{}]
    for name, (target, _) in layout(header).items():
        tensor = header.tensors[name]
        if shards[-1] and sum(t.numbers for t in shards[-1].values()) + tensor.numbers > SHARD_NUMBERS:
            shards.append({})
        shards[-1][target] = tensor
    places: dict[str, str] = {}
    with progress(f"converting {file.name}", len(header.tensors), "tensors") as advance:
        for number, shard in enumerate(shards, start=1):
            one = len(shards) == 1
            saved = "model.safetensors" if one else f"model-{number:05}-of-{len(shards):05}.safetensors"
            weights = {name: _weights(file, tensor, header, width) for name, tensor in _counted(shard, advance)}
            save_file(weights, folder / saved, metadata={"format": "pt"})
            (folder / saved).chmod(0o644)  # made for its owner alone, and a cache may be shared
            places |= dict.fromkeys(shard, saved)
    if len(shards) > 1:
        index = {"metadata": {"total_parameters": header.parameters}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _counted(shard: dict[str, Tensor], advance: Callable[[int], None]) -> Iterable[tuple[str, Tensor]]:
    for item in shard.items():
        yield item
        advance(1)


def _weights(file: Path, tensor: Tensor, header: Header, width: str) -> np.ndarray:
    """A tensor's numbers, in the order that transformers has them."""
    import numpy as np

    _, numbers, size = TYPES[tensor.type]
    stored = np.fromfile(file, dtype=np.uint8, count=tensor.bytes, offset=tensor.start)
    rows = stored.reshape(-1, tensor.shape[-1] // numbers * size)
    with plain_gguf() as gguf:
        # Its plain types are views of the bytes, not of rows of them.
        kind = gguf.GGMLQuantizationType(tensor.type)
        plain = {"F32": np.float32, "F16": np.float16}.get(kind.name)
        values = stored.view(plain) if plain is not None else gguf.dequantize(rows, kind)
    weights = np.asarray(values, dtype=np.float32).reshape(tensor.shape)
    if not np.isfinite(weights).all():
        raise ConfigError(f"model.path: '{file}' is damaged: {tensor.name} holds values that are no numbers")
    if header.architecture == "llama" and tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        key = "attention.head_count" if "attn_q" in tensor.name else "attention.head_count_kv"
        weights = _halves(weights, int(header.number(key, header.number("attention.head_count"))))
    return np.ascontiguousarray(weights.astype(width))


def _halves(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a rotary projection, which llama.cpp has in pairs, in two halves a head."""
    paired = weights.reshape(heads, weights.shape[0] // heads // 2, 2, -1)
    return paired.swapaxes(1, 2).reshape(weights.shape)


def _write_tokenizer(header: Header, folder: Path) -> tuple[str, str]:
    """Tokenizer, its settings and the generation settings; returns end of turn and template in words."""
    tokens, facts = tokens_of(header), header.facts
    _tokenizer(header).save(str(folder / "tokenizer.json"))

    def token(name: str) -> str | None:
        number = facts.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None

    template = header.text("tokenizer.chat_template")
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(header.number("context_length")),
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
    }
    place = folder / "tokenizer_config.json"
    given = {key: value for key, value in settings.items() if value is not None}
    place.write_text(json.dumps(given, indent=1), encoding="utf-8")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    end, words = end_of_turn(folder, template)
    if end is None:
        raise ValueError("neither the file nor its template says which token ends a turn")
    place.write_text(json.dumps({**given, "eos_token": end}, indent=1), encoding="utf-8")
    numbers = {name: tokens.index(str(given[f"{name}_token"])) for name in ("bos", "pad") if f"{name}_token" in given}
    generation = {"eos_token_id": tokens.index(end), **{f"{name}_token_id": n for name, n in numbers.items()}}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1), encoding="utf-8")
    stated = given.get("eos_token")
    other = f" (the file says {stated}, which its template never writes)" if stated not in (None, end) else ""
    return f"{end} ({tokens.index(end)}){other}", words


def end_of_turn(folder: Path, template: str) -> tuple[str | None, str]:
    """The token that ends a turn, as the template writes it, else as the tokenizer says; and the template in words."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    stated = tokenizer.eos_token
    if not template:
        return stated, "no chat template (model.chat_template=plain)"
    turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _END}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    # A template calls what it likes.
    except Exception as error:
        return stated, f"a chat template that cannot be used ({' '.join(str(error).split())[:80]})"
    after = text.rpartition(_END)[2]
    written = [(after.find(t), t) for t in tokenizer.all_special_tokens + _added(tokenizer) if t and t in after]
    return (min(written)[1] if written else stated), "chat template"


def _added(tokenizer: Any) -> list[str]:
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def _tokenizer(header: Header) -> Tokenizer:
    """The tokenizer that a file describes: byte pairs, cut as the model's own does."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens, facts = tokens_of(header), header.facts
    merges = facts.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ValueError("it has no merges (tokenizer.ggml.merges)")
    pairs = [(left, right) for left, _, right in (str(merge).partition(" ") for merge in merges)]
    pre = header.text("tokenizer.ggml.pre")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library has no type of its own for words that are not there
        raise ValueError(f"its merges do not fit its vocabulary ({error})") from None
    space = bool(facts.get("tokenizer.ggml.add_space_prefix", False))
    if pre in _CUTS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_CUTS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False),
            ]
        )
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=space)])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts.get("tokenizer.ggml.token_type")
    marked = list(zip(tokens, kinds if isinstance(kinds, list) else [], strict=False))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in marked if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in marked if k == _USER])
    return tokenizer
