"""Follows one parameter through the calls that pass it on, depth first, as a newcomer would read it.

The rule: from the function where the walk starts, the value travels on where a call hands it over, by position or by
keyword, as a bare name or as what a call made of it that returns the same kind (`settle(config)`,
`config.model_copy(...)`), to a function, method (`self.name(...)`) or class of the package. In a class it is also the
attribute that it was stored in (`self.config`), read in the order of the methods. A section (`config.model`) given to a
parameter annotated with a `...Config` is a stay too, but is not followed from there. Each (function, parameter) is
visited once. Calls through objects whose type only a type checker knows are not followed.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from scripts.house_tree import Function, Module, Modules, bindings


@dataclass(frozen=True)
class Stay:
    """A function that the value reaches, and the name that it has there."""

    module: str
    function: str
    """Qualified by its class; of a class without `__init__` the class."""
    parameter: str


@dataclass(frozen=True)
class Place:
    """A function or class by its definition."""

    module: Module
    node: Function | ast.ClassDef
    owner: ast.ClassDef | None = None
    """The class of a method."""

    @property
    def name(self) -> str:
        """Its name within the module."""
        return f"{self.owner.name}.{self.node.name}" if self.owner else self.node.name


@dataclass
class Walk:
    """One trip through the package."""

    modules: Modules
    stays: list[Stay] = field(default_factory=list)

    def locate(self, module: str, name: str, depth: int = 0) -> Place | str | None:
        """What `name` of `module` is: a definition, a module's name, or None if it is not of this package."""
        if f"{module}.{name}" in self.modules:
            return f"{module}.{name}"
        if module not in self.modules or depth > 8:
            return None
        here = self.modules[module]
        if name in here.definitions:
            return Place(here, here.definitions[name])
        return self._bound(here.imported.get(name), depth)

    def _bound(self, bound: tuple[str, str | None] | None, depth: int) -> Place | str | None:
        """What an import has bound, through the re-exports of packages."""
        if bound is None:
            return None
        return bound[0] if bound[1] is None else self.locate(bound[0], bound[1], depth + 1)

    def callee(self, call: ast.Call, place: Place) -> Place | None:
        """The function or class that `call`, written in `place`, calls."""
        parts = dotted(call.func)
        if not parts:
            return None
        if parts[0] in ("self", "cls") and place.owner is not None:
            return self.method(place.module, place.owner, parts[1]) if len(parts) == 2 else None
        local = bindings(place.node, place.module).get(parts[0])
        target = self._bound(local, 0) if local else self.locate(place.module.name, parts[0])
        for part in parts[1:]:
            target = self.locate(target, part) if isinstance(target, str) else None
        return target if isinstance(target, Place) else None

    def method(self, module: Module, owner: ast.ClassDef, name: str) -> Place | None:
        """A method of a class or of its bases in the package."""
        for node in owner.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return Place(module, node, owner)
        for base in self._bases(module, owner):
            if isinstance(base.node, ast.ClassDef) and (place := self.method(base.module, base.node, name)):
                return place
        return None

    def _bases(self, module: Module, owner: ast.ClassDef) -> Iterator[Place]:
        for base in owner.bases:
            parts = dotted(base)
            place = self.locate(module.name, parts[0]) if len(parts) == 1 else None
            if isinstance(place, Place) and place.node is not owner:
                yield place

    def parameters(self, place: Place) -> dict[str, ast.expr | None]:
        """Names and annotations in order: a function's arguments, a class's fields."""
        if isinstance(place.node, ast.ClassDef):
            if init := self.method(place.module, place.node, "__init__"):
                return self.parameters(init)
            result: dict[str, ast.expr | None] = {}
            for base in self._bases(place.module, place.node):
                result |= self.parameters(base)
            named = [n for n in place.node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
            return result | {node.target.id: node.annotation for node in named if isinstance(node.target, ast.Name)}
        arguments = [*place.node.args.posonlyargs, *place.node.args.args]
        static = any(dotted(item)[-1:] == ["staticmethod"] for item in place.node.decorator_list)
        if place.owner is not None and not static:
            arguments = arguments[1:]
        return {item.arg: item.annotation for item in [*arguments, *place.node.args.kwonlyargs]}

    def enter(self, place: Place, parameter: str, whole: bool = True) -> None:
        """Stay in `place`, then go wherever it hands the value over; a section's trip ends where it is handed to."""
        if isinstance(place.node, ast.ClassDef) and (init := self.method(place.module, place.node, "__init__")):
            place = init
        stay = Stay(place.module.name, place.name, parameter)
        if stay in self.stays:
            return
        self.stays.append(stay)
        if not whole:
            return
        if isinstance(place.node, ast.ClassDef):
            self._members(place.module, place.node, parameter)
            return
        carried = {parameter}
        self._follow(place, carried)
        if place.owner is not None and place.node.name == "__init__":
            for attribute in stored(place.node, carried):
                self._members(place.module, place.owner, attribute)

    def _members(self, module: Module, owner: ast.ClassDef, attribute: str) -> None:
        """Follow an attribute through the methods of the class that keeps it."""
        for node in owner.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name != "__init__":
                self._follow(Place(module, node, owner), {f"self.{attribute}"})

    def _follow(self, place: Place, carried: set[str]) -> None:
        for node in in_order(place.node):
            if (
                isinstance(node, (ast.Assign, ast.AnnAssign))
                and node.value
                and self.carries(node.value, place, carried)
            ):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                carried |= {target.id for target in targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.Call) and (target := self.callee(node, place)):
                for name, whole in self.handed(node, target, place, carried):
                    self.enter(target, name, whole)

    def handed(self, call: ast.Call, target: Place, place: Place, carried: set[str]) -> list[tuple[str, bool]]:
        """Parameters of `target` that `call` gives the value to, and whether as a whole or only a section."""
        given = list(zip(self.parameters(target), call.args, strict=False)) + [
            (k.arg, k.value) for k in call.keywords if k.arg
        ]
        kinds = self.parameters(target)
        result = []
        for name, value in given:
            if name in kinds and self.carries(value, place, carried):
                result.append((name, True))
            elif name in kinds and is_section(value, kinds[name], carried):
                result.append((name, False))
        return result

    def carries(self, value: ast.expr, place: Place, carried: set[str]) -> bool:
        """Whether an expression is the value, or the same kind made from it."""
        if isinstance(value, (ast.Name, ast.Attribute)):
            return ".".join(dotted(value)) in carried
        if isinstance(value, ast.Await):
            return self.carries(value.value, place, carried)
        if isinstance(value, ast.IfExp):
            return any(self.carries(side, place, carried) for side in (value.body, value.orelse))
        if not isinstance(value, ast.Call):
            return False
        if isinstance(value.func, ast.Attribute) and value.func.attr == "model_copy":
            return self.carries(value.func.value, place, carried)
        target = self.callee(value, place)
        if target is None or isinstance(target.node, ast.ClassDef):
            return False
        kinds = self.parameters(target)
        handed = self.handed(value, target, place, carried)
        return any(words(target.node.returns) & words(kinds[name]) for name, whole in handed if whole)


def dotted(node: ast.AST) -> list[str]:
    """`a.b.c` as its parts; empty for anything else."""
    if isinstance(node, ast.Attribute):
        parts = dotted(node.value)
        return [*parts, node.attr] if parts else []
    return [node.id] if isinstance(node, ast.Name) else []


def is_section(value: ast.expr, kind: ast.expr | None, carried: set[str]) -> bool:
    """Whether an argument is a section of the config (`config.model`), handed to a parameter that takes a section."""
    parts = dotted(value)
    return ".".join(parts[:-1]) in carried and any(word.endswith("Config") for word in words(kind))


def words(annotation: ast.expr | None) -> set[str]:
    """Names in an annotation."""
    return {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} if annotation else set()


def in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes in the order in which they are evaluated: arguments before their call, values before their name."""
    for child in ast.iter_child_nodes(node):
        yield from in_order(child)
        yield child


def stored(init: Function, carried: set[str]) -> list[str]:
    """Attributes of self that `__init__` stores the value in."""
    return [
        target.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in carried
        for target in node.targets
        if isinstance(target, ast.Attribute) and dotted(target)[:1] == ["self"]
    ]


def layers(root: Path) -> list[list[str]]:
    """Modules of the `layers` contract of import-linter in pyproject.toml, the highest layer first."""
    path = root / "pyproject.toml"
    tool = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}) if path.exists() else {}
    for contract in tool.get("importlinter", {}).get("contracts", []):
        if contract.get("type") == "layers":
            inside = "".join(f"{container}." for container in contract.get("containers", [])[:1])
            rows = [row.replace("(", "").replace(")", "").replace(":", "|") for row in contract["layers"]]
            return [[inside + name.strip() for name in row.split("|")] for row in rows]
    return []


def height(module: str, rows: list[list[str]]) -> int | None:
    """The layer of a module, counted from the top; None if the contract does not name it."""
    named = {name: at for at, row in enumerate(rows) for name in row}
    while module and module not in named:
        module = module.rpartition(".")[0]
    return named.get(module)


def climbs(stays: list[Stay], rows: list[list[str]]) -> list[str]:
    """Steps from one stay to the next that lead into a higher layer; a module that no layer names takes no part."""
    result = []
    for left, entered in pairwise(stays):
        low, high = height(left.module, rows), height(entered.module, rows)
        if low is not None and high is not None and high < low:
            result.append(f"{left.module}:{left.function} -> {entered.module}:{entered.function}")
    return result
