"""How an encoder's texts become vectors: pooling, length, prompts. Read from the model, named, or given; never guessed.

In this order: `encoder=NAME` (a preset, or `own`); a hub id of a known family; the model's own files, as
sentence-transformers writes them (`modules.json`, `config_sentence_transformers.json`); a folder's name, where it is
exactly that of a known family; the keys `pooling` and `normalise`. What is left is refused. Needs no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mmrl.config.retriever import DenseConfig
from mmrl.errors import DataError
from mmrl.models.fetched import encoder_source
from mmrl.models.hub import hub_answers
from mmrl.system.files import user_path

MODULES, MODEL_CONFIG = "modules.json", "config_sentence_transformers.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What is done to a text before and after the network; part of an index, whose queries are treated alike."""

    encoder: str
    """Where it comes from: `own` (the model's files), a name of `PRESETS`, or `given` (by keys)."""
    pooling: str
    """How token vectors become one; with `own` as the model's files call it, `own modules` where they name none."""
    normalise: bool
    """Whether vectors have length 1, so that inner products are cosines."""
    query_prompt: str = ""
    passage_prompt: str = ""
    """In front of every query and passage."""
    given: str = ""
    """Which of these keys were set, joined by commas; the others are the encoder's."""

    @classmethod
    def of(cls, settings: Mapping[str, str | float]) -> Treatment:
        """The one that an index was made with."""
        if "pooling" not in settings:  # by an earlier mmrl, which had the two presets alone
            return PRESETS[str(settings["encoder"])]
        return cls(
            encoder=str(settings["encoder"]),
            pooling=str(settings["pooling"]),
            normalise=bool(settings["normalise"]),
            query_prompt=str(settings["query_prompt"]),
            passage_prompt=str(settings["passage_prompt"]),
            given=str(settings["given"]),
        )

    def settings(self) -> dict[str, str | bool]:
        """As an index keeps it."""
        return asdict(self)

    def __str__(self) -> str:
        length = "length 1" if self.normalise else "any length"
        prompts = [p for p in (self.query_prompt, self.passage_prompt) if p]
        return f"{self.encoder}: pooling {self.pooling}, {length}, prompts {', '.join(map(repr, prompts)) or 'none'}"


PRESETS: Mapping[str, Treatment] = {
    # arXiv 2112.09118: the mean of the last hidden states, compared by inner product
    "contriever": Treatment(encoder="contriever", pooling="mean", normalise=False),
    # arXiv 2212.03533: the same mean with length 1, and a word in front that says what a text is
    "e5": Treatment(encoder="e5", pooling="mean", normalise=True, query_prompt="query: ", passage_prompt="passage: "),
}
# Whole names: `e5-mistral-7b-instruct`, say, is another kind of model.
FAMILIES = {
    "contriever": re.compile(r"m?contriever(-msmarco)?"),
    "e5": re.compile(r"(multilingual-)?e5-(small|base|large)(-v2|-unsupervised)?"),
}
PUBLISHERS = {"contriever": "facebook", "e5": "intfloat"}
CHOICES = ("pooling", "normalise", "query_prompt", "passage_prompt")
"""What the keys of a section can say."""


def treatment_of(config: DenseConfig, model: str, section: str = "task.retriever.") -> Treatment:
    """The treatment that a section describes.

    Args:
        config: what was set.
        model: folder or hub id.
        section: what stands before its keys in messages.

    Raises:
        DataError: neither the model nor the section says it, or both do.
    """
    known = _named(config, model, section)
    if known is None and (config.pooling is None or config.normalise is None):
        raise DataError(
            f"{section}model: '{model}' does not say how its vectors are made (no {MODULES}); expected "
            f"{section}encoder=contriever or e5, or both {section}pooling=mean (or cls, lasttoken, …) and "
            f"{section}normalise=true or false"
        )
    base = known or Treatment(encoder="given", pooling="", normalise=False)
    if base.encoder == "own":
        _check_given(config, base, model, section)
    given = {name: value for name in CHOICES if (value := getattr(config, name)) is not None}
    return replace(base, **given, given=",".join(given))


def changes(settings: Mapping[str, str | float], key: str) -> list[str]:
    """Why an index cannot be searched with its encoder: the model's own files say another treatment than it had.

    Args:
        settings: of the index.
        key: that names it, for messages.
    """
    made, model = Treatment.of(settings), str(settings["model"])
    # A preset was somebody's choice; before indexes stored their treatment, it may have been a guess.
    if made.encoder != "own" and "pooling" in settings:
        return []
    try:
        now = _own(model, f"{key}: its encoder")
    except DataError as error:
        return error.problems
    shared = [name for name in CHOICES if name not in made.given.split(",")]
    if now is None or all(getattr(made, name) == getattr(now, name) for name in shared):
        return []
    return [f"{key}: made with {made}; its encoder '{model}' says {now}; build it again with `mmrl index build`"]


def _named(config: DenseConfig, model: str, section: str) -> Treatment | None:
    """A preset or the model's own; None where neither is known."""
    if config.encoder is not None and config.encoder != "own":
        return PRESETS[config.encoder]
    family = _family(model)
    on_hub = not user_path(model).is_dir()
    if config.encoder is None and family and on_hub and model.partition("/")[0] == PUBLISHERS[family]:
        return PRESETS[family]
    own = _own(model, f"{section}model")
    if own is None and config.encoder == "own":
        raise DataError(
            f"{section}encoder: got own, but '{model}' has no {MODULES}; expected contriever, e5, or {section}pooling= "
            f"and {section}normalise="
        )
    return own or (PRESETS[family] if family else None)


def _family(model: str) -> str | None:
    name = Path(model).name.lower()
    return next((family for family, names in FAMILIES.items() if names.fullmatch(name)), None)


def _check_given(config: DenseConfig, own: Treatment, model: str, section: str) -> None:
    """Refuse what would contradict, or repeat, what the model's own files say."""
    why = f"'{model}' says it itself ({MODULES})"
    problems = []
    if config.pooling is not None:
        problems.append(f"{section}pooling: got {config.pooling}, but {why}: {own.pooling}; leave it out")
    if config.normalise is False and _has_normalise(model, f"{section}model"):
        problems.append(f"{section}normalise: got false, but {why}: its vectors have length 1; leave it out")
    if problems:
        raise DataError(problems)


def _own(model: str, key: str) -> Treatment | None:
    """What the model's files say; None: it has none.

    Raises:
        DataError: files that cannot be read, or a model of another kind (sparse, one vector a token).
    """
    modules = _read(model, MODULES, key)
    if modules is None:
        return None
    config = _read(model, MODEL_CONFIG, key) or {}
    kind = config.get("model_type") or "SentenceTransformer"
    if kind != "SentenceTransformer":
        hint = "; use task.retriever.name=colbert" if kind == "MultiVectorEncoder" else ""
        raise DataError(f"{key}: '{model}' is a {kind}, expected an encoder with one vector a text{hint}")
    similarity = config.get("similarity_fn_name") or "cosine"  # as sentence-transformers takes it
    if similarity not in ("cosine", "dot"):
        raise DataError(f"{key}: '{model}' is compared by {similarity}, expected cosine or dot (inner product)")
    try:
        prompts = {name: str(text) for name, text in (config.get("prompts") or {}).items() if text}
        own = Treatment(
            encoder="own",
            pooling=_pooling(model, modules, key),
            normalise=similarity == "cosine" or _has_normalise(model, key),
            query_prompt=prompts.get("query", ""),
            passage_prompt=next((prompts[n] for n in ("document", "passage", "corpus") if n in prompts), ""),
        )
    except (KeyError, TypeError, AttributeError):
        raise DataError(
            f"{key}: {model}: {MODULES} or {MODEL_CONFIG} is not as sentence-transformers writes it"
        ) from None
    # The files of E5's authors name no prompts, and its vectors are worth little without.
    if _family(model) == "e5" and not prompts:
        return replace(own, query_prompt=PRESETS["e5"].query_prompt, passage_prompt=PRESETS["e5"].passage_prompt)
    return own


def _pooling(model: str, modules: Any, key: str) -> str:
    place = next((m["path"] for m in modules if m["type"].endswith(".Pooling")), None)
    if place is None:
        return "own modules"
    config = _read(model, f"{place}/config.json", key) or {}
    mode = config.get("pooling_mode")
    if mode is None:
        flags = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean", "lasttoken": "lasttoken"}
        flags |= {"mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean_tokens": "weightedmean"}
        mode = [name for flag, name in flags.items() if config.get(f"pooling_mode_{flag}")] or "mean"
    return mode if isinstance(mode, str) else "+".join(mode)


def _has_normalise(model: str, key: str) -> bool:
    return any(m["type"].endswith(".Normalize") for m in _read(model, MODULES, key) or ())


def _read(model: str, name: str, key: str) -> Any:
    """A JSON file of a model; None where there is none, or where it is neither cached nor to be had."""
    model = encoder_source(model)
    folder = user_path(model)
    file: Path | None = folder / name
    if not folder.is_dir():
        file = _from_hub(model, name, key)
    if file is None or not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{key}: {model}: {name} cannot be read: {error}") from None


def _from_hub(model: str, name: str, key: str) -> Path | None:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    cached = try_to_load_from_cache(model, name)
    if isinstance(cached, str):
        return Path(cached)
    # Anything else but None is the hub's remembered word that there is no such file.
    if cached is not None or not hub_answers():
        return None
    try:
        return Path(hf_hub_download(model, name))
    except EntryNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{key}: {model}: cannot fetch {name}: {error}") from None
