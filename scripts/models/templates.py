"""The chat templates of the installed TRL, each in a folder with a tokenizer that has its special tokens."""

from __future__ import annotations

import re
from pathlib import Path

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SPECIAL = re.compile(r"<\|[^|<>\s]+\|?>|<[^|<>\s]+\|>|<｜[^｜]+｜>|<(?:start_of|end_of)_\w+>|\[/?[A-Z_]{4,}\]")
"""Special tokens in a template's text."""
PLAIN = re.compile(r"</?(?:think|tool_call|tool_response|tools)>")
"""Added tokens that are text."""
REPLY = "a reply"
ASKED = [{"role": "user", "content": "?"}, {"role": "assistant", "content": REPLY}]


def template_names() -> list[str]:
    """List the templates by name, without those that TRL has for training alone."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))


def save_tokenizer(name: str, folder: Path) -> None:
    """Save a byte-level tokenizer with a template exactly as TRL has it, and its tokens."""
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    made = _tokenizer(template, "</s>")
    if "eos_token" not in template and (end := _end(made)):
        made = _tokenizer(template, end)
    made.save_pretrained(folder)


def _end(made: PreTrainedTokenizerFast) -> str | None:
    """Return the last of the special tokens right after a reply, where the template writes any."""
    try:
        text = str(made.apply_chat_template(ASKED, tokenize=False))
    except Exception:  # of images alone
        return None
    after = re.match(rf"(?:{SPECIAL.pattern})+", text.rpartition(REPLY)[2])
    return SPECIAL.findall(after[0])[-1] if after else None


def _tokenizer(template: str, end: str) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    raw.train_from_iterator([], trainer)
    special = sorted({"<s>", "</s>", "<pad>", *SPECIAL.findall(template)})
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    plain = sorted({*PLAIN.findall(template)})
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token=end, pad_token="<pad>")
    made.chat_template = template
    return made
