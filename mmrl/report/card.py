"""The model card of a run: `README.md` with the hub's front matter, for checkpoints and exported folders.

Part of `report`. Everything in it is read from the run directory; folders of this machine are not named, since a card
is there to be published.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from mmrl.config.base import FETCHED, SHIPPED
from mmrl.config.other_stages import SFT
from mmrl.models.load import located
from mmrl.report.overview import Item, Overview
from mmrl.report.stats import Difference, compare_items, number, short, signed
from mmrl.report.tables import interval, markdown
from mmrl.system.files import JsonObject
from mmrl.system.objects import readable

PAPERS: Mapping[str, str] = {
    "grpo": "2402.03300",
    "ppo": "1707.06347",
    "mmgrpo": "2508.04660",
    **dict.fromkeys(("mhgpo_is", "mhgpo_fof", "mhgpo_rr", "mhgpo_fof_os", "mappo"), "2506.02718"),
    **dict.fromkeys(("grpo_mr", "mt_grpo", "mt_grpo_variable", "mt_ppo"), "2505.11821"),
}
"""Algorithm -> arXiv number of the paper that it comes from."""
UNKNOWN_LICENCE = (
    "The licence of `{base}` is not known to mmrl: no licence stands in its own card. Look it up before you share this."
)


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
    base, revision = str(seen.get("model.path", "?")), seen.get("model.revision")
    named = f"`{shown_path(base)}`" + (f" at `{revision}`" if revision else "")
    algorithm, task = str(seen.get("algo.name", "?")), str(seen.get("task.name", "?"))
    parts = [
        front_matter(seen, facts),
        f"# {facts.title}",
        f"{named}, trained for {facts.step} steps {_how(algorithm)} on the task `{task}`, with "
        f"mmrl {_version(seen)}. {facts.holds}",
    ]
    if facts.snippets:
        parts += ["## Use", *(f"{name}:\n\n```python\n{code}\n```" for name, code in facts.snippets.items())]
    parts += ["## Results", *_results(seen, facts.step)]
    parts += ["## Program and prompts", *_program(seen, facts)]
    parts += ["## Training", _training(seen, facts, named), "### Hyperparameters", _settings(seen)]
    parts += ["## How it was made", _made(seen)]
    licence = f"That of the base model: `{facts.licence}`." if facts.licence else UNKNOWN_LICENCE
    parts += ["## Licence", licence.format(base=shown_path(base))]
    return readable("\n\n".join(parts)) + "\n"


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
    return f"---\n{data.to_yaml()}\n---"


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


def _results(seen: Overview, step: int) -> list[str]:
    """Before and after with intervals, on the split that the run evaluates on."""
    split = seen.split
    evaluated: Mapping[int, Sequence[Item]] = seen.items.get(split, {})
    note = [sentence for sentence in seen.kind if sentence.startswith("Data: the embedded mini world")]
    if 0 not in evaluated or step not in evaluated:
        there = ", ".join(map(str, sorted(evaluated))) or "none"
        return [f"Step {step} was not evaluated on {split} (evaluated steps: {there}).", *note]
    resamples = int(seen.get("eval.bootstrap", 1000))
    compared = compare_items(evaluated[0], evaluated[step], int(seen.get("seed", 0)), resamples, seen.main_metric)
    records = {record["step"]: record for record in seen.history}
    rows = [["metric", "before", "after", "difference", ""]]
    for name, difference in compared.items():
        key = f"eval/{split}/{name}"
        rows.append([f"`{name}`", *(_interval(records.get(at, {}), key) for at in (0, step)), *_difference(difference)])
    count = next(iter(compared.values())).n if compared else 0
    samples = int(seen.get("eval.samples", 1))
    how = "greedy" if not seen.get("eval.temperature", 0.0) else f"temperature {seen.get('eval.temperature')}"
    return [
        f"Split `{split}`, {count} items, {samples} sample{'s' if samples > 1 else ''} each ({how}); means with 95 % "
        "bootstrap intervals over items, differences paired by item. Before: the base model in the same program.",
        markdown(rows),
        *note,
    ]


def _interval(record: JsonObject, key: str) -> str:
    low, high = (number(record.get(f"{key}_{end}")) for end in ("low", "high"))
    value = short(number(record.get(key)))
    return value if low is None or high is None else f"{value} [{short(low)}, {short(high)}]"


def _difference(compared: Difference) -> list[str]:
    return [f"{signed(compared.difference)} {interval(compared)}", compared.verdict]


def _program(seen: Overview, facts: CardFacts) -> list[str]:
    """The program's modules, which weights each speaks with, and the prompts."""
    parts = []
    if facts.modules:
        parts.append(markdown([["module", "speaks with"], *([f"`{m}`", what] for m, what in facts.modules.items())]))
    elif seen.modules:
        parts.append(f"Modules that share these weights: {', '.join(f'`{module}`' for module in seen.modules)}.")
    if facts.prompts:
        return [*parts, *facts.prompts]
    return [*parts, f"Prompts: those that the task `{seen.get('task.name')}` of mmrl {_version(seen)} ships with."]


def _training(seen: Overview, facts: CardFacts, base: str) -> str:
    sources = seen.get("task.data") or {}
    data = {split: shown_path(str(source)) for split, source in sources.items() if split in ("train", seen.split)}
    counts = seen.summary.get("facts") or {}
    of = "sequences" if seen.get("algo.name") == SFT else "examples"
    rows = [
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
    return markdown(rows)


def _counted(source: str, count: object) -> str:
    named = "the embedded mini world of mmrl" if source == "mini" else f"`{source}`"
    return f"{named} ({count} examples)" if count else named


def _trained(seen: Overview) -> str:
    lora = seen.get("model.lora")
    if not isinstance(lora, dict):
        return "all"
    return f"LoRA, r {lora.get('r')}, alpha {lora.get('alpha')}, on {', '.join(lora.get('targets') or ())}"


def _settings(seen: Overview) -> str:
    """The config of the run, but for what belongs to its machine."""
    sections = {name: seen.config[name] for name in ("algo", "train", "task", "model", "eval") if name in seen.config}
    return f"```yaml\n{yaml.safe_dump(_published(sections), sort_keys=False, allow_unicode=True)}```"


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


def _made(seen: Overview) -> str:
    environment = seen.environment
    versions = environment.get("versions") or {}
    source, folder = environment.get("mmrl_git"), environment.get("git")
    words = [_word(str(word)) for word in environment.get("command") or ()]
    rows = [["", ""], ["command", f"`{shlex.join(words)}`"], ["mmrl", f"{_version(seen)}{_commit(source)}"]]
    if folder and folder != source:
        rows.append(["started in a repository at", _commit(folder).removeprefix(", commit ")])
    rows += [
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items() if name != "mmrl")],
        ["Python", str(environment.get("python", "?"))],
        ["started", str(environment.get("started", "?"))],
        ["hardware", f"{seen.get('hardware.name', '?')}, {seen.get('hardware.device', '?')}"],
    ]
    return markdown(rows)


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
ASK = '[{"role": "user", "content": "Hello"}]'


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
    yield (
        "transformers",
        (
            "from transformers import pipeline\n"
            f'chat = pipeline("text-generation", model="{weights}")\n'
            f'print(chat({ASK}, max_new_tokens=64, do_sample=False, return_full_text=False)[0]["generated_text"])'
        ),
    )
    yield "vLLM", _vllm(weights, base, rank)
    # Whole models of several modules are served one at a time.
    policy = weights if names and not modules else str(folder)
    served = f"policy/{modules[0]}" if modules else "policy"
    yield "DSPy", f"import dspy  # after: mmrl serve policy={policy}\n{_dspy(folder, served, bool(modules), program)}"
    yield (
        "openai",
        (
            f"from openai import OpenAI  # after: mmrl serve policy={policy}\n"
            f'client = OpenAI(base_url="{ADDRESS}", api_key="none")\n'
            f'print(client.chat.completions.create(model="{served}", messages={ASK}).choices[0].message.content)'
        ),
    )


def _dspy(folder: Path, served: str, apart: bool, program: str | None) -> str:
    shared = program == "shared_first"
    first = "from mmrl.tasks.dspy.fields import shared_first\n" if shared else ""
    adapter = "adapter=shared_first(dspy.ChatAdapter())" if shared else ""
    loaded = f'program = Program(); program.load("{folder}/program.json")  # Program: your dspy.Module'
    # DSPy's cache knows policies by name alone, and the next one served has the same name.
    where = f'api_base="{ADDRESS}", api_key="none", cache=False'
    if program and apart:
        each = "for name, predictor in program.named_predictors():"
        layout = f"{first}dspy.configure({adapter})\n" if shared else ""
        return f'{layout}{loaded}\n{each} predictor.lm = dspy.LM(f"openai/policy/{{name}}", {where})'
    example = loaded if program else 'print(dspy.Predict("question -> answer")(question="Hello").answer)'
    configured = ", ".join(filter(None, (f'lm=dspy.LM("openai/{served}", {where})', adapter)))
    return f"{first}dspy.configure({configured})\n{example}"


def _vllm(weights: str, base: str, rank: int | None) -> str:
    if rank is None:
        return (
            "from vllm import LLM, SamplingParams\n"
            f'model = LLM("{weights}")\n'
            f"print(model.chat({ASK}, SamplingParams(max_tokens=64))[0].outputs[0].text)"
        )
    source = located(base) if base in SHIPPED or base in FETCHED else base
    # vLLM takes some ranks alone
    most = next((known for known in RANKS if known >= rank), rank)
    return (
        "from vllm import LLM, SamplingParams; from vllm.lora.request import LoRARequest\n"
        f'model = LLM("{source}", tokenizer="{weights}", enable_lora=True, max_lora_rank={most})\n'
        f'lora = LoRARequest("{Path(weights).name}", 1, "{weights}")\n'
        f"print(model.chat({ASK}, SamplingParams(max_tokens=64), lora_request=lora)[0].outputs[0].text)"
    )
