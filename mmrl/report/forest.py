"""The JSON form of a forest (version 1): read with every malformed record refused, and written.

What `mmrl credit rollouts=FILE` reads and what a journal exports (docs/algorithms.md has the form). Reading collects
all problems of a file and names each by record id.

A rollout whose error is model-caused and whose reward is null takes 0, the default failure score: such a rollout is
trained. With another error and no reward it is never credited.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl import errors
from mmrl.errors import DataError, nearest, unknown
from mmrl.records import LARGEST, Call, Forest, Rollout

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
    *("values", "logprobs", "ref_logprobs"),
)
ROLLOUT_KEYS = ("id", "example", "leaf", "reward", "error", "fork")


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
    reader = _Reader(source)
    forest = reader.forest(raw)
    if forest is None or reader.problems:
        raise DataError(reader.problems)
    return forest


def dump_forest(forest: Forest) -> dict[str, Any]:
    """The JSON form of a forest; what the form has no place for (texts, prompts, metrics) is left out."""
    teachers = {call.id: rollout.teacher for rollout in forest.rollouts for call in forest.path(rollout)}
    written = _written(forest)
    for call in written["calls"]:
        if call.get("teacher") is None and teachers.get(call["id"]) is not None:
            call["teacher"] = teachers[call["id"]]
        if "completion_ids" in call:
            del call["completion_tokens"]
    return written


def check_forest(forest: Forest, source: str) -> None:
    """Whether a forest that was not read from its JSON form is one that could be.

    Raises:
        DataError: as `parse_forest`.
    """
    reader = _Reader(source)
    reader.forest(_written(forest))
    if reader.problems:
        raise DataError(reader.problems)


def _written(forest: Forest) -> dict[str, Any]:
    """All fields that the form has a place for; reads single records only, so it ends whatever they say."""
    calls = []
    for call in forest.calls.values():
        record = {key: getattr(call, key) for key in CALL_KEYS if key != "completion_ids" or call.completion_ids}
        record = {key: list(value) if isinstance(value, tuple) else value for key, value in record.items()}
        calls.append({k: v for k, v in record.items() if v is not None or k in ("parent", "turn_reward")})
    rollouts = [{key: getattr(rollout, key) for key in ROLLOUT_KEYS} for rollout in forest.rollouts]
    return {"version": VERSION, "modules": list(forest.modules), "calls": calls, "rollouts": rollouts}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [key for key, _ in pairs]
        repeated = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"the key '{repeated}' occurs twice in the record with id {found.get('id')!r}")
    return found


@dataclass(slots=True)
class _Reader:
    """Reads one file; `where` is the record under way."""

    source: str
    problems: list[str] = field(default_factory=list)
    where: str = ""

    def problem(self, message: str) -> None:
        self.problems.append(f"{self.source}: {self.where}{': ' if self.where else ''}{message}")

    def forest(self, raw: Any) -> Forest | None:
        if not self._keys(raw, ("version", "modules", "calls", "rollouts"), required=True):
            return None
        if raw["version"] != VERSION or isinstance(raw["version"], bool):
            self.problem(f"version: got {raw['version']!r}, expected {VERSION}")
        modules = raw["modules"]
        names_ok = isinstance(modules, list) and all(isinstance(name, str) and name for name in modules)
        if not names_ok or not modules or len(set(modules)) != len(modules):
            self.problem(f"modules: got {modules!r}, expected a list of different names")
            return None
        for key in ("calls", "rollouts"):
            if not isinstance(raw[key], list):
                self.problem(f"{key}: got {type(raw[key]).__name__}, expected a list")
                return None
        calls = self._unique("call", [self._call(item, n, modules) for n, item in enumerate(raw["calls"])])
        rollouts = self._unique("rollout", [self._rollout(item, n, modules) for n, item in enumerate(raw["rollouts"])])
        if self.problems:
            return None
        ordered = self._ordered(calls)
        if not self.problems:
            self._paths(ordered)
            rollouts = {key: self._checked(rollout, ordered) for key, rollout in rollouts.items()}
            self._leaves(ordered, rollouts)
        return Forest(calls=ordered, rollouts=tuple(rollouts.values()), modules=tuple(modules))

    def _call(self, raw: Any, position: int, modules: Sequence[str]) -> Call | None:
        self.where = f"calls[{position}]"
        if not self._keys(raw, CALL_KEYS):
            return None
        self.where = f"call {raw.get('id')!r}"
        before = len(self.problems)
        module = self._text(raw, "module")
        if module is not None and module not in modules:
            self.problem(unknown("module", module, modules))
        ids = self._ids(raw)
        tokens = self._count(raw, "completion_tokens", default=None if ids is None else len(ids))
        if tokens is None and len(self.problems) == before:
            self.problem("expected completion_tokens or completion_ids")
        if ids is not None and tokens is not None and tokens != len(ids):
            self.problem(f"completion_tokens: got {tokens}, completion_ids has {len(ids)}")
        observed = self._count(raw, "observation_tokens", default=0) or 0
        lengths = (tokens or 0, (tokens or 0) + observed)
        record: dict[str, Any] = {
            "id": self._text(raw, "id"),
            "example": self._text(raw, "example"),
            "parent": self._text(raw, "parent", optional=True),
            "module": module,
            "invocation": self._count(raw, "invocation", default=0),
            "turn": self._count(raw, "turn", default=0),
            "prompt_tokens": self._count(raw, "prompt_tokens", default=None),
            "teacher": self._text(raw, "teacher", optional=True),
            "completion_tokens": tokens,
            "completion_ids": tuple(ids or ()),
            "observation_tokens": observed,
            "ok": self._flag(raw, "ok"),
            "present_fields": self._count(raw, "present_fields", default=0),
            "expected_fields": self._count(raw, "expected_fields", default=0),
            "penalty": self._number(raw, "penalty", default=0.0),
            "turn_reward": self._number(raw, "turn_reward"),
            **{key: self._numbers(raw, key, lengths) for key in ("values", "logprobs", "ref_logprobs")},
        }
        if len(self.problems) == before and record["present_fields"] > record["expected_fields"]:
            self.problem(
                f"present_fields: got {record['present_fields']} of {record['expected_fields']} expected_fields"
            )
        return Call(**record) if len(self.problems) == before else None

    def _rollout(self, raw: Any, position: int, modules: Sequence[str]) -> Rollout | None:
        self.where = f"rollouts[{position}]"
        if not self._keys(raw, ROLLOUT_KEYS):
            return None
        self.where = f"rollout {raw.get('id')!r}"
        before = len(self.problems)
        error = self._text(raw, "error", optional=True)
        fork = self._text(raw, "fork", optional=True)
        if error is not None and error not in FAILURES:
            self.problem(unknown("error", error, FAILURES))
        if fork is not None and fork not in modules:
            self.problem(unknown("fork", fork, modules))
        reward = self._number(raw, "reward")
        if reward is None and error in errors.MODEL_CAUSED:
            reward = 0.0
        if reward is not None and error in FAILURES and error not in errors.MODEL_CAUSED:
            self.problem(f"reward: got {reward:g} with error '{error}', which is never credited; expected null")
        record: dict[str, Any] = {
            "id": self._text(raw, "id"),
            "example": self._text(raw, "example"),
            "leaf": self._text(raw, "leaf", optional=True),
        }
        found = len(self.problems) == before
        return Rollout(**record, reward=reward, error=error, fork=fork) if found else None

    def _unique(self, what: str, records: Sequence[Any]) -> dict[str, Any]:
        """Records by id; duplicates are problems."""
        found: dict[str, Any] = {}
        for record in records:
            if record is None:
                continue
            self.where = f"{what} '{record.id}'"
            if record.id in found:
                self.problem("this id occurs twice")
            found[record.id] = record
        return found

    def _ordered(self, calls: Mapping[str, Call]) -> dict[str, Call]:
        """Calls with parents first, else in the file's order; unknown parents and cycles are problems."""
        ordered: dict[str, Call] = {}
        for call in calls.values():
            chain: list[Call] = []
            current: Call | None = call
            while current is not None and current.id not in ordered:
                self.where = f"call '{current.id}'"
                if current in chain:
                    self.problem(f"parent: a cycle ({' -> '.join(c.id for c in chain[chain.index(current) :])})")
                    return ordered
                chain.append(current)
                if current.parent is not None and current.parent not in calls:
                    self.problem(
                        f"parent: got '{current.parent}', which is no call{nearest(current.parent, list(calls))}"
                    )
                    break
                current = calls[current.parent] if current.parent is not None else None
            ordered.update((item.id, item) for item in reversed(chain))
        return ordered

    def _paths(self, calls: Mapping[str, Call]) -> None:
        """Parents belong to the same example, and invocations count the module's earlier calls on the path."""
        counts: dict[str, dict[str, int]] = {}
        for call in calls.values():
            self.where = f"call '{call.id}'"
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
            self.problem(f"leaf: got '{rollout.leaf}', which is no call{nearest(rollout.leaf, list(calls))}")
            return rollout
        leaf = calls[rollout.leaf]
        if leaf.example != rollout.example:
            self.problem(f"example: got '{rollout.example}', its leaf has '{leaf.example}'")
        return Rollout(
            id=rollout.id,
            example=rollout.example,
            leaf=rollout.leaf,
            reward=rollout.reward,
            error=rollout.error,
            fork=rollout.fork,
            teacher=leaf.teacher,
        )

    def _leaves(self, calls: Mapping[str, Call], rollouts: Mapping[str, Rollout]) -> None:
        """The outcome reward stands on the leaf, so a leaf has no turn reward of its own."""
        parents = {call.parent for call in calls.values()}
        for rollout in rollouts.values():
            leaf = calls.get(rollout.leaf or "")
            if leaf is not None and leaf.turn_reward is not None and leaf.id not in parents:
                self.where = f"call '{leaf.id}'"
                self.problem("turn_reward: got a number on the last call of a rollout, expected null there")

    def _keys(self, raw: Any, known: Sequence[str], required: bool = False) -> bool:
        if not isinstance(raw, dict):
            self.problem(f"got {type(raw).__name__}, expected an object")
            return False
        if "id" in raw and isinstance(raw["id"], str):
            self.where = f"{self.where} '{raw['id']}'"
        for key in raw:
            if key not in known:
                self.problem(f"{key}: unknown key{nearest(key, known)} (known: {', '.join(known)})")
        missing = [key for key in known if required and key not in raw]
        for key in missing:
            self.problem(f"{key}: missing")
        return not missing

    def _text(self, raw: Mapping[str, Any], key: str, optional: bool = False) -> str | None:
        value = raw.get(key)
        if not (isinstance(value, str) and value) and not (optional and value is None):
            self.problem(f"{key}: got {value!r}, expected a {'name or null' if optional else 'non-empty text'}")
            return None
        return value

    def _count(self, raw: Mapping[str, Any], key: str, default: int | None) -> int | None:
        value = raw.get(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST:
            self.problem(f"{key}: got {value!r}, expected a whole number from 0 to {MOST}")
            return default
        return value

    def _flag(self, raw: Mapping[str, Any], key: str) -> bool:
        value = raw.get(key, True)
        if not isinstance(value, bool):
            self.problem(f"{key}: got {value!r}, expected true or false")
        return bool(value)

    def _number(self, raw: Mapping[str, Any], key: str, default: float | None = None) -> float | None:
        value = raw.get(key)
        if value is None:
            return default
        if not _is_number(value):
            self.problem(f"{key}: got {value!r}, expected a finite number (of at most {LARGEST:g} in size) or null")
            return default
        return float(value)

    def _numbers(self, raw: Mapping[str, Any], key: str, lengths: tuple[int, int]) -> tuple[float, ...] | None:
        value = raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(_is_number(item) for item in value):
            self.problem(f"{key}: expected a list of finite numbers or null")
            return None
        if len(value) not in lengths:
            also = f" (or {lengths[1]} with observation tokens)" if lengths[1] != lengths[0] else ""
            self.problem(f"{key}: got {len(value)} numbers, expected {lengths[0]}, one per completion token{also}")
            return None
        return tuple(float(item) for item in value)

    def _ids(self, raw: Mapping[str, Any]) -> list[int] | None:
        value = raw.get("completion_ids")
        if value is None:
            return None
        if not isinstance(value, list) or any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in value):
            self.problem("completion_ids: expected a list of token ids")
            return None
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
