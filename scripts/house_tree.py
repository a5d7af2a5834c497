"""Reads a Python package without importing it: modules, lines, tokens, imports and the graph that they make."""

from __future__ import annotations

import ast
import io
import math
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

RUN, TYPING, LAZY = "run", "typing", "lazy"
"""When an import happens: as the module is loaded, for the type checker only, or inside a function."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    """Dotted; of an `__init__` file the package's."""
    path: Path
    """Relative to the repository."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The file, parsed."""
        return ast.parse(self.text)

    @cached_property
    def tokens(self) -> tuple[tokenize.TokenInfo, ...]:
        """The file's tokens, comments included."""
        return tuple(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @property
    def lines(self) -> int:
        """Lines of the file, blanks and comments included."""
        return len(self.text.splitlines())

    @property
    def is_package(self) -> bool:
        """Whether this is an `__init__` file."""
        return self.path.name == "__init__.py"

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @cached_property
    def definitions(self) -> dict[str, Function | ast.ClassDef]:
        """Functions and classes at the module's top level."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return {node.name: node for node in self.tree.body if isinstance(node, kinds)}

    @cached_property
    def imported(self) -> dict[str, tuple[str, str | None]]:
        """Names that the module's imports bind, see `bindings`."""
        return bindings(self.tree, self)


Modules = Mapping[str, Module]


@dataclass(frozen=True)
class Edge:
    """One import of a module of the package."""

    source: str
    target: str
    when: str


def read(root: Path, package: str) -> dict[str, Module]:
    """Every module of `root/package`, by dotted name."""
    modules = {}
    for path in sorted((root / package).rglob("*.py")):
        relative = path.relative_to(root)
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        modules[name] = Module(name, relative, path.read_text(encoding="utf-8"))
    return modules


def import_nodes(node: ast.AST, when: str = RUN) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Import statements below `node`, each with when it happens."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, when
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from import_nodes(child, LAZY)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for statements, kind in ((child.body, TYPING), (child.orelse, when)):
                yield from import_nodes(ast.Module(statements, []), kind)
        else:
            yield from import_nodes(child, when)


def origin(node: ast.ImportFrom, module: Module) -> str:
    """The dotted name after `from`, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def edges(modules: Modules) -> list[Edge]:
    """Imports within the package. `from package import sub` leads to `package.sub`, not to the package's `__init__`."""
    result = []
    for module in modules.values():
        for node, when in import_nodes(module.tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                base = origin(node, module)
                targets = [f"{base}.{a.name}" if f"{base}.{a.name}" in modules else base for a in node.names]
            result += [Edge(module.name, target, when) for target in dict.fromkeys(targets) if target in modules]
    return [edge for edge in result if edge.source != edge.target]


def graph(links: Iterable[Edge], kinds: Sequence[str]) -> dict[str, set[str]]:
    """Module -> modules that it imports, counting imports of these kinds."""
    result: dict[str, set[str]] = {}
    for edge in links:
        if edge.when in kinds:
            result.setdefault(edge.source, set()).add(edge.target)
    return result


def reachable(links: Mapping[str, set[str]], start: str) -> set[str]:
    """Everything that `start` leads to; `start` itself only where a way leads back to it."""
    seen: set[str] = set()
    queue = [start]
    while queue:
        for target in links.get(queue.pop(), ()):
            if target not in seen:
                seen.add(target)
                queue.append(target)
    return seen


def largest_cycle(links: Mapping[str, set[str]]) -> list[str]:
    """Members of the largest strongly connected component, sorted; empty without a cycle."""
    ways = {name: reachable(links, name) for name in links}
    cycles = [sorted(b for b in ways[a] if a in ways.get(b, ())) for a in sorted(ways) if a in ways[a]]
    return max(cycles, key=len, default=[])


def bindings(
    node: ast.AST, module: Module, kinds: Sequence[str] = (RUN, TYPING, LAZY)
) -> dict[str, tuple[str, str | None]]:
    """Names that imports below `node` bind: name -> (module, name taken from it, or None for the module itself)."""
    result: dict[str, tuple[str, str | None]] = {}
    for statement in (statement for statement, when in import_nodes(node) if when in kinds):
        for alias in statement.names:
            if isinstance(statement, ast.ImportFrom):
                result[alias.asname or alias.name] = (origin(statement, module), alias.name)
            elif alias.asname:
                result[alias.asname] = (alias.name, None)
            else:
                top = alias.name.partition(".")[0]
                result[top] = (top, None)
    return result


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile, 0 of nothing."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0
