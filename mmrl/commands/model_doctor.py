"""`mmrl doctor model=…`: what a run would do with a model, and how exactly, before there is a run."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.config import RlRunConfig, TrainConfig
from mmrl.models.selfcheck import Way
from mmrl.report.text import align, clean
from mmrl.run.build import check_model
from mmrl.run.settle import settle
from mmrl.system.files import dumps

if TYPE_CHECKING:
    from mmrl.models.template_facts import TemplateFacts


@dataclass(slots=True)
class Examined:
    """Facts of a model, in the order in which they are printed."""

    facts: dict[str, str] = field(default_factory=dict)
    ways: list[Way] = field(default_factory=list)
    """Results of the self-check."""
    notes: list[str] = field(default_factory=list)
    """What is said of it at the start of a run."""


class _Notes(logging.Handler):
    """Collects what a run would warn of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message once."""
        if (text := record.getMessage()) not in self.texts:
            self.texts.append(text)


def examine_model(config: RlRunConfig, *, as_json: bool) -> None:
    """Load a model as a run would, check every way to compute with it, and print what was found.

    Raises:
        ConfigError: it cannot be used.
    """
    log, notes = logging.getLogger("mmrl"), _Notes()
    # In the report, not above it.
    propagate, log.propagate = log.propagate, False
    log.addHandler(notes)
    try:
        found = _examined(settle(config).config)
    finally:
        log.removeHandler(notes)
        log.propagate = propagate
    found.notes = notes.texts
    if as_json:
        print(dumps(asdict(found), indent=1))
        return
    rows = [
        (f"check: {way.name}", f"differs by {way.largest:.1g} nats at most ({way.tokens} tokens)") for way in found.ways
    ]
    facts = [(name, clean(fact)) for name, fact in (*found.facts.items(), *rows)]
    print("\n".join([align(facts), "", *(f"note: {clean(note)}" for note in found.notes), "it can be used"]))


def _examined(config: RlRunConfig) -> Examined:
    from mmrl.engines.base import EngineSetup
    from mmrl.engines.embedded.architecture import unsupported
    from mmrl.engines.embedded.row_decoder import WORDS
    from mmrl.engines.embedded.transformers_engine import TransformersEngine
    from mmrl.models.adapter import targets_of
    from mmrl.models.load import load_model, load_tokenizer
    from mmrl.models.template_facts import template_facts
    from mmrl.trainer.settings import Settings
    from mmrl.trainer.tree_attention import unsupported_reason
    from mmrl.trainer.trl_trainer import MmrlTrainer

    section = config.model
    # As a run does before it makes a directory: files, adapter and context.
    check_model(config)
    tokenizer = load_tokenizer(section)
    model = load_model(section, config.hardware.device)
    text = model.config.get_text_config()
    found = Examined()
    native, tries = unsupported(model), unsupported_reason(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    template = template_facts(tokenizer)
    adapter = "none: all weights are trained" if section.lora is None else targets_of(model, section.lora).described
    positions = getattr(text, "max_position_embeddings", None)
    attention = str(model.config._attn_implementation)
    # The trainer first: with an adapter it wraps the model, and the engine serves what it has wrapped.
    with tempfile.TemporaryDirectory(prefix="mmrl-doctor-", ignore_cleanup_errors=True) as folder:
        settings = Settings.supervised(TrainConfig(packing=config.train.packing), section, config.seed)
        trainer = MmrlTrainer(
            model,
            tokenizer,
            settings,
            output_dir=Path(folder),
        )
        setup = EngineSetup(threads=config.hardware.threads, weights=section)
        engine = TransformersEngine(trainer.forwards.policy, tokenizer, config.engine.in_process, setup)
    # Those of generation_config.json behind the template's.
    ends = [token for token in tokenizer.convert_ids_to_tokens(sorted(engine.rules.eos_ids)) if token is not None]
    loop = WORDS[type(engine.decoder.loops[""])]
    found.ways = [*engine.ways, *trainer.ways]
    found.facts = {
        "model": f"{section.path} ({type(model).__name__}, {parameters / 1e6:,.0f} million parameters)",
        "computed in": f"{str(model.dtype).removeprefix('torch.')} on {config.hardware.device}, attention {attention}",
        "context": f"{positions:,} tokens" if positions else "no table of positions",
        "engine": loop + (f" ({native})" if native else ""),
        "update": "packed tries" if trainer.forwards.tries else f"padded rows ({tries or 'train.packing'})",
        "adapter": adapter,
        **_template(template, tuple(dict.fromkeys([*template.ends, *ends]))),
    }
    return found


def _template(facts: TemplateFacts, ends: tuple[str, ...]) -> dict[str, str]:
    """Return the rows of a chat template that was not refused: then its prompts are the tokenizer's own."""
    marks = ", ".join(facts.marks)
    return {
        "prompts": "the tokenizer's own, token for token",
        "system text": "has a role" if facts.system == "role" else "opens the user's turn",
        "thinking": "a mode (model.thinking)" if facts.thinking else "no mode",
        "tools": facts.no_tools or "written, and calls can be read",
        "ends of turn": ", ".join(ends),
        "date": "written (model.date)" if facts.dated else "not written",
        **({"parts of replies": f"{marks}: {'read' if facts.read else 'not read'}"} if marks else {}),
    }
