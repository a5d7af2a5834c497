"""GGUF files: what one holds, read within the bounds of the file, and why it cannot be converted.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Needs neither torch nor the package `gguf`, so a
wrong file is refused before anything is loaded. `mmrl.models.gguf_folder` makes a model folder of one.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from mmrl.errors import ConfigError
from mmrl.system.files import user_path

Value: TypeAlias = "int | float | bool | str | list[int | float | bool | str]"

ENDING = ".gguf"
FACTS = "mmrl.json"
"""Of a model folder that mmrl has made: what of; written last."""
ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""`general.architecture` of what can be converted: dense decoders laid out as Llama is (Mistral's are llama)."""
PRE_TOKENISATIONS = ("gpt-2", "smollm", "qwen2", "llama-bpe")
"""`tokenizer.ggml.pre`: how text is cut before byte pairs are merged."""
# name, numbers of a block, bytes of a block: ggml.h's and ggml-common.h's; the package `gguf` de-quantises these
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}
"""Number of a tensor's type -> its name, and the size of its blocks."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_LONGEST_NAME, _MOST_DIMENSIONS = 65_535, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    """As PyTorch has it: the fastest dimension last."""
    type: int
    """A key of `TYPES`, or one that cannot be read."""
    start: int
    """Of its bytes in the file."""

    @property
    def numbers(self) -> int:
        """How many numbers it has."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """How many bytes they take in the file."""
        _, numbers, size = TYPES[self.type]
        return self.numbers // numbers * size


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a file says of itself."""

    facts: Mapping[str, Value]
    tensors: Mapping[str, Tensor]

    def text(self, key: str, default: str = "") -> str:
        """A fact that is a text."""
        value = self.facts.get(key, default)
        return value if isinstance(value, str) else default

    def number(self, key: str, default: int | float | None = None) -> int | float:
        """A fact of the architecture that is a number: `block_count` for `llama.block_count`.

        Raises:
            ValueError: there is none.
        """
        value = self.facts.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"has no number {self.architecture}.{key}")
        return value

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return self.text("general.architecture")

    @property
    def parameters(self) -> int:
        """Numbers of all tensors."""
        return sum(tensor.numbers for tensor in self.tensors.values())

    @property
    def quantisation(self) -> str:
        """The type that most numbers have."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            name = TYPES[tensor.type][0]
            counts[name] = counts.get(name, 0) + tensor.numbers
        return max(counts, key=lambda name: counts[name])


class _Reader:
    """Reads forward through a file's bytes; never past the end."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def unpack(self, form: str) -> int | float | bool:
        """One little-endian number.

        Raises:
            ValueError: the file ends before.
        """
        size = struct.calcsize(form)
        value: int | float | bool = struct.unpack("<" + form, self.take(size))[0]
        return value

    def count(self) -> int:
        """A length or a number of things, none of which takes less than a byte."""
        number = int(self.unpack("Q"))
        if number > len(self.data):
            raise ValueError(f"says that {number:,} things follow, in a file of {len(self.data):,} bytes")
        return number

    def take(self, size: int) -> bytes:
        piece = self.data[self.at : self.at + size]
        if len(piece) < size:
            raise ValueError("ends in the middle of its header")
        self.at += size
        return piece

    def text(self) -> str:
        return self.take(self.count()).decode("utf-8")

    def value(self, kind: int) -> Value:
        """A fact's value; arrays of arrays, which no model has, are refused."""
        if kind == _TEXT:
            return self.text()
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"has a value of the unknown type {kind}")
        inner, size = int(self.unpack("I")), self.count()
        if inner == _TEXT:
            return [self.text() for _ in range(size)]
        if inner not in _SCALARS:
            raise ValueError(f"has a list of the unknown type {inner}")
        form = f"{size}{_SCALARS[inner]}"
        return list(struct.unpack("<" + form, self.take(struct.calcsize("<" + form))))


def read_header(path: Path) -> Header:
    """What a GGUF file says of itself; its numbers stay on disk.

    Raises:
        ConfigError: it cannot be read, or is none, or is damaged or cut off.
    """
    status = _status(path)
    return _read_header(path, status)


def _status(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"model.path: '{path}' cannot be read: {error.strerror}") from None
    return found.st_size, found.st_mtime_ns


@lru_cache(maxsize=8)
def _read_header(path: Path, status: tuple[int, int]) -> Header:
    # Size and time are arguments so that a file that was replaced is read again.
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(_Reader(data), status[0])
    # An empty file cannot be mapped (ValueError too).
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(
            f"model.path: '{path}' is damaged or no GGUF file: {error}; expected a GGUF file as it was published"
        ) from None


def _header(reader: _Reader, size: int) -> Header:
    if reader.take(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = reader.unpack("I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}, expected 2 or 3 (little-endian)")
    tensors, facts = reader.count(), reader.count()
    # Whatever a damaged file claims, each thing read takes bytes of it, so that reading ends.
    known: dict[str, Value] = {}
    for _ in range(facts):
        name = reader.text()
        known[name] = reader.value(int(reader.unpack("I")))
    read: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(tensors):
        name = reader.text()
        dimensions = int(reader.unpack("I"))
        if dimensions > _MOST_DIMENSIONS or len(name) > _LONGEST_NAME:
            raise ValueError(f"has a tensor of {dimensions} dimensions")
        shape = tuple(int(reader.unpack("Q")) for _ in range(dimensions))
        # GGML counts dimensions from the fastest one
        read.append((name, shape[::-1], int(reader.unpack("I")), int(reader.unpack("Q"))))
    alignment = known.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    begin = -(-reader.at // alignment) * alignment
    held = {n: Tensor(name=n, shape=shape, type=kind, start=begin + offset) for n, shape, kind, offset in read}
    for tensor in held.values():
        if tensor.type in TYPES and tensor.start + tensor.bytes > size:
            raise ValueError(f"it is cut off: {tensor.name} ends at byte {tensor.start + tensor.bytes:,} of {size:,}")
    return Header(facts=known, tensors=held)


def is_gguf(path: str) -> bool:
    """Whether `model.path` or `policy` names a GGUF file, by its ending."""
    return path.lower().endswith(ENDING)


def gguf_problems(key: str, path: str) -> list[str]:
    """Why no model can be made of a GGUF file, one sentence each.

    Args:
        key: that names it: `model.path`, `policy`.
        path: as typed.
    """
    file = user_path(path)
    if not file.is_file():
        return [f"{key}: no file '{path}', expected a GGUF file"]
    try:
        header = read_header(file)
    except ConfigError as error:
        return [f"{key}: {problem.partition(': ')[2]}" for problem in error.problems]
    instead = "use the model's hub id or folder instead"
    if header.architecture not in ARCHITECTURES:
        got = header.architecture or "none"
        return [f"{key}: '{path}' has the architecture {got}, expected one of {', '.join(ARCHITECTURES)}; {instead}"]
    unread = sorted({tensor.type for tensor in header.tensors.values()} - set(TYPES))
    if unread:
        names = ", ".join(name for name, _, _ in TYPES.values())
        kinds = ", ".join(map(str, unread))
        return [
            f"{key}: '{path}' is quantised in a way that cannot be read (type {kinds}), expected {names}; {instead}"
        ]
    return [f"{key}: '{path}' {problem}; {instead}" for problem in _unconverted(header)]


def _unconverted(header: Header) -> list[str]:
    """What of a file has no place in a folder that transformers loads."""
    problems = []
    if int(header.facts.get("split.count", 0) or 0) > 1:  # type: ignore[arg-type]  # a list would be no count
        problems.append("is one part of several, expected a model in one file")
    if header.facts.get(f"{header.architecture}.expert_count", 0):
        problems.append("is a mixture of experts, expected a dense model")
    scaling = header.text(f"{header.architecture}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in header.tensors:
        problems.append("scales its rotary positions for long contexts, which is not converted")
    kind, pre = header.text("tokenizer.ggml.model", "none"), header.text("tokenizer.ggml.pre", "none")
    if kind != "gpt2":
        problems.append(f"has a tokenizer of the kind {kind}, expected gpt2 (byte pairs)")
    elif pre not in PRE_TOKENISATIONS:
        problems.append(f"cuts text as '{pre}' does, expected one of {', '.join(PRE_TOKENISATIONS)}")
    try:
        missing, strange = layout_differences(header)
    except ValueError as error:
        return [*problems, str(error)]
    problems += [f"lacks the tensors {', '.join(missing[:5])}"] if missing else []
    problems += [f"has tensors of no such architecture: {', '.join(strange[:5])}"] if strange else []
    return problems


_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_MORE = {
    "llama": {},
    "qwen2": {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"},
    "qwen3": {f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"},
}


def layout(header: Header) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name in the file -> name in a folder that transformers loads, and its shape.

    Raises:
        ValueError: the file lacks one of its sizes.
    """
    hidden, vocab = int(header.number("embedding_length")), len(tokens_of(header))
    heads, inner = int(header.number("attention.head_count")), int(header.number("feed_forward_length"))
    keys = int(header.number("attention.head_count_kv", heads))
    width = int(header.number("attention.key_length", hidden // max(1, heads)))
    sizes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (heads * width, hidden),
        "attn_k.weight": (keys * width, hidden),
        "attn_v.weight": (keys * width, hidden),
        "attn_output.weight": (hidden, heads * width),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
        "attn_q.bias": (heads * width,),
        "attn_k.bias": (keys * width,),
        "attn_v.bias": (keys * width,),
        "attn_q_norm.weight": (width,),
        "attn_k_norm.weight": (width,),
    }
    named = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if "output.weight" in header.tensors:  # else the input embedding is the output's too
        named["output.weight"] = ("lm_head.weight", (vocab, hidden))
    layers = int(header.number("block_count"))
    if layers > len(header.tensors):
        raise ValueError(f"says that it has {layers:,} layers, with {len(header.tensors):,} tensors")
    for number in range(layers):
        for short, long in (_LAYER | _MORE[header.architecture]).items():
            named[f"blk.{number}.{short}"] = (f"model.layers.{number}.{long}", sizes[short])
    return named


def tokens_of(header: Header) -> list[str]:
    """The vocabulary.

    Raises:
        ValueError: there is none.
    """
    tokens = header.facts.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ValueError("has no vocabulary (tokenizer.ggml.tokens)")
    return [str(token) for token in tokens]


def layout_differences(header: Header) -> tuple[list[str], list[str]]:
    """Tensors that the architecture has and the file lacks, or has in another shape; and those it has beside."""
    expected = layout(header)
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    missing = [name for name, (_, shape) in expected.items() if shapes.get(name) != shape]
    return missing, [name for name in shapes if name not in expected]
