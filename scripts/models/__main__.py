"""What mmrl does with other people's models: the tables of docs/models.md.

    python -m scripts.models                   measure every architecture and template, write the page (three minutes)
    python -m scripts.models templates         the templates alone (seconds)
    python -m scripts.models qwen3_next bert   print what is measured of these architectures

An architecture is a model type of transformers, as a tiny random instance.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from mmrl.config import ModelConfig
from mmrl.errors import ConfigError
from mmrl.models.load import load_tokenizer
from mmrl.models.template_facts import template_facts
from scripts.docs import code, filled
from scripts.models.architectures import BEYOND, architectures
from scripts.models.known import DIFFERS, PARTLY, REFUSED
from scripts.models.measure import TOLERANCE, measure, quiet
from scripts.models.templates import save_tokenizer, template_names

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LOOPS = {
    "the native decoder": "native decoder",
    "the model's own layers over shared prefixes": "its own layers, shared prefixes once",
    "the model's own forward, shared prefixes once": "its own forward, shared prefixes once",
    "generation by the model's own forward": "its own forward, with its cache",
    "generation without a cache": "its own forward, without a cache",
}
"""What the engine says of its way -> words of the table."""
REASONS = {
    "are not in its files": "the text class does not find its weights in such files",
    DIFFERS: "by the self-check: a token's numbers depend on what follows it",
}
"""Words of a refusal that are no sentence by themselves -> a reason."""


def architecture_table() -> str:
    """Measure every architecture; those of one line behave alike."""
    rows: dict[tuple[str, ...], list[str]] = {}
    refused: dict[str, list[str]] = {}
    for name in architectures():
        found = measure(name)
        first = found.get("load", found.get("engine"))
        if isinstance(first, str):
            refused.setdefault(REASONS.get(REFUSED[name], REFUSED[name]), []).append(name)
            continue
        update = verdict([found.get(way, found.get("update", "")) for way in ("padded", "training", "gradient")])
        adapter = verdict([found.get("adapter", "")])
        if "no" in (update, adapter):
            adapter = f"refused: {PARTLY[name][1]}"
        row = (LOOPS[str(found["loop"])], update, "yes" if "tries" in found else "no", adapter)
        rows.setdefault(row, []).append(name)
    for name, reason in BEYOND.items():
        refused.setdefault(f"not tried: {reason}", []).append(name)
    (most, names), *order = sorted(rows.items(), key=lambda item: -len(item[1]))
    lines = ["| engine | update | tries | adapter | architectures |", "|---|---|---|---|---|"]
    lines.append(f"| {' | '.join(most)} | all {len(names)} others |")
    lines += [f"| {' | '.join(row)} | {code(names)} |" for row, names in order]
    lines += ["", "| refused | architectures |", "|---|---|"]
    return "\n".join(lines + [f"| {reason} | {code(names)} |" for reason, names in refused.items()])


def verdict(numbers: Iterable[float | str]) -> str:
    """Whether all of them agree; a gradient's tolerance is its own, and the tests hold it."""
    return "yes" if all(isinstance(value, float) and value <= 10 * TOLERANCE for value in numbers) else "no"


def template_table() -> str:
    """The facts of every chat template of TRL, as `mmrl doctor` prints them."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in template_names():
        rows.setdefault(template_row(name), []).append(name)
    lines = ["| prompt | tools | thinking | templates |", "|---|---|---|---|"]
    order = sorted(rows.items(), key=lambda item: (item[0][0] != "as written", -len(item[1])))
    return "\n".join(lines + [f"| {' | '.join(row)} | {code(names)} |" for row, names in order])


def template_row(name: str) -> tuple[str, ...]:
    """Prompt, tools and thinking of a template."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(name, Path(folder))
        (Path(folder) / "config.json").write_text('{"model_type": "llama"}')
        try:
            facts = template_facts(load_tokenizer(ModelConfig(name="x", path=folder)))
        except ConfigError as error:
            return (f"refused: it {re.split(r'chat template of .*?. |; ', str(error))[1]}", "", "")
    extras = ["system text opens the user's turn"] if facts.system == "merged" else []
    extras += ["writes the date"] if facts.dated else []
    extras += ["earlier replies otherwise"] if any("earlier replies" in note for note in facts.notes) else []
    tools = "yes" if not facts.no_tools else "not written" if "does not write" in facts.no_tools else "not read back"
    thinking = ("a mode" if facts.thinking else "") + (", split off" if facts.marks and facts.read else "")
    return "; ".join(["as written", *extras]), tools, thinking.removeprefix(", ")


def show(name: str, found: Mapping[str, float | str]) -> None:
    """Print what was measured of an architecture, a line for each way."""
    print(name)
    for way, value in found.items():
        print(f"  {way:14} {value:.1e}" if isinstance(value, float) else f"  {way:14} {value}")


def main(arguments: list[str]) -> int:
    """Write the page, or print what is measured of the named architectures."""
    quiet()
    parts = {"architectures": architecture_table, "templates": template_table}
    chosen = [name for name in arguments if name in parts] if arguments else [*parts]
    if unknown := {*arguments} - {*parts, *architectures()}:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; expected templates, or some of {architectures()}")
    for name in sorted({*arguments} - {*parts}):
        show(name, measure(name))
    for name in chosen:
        text = filled(PAGE.read_text(encoding="utf-8"), name, parts[name](), by="models")
        PAGE.write_text(text, encoding="utf-8")
        print(f"written: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
