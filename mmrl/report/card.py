"""The model card of a run: `README.md` with the hub's front matter, for checkpoints and exported folders.

Part of `report`. Everything in it is read from the run directory; folders of this machine are not named, since a card
is there to be published.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mmrl.config.base import SHIPPED, path_override
from mmrl.config.sft import SFT
from mmrl.models.load import local_path
from mmrl.report.html import templates
from mmrl.report.overview import Item, Overview
from mmrl.report.stats import number
from mmrl.report.tables import before_after_rows, markdown
from mmrl.system.objects import display_name

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

PAPERS: Mapping[str, str] = {
    "grpo": "2402.03300",
    "ppo": "1707.06347",
    "mmgrpo": "2508.04660",
    **dict.fromkeys(("mhgpo_is", "mhgpo_fof", "mhgpo_rr", "mhgpo_fof_os", "mappo"), "2506.02718"),
    **dict.fromkeys(("grpo_mr", "mt_grpo", "mt_grpo_variable", "mt_ppo"), "2505.11821"),
    "distill": "2306.08543",
    "c3": "2603.06859",
    "ccpo": "2603.21563",
    "dr_mas": "2602.08847",
    "gigpo": "2505.10978",
    "igpo": "2510.14967",
    "tree_grpo": "2509.21240",
}
"""Algorithm -> arXiv number of the paper that it comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """Facts of a card that are not in the run directory."""

    title: str
    step: int
    holds: str
    kind: str = "merged"
    """`merged` (full weights) or `adapter` (LoRA adapters)."""
    licence: str | None = None
    """The base model's, as the hub abbreviates it; None: not known."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Module -> what it speaks with, in words; empty where all share one policy."""
    prompts: Sequence[str] = ()
    snippets: Mapping[str, str] = field(default_factory=dict)
    """Library -> code that uses the folder."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Split -> hub id of the data set, where it has one."""


def model_card(overview: Overview, facts: CardFacts) -> str:
    """Return the text of `README.md`."""
    evaluated: Mapping[int, Sequence[Item]] = overview.items.get(overview.split, {})
    # Both evaluations of the split, or no numbers.
    compared = overview.compared(0, facts.step) if {0, facts.step} <= evaluated.keys() else {}
    sections = {
        name: overview.config[name] for name in ("algo", "train", "task", "model", "eval") if name in overview.config
    }
    template = templates().get_template("card.md")
    return display_name(
        template.render(
            overview=overview,
            facts=facts,
            front=_front_matter(overview, facts).to_yaml(),
            base=str(overview.get("model.path", "?")),
            method=_method_text(str(overview.get("algo.name", "?"))),
            shorten_path=shorten_path,
            compared=markdown(before_after_rows(compared)),
            count=next((difference.n for difference in compared.values()), 0),
            evaluated=sorted(evaluated),
            settings=yaml.safe_dump(_published(sections), sort_keys=False, allow_unicode=True).rstrip("\n"),
            command=shlex.join(shorten_path(str(word)) for word in overview.environment.get("command") or ()),
        )
    )


def _front_matter(overview: Overview, facts: CardFacts) -> ModelCardData:
    """Return the block between `---` that the hub reads."""
    from huggingface_hub import EvalResult, ModelCardData

    task, split, sources = str(overview.get("task.name", "?")), overview.split, overview.get("task.data") or {}
    mini = sources.get(split) == "mini" and "mini world" in overview.stated_data
    last = next((record for record in overview.history if record["step"] == facts.step), {})
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=facts.data.get(split, f"mmrl-{task}"),
            dataset_name=f"{task}, {split}" + (" (the mini world of mmrl)" if mini else ""),
            dataset_split=split,
            metric_type=name,
            metric_value=round(value, 4),
        )
        for name in overview.metric_names(split)
        if (value := number(last.get(f"eval/{split}/{name}"))) is not None
    ]
    algorithm, base = str(overview.get("algo.name", "?")), str(overview.get("model.path", ""))
    kind = {SFT: "supervised", "distill": "distillation"}.get(algorithm, "reinforcement-learning")
    paper = [f"arxiv:{PAPERS[algorithm]}"] if algorithm in PAPERS else []
    adapter = facts.kind == "adapter"
    # The hub accepts only its own names here, so a folder's name is left out.
    known: dict[str, Any] = {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    return ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["mmrl", kind, algorithm, *paper],
        datasets=list(dict.fromkeys(facts.data.values())) or None,
        license=facts.licence,
        eval_results=results or None,
        model_name=facts.title if results else None,
        **(known if base and is_hub_id(base) else {}),
    )


def is_hub_id(base: str) -> bool:
    """Return True for a model's name on the hub, False for a folder's."""
    folder = Path(base).exists() or base.startswith((".", "/", "~"))
    return not (folder or base in SHIPPED)


def shorten_path(text: str) -> str:
    """Shorten a path, or that of `KEY=PATH`, by the folders of this machine: of a file or a folder its name alone."""
    key, equals, path = text.rpartition("=")
    local = path.startswith(("/", "~", "./", "../")) or Path(path).exists()
    return f"{key}{equals}{Path(path).name}" if local else text


def _method_text(algorithm: str) -> str:
    """Describe how the weights were trained."""
    number = PAPERS.get(algorithm)
    link = f" ([arXiv {number}](https://arxiv.org/abs/{number}))" if number else ""
    kinds = {SFT: f"supervised training (`{SFT}`)", "distill": "on-policy distillation (`distill`)"}
    return f"by {kinds.get(algorithm, f'reinforcement learning with `{algorithm}`')}{link}"


def _published(value: object) -> object:
    """Strip a config of folders of this machine and addresses of its servers."""
    if isinstance(value, dict):
        return {
            name: "(an address)" if name == "url" and isinstance(inner, str) else _published(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_published(inner) for inner in value]
    return shorten_path(value) if isinstance(value, str) and "/" in value else value


ADDRESS = "http://127.0.0.1:8000/v1"
"""Default address of `mmrl serve`."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM takes."""


def snippets(
    folder: Path,
    names: Sequence[str],
    base: str,
    rank: int | None,
    *,
    modules: Sequence[str],
    program: str | None,
    revision: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield (library, code) pairs.

    Args:
        folder: the export, or its name on the hub.
        names: folders below it, one for each set of weights; empty: it holds the weights itself.
        base: the base model of adapters.
        revision: the base's on the hub; None: its newest, or a folder.
        rank: of an adapter; None: full weights.
        modules: those that `mmrl serve` knows apart, where the folder says which one speaks with which weights.
        program: `task.prompt_layout` of the folder's `program.json`; None: it has none.
    """
    weights = f"{folder}/{names[0]}" if names else str(folder)
    values = {
        "folder": folder,
        "weights": weights,
        "lora": Path(weights).name,
        "base": local_path(base) if base in SHIPPED else base,
        "revision": f', revision="{revision}"' if revision else "",
        "rank": None if rank is None else next((supported for supported in RANKS if supported >= rank), rank),
        # Whole models of several modules are served one at a time.
        "policy": shlex.quote(path_override("policy", weights if names and not modules else folder)),
        "served": f"policy/{modules[0]}" if modules else "policy",
        "apart": bool(modules),
        "program": program,
        "address": ADDRESS,
    }
    code = templates().get_template("snippets.jinja").make_module(values)
    for name in ("transformers", "vLLM", "DSPy", "openai"):
        yield name, str(getattr(code, name.lower())())
