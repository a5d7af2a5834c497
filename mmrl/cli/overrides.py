"""The words of a command that Hydra composes: sorted, parsed and judged one by one, and taken apart into jobs.

Hydra stops at the first word that it cannot read, some of them with a traceback; here each is named, all at once.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import NoReturn

from antlr4 import CommonTokenStream, InputStream, ParserRuleContext
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser

from mmrl.cli.arguments import CommandLine, find_repeated, sort_words
from mmrl.config.base import in_quotes, quoted_text, value_at
from mmrl.config.validate import COLON, IN_A_NAME, meant_keys
from mmrl.errors import ConfigError, refuse, unknown
from mmrl.store.policy import model_of, prompts_of
from mmrl.system.conf import GROUPS, options, row_keys


class _Flags(argparse.ArgumentParser):
    """Parser of Hydra's flags, whose own one ends the process at the first that it does not know."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


FLAGS = _Flags(add_help=False, allow_abbrev=False)
FLAGS.add_argument("-m", "--multirun", action="store_true")
FLAGS.add_argument("--config-dir", "-cd", action="append", default=[])
FLAGS.add_argument("--cfg", "-c", action="append", default=[], choices=["job", "full"])
NO_ROW = ("experiment=null", "experiment=")
"""The default, which Hydra has no words for: it takes null for no choice at all."""


def read_line(
    words: Sequence[str], command_keys: Collection[str] = (), names: bool = False, once: bool = True, single: str = ""
) -> CommandLine:
    """Sort the words after a command.

    Args:
        words: overrides, flags, and what the command takes besides.
        command_keys: keys of the command itself; Hydra does not see them, so their values need no quotes.
        names: True if the command takes words without a `=`.
        once: True if a config key may be given only once; the command's own keys always may.
        single: name of a command that neither sweeps nor prints a config; empty: it does.

    Raises:
        ConfigError: every word that cannot be read.
    """
    flags, rest = FLAGS.parse_known_args(words)
    config_dir, prints = flags.config_dir[0] if flags.config_dir else None, flags.cfg[0] if flags.cfg else ""
    positional, settings, unknown_flags = sort_words(rest)
    problems = [] if names else [f"{name}: expected key=value" for name in positional]
    problems += find_repeated(["--config-dir"] * len(flags.config_dir) + ["--cfg"] * len(flags.cfg))
    for flag in unknown_flags:
        suggestion = meant_keys(flag.partition("=")[0].lstrip("-").replace("-", "_"))
        hint = f"{suggestion} Keys are typed as KEY=VALUE" if suggestion else ""
        problems.append(f"{flag.partition('=')[0]}: unknown flag{hint} (known: -m, --config-dir, --cfg job|full)")
    # Not Path's own test, which raises for a name that is too long.
    problems += [f"--config-dir: no folder '{folder}'" for folder in flags.config_dir if not os.path.isdir(folder)]
    # Own keys are taken out before Hydra parses: a path or a list of names need not be valid Hydra grammar.
    command_pairs = [text.partition("=")[::2] for text in settings if text.partition("=")[0] in command_keys]
    problems += find_repeated([key for key, _ in command_pairs])
    texts = [text for text in settings if text.partition("=")[0] not in command_keys]
    overrides = parse([text for text in texts if text not in NO_ROW], problems)
    if once:
        # `~key` takes something out, and what is put in its place may have the same name.
        keys = [override.get_key_element().lstrip("+") for override in overrides if not override.is_delete()]
        problems += find_repeated([*keys, *("experiment" for text in texts if text in NO_ROW)])
    line = CommandLine(
        tuple(overrides), dict(command_pairs), tuple(positional), flags.multirun, config_dir, tuple(words), prints
    )
    idle = ("hydra.run.", "hydra.mode.") if line.multirun else ("hydra.", "hydra/")
    problems += [
        f"{key}: has no effect here; a run's folder is run.dir=, and Hydra drives sweeps alone (mmrl train -m)"
        for key in line.keys
        if f"{key}.".startswith(idle) and not line.prints
    ]
    problems += [f"{switch}: not for {single}" for switch in line.switches if single]
    refuse(dict.fromkeys(problems))
    return line


def parse(texts: Sequence[str], problems: list[str]) -> list[Override]:
    """Parse each text with Hydra; texts that it cannot read, and keys that one has twice, are added to `problems`."""
    # Word by word: the parser stops at the first word that it cannot read, and all of them are to be named.
    parser, parsed = OverridesParser.create(), []
    for text in texts:
        try:
            parsed += parser.parse_overrides([text])
        except HydraException as error:
            key, sign, value = text.partition("=")
            quotable = sign and value[:1] not in ("[", "{", "(", "'", '"')
            quoted = f"; in quotes: {shlex.quote(f'{key}={in_quotes(value)}')}" if quotable else ""
            problems.append(f"{text}: not an override that can be read ({str(error).splitlines()[0]}){quoted}")
        else:
            tree = OverrideParser(CommonTokenStream(OverrideLexer(InputStream(text)))).override()  # type: ignore[no-untyped-call]
            problems += _repeated_within(tree, key_of(text))
    return parsed


def _repeated_within(node: ParserRuleContext, path: str) -> list[str]:
    """Return a sentence for each key that a mapping of a parsed override has twice: Hydra's values keep the last."""
    children = [child for child in node.getChildren() if isinstance(child, ParserRuleContext)]
    if isinstance(node, OverrideParser.DictContainerContext):
        inner = [f"{path}.{pair.dictKey().getText().strip()}" for pair in children]
        colon = COLON if any(IN_A_NAME.match(pair.element().getText()) for pair in children) else ""
        problems = [f"{problem}{colon}" for problem in find_repeated(inner)]
    else:
        problems = []
        numbered = isinstance(node, OverrideParser.ListContainerContext)
        inner = [f"{path}.{number}" if numbered else path for number in range(len(children))]
    return problems + [
        text for child, key in zip(children, inner, strict=True) for text in _repeated_within(child, key)
    ]


def key_of(word: str) -> str:
    """Return the key that an override sets."""
    return word.lstrip("+~").partition("=")[0].partition("@")[0]


def value_text(override: Override) -> str | None:
    """Return the text after the `=`; None for `~key` alone."""
    _, equals, value = str(override.input_line).partition("=")
    return value if equals else None


def is_search(line: CommandLine) -> bool:
    """True if a sweeper chooses values as it goes (`hydra/sweeper=optuna`), so that its jobs cannot be listed."""
    sweepers = [value_text(override) for override in line.overrides if override.key_or_group == "hydra/sweeper"]
    return line.multirun and any(name not in (None, "basic") for name in sweepers)


def expand(line: CommandLine, problems: list[str]) -> list[list[str]]:
    """Return the overrides of each job: one without `-m`, else the cross product; of a search, its two extremes.

    A group that is given a choice it does not have is added to `problems` and left at its default, so that the rest
    of the command line can still be judged.

    Raises:
        ConfigError: a sweep without `-m`, or one that cannot be listed.
    """
    swept = [override.get_key_element() for override in line.overrides if override.is_sweep_override()]
    if swept and not line.multirun:
        raise ConfigError(
            f'{key}: got several values; run a sweep with -m, or quote a list: "{key}=[a,b]"' for key in swept
        )
    # A key that is given twice keeps its place and takes the later value, as in Hydra's own sweeper.
    axes: dict[str, list[tuple[Override, str | None]]] = {}
    search = is_search(line)
    for override in line.overrides:
        try:
            values = _values(override, search)
        except HydraException as error:
            raise ConfigError(f"{override.input_line}: {error}") from None
        axes[override.get_key_element()] = [(override, value) for value in values]
        repeats = [value for value in dict.fromkeys(values) if values.count(value) > 1 and not search]
        problems += [
            f"{override.key_or_group}: got {value} more than once, which would be the same run" for value in repeats
        ]
    # For a search the two ends of all keys at once: problems are reported before anything runs. In
    # a grid the last key varies fastest, as in Hydra's own sweeper, so that jobs have the same numbers there.
    jobs = zip(*axes.values(), strict=True) if search else itertools.product(*axes.values())
    return [
        [force_override(override, value) for override, value in job if not _left_out(override, value, line, problems)]
        for job in jobs
    ]


def _values(override: Override, search: bool) -> list[str | None]:
    """Return the texts after the `=`: each value of a sweep, both ends of a search; None: `~key` alone."""
    value = override.value()
    if isinstance(value, IntervalSweep):
        if not search:
            raise HydraException("an interval is for a sweeper that searches; add hydra/sweeper=optuna, or list values")
        return [str(value.start), str(value.end)]
    values: list[str | None]
    if override.is_sweep_override():
        values = list(override.sweep_string_iterator())
    else:
        values = [override.get_value_element_as_str() if value_text(override) is not None else None]
    return [values[0], values[-1]] if search else values


def _left_out(override: Override, value: str | None, line: CommandLine, problems: list[str]) -> bool:
    """True if Hydra must not see an override: no choice, or one that is not there (which is added to `problems`)."""
    key, choice = override.key_or_group, (value or "").strip("'\"")
    # `group@package=` puts a choice at another place of the config, which Hydra alone resolves.
    if override.package is not None:
        return False
    if override.is_delete():
        needed = key in GROUPS and key != "experiment"
        if needed:
            problems.append(f"{key}: got no name, expected one of {', '.join(options(key, line.config_dir))}")
        return needed
    if key not in GROUPS:
        # Hydra takes every folder of configs for a group, also those that other commands and choices read.
        if stray := not override.is_add() and options(key, line.config_dir):
            problems.append(f"{key}: unknown key; a run is composed of {', '.join(GROUPS)}")
        return bool(stray)
    if f"{key}={choice}" in NO_ROW:
        return True
    choices = options(key, line.config_dir)
    if choice in choices:
        return False
    missing = f"{key}: got '{choice}', and there is none; conf/{key}/{choice}.yaml in the current folder would be it"
    if key == "algo" and set(choice.split("+")) <= {*choices}:
        missing = (
            f"algo: got '{choice}', and a run has one algorithm; mmrl compare algo={choice} runs one after the other"
        )
        choices = []
    problems.append(unknown(key, choice, choices) if choices else missing)
    return True


def force_override(override: Override, value: str | None) -> str:
    """Return the override in a form that Hydra never refuses; pydantic names unknown keys afterwards."""
    key = override.key_or_group
    text = override.get_key_element() if value is None else f"{override.get_key_element()}={value}"
    # A choice of a group and Hydra's own keys take no `++`; with a `+` or `~` the user has chosen the form already.
    has_form = override.is_add() or override.is_force_add() or override.is_delete() or override.package is not None
    return text if has_form or key in GROUPS or key.startswith("hydra") or "/" in key else f"++{text}"


def policy_words(sections: Mapping[str, object], words: Sequence[str], config_dir: str | None) -> list[str]:
    """Return further words of an evaluation: `model=` and settings of its policy's run.

    What is typed, or set by a row (`experiment=`), stays.
    Else every policy would be evaluated with the limits of the default model, the tiny one.

    Args:
        sections: composition of the words as typed.
        words: the overrides of the job.
    """
    model, policy = sections.get("model"), sections.get("policy")
    user_keys = {*map(key_of, words), *row_keys(words, config_dir)}
    if policy is None and isinstance(model, Mapping) and user_keys & {"model", "model.path"}:
        # the model itself, as it is before any training
        return [f"++policy={hydra_value('policy', model['path'])}"] if isinstance(model.get("path"), str) else []
    if not isinstance(model, Mapping) or not isinstance(policy, str):
        return []
    elsewhere = value_at(sections, "engine.name") == "openai"  # then it is the name of an endpoint's model
    name, keys = model_of(policy)
    if elsewhere:
        name, keys = "hf", {}
    name = name if name in options("model", config_dir) else "hf"
    explicit = model.get("name") != "tiny" or name == "tiny" or "model" in user_keys
    added = [] if explicit else [f"model={name}"]
    if model.get("path") is None or (added and name == "hf"):
        # an endpoint's texts are read by a tokenizer that is here
        keys = {"path": "tiny" if elsewhere else policy, **keys}
    keys = {key: value for key, value in keys.items() if f"model.{key}" not in user_keys}
    dtype = keys.get("dtype", "auto" if added else model.get("dtype"))
    for key, fault in _faults(keys, str(dtype), value_at(sections, "hardware.device")):
        print(f"warning: model.{key}: left out {keys.pop(key)} of {policy}, {fault}", file=sys.stderr)
    added += [f"++model.{key}={hydra_value(key, value)}" for key, value in keys.items()]
    task, prompts = prompts_of(policy) if not elsewhere else (None, None)
    # Weights that were trained with prompts of their own are evaluated with these, on the task that they are for.
    if prompts is not None and value_at(sections, "task.name") == task and "task.prompts" not in user_keys:
        added.append(f"++task.prompts={hydra_value('task.prompts', prompts)}")
    return added


def _faults(keys: Mapping[str, object], dtype: str, device: object) -> Iterator[tuple[str, str]]:
    """Yield the settings of a policy's run with which nothing can be computed here, and why."""
    from mmrl.models.prepare import attention_fault, matmul_fault

    if "matmul" in keys and device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    faults = {
        "matmul": matmul_fault(str(keys.get("matmul")), dtype, str(device)),
        "attention": attention_fault(str(keys["attention"]), dtype) if "attention" in keys else "",
    }
    yield from ((key, fault) for key, fault in faults.items() if fault)


def refuse_beside_resume(line: CommandLine, *allowed: str) -> None:
    """Raise `ConfigError` for anything beside `resume=` except the keys in `allowed`."""
    line = line.without(allowed)
    pairs = [f"{key}={value}" for key, value in line.command_keys.items() if key != "resume"]
    if line.overrides or line.switches or pairs:
        extra = ", ".join([*pairs, *line.words, *line.switches])
        exception = f" (but {' '.join(allowed)}: further steps)" if allowed else ""
        raise ConfigError(f"resume: a run continues with the config it was started with{exception}; remove {extra}")


_NAME = re.compile(r"[\w/+.$%*@?|:=,(){}\[\] \t\\-]+", re.ASCII)
"""Names in a mapping that Hydra's grammar can read, some characters behind a backslash."""


def hydra_value(key: str, value: object) -> str:
    """Return a value in Hydra's grammar.

    Raises:
        ConfigError: it is no text, number, truth value, None, list or mapping of these, of numpy's and torch's either.
    """
    if isinstance(value, Enum):
        value = value.value
    if hasattr(value, "tolist"):  # a number or an array
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | os.PathLike):
        return quoted_text(os.fspath(value))
    if isinstance(value, Mapping):
        if unfit := [name for name in map(str, value) if not _NAME.fullmatch(name)]:
            raise ConfigError(f"{key}: got the name {unfit[0]!r}, which has no word; set it in a file of conf/")
        names = [re.sub(r"([\\(){}\[\]:=, \t])", r"\\\1", str(name)) for name in value]
        values = [hydra_value(key, inner) for inner in value.values()]
        return "{" + ",".join(map(":".join, zip(names, values, strict=True))) + "}"
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return f"[{','.join(hydra_value(key, inner) for inner in value)}]"
    raise ConfigError(f"{key}: got a {type(value).__name__}, expected text, a number, true, false, None or a list")
