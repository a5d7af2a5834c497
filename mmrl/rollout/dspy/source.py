"""The source of a user's `forward` and `aforward`, read for what could not be recorded when it runs.

Only what is plain to see is found: a call by its dotted name, in the methods that these two call by `self.name`. What
is hidden better ends its rollouts with the same sentence.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import dspy

COPYING = (dspy.BestOfN, dspy.Refine)
"""Modules that may be made while a program runs: they have no predictors of their own, and copies are known."""


def source_problems(part: dspy.Module, options: Collection[str]) -> Iterator[str]:
    """Each place that makes a predictor, sets an LM or adapter, or passes options other than `options`."""
    for method, file, tree, names in _methods(type(part)):
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda call: call.lineno):
            problem = _problem(call, names, options)
            if problem:
                yield f"{method} ({file}, line {call.lineno}) {problem}"


def _methods(kind: type) -> Iterator[tuple[str, str, ast.AST, Mapping[str, Any]]]:
    """Name, file, syntax tree (with the file's line numbers) and global names of each method that a run passes."""
    pending, seen = ["forward", "aforward"], set[str]()
    while pending:
        name = pending.pop(0)
        function = inspect.unwrap(getattr(kind, name)) if hasattr(kind, name) else None
        if name in seen or not inspect.isfunction(function) or function.__module__.startswith("dspy."):
            continue
        seen.add(name)
        try:
            lines, first = inspect.getsourcelines(function)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError):
            continue  # made in an interpreter, or no source is left: its rollouts will tell
        ast.increment_lineno(tree, first - 1)
        yield name, Path(function.__code__.co_filename).name, tree, {**vars(builtins), **function.__globals__}
        pending += [
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        ]


def _problem(call: ast.Call, names: Mapping[str, Any], options: Collection[str]) -> str | None:
    called = _value(call.func, names)
    if inspect.isclass(called) and issubclass(called, dspy.Module) and not issubclass(called, COPYING):
        return f"makes a {called.__name__}; make it in __init__ and keep it as an attribute, so that it has a name"
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    if called in (dspy.context, dspy.configure):
        key = next((key for key in ("lm", "adapter") if key in given), None)
        if key is not None:
            instead = "make a frozen model a tool of the task" if key == "lm" else "set it where the program is made"
            return f"sets another {key}, whose requests would not be recorded; {instead}"
    config = given.get("config")
    # Only of what is called on `self`: a dictionary named `config` may be anything elsewhere.
    if isinstance(config, ast.Dict) and called is None:
        keys = {key.value for key in config.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
        refused = sorted(keys - set(options))
        if refused:
            return f"sets {', '.join(refused)}; sampling is set by algo.* and eval.*: leave these out"
    return None


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The object behind a dotted name; None where there is none, or where it begins at a local one."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, names)
        return getattr(owner, node.attr, None) if inspect.ismodule(owner) or inspect.isclass(owner) else None
    return None
