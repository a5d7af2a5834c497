"""Reading and writing forests: the JSON form (version 1), and the check of the graph.

`mmrl credit rollouts=FILE` reads the form, `mmrl show RUN step=N --json` writes it (docs/forest.md describes it).
pydantic reads the records; then what they say of each other is checked. Each of the two tells all it finds at once.

A rollout whose error is model-caused and whose reward is null takes 0, the default failure score: such a rollout is
trained. With another error and no reward it is never credited.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError

from mmrl import errors
from mmrl.errors import DataError, unknown
from mmrl.records import EMPTY, LARGEST, Call, Forest, Rollout
from mmrl.system.files import JsonObject

VERSION = 1
FAILURES = tuple(
    sorted({kind.kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "kind")})
)
"""Values of `rollouts[].error`."""
LARGEST_COUNT = 10_000_000
"""Largest count (tokens of a call, fields, turns): what is credited per token must fit into memory."""
LONGEST_CYCLE = 10
"""Calls of a cycle that are named."""


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("expected a text that is not empty")
    return text


def _bounded(number: float) -> float:
    if not abs(number) <= LARGEST:
        raise ValueError(f"expected a finite number, of at most {LARGEST:g} in size")
    return number


# `min_length` would refuse a lone surrogate, which JSON may hold and a model may write.
_Name = Annotated[str, AfterValidator(_not_empty)]
_Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
_Number = Annotated[float, AfterValidator(_bounded)]
# The models are strict; a tuple may come as a list, which JSON has in its place, and a mapping be of any kind.
_Numbers = Annotated[tuple[_Number, ...], Strict(False)]
_Ids = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Strict(False)]


class _Form(BaseModel):
    # From attributes: records of a journal are checked as those of a file are.
    model_config = ConfigDict(strict=True, extra="forbid", from_attributes=True)


class _Call(_Form):
    """Fields of a `Call` in the JSON form."""

    id: _Name
    example: _Name
    parent: _Name | None = None
    module: _Name
    invocation: _Count = 0
    turn: _Count = 0
    prompt_tokens: _Count | None = None
    teacher: _Name | None = None
    completion_tokens: _Count | None = None
    completion_ids: _Ids = ()
    observation_tokens: _Count = 0
    ok: bool = True
    present_fields: _Count = 0
    expected_fields: _Count = 0
    penalty: _Number = 0.0
    turn_reward: _Number | None = None
    values: _Numbers | None = None
    logprobs: _Numbers | None = None
    ref_logprobs: _Numbers | None = None
    distillation: _Numbers | None = None
    facts: Annotated[Mapping[str, Any], Strict(False)] = EMPTY

    @property
    def tokens(self) -> int:
        """Number of completion tokens, if known."""
        return len(self.completion_ids) or self.completion_tokens or 0

    def record(self) -> Call:
        """Convert to a `Call`, with the length of its completion."""
        return Call(**(dict(self) | {"completion_tokens": self.tokens}))


class _Rollout(_Form):
    """Fields of a `Rollout` in the JSON form."""

    id: _Name
    example: _Name
    leaf: _Name | None = None
    reward: _Number | None = None
    error: _Name | None = None
    fork: _Name | None = None
    counterfactuals: Annotated[Mapping[str, _Number], Strict(False)] = EMPTY

    def record(self, teacher: str | None) -> Rollout:
        """Convert to a `Rollout`; the default failure score stands for a reward, as if the run had scored it."""
        failed = self.reward is None and self.error in errors.MODEL_CAUSED
        return Rollout(**(dict(self) | {"reward": 0.0 if failed else self.reward, "teacher": teacher}))


class _File(_Form):
    """A forest file."""

    version: Literal[1]
    modules: Annotated[list[_Name], Field(min_length=1)]
    calls: list[_Call]
    rollouts: list[_Rollout]
    step: _Count = 0


def parse_forest(text: str, source: str) -> Forest:
    """Parse the forest in `text`.

    Args:
        source: names the text in errors, such as its file.

    Raises:
        DataError: not JSON, or malformed records; one sentence per problem, each with the source and the record's id.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source}: not JSON ({error})") from None
    return _read(raw, source)


def dump_forest(forest: Forest) -> JsonObject:
    """Convert a forest to its JSON form; what the form has no place for (texts, prompts, metrics) is left out.

    Raises:
        DataError: values of other types, out of a damaged journal.
    """
    teachers = {call.id: rollout.teacher for rollout in forest.rollouts for call in forest.path(rollout)}
    form = _checked(_records(forest), f"step {forest.step}").model_dump(mode="json", exclude_defaults=True)
    for call in form["calls"]:
        # A call without a teacher of its own has that of its rollout.
        if teachers.get(call["id"]) is not None:
            call.setdefault("teacher", teachers[call["id"]])
        if "completion_ids" in call:
            del call["completion_tokens"]
    return form


def check_forest(forest: Forest, source: str) -> None:
    """Check a forest that was not read from its JSON form as if it had been.

    Raises:
        DataError: as `parse_forest`.
    """
    _read(_records(forest), source)


def _records(forest: Forest) -> JsonObject:
    records = {"calls": list(forest.calls.values()), "rollouts": list(forest.rollouts)}
    return {"version": VERSION, "step": forest.step, "modules": list(forest.modules), **records}


def _checked(raw: Any, source: str) -> _File:
    try:
        return _File.model_validate(raw)
    except ValidationError as error:
        raise DataError([f"{source}: {problem}" for problem in _refused(error, raw)]) from None


def _read(raw: Any, source: str) -> Forest:
    file = _checked(raw, source)
    _refuse(_faults(file), source)
    calls = {call.id: call.record() for call in file.calls}
    _refuse(_links(file), source)
    calls = _ordered(calls, source)
    teachers = {call.id: call.teacher for call in file.calls}
    rollouts = tuple(rollout.record(teachers.get(rollout.leaf or "")) for rollout in file.rollouts)
    forest = Forest(calls=calls, rollouts=rollouts, modules=tuple(file.modules), step=file.step)
    _refuse(_paths(forest), source)
    return forest


def _refuse(problems: Iterable[str], source: str) -> None:
    if sentences := [f"{source}: {problem}" for problem in problems]:
        raise DataError(sentences)


def _refused(error: ValidationError, raw: Any) -> Iterable[str]:
    """Return a sentence per field that pydantic refuses; several wrong elements of a list are one problem."""
    problems: dict[tuple[object, ...], str] = {}
    for item in error.errors(include_url=False):
        where, loc = "", item["loc"]
        if len(loc) > 1 and loc[0] in ("calls", "rollouts"):
            record = raw[loc[0]][loc[1]]
            name = record.get("id") if isinstance(record, dict) else getattr(record, "id", None)
            where = f"{str(loc[0])[:-1]} {name!r}: " if isinstance(name, str) else f"{loc[0]}[{loc[1]}]: "
            loc = loc[2:]
        path = where + f"{'.'.join(map(str, loc))}: " * bool(loc)
        message = item["msg"].removeprefix("Value error, ")
        fault = "missing" if item["type"] == "missing" else f"got {item['input']!r}, {message[0].lower()}{message[1:]}"
        problems.setdefault((where, *loc[:1]), f"{path}{fault}")
    return problems.values()


# --- what records say of each other


def _faults(file: _File) -> Iterator[str]:
    """Yield names that occur twice or that nothing has, and fields of a record that contradict each other."""
    # Names are checked against the file's own list: a typo would else be a module that never learns.
    modules = file.modules
    if len(set(modules)) < len(modules):
        yield f"modules: got {modules!r}, expected a list of different names"
    for records in (file.calls, file.rollouts):
        ids = set()
        for record in records:
            where = f"{type(record).__name__[1:].lower()} '{record.id}'"
            if record.id in ids:
                yield f"{where}: this id occurs twice"
            ids.add(record.id)
            faults = _call_faults(record, modules) if isinstance(record, _Call) else _rollout_faults(record, modules)
            yield from (f"{where}: {fault}" for fault in faults)


def _call_faults(call: _Call, modules: Sequence[str]) -> Iterator[str]:
    if call.module not in modules:
        yield unknown("module", call.module, modules)
    if not {"completion_tokens", "completion_ids"} & call.model_fields_set:
        yield "expected completion_tokens or completion_ids"
        return
    count, observed = call.tokens, call.observation_tokens
    if call.completion_tokens not in (None, count):
        yield f"completion_tokens: got {call.completion_tokens}, completion_ids has {count}"
    for key in ("values", "logprobs", "ref_logprobs", "distillation"):
        numbers = getattr(call, key)
        # With `algo.obs=all` a critic also has a value for each observation token.
        if numbers is not None and len(numbers) not in (count, count + observed):
            also = f" (or {count + observed} with observation tokens)" if observed else ""
            yield f"{key}: got {len(numbers)} numbers, expected {count}, one per completion token{also}"
    if call.present_fields > call.expected_fields:
        yield f"present_fields: got {call.present_fields} of {call.expected_fields} expected_fields"


def _rollout_faults(rollout: _Rollout, modules: Sequence[str]) -> Iterator[str]:
    error = rollout.error
    if error is not None and error not in FAILURES:
        yield unknown("error", error, FAILURES)
    elif error is not None and rollout.reward is not None and error not in errors.MODEL_CAUSED:
        yield f"reward: got {rollout.reward:g} with error '{error}', which is never credited; expected null"
    if rollout.fork is not None and rollout.fork not in modules:
        yield unknown("fork", rollout.fork, modules)
    if rollout.leaf is None and error is None:
        yield "leaf: got null without an error, expected the id of its last call"


def _links(file: _File) -> Iterator[str]:
    """Yield parents and leaves that are no calls."""
    calls = {call.id for call in file.calls}
    links = [(f"call '{call.id}': parent", call.parent) for call in file.calls]
    links += [(f"rollout '{rollout.id}': leaf", rollout.leaf) for rollout in file.rollouts]
    for where, name in links:
        if name is not None and name not in calls:
            yield f"{where}: got '{name}', which is no call"


def _ordered(calls: Mapping[str, Call], source: str) -> dict[str, Call]:
    """Sort calls with parents first, else in the file's order.

    Raises:
        DataError: the first cycle among parents.
    """
    ordered: dict[str, Call] = {}
    for call in calls.values():
        # Depth first along parents; each call is visited once, and a chain that meets itself is a cycle.
        chain: dict[str, Call] = {}
        current: Call | None = call
        while current is not None and current.id not in ordered:
            if current.id in chain:
                cycle = [*chain][[*chain].index(current.id) :][:LONGEST_CYCLE]
                raise DataError(f"{source}: call '{current.id}': parent: a cycle ({' -> '.join(cycle)})")
            chain[current.id] = current
            current = calls[current.parent] if current.parent is not None else None
        ordered.update(reversed(chain.items()))
    return ordered


def _paths(forest: Forest) -> Iterator[str]:
    """Yield paths that change their example, miscount their modules, or have a turn reward beside the outcome's."""
    counts: dict[str, dict[str, int]] = {}
    for call in forest.calls.values():
        earlier = dict(counts[call.parent]) if call.parent is not None else {}
        if call.parent is not None and (parent_example := forest.calls[call.parent].example) != call.example:
            yield f"call '{call.id}': example: got '{call.example}', its parent has '{parent_example}'"
        if call.invocation != (expected := earlier.get(call.module, 0)):
            yield (
                f"call '{call.id}': invocation: got {call.invocation}, its path has {expected} earlier calls of "
                f"'{call.module}' (invocations count from 0)"
            )
        counts[call.id] = earlier | {call.module: expected + 1}
    for rollout in forest.rollouts:
        leaf = forest.calls.get(rollout.leaf or "")
        if leaf is not None and leaf.example != rollout.example:
            yield f"rollout '{rollout.id}': example: got '{rollout.example}', its leaf has '{leaf.example}'"
        # The outcome reward stands on the leaf, so a leaf has no turn reward of its own.
        if leaf is not None and leaf.turn_reward is not None and not forest.children[leaf.id]:
            yield f"call '{leaf.id}': turn_reward: got a number on the last call of a rollout, expected null there"
