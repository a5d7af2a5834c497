"""The model card of a run: `README.md` with the hub's front matter, for checkpoints and exported folders.

Part of `report`. Everything in it is read from the run directory; folders of this machine are not named, since a card
is there to be published.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from mmrl.config.base import FETCHED, SHIPPED
from mmrl.config.other_stages import SFT
from mmrl.models.load import located
from mmrl.report.overview import Item, Overview
from mmrl.report.stats import Difference, compare_items, number, short, signed
from mmrl.report.tables import Rows, interval, markdown
from mmrl.system.files import JsonObject
from mmrl.system.objects import readable

PAPERS: Mapping[str, str] = {
    "grpo": "2402.03300",
    "ppo": "1707.06347",
    "mmgrpo": "2508.04660",
    **dict.fromkeys(("mhgpo_is", "mhgpo_fof", "mhgpo_rr", "mhgpo_fof_os", "mappo"), "2506.02718"),
    **dict.fromkeys(("grpo_mr", "mt_grpo", "mt_grpo_variable", "mt_ppo"), "2505.11821"),
    "ccpo": "2603.21563",
    "dr_mas": "2602.08847",
    "gigpo": "2505.10978",
    "igpo": "2510.14967",
    "tree_grpo": "2509.21240",
}
"""Algorithm -> arXiv number of the paper that it comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a card says beside what is in the run directory."""

    title: str
    step: int
    """Training steps done."""
    holds: str
    """What the folder holds, one sentence."""
    kind: str = "merged"
    """`merged` (full weights) or `adapter` (LoRA adapters)."""
    licence: str | None = None
    """Of the base model, as the hub abbreviates it; None: not known."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Module -> what it speaks with, in words; empty where all share one policy."""
    prompts: Sequence[str] = ()
    """Paragraphs about the program's prompts."""
    snippets: Mapping[str, str] = field(default_factory=dict)
    """Library -> code that uses the folder."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Split -> hub id of the data set, where it has one."""


def model_card(seen: Overview, facts: CardFacts) -> str:
    """The text of `README.md`."""
    base, revision, split = str(seen.get("model.path", "?")), seen.get("model.revision"), seen.split
    named = f"`{shown_path(base)}`" + (f" at `{revision}`" if revision else "")
    compared = _compared(seen, facts.step)
    temperature = seen.get("eval.temperature", 0.0)
    sections = {name: seen.config[name] for name in ("algo", "train", "task", "model", "eval") if name in seen.config}
    text = (
        _templates()
        .get_template("card.md")
        .render(
            facts=facts,
            front=front_matter(seen, facts),
            base=named,
            base_name=shown_path(base),
            how=_how(str(seen.get("algo.name", "?"))),
            task=str(seen.get("task.name", "?")),
            version=_version(seen),
            split=split,
            compared=_result_rows(seen, facts.step, compared) if compared is not None else None,
            count=next((difference.n for difference in (compared or {}).values()), 0),
            samples=int(seen.get("eval.samples", 1)),
            sampled=f"temperature {temperature}" if temperature else "greedy",
            evaluated=sorted(seen.items.get(split, {})),
            note=[sentence for sentence in seen.kind if sentence.startswith("Data: the embedded mini world")],
            speaks=[["module", "speaks with"], *([f"`{module}`", what] for module, what in facts.modules.items())],
            modules=seen.modules,
            training=_training(seen, facts, named),
            settings=yaml.safe_dump(_published(sections), sort_keys=False, allow_unicode=True).rstrip("\n"),
            made=_made(seen),
        )
    )
    return readable(text)


@cache
def _templates() -> Environment:
    """Of text, in which nothing is escaped."""
    templates = Environment(
        loader=PackageLoader("mmrl.report"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters["table"] = markdown
    return templates


def checkpoint_card(config: JsonObject, step: int) -> str:
    """`README.md` of a checkpoint: how its weights came about, in place of peft's empty form.

    Args:
        config: of the run; empty where the trainer's user stores none.
        step: steps done.
    """
    model, task, algo = (config.get(section) or {} for section in ("model", "task", "algo"))
    base, algorithm = _on_hub(str(model.get("path", ""))), str(algo.get("name", ""))
    head = {
        **({"base_model": base} if base and is_hub_id(base) else {}),
        "library_name": "peft" if model.get("lora") else "transformers",
        "pipeline_tag": "text-generation",
        "tags": [tag for tag in _tags(algorithm) if tag],
    }
    how = f" {_how(algorithm, paper=False)} on the task `{task.get('name')}`" if algorithm else ""
    named = f"`{shown_path(base)}`" if base else "a model"
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# Step {step}\n\n{named}, trained for {step} steps{how}, "
        "with mmrl. A checkpoint holds the state of the optimizer too. The weights for other libraries, with a card "
        f"that has data, settings and numbers: `mmrl export RUN_DIR out=FOLDER checkpoint={step}`.\n"
    )


def front_matter(seen: Overview, facts: CardFacts) -> str:
    """The block between `---` that the hub reads."""
    from huggingface_hub import EvalResult, ModelCardData

    base, task, split = _on_hub(str(seen.get("model.path", ""))), str(seen.get("task.name", "?")), seen.split
    last = next((record for record in seen.history if record["step"] == facts.step), {})
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=facts.data.get(split, f"mmrl-{task}"),
            dataset_name=f"{task}, {split}" + (" (the mini world of mmrl)" if _mini(seen, split) else ""),
            dataset_split=split,
            metric_type=name,
            metric_value=round(value, 4),
        )
        for name in seen.metric_names(split)
        if (value := number(last.get(f"eval/{split}/{name}"))) is not None
    ]
    algorithm = str(seen.get("algo.name", "?"))
    data = ModelCardData(
        # The hub takes names of its own alone here, so a folder's is left out.
        base_model=base if is_hub_id(base) else None,
        datasets=list(dict.fromkeys(facts.data.values())) or None,
        library_name="peft" if facts.kind == "adapter" else "transformers",
        license=facts.licence,
        pipeline_tag="text-generation",
        tags=[*_tags(algorithm), *([f"arxiv:{PAPERS[algorithm]}"] if algorithm in PAPERS else [])],
        eval_results=results or None,
        model_name=facts.title if results else None,
    )
    if is_hub_id(base):
        data["base_model_relation"] = "adapter" if facts.kind == "adapter" else "finetune"
    return data.to_yaml()


def _on_hub(base: str) -> str:
    """The hub id of a fetched model, else the base as it is."""
    return FETCHED.get(base, base)


def is_hub_id(base: str) -> bool:
    """Whether a model's name is one of the hub's and not a folder's."""
    return (
        base not in SHIPPED and base not in FETCHED and not Path(base).exists() and not base.startswith((".", "/", "~"))
    )


def shown_path(text: str) -> str:
    """A path without the folders of this machine: of a file or a folder its name alone."""
    return Path(text).name if text.startswith(("/", "~", "./", "../")) or Path(text).exists() else text


def _mini(seen: Overview, split: str) -> bool:
    return (seen.get("task.data") or {}).get(split) == "mini"


def _how(algorithm: str, paper: bool = True) -> str:
    """How weights were trained, in words."""
    if algorithm == SFT:
        return f"by supervised training (`{SFT}`)"
    number = PAPERS.get(algorithm) if paper else None
    link = f" ([arXiv {number}](https://arxiv.org/abs/{number}))" if number else ""
    return f"by reinforcement learning with `{algorithm}`{link}"


def _tags(algorithm: str) -> list[str]:
    """What the hub lists a model under."""
    return ["mmrl", "supervised", SFT] if algorithm == SFT else ["mmrl", "reinforcement-learning", algorithm]


def _version(seen: Overview) -> str:
    return str(seen.environment.get("versions", {}).get("mmrl", "?"))


def _compared(seen: Overview, step: int) -> dict[str, Difference] | None:
    """Metric -> the evaluation at `step` against the one before training; None where one was not made."""
    evaluated: Mapping[int, Sequence[Item]] = seen.items.get(seen.split, {})
    if 0 not in evaluated or step not in evaluated:
        return None
    resamples = int(seen.get("eval.bootstrap", 1000))
    return compare_items(evaluated[0], evaluated[step], int(seen.get("seed", 0)), resamples, seen.main_metric)


def _result_rows(seen: Overview, step: int, compared: Mapping[str, Difference]) -> Rows:
    records = {record["step"]: record for record in seen.history}
    rows = [["metric", "before", "after", "difference", ""]]
    for name, change in compared.items():
        key = f"eval/{seen.split}/{name}"
        ends = [_interval(records.get(at, {}), key) for at in (0, step)]
        rows.append([f"`{name}`", *ends, f"{signed(change.difference)} {interval(change)}", change.verdict])
    return rows


def _interval(record: JsonObject, key: str) -> str:
    low, high = (number(record.get(f"{key}_{end}")) for end in ("low", "high"))
    value = short(number(record.get(key)))
    return value if low is None or high is None else f"{value} [{short(low)}, {short(high)}]"


def _training(seen: Overview, facts: CardFacts, base: str) -> Rows:
    sources = seen.get("task.data") or {}
    data = {split: shown_path(str(source)) for split, source in sources.items() if split in ("train", seen.split)}
    counts = seen.summary.get("facts") or {}
    of = "sequences" if seen.get("algo.name") == SFT else "examples"
    return [
        ["", ""],
        ["base model", base],
        ["parameters trained", _trained(seen)],
        ["task", f"`{seen.get('task.name')}`"],
        *([["reward", f"`{seen.get('task.reward')}`"]] if seen.get("task.reward") else []),
        *([f"{split} data", _counted(source, counts.get(f"{split} items"))] for split, source in data.items()),
        ["algorithm", f"`{seen.get('algo.name')}`"],
        ["steps", f"{facts.step} of {seen.get('train.steps')}, {seen.get('train.batch_size')} {of} each"],
        ["seed", str(seen.get("seed"))],
    ]


def _counted(source: str, count: object) -> str:
    named = "the embedded mini world of mmrl" if source == "mini" else f"`{source}`"
    return f"{named} ({count} examples)" if count else named


def _trained(seen: Overview) -> str:
    lora = seen.get("model.lora")
    if not isinstance(lora, dict):
        return "all"
    return f"LoRA, r {lora.get('r')}, alpha {lora.get('alpha')}, on {', '.join(lora.get('targets') or ())}"


def _published(value: object) -> object:
    """A config without folders of this machine and addresses of its servers."""
    if isinstance(value, dict):
        return {
            name: "(an address)" if name == "url" and isinstance(inner, str) else _published(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_published(inner) for inner in value]
    return shown_path(value) if isinstance(value, str) and "/" in value else value


def _made(seen: Overview) -> Rows:
    environment = seen.environment
    versions = environment.get("versions") or {}
    source, folder = environment.get("mmrl_git"), environment.get("git")
    words = [_word(str(word)) for word in environment.get("command") or ()]
    rows = [["", ""], ["command", f"`{shlex.join(words)}`"], ["mmrl", f"{_version(seen)}{_commit(source)}"]]
    if folder and folder != source:
        rows.append(["started in a repository at", _commit(folder).removeprefix(", commit ")])
    return [
        *rows,
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items() if name != "mmrl")],
        ["Python", str(environment.get("python", "?"))],
        ["started", str(environment.get("started", "?"))],
        ["hardware", f"{seen.get('hardware.name', '?')}, {seen.get('hardware.device', '?')}"],
    ]


def _word(word: str) -> str:
    """A word of a command line without folders of this machine."""
    key, equals, value = word.partition("=")
    return f"{key}={shown_path(value)}" if equals else shown_path(word)


def _commit(state: object) -> str:
    if not isinstance(state, dict) or not state.get("commit"):
        return ""
    return f", commit `{state['commit'][:12]}`" + (" with changes" if state.get("dirty") else "")


ADDRESS = "http://127.0.0.1:8000/v1"
"""Where `mmrl serve` listens where no other address is set."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Those of adapters that vLLM takes."""


def snippets(
    folder: Path, names: Sequence[str], base: str, rank: int | None, *, modules: Sequence[str], program: str | None
) -> Iterator[tuple[str, str]]:
    """(library, code) for each.

    Args:
        folder: the export, or its name on the hub.
        names: folders below it, one for each set of weights; empty: it holds the weights itself.
        base: the base model of adapters.
        rank: of an adapter; None: full weights.
        modules: those that `mmrl serve` knows apart, where the folder says which one speaks with which weights.
        program: `task.prompt_layout` of the folder's `program.json`; None: it has none.
    """
    weights = f"{folder}/{names[0]}" if names else str(folder)
    code = (
        _templates()
        .get_template("snippets.jinja")
        .make_module(
            {
                "folder": folder,
                "weights": weights,
                "lora": Path(weights).name,
                "base": located(base) if base in SHIPPED or base in FETCHED else base,
                "rank": None if rank is None else next((known for known in RANKS if known >= rank), rank),
                # Whole models of several modules are served one at a time.
                "policy": weights if names and not modules else str(folder),
                "served": f"policy/{modules[0]}" if modules else "policy",
                "apart": bool(modules),
                "program": program,
                "address": ADDRESS,
            }
        )
    )
    for name, macro in (("transformers", "transformers"), ("vLLM", "vllm"), ("DSPy", "dspy"), ("openai", "openai")):
        yield name, str(getattr(code, macro)())
