"""Trained weights as folders that other libraries load: adapters merged or alone, tokenizer, chat template checked.

Used by `mmrl export`; torch and transformers load inside the functions.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.config import ModelConfig
from mmrl.config.base import SHIPPED
from mmrl.errors import CheckpointError
from mmrl.models.chat import eos_ids, render_prompt, template_of
from mmrl.models.load import (
    NO_CODE,
    PROCESSORS,
    load_configs,
    load_policy,
    load_tokenizer,
    local_path,
    processor_files,
)
from mmrl.models.report import without_bars
from mmrl.models.template import SYSTEM_MERGED
from mmrl.store.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = "generation_config.json"
FULL = ("model*.safetensors", "model.safetensors.index.json", "config.json", GENERATION, *PROCESSORS)
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
CONVERSATIONS: Sequence[Sequence[dict[str, str]]] = (
    ({"role": "user", "content": "Who?"},),
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": " Two\n\nlines: {x} "}),
    (
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Größer? <b>&amp;</b>"},
    ),
)
"""Conversations that chat templates are compared on."""


def copy_full(checkpoint: Path, target: Path) -> None:
    """Copy full weights of a checkpoint, byte for byte."""
    for pattern in FULL:
        for file in checkpoint.glob(pattern):
            shutil.copyfile(file, target / file.name)


def write_merged(base: str, adapter: Path, model: ModelConfig, target: Path) -> str:
    """Write full weights with an adapter merged into them, in the base's own type. Returns that type.

    Raises:
        ConfigError: the base cannot be loaded.
        CheckpointError: the adapter holds numbers that are not finite.
    """
    config, generation = load_configs(model.model_copy(update={"path": base}))
    # A model of several kinds of input says it of its text part alone.
    native = str(config.dtype or config.get_text_config().dtype).removeprefix("torch.")
    dtype = native if native in ("float32", "bfloat16", "float16") else "float32"
    # On the CPU: merging is one product per layer, and a GPU may be in use by the next run. `matmul` is of runs, and
    # may not fit the base's own type.
    own_type = model.model_copy(update={"path": base, "dtype": dtype, "matmul": "torch"})
    loaded, _, _ = load_policy(Policy(base=base, adapter=str(adapter)), own_type, "cpu")
    from peft import PeftModel

    assert isinstance(loaded, PeftModel)
    try:
        merged = loaded.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise CheckpointError(f"{adapter}: cannot be merged: {error}") from None
    if generation is not None:
        merged.generation_config = generation
    with without_bars():
        merged.save_pretrained(target)
    for file in processor_files(own_type, merged.config):
        shutil.copyfile(file, target / file.name)
    return dtype


def is_local(base: str) -> bool:
    """Return whether a base is a folder, which has no revision."""
    return base in SHIPPED or Path(base).is_dir()


def copy_adapter(folder: Path, base: str, model: ModelConfig, target: Path) -> None:
    """Copy an adapter alone, which names its base so that it loads from any folder of this machine."""
    target.mkdir(exist_ok=True)
    for name in ADAPTER:
        shutil.copyfile(folder / name, target / name)
    config = json.loads((target / ADAPTER[0]).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = str(Path(local_path(base)).resolve()) if is_local(base) else base
    config["revision"] = None if is_local(base) else model.revision
    (target / ADAPTER[0]).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(checkpoint: Path, targets: Iterable[Path]) -> PreTrainedTokenizerBase:
    """Write the tokenizer that the run trained with, chat template and thinking mode included, into each folder."""
    from transformers import AutoTokenizer

    # From the checkpoint and not the base: the config's settings of the template are in it already.
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, **NO_CODE)
    # Programs send system messages, and every user of the export would have to merge them.
    if template_of(tokenizer).merges:
        tokenizer.chat_template = SYSTEM_MERGED + str(tokenizer.chat_template)
    for target in targets:
        tokenizer.save_pretrained(target)
    return tokenizer


def write_ends(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add what ends a turn in a run to the generation config of full weights: other libraries stop by that alone."""
    from transformers import GenerationConfig

    file = folder / GENERATION
    stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    own = GenerationConfig(eos_token_id=stored.get("eos_token_id"))
    stored["eos_token_id"] = sorted(eos_ids(tokenizer, own))
    file.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")


def ends_note(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> str:
    """Return a line about ends of a turn that the generation config of an adapter's base lacks; empty for none.

    An adapter is used with its base's, whatever lies beside it.
    """
    from transformers import GenerationConfig

    config, generation = load_configs(model)
    generation = generation or GenerationConfig.from_model_config(config)
    ends, named = eos_ids(tokenizer, generation), generation.eos_token_id
    if ends <= {*(named if isinstance(named, list) else [named])}:
        return ""
    ids = sorted(ends)
    return f"turns end at the tokens {ids}: give eos_token_id={ids} to transformers, stop_token_ids={ids} to vLLM"


def check_template(folder: Path, model: ModelConfig) -> None:
    """Compare an exported tokenizer with the training's: the same ids for conversations.

    Args:
        model: the `model` section of the run.

    Raises:
        CheckpointError: the ids of one differ.
    """
    from transformers import AutoTokenizer

    trained, exported = load_tokenizer(model), AutoTokenizer.from_pretrained(folder, **NO_CODE)
    for messages in CONVERSATIONS:
        try:
            expected = render_prompt(trained, messages)
        # A template may refuse a role or an order of roles, in any words; the exported one is the same.
        except Exception:
            continue
        text = template_of(trained).render(exported, messages, add_generation_prompt=True)
        if tuple(exported.encode(text, add_special_tokens=False)) != expected:
            raise CheckpointError(
                f"{folder.name}: its chat template gives other token ids than in training for {messages!r}; nothing is "
                "exported, since the model would be asked in words that it was not trained on"
            )
