"""Reading and writing forests: the JSON form (version 1), single records of a journal, and the check of the graph.

`mmrl credit rollouts=FILE` reads the form, `mmrl show RUN step=N --json` writes it (docs/algorithms.md describes it).
Types come from the record dataclasses; pydantic's errors become one line each, and all of a file are collected.

A rollout whose error is model-caused and whose reward is null takes 0, the default failure score: such a rollout is
trained. With another error and no reward it is never credited.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from types import UnionType
from typing import Annotated, Any, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError, create_model

from mmrl import errors
from mmrl.errors import DataError, nearest, unknown
from mmrl.records import LARGEST, Call, Forest, Rollout
from mmrl.system.files import JsonObject

VERSION = 1
FAILURES = tuple(
    sorted({kind.kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "kind")})
)
"""What `rollouts[].error` may say."""
MOST = 10_000_000
"""Largest count (tokens of a call, fields, turns): what is credited per token must fit into memory."""

CALL_KEYS = (
    *("id", "example", "parent", "module", "invocation", "turn", "prompt_tokens", "teacher", "completion_tokens"),
    *("completion_ids", "observation_tokens", "ok", "present_fields", "expected_fields", "penalty", "turn_reward"),
    *("values", "logprobs", "ref_logprobs", "facts"),
)
ROLLOUT_KEYS = ("id", "example", "leaf", "reward", "error", "fork", "counterfactuals")
SUGGESTIONS = 10
"""Problems of a file that say what was perhaps meant; calls of a cycle that are named."""
PER_TOKEN = ("values", "logprobs", "ref_logprobs")

Record = TypeVar("Record", Call, Rollout)


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("empty")
    return text


# `min_length` would refuse a lone surrogate, which JSON may hold and a model may write.
_Name = Annotated[str, AfterValidator(_not_empty)]
_Count = Annotated[int, Field(ge=0, le=MOST)]
_Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
_WHOLE = f"got {{}}, expected a whole number from 0 to {MOST}"
_FINITE = f"got {{}}, expected a finite number (of at most {LARGEST:g} in size) or null"
_FORM: Mapping[object, tuple[object, str]] = {
    str: (_Name, "got {}, expected a non-empty text"),
    str | None: (_Name | None, "got {}, expected a name or null"),
    bool: (bool, "got {}, expected true or false"),
    int: (_Count | None, _WHOLE),
    int | None: (_Count | None, _WHOLE),
    float: (_Number | None, _FINITE),
    float | None: (_Number | None, _FINITE),
    # The model is strict; JSON has no tuples, so the tuple itself may come as a list.
    tuple[int, ...]: (
        Annotated[tuple[Annotated[int, Field(ge=0)], ...], Strict(False)] | None,
        "expected a list of token ids",
    ),
    tuple[float, ...] | None: (
        Annotated[tuple[_Number, ...], Strict(False)] | None,
        "expected a list of finite numbers or null",
    ),
    Mapping[str, Any]: (dict[str, Any] | None, "got {}, expected names and values"),
    Mapping[str, float]: (dict[str, _Number] | None, "got {}, expected names and finite numbers"),
}
"""The form's rules: type of a record's field -> type in the file (null: the default), and what to say of others."""


def parse_forest(text: str, source: str) -> Forest:
    """The forest in `text`.

    Args:
        source: names the text in errors, such as its file.

    Raises:
        DataError: not JSON, or malformed records; one sentence per problem, each with the source and the record's id.
    """
    try:
        raw = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise DataError(f"{source}:{error.lineno}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source}: {error}") from None
    return _Reader(source).read(raw)


def dump_forest(forest: Forest) -> JsonObject:
    """The JSON form of a forest; what the form has no place for (texts, prompts, metrics) is left out."""
    teachers = {call.id: rollout.teacher for rollout in forest.rollouts for call in forest.path(rollout)}
    calls = [_call_form(call) for call in forest.calls.values()]
    for call in calls:
        # A call without a teacher of its own has that of its rollout.
        if call.get("teacher") is None and teachers.get(str(call["id"])) is not None:
            call["teacher"] = teachers[str(call["id"])]
        if "completion_ids" in call:
            del call["completion_tokens"]
    return _form(calls, forest)


def check_forest(forest: Forest, source: str) -> None:
    """Check a forest that was not read from its JSON form as if it had been.

    Raises:
        DataError: as `parse_forest`.
    """
    # From single records, not along paths: a damaged forest may have cycles.
    _Reader(source).read(_form([_call_form(call) for call in forest.calls.values()], forest))


def read_record(kind: type[Record], raw: JsonObject, source: str) -> Record:
    """One record of a journal: all its fields, with the types of the dataclass (no limits on values).

    Raises:
        DataError: one sentence per field that is unknown, missing or of another type, with source and record.
    """
    try:
        return kind(**dict(_JOURNAL[kind].model_validate(raw)))
    except ValidationError as error:
        where = f"{source}: {kind.__name__.lower()} {raw.get('id')!r}"
        raise DataError([f"{where}: {problem}" for problem in _problems(error, kind, raw)]) from None


def _call_form(call: Call) -> JsonObject:
    record = {key: getattr(call, key) for key in CALL_KEYS if key != "completion_ids" or call.completion_ids}
    record = {key: list(value) if isinstance(value, tuple) else value for key, value in record.items()}
    return _plain(record, ("parent", "turn_reward"))


def _plain(record: JsonObject, nullable: Sequence[str]) -> JsonObject:
    """Without nulls, but for keys that say so, and without empty mappings."""
    record = {key: dict(value) if isinstance(value, Mapping) else value for key, value in record.items()}
    return {key: value for key, value in record.items() if key in nullable or value not in (None, {})}


def _form(calls: list[JsonObject], forest: Forest) -> JsonObject:
    records = [{key: getattr(rollout, key) for key in ROLLOUT_KEYS} for rollout in forest.rollouts]
    rollouts = [_plain(record, ROLLOUT_KEYS[:-1]) for record in records]
    form = {"version": VERSION, "step": forest.step, "modules": list(forest.modules)}
    return form | {"calls": calls, "rollouts": rollouts}


def _no_duplicates(pairs: list[tuple[str, object]]) -> JsonObject:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [key for key, _ in pairs]
        repeated = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"the key '{repeated}' occurs twice in the record with id {record.get('id')!r}")
    return record


# --- single records


def _schema(kind: type[Call] | type[Rollout], keys: Sequence[str] = ()) -> type[BaseModel]:
    """A strict model of a record: `keys` by the rules of the form; without `keys` all fields, as a journal has them."""
    hints = get_type_hints(kind)
    absent: dict[object, object] = {str: ..., bool: True}
    form = {key: (_FORM[hints[key]][0], absent.get(hints[key])) for key in keys}
    journal = {
        item.name: (_as_written(hints[item.name]), ... if item.default is MISSING else item.default)
        for item in fields(kind)
    }
    config = ConfigDict(strict=True, extra="ignore" if keys else "forbid")
    return create_model(kind.__name__, __config__=config, **(form or journal))


def _as_written(hint: object) -> object:
    """The type that a journal has for the type of a field."""
    if get_origin(hint) is UnionType:
        return _as_written(get_args(hint)[0]) | None  # type: ignore[operator]
    if get_origin(hint) is tuple:
        return Annotated[hint, Strict(False)]
    if get_origin(hint) is Mapping:
        return dict[str, int | float | bool] if get_args(hint)[1] is float else dict
    # Numbers come back as a task gave them (1 stays 1), so that an export has the same bytes again.
    return int | float | bool if hint is float else hint


_FILE = {Call: _schema(Call, CALL_KEYS), Rollout: _schema(Rollout, ROLLOUT_KEYS)}
_JOURNAL = {Call: _schema(Call), Rollout: _schema(Rollout)}


def _problems(error: ValidationError, kind: type[Call] | type[Rollout], raw: JsonObject) -> Iterator[str]:
    """One sentence per field that pydantic refuses; several wrong elements of a list are one problem."""
    hints = get_type_hints(kind)
    # Errors of a union or of elements share the field; the last one stands for all.
    refused = {str(detail["loc"][0]): detail for detail in error.errors(include_url=False, include_input=False)}
    for key, detail in refused.items():
        if detail["type"] == "extra_forbidden":
            yield f"{key}: unknown key{nearest(key, list(hints))} (known: {', '.join(hints)})"
        elif hints[key] in _FORM:
            yield f"{key}: {_FORM[hints[key]][1].format(repr(raw.get(key)))}"
        else:
            yield f"{key}: got {raw.get(key)!r}, expected names and {'values' if key == 'facts' else 'numbers'}"


@dataclass(slots=True)
class _Reader:
    """Reads one file; `where` names the record that is being read."""

    source: str
    problems: list[str] = field(default_factory=list)
    where: str = ""

    def problem(self, message: str) -> None:
        self.problems.append(f"{self.source}: {self.where}{': ' if self.where else ''}{message}")

    def near(self, name: str, choices: Sequence[str]) -> str:
        # Of the first problems alone: it looks at every choice, and a file may be wrong throughout.
        return nearest(name, choices) if len(self.problems) < SUGGESTIONS else ""

    def read(self, raw: object) -> Forest:
        forest = self._forest(raw)
        if forest is None or self.problems:
            raise DataError(self.problems)
        return forest

    def _forest(self, raw: object) -> Forest | None:
        top = ("version", "modules", "calls", "rollouts")
        if not self._is_object(raw, (*top, "step")):
            return None
        for key in (missing := [key for key in top if key not in raw]):
            self.problem(f"{key}: missing")
        if missing:
            return None
        # True == 1 in Python.
        if raw["version"] != VERSION or isinstance(raw["version"], bool):
            self.problem(f"version: got {raw['version']!r}, expected {VERSION}")
        modules, calls, rollouts, step = raw["modules"], raw["calls"], raw["rollouts"], raw.get("step", 0)
        if type(step) is not int or not 0 <= step <= MOST:  # a truth value is an int to `isinstance`
            self.problem(f"step: {_WHOLE.format(repr(step))}")
        names_ok = isinstance(modules, list) and all(isinstance(name, str) and name for name in modules)
        if not isinstance(modules, list) or not names_ok or not modules or len(set(modules)) != len(modules):
            self.problem(f"modules: got {modules!r}, expected a list of different names")
            return None
        if not isinstance(calls, list) or not isinstance(rollouts, list):
            key, wrong = ("rollouts", rollouts) if isinstance(calls, list) else ("calls", calls)
            self.problem(f"{key}: got {type(wrong).__name__}, expected a list")
            return None
        by_id = self._by_id([self._call(item, number, modules) for number, item in enumerate(calls)])
        ends = self._by_id([self._rollout(item, number, modules) for number, item in enumerate(rollouts)])
        return None if self.problems else replace(self._graph(by_id, ends, modules), step=step)

    def _is_object(self, raw: object, known: Sequence[str]) -> TypeGuard[JsonObject]:
        if not isinstance(raw, dict):
            self.problem(f"got {type(raw).__name__}, expected an object")
            return False
        if isinstance(raw.get("id"), str):
            self.where = f"{self.where} '{raw['id']}'"
        for key in raw:
            if key not in known:
                self.problem(f"{key}: unknown key{self.near(key, known)} (known: {', '.join(known)})")
        return True

    def _fields(
        self, kind: type[Call] | type[Rollout], raw: object, position: int, keys: Sequence[str]
    ) -> JsonObject | None:
        """The values of a record's fields, without nulls; None where there are problems."""
        name = kind.__name__.lower()
        self.where = f"{name}s[{position}]"
        before = len(self.problems)
        if not self._is_object(raw, keys):
            return None
        self.where = f"{name} {raw.get('id')!r}"
        try:
            values = dict(_FILE[kind].model_validate(raw))
        except ValidationError as error:
            for problem in _problems(error, kind, raw):
                self.problem(problem)
        return None if len(self.problems) > before else {k: v for k, v in values.items() if v is not None}

    def _call(self, raw: object, position: int, modules: Sequence[str]) -> Call | None:
        before = len(self.problems)
        if (values := self._fields(Call, raw, position, CALL_KEYS)) is None:
            return None
        ids, tokens = values.get("completion_ids"), values.get("completion_tokens")
        if ids is None and tokens is None:
            self.problem("expected completion_tokens or completion_ids")
            return None
        if isinstance(ids, tuple):
            tokens = len(ids) if tokens is None else tokens
            if tokens != len(ids):
                self.problem(f"completion_tokens: got {tokens}, completion_ids has {len(ids)}")
        call = Call(**{"parent": None, **values, "completion_tokens": tokens})
        # Names are checked against the file's own list: a typo would else be a module that never learns.
        if call.module not in modules:
            self.problem(unknown("module", call.module, modules))
        # With `algo.obs=all` a critic also has a value for each observation token.
        lengths = (call.completion_tokens, call.completion_tokens + call.observation_tokens)
        for key in PER_TOKEN:
            numbers = getattr(call, key)
            if numbers is not None and len(numbers) not in lengths:
                also = f" (or {lengths[1]} with observation tokens)" if call.observation_tokens else ""
                self.problem(
                    f"{key}: got {len(numbers)} numbers, expected {lengths[0]}, one per completion token{also}"
                )
        if call.present_fields > call.expected_fields:
            self.problem(f"present_fields: got {call.present_fields} of {call.expected_fields} expected_fields")
        return call if len(self.problems) == before else None

    def _rollout(self, raw: object, position: int, modules: Sequence[str]) -> Rollout | None:
        before = len(self.problems)
        if (values := self._fields(Rollout, raw, position, ROLLOUT_KEYS)) is None:
            return None
        rollout = Rollout(**{"leaf": None, "reward": None, **values})
        if rollout.error is not None and rollout.error not in FAILURES:
            self.problem(unknown("error", rollout.error, FAILURES))
        elif rollout.error is not None and rollout.reward is not None and rollout.error not in errors.MODEL_CAUSED:
            self.problem(
                f"reward: got {rollout.reward:g} with error '{rollout.error}', which is never credited; expected null"
            )
        if rollout.fork is not None and rollout.fork not in modules:
            self.problem(unknown("fork", rollout.fork, modules))
        # The default failure score, as if the run had scored it.
        if rollout.reward is None and rollout.error in errors.MODEL_CAUSED:
            rollout = replace(rollout, reward=0.0)
        return rollout if len(self.problems) == before else None

    def _by_id(self, records: Sequence[Record | None]) -> dict[str, Record]:
        """Records by id; duplicates are problems."""
        by_id: dict[str, Record] = {}
        for record in filter(None, records):
            self.where = f"{type(record).__name__.lower()} '{record.id}'"
            if record.id in by_id:
                self.problem("this id occurs twice")
            by_id[record.id] = record
        return by_id

    def _graph(self, calls: Mapping[str, Call], rollouts: Mapping[str, Rollout], modules: Sequence[str]) -> Forest:
        ordered = self._ordered(calls)
        if not self.problems:
            self._paths(ordered)
            rollouts = {key: self._checked(rollout, ordered) for key, rollout in rollouts.items()}
            self._leaves(ordered, rollouts)
        return Forest(calls=ordered, rollouts=tuple(rollouts.values()), modules=tuple(modules))

    def _ordered(self, calls: Mapping[str, Call]) -> dict[str, Call]:
        """Calls with parents first, else in the file's order; unknown parents and cycles are problems."""
        # Depth first along parents; each call is visited once, and a chain that meets itself is a cycle.
        ordered: dict[str, Call] = {}
        for call in calls.values():
            chain: dict[str, Call] = {}
            current: Call | None = call
            while current is not None and current.id not in ordered:
                self.where = f"call '{current.id}'"
                if current.id in chain:
                    cycle = [*chain][[*chain].index(current.id) :][:SUGGESTIONS]
                    self.problem(f"parent: a cycle ({' -> '.join(cycle)})")
                    return ordered
                chain[current.id] = current
                if current.parent is not None and current.parent not in calls:
                    near = self.near(current.parent, list(calls))
                    self.problem(f"parent: got '{current.parent}', which is no call{near}")
                    break
                current = calls[current.parent] if current.parent is not None else None
            ordered.update(reversed(chain.items()))
        return ordered

    def _paths(self, calls: Mapping[str, Call]) -> None:
        """Parents belong to the same example, and invocations count the module's earlier calls on the path."""
        counts: dict[str, dict[str, int]] = {}
        for call in calls.values():
            self.where = f"call '{call.id}'"
            # Counts of modules on the path to the parent, which `ordered` has placed before.
            earlier = dict(counts[call.parent]) if call.parent is not None else {}
            if call.parent is not None and calls[call.parent].example != call.example:
                self.problem(f"example: got '{call.example}', its parent has '{calls[call.parent].example}'")
            if call.invocation != earlier.get(call.module, 0):
                self.problem(
                    f"invocation: got {call.invocation}, its path has {earlier.get(call.module, 0)} earlier calls of "
                    f"'{call.module}' (invocations count from 0)"
                )
            counts[call.id] = earlier | {call.module: earlier.get(call.module, 0) + 1}

    def _checked(self, rollout: Rollout, calls: Mapping[str, Call]) -> Rollout:
        """A rollout whose leaf exists and is of its example; its teacher is its calls' teacher."""
        self.where = f"rollout '{rollout.id}'"
        if rollout.leaf is None:
            if rollout.error is None:
                self.problem("leaf: got null without an error, expected the id of its last call")
            return rollout
        if rollout.leaf not in calls:
            self.problem(f"leaf: got '{rollout.leaf}', which is no call{self.near(rollout.leaf, list(calls))}")
            return rollout
        leaf = calls[rollout.leaf]
        if leaf.example != rollout.example:
            self.problem(f"example: got '{rollout.example}', its leaf has '{leaf.example}'")
        return replace(rollout, teacher=leaf.teacher)

    def _leaves(self, calls: Mapping[str, Call], rollouts: Mapping[str, Rollout]) -> None:
        """The outcome reward stands on the leaf, so a leaf has no turn reward of its own."""
        parents = {call.parent for call in calls.values()}
        for rollout in rollouts.values():
            leaf = calls.get(rollout.leaf or "")
            if leaf is not None and leaf.turn_reward is not None and leaf.id not in parents:
                self.where = f"call '{leaf.id}'"
                self.problem("turn_reward: got a number on the last call of a rollout, expected null there")
