"""Measures the structure of the package and prints one table: figure, now, target, whether it is met.

    python -m scripts.house                print the table (`make house`)
    python -m scripts.house --verbose      and what stands behind it: modules, cycles, the walk, figures per package
    python -m scripts.house --json FILE    and write it as JSON
    python -m scripts.house --check        exit with 1 where a target is missed

Nothing is imported from the package: it is read as text (`house_tree`), and one walk is followed (`house_walk`).
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.house_tree import (
    LAZY,
    RUN,
    TYPING,
    Module,
    Modules,
    bindings,
    edges,
    graph,
    import_nodes,
    largest_cycle,
    percentile,
    read,
)
from scripts.house_walk import Place, Walk, climbs, layers

TOP = Path(__file__).resolve().parent.parent

# Everything that is measured by its name, so that a move needs a change here only. The first that exists is taken.
PACKAGE = "mmrl"
LOOP = ("mmrl.stages.weights",)  # the module that holds the weight stage's loop
GRPO = ("mmrl.algorithms.grpo",)
GRPO_ROOMS = ("mmrl.algorithms", "mmrl.credit", "mmrl.rollout.plans")
TRIP = (("mmrl.run.session", "begin", "config"), ("mmrl.run", "train", "config"))  # module, function, parameter
DIALECT = {"found", "told", "asked", "said", "aloud", "kept", "lay", "plant", "wanted", "retell", "taught"}

ALL = (RUN, TYPING, LAZY)


@dataclass(frozen=True)
class Figure:
    """One row: values that are told apart by slashes, each with its limit or None (information)."""

    name: str
    now: tuple[float, ...]
    limits: tuple[float | None, ...] = ()
    sign: str = "≤"
    note: str = ""
    """Stands behind the target."""
    digits: int = 0
    details: tuple[str, ...] = ()
    """Printed with --verbose."""
    shown: tuple[str, ...] = ()
    """Printed always."""
    binding: bool = True
    """Whether --check minds."""

    @property
    def met(self) -> bool | None:
        """Whether every value that has a limit is within it; None if none has."""
        tests: dict[str, Callable[[float, float], bool]] = {
            "≤": lambda now, limit: now <= limit,
            "<": lambda now, limit: now < limit,
            "≥": lambda now, limit: now >= limit,
        }
        limited = [(now, limit) for now, limit in zip(self.now, self.limits, strict=False) if limit is not None]
        return all(tests[self.sign](*pair) for pair in limited) if limited and self.now else None if self.now else False

    def cells(self) -> tuple[str, str, str, str]:
        """The row as text."""
        now = " / ".join(f"{value:,.{self.digits}f}" for value in self.now) or "not there: see the top of the script"
        target = " / ".join("-" if limit is None else f"{limit:,g}" for limit in self.limits)
        target = f"{self.sign} {target}" if target else ""
        return self.name, now, f"{target} {self.note}".strip(), {True: "yes", False: "NO", None: ""}[self.met]


def figures(root: Path, package: str = PACKAGE) -> list[Figure]:
    """Every figure of the repository at `root`."""
    modules = read(root, package)
    return [
        *sizes(modules),
        *wiring(modules),
        *words(modules),
        *reading(modules, root),
        *around(root),
        *habits(modules),
    ]


def sizes(modules: Modules) -> list[Figure]:
    """Files, functions and their parameters."""
    files = [module for module in modules.values() if not (module.is_package and module.lines <= 1)]
    lengths = [module.lines for module in files]
    functions = [(module, node) for module in files for node in functions_of(module)]
    lines = [(node.end_lineno or node.lineno) - node.lineno + 1 for _, node in functions]
    counts = [parameters(node) for _, node in functions]
    long = [f"{m.path}: {m.lines} lines" for m in files if m.lines > 400]
    long += [f"{m.path}:{n.lineno} {n.name}: {k} lines" for (m, n), k in zip(functions, lines, strict=True) if k > 60]
    total = sum(lengths)
    return [
        Figure("files / lines", (len(files), total), (175, 30_000), note="(aim 160 / 28,000)"),
        Figure("file lines p50 / p95 / max", three(lengths), (None, 360, 400), note="(p50 about 150)"),
        Figure("function lines p50 / p95 / max", three(lines), (None, 30, 60), details=tuple(long)),
        Figure("parameters p95 / max", three(counts)[1:]),
    ]


def three(values: Sequence[int]) -> tuple[float, float, float]:
    """Median, 95th percentile and maximum."""
    return percentile(values, 0.5), percentile(values, 0.95), max(values, default=0)


def functions_of(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, nested ones too."""
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters of a function without self and cls."""
    names = [item.arg for item in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
    return len([name for name in names if name not in ("self", "cls")])


def wiring(modules: Modules) -> list[Figure]:
    """Who imports whom."""
    links = edges(modules)
    importers: dict[str, set[str]] = {}
    for edge in links:
        if not modules[edge.target].is_package and not edge.target.endswith("__main__"):
            importers.setdefault(edge.target, set()).add(edge.source)
    single = sorted(f"{name} <- {min(users)}" for name, users in importers.items() if len(users) == 1)
    cycles = [largest_cycle(graph(links, kinds)) for kinds in ((RUN,), (RUN, TYPING), ALL)]
    members = tuple(dict.fromkeys("cycle: " + ", ".join(cycle) for cycle in cycles if cycle))
    loop = first(LOOP, modules)
    out = sorted(graph(links, ALL).get(loop, ())) if loop else []
    repeated = repeated_names(modules)
    return [
        Figure("modules with one importer", (len(single),), (30,), details=tuple(single)),
        Figure("largest cycle: run / +typing / +lazy", tuple(map(len, cycles)), (0, 0, 0), shown=members),
        Figure("fan-out of the loop", (len(out),) if loop else (), (14,), details=tuple(out)),
        Figure("repeated file names", (len(repeated),), (2,), shown=tuple(repeated)),
    ]


def first(names: Iterable[str], modules: Modules) -> str | None:
    """The first of these modules that exists."""
    return next((name for name in names if name in modules), None)


def repeated_names(modules: Modules) -> list[str]:
    """File names that occur in two folders or more, with their paths."""
    places: dict[str, list[str]] = {}
    for module in modules.values():
        if not module.is_package:
            places.setdefault(module.path.name, []).append(module.path.as_posix())
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()) if len(paths) > 1]


def words(modules: Modules) -> list[Figure]:
    """Types, comments and vocabulary, per thousand lines or in per cent of them."""
    everything = list(modules.values())
    return [
        share("`Any` per 1,000 lines", everything, lambda m: names_in(m)["Any"], 1000, limits=(6,)),
        share("own-line comments, % of lines", everything, comment_lines, 100, limits=(3,), sign="≥"),
        share("docstrings, % of lines", everything, docstring_lines, 100),
        share("`found` per 1,000 lines", everything, lambda m: names_in(m)["found"], 1000, limits=(1,), sign="<"),
        share("dialect per 1,000 lines", everything, dialect, 1000, limits=(3,), sign="<", binding=False),
    ]


def share(
    name: str,
    modules: Sequence[Module],
    count: Callable[[Module], int],
    per: int,
    limits: tuple[float | None, ...] = (),
    sign: str = "≤",
    binding: bool = True,
) -> Figure:
    """Counts per `per` lines, of all modules and, for --verbose, per package."""
    rooms: dict[str, list[int]] = {}
    for module in modules:
        parts = module.path.parts[1:-1]
        room = rooms.setdefault(parts[0] if parts else "(top)", [0, 0])
        room[0] += count(module)
        room[1] += module.lines
    total, lines = (sum(column) for column in zip(*rooms.values(), strict=True)) if rooms else (0, 0)
    each = [f"{room:<12} {per * n / max(k, 1):6.1f}  ({n} in {k})" for room, (n, k) in sorted(rooms.items())]
    now = (per * total / max(lines, 1),)
    return Figure(name, now, limits, sign, digits=1, details=tuple(each), binding=binding)


def names_in(module: Module) -> Counter[str]:
    """Identifiers in the code, keywords included."""
    return Counter(token.string for token in module.tokens if token.type == tokenize.NAME)


def comment_lines(module: Module) -> int:
    """Lines that hold nothing but a comment."""
    comments = [token for token in module.tokens if token.type == tokenize.COMMENT]
    return sum(token.line.lstrip().startswith("#") for token in comments)


def docstring_lines(module: Module) -> int:
    """Lines of strings that stand alone: of modules, classes, functions and fields."""
    texts = [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in texts)


def dialect(module: Module) -> int:
    """Words of the private dialect, in identifiers (`found_at`, `TaughtTurn`), comments and strings."""
    code = (tokenize.OP, tokenize.NUMBER)
    texts = (token.string for token in module.tokens if token.type not in code)
    return sum(word.lower() in DIALECT for text in texts for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", text))


def reading(modules: Modules, root: Path) -> list[Figure]:
    """What a reader has to go through: for GRPO, and on the way of the config."""
    start = first(GRPO, modules)
    files = needed(modules, start) if start else []
    grpo = (len(files), sum(modules[name].lines for name in files)) if start else ()
    walk = Walk(modules)
    entry = next((place for place in TRIP if isinstance(walk.locate(*place[:2]), Place)), None)
    if entry and isinstance(place := walk.locate(*entry[:2]), Place):
        walk.enter(place, entry[2])
    up = climbs(walk.stays, layers(root))
    trip = (len(walk.stays), len({stay.module for stay in walk.stays}), len(up)) if entry else ()
    way = [f"{stay.module}:{stay.function}({stay.parameter})" for stay in walk.stays]
    return [
        Figure("GRPO whole: files / lines", grpo, (6, 450), note="(was 10 / 848)", details=tuple(files)),
        Figure(
            "the config's trip: stays / rooms / climbs",
            trip,
            (18, 10, 5),
            note="(was 39 / 17 / 10)",
            details=(*way, *(f"climb: {line}" for line in up)),
        ),
    ]


def needed(modules: Modules, start: str) -> list[str]:
    """Modules of the arithmetic that `start` takes a name from, and those that they take one from, and so on.

    Counted are the rooms of the credit computation only. Left out is what every module speaks of and a reader knows
    already: records, config, errors, rng. A name taken from a package's `__init__` leads to where it is defined.
    """
    walk, result, queue = Walk(modules), {start}, [start]
    while queue:
        module = modules[queue.pop()]
        for source, name in bindings(module.tree, module, (RUN, LAZY)).values():
            target = walk.locate(source, name) if name else source
            where = target.module.name if isinstance(target, Place) else target if isinstance(target, str) else source
            inside = any(f"{where}.".startswith(f"{room}.") for room in GRPO_ROOMS)
            if inside and where in modules and not modules[where].is_package and where not in result:
                result.add(where)
                queue.append(where)
    return sorted(result)


def around(root: Path) -> list[Figure]:
    """README and tests."""
    readme, tests = root / "README.md", root / "tests"
    files = sorted(path.relative_to(tests) for path in tests.rglob("*.py"))
    cases = [path for path in files if path.name.startswith("test_")]
    known = ("conftest.py", "__init__.py")
    helpers = [path for path in files if path not in cases and path.name not in known]
    flat = [path for path in cases if len(path.parts) == 1]
    return [
        Figure("README bytes", (readme.stat().st_size if readme.exists() else 0,), (9216,)),
        Figure("test folders", (len({path.parent for path in cases} - {Path()}),)),
        Figure("test files directly in tests/", (len(flat),), (0,)),
        Figure("helper modules of the tests", (len(helpers),), (8,), details=tuple(map(str, helpers))),
    ]


def habits(modules: Modules) -> list[Figure]:
    """Counts that are information: silenced types, broad excepts, imports inside functions."""
    comments = [t.string for m in modules.values() for t in m.tokens if t.type == tokenize.COMMENT]
    nodes = [node for module in modules.values() for node in ast.walk(module.tree)]
    lazy = [when for module in modules.values() for _, when in import_nodes(module.tree) if when == LAZY]
    return [
        Figure("type: ignore", (sum("type: ignore" in text for text in comments),)),
        Figure("broad except", (sum(isinstance(node, ast.ExceptHandler) and is_broad(node) for node in nodes),)),
        Figure("imports inside functions", (len(lazy),)),
    ]


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether it catches everything."""
    named = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else set()
    return handler.type is None or bool(named & {"Exception", "BaseException"})


def table(rows: Sequence[Figure], verbose: bool = False) -> str:
    """The figures as text, with what stands behind them."""
    cells = [("figure", "now", "target", "ok"), *(row.cells() for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    lines = [" | ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "-+-".join("-" * width for width in widths))
    for row in rows:
        behind = row.shown + (row.details if verbose else ())
        lines += ["", f"{row.name}:", *(f"  {line}" for line in behind)] if behind else []
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 with --check where a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m scripts.house", description="Measure the package's structure.")
    parser.add_argument("--root", type=Path, default=TOP, help="the repository to measure")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--verbose", action="store_true", help="list what stands behind the figures")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    options = parser.parse_args(arguments)
    rows = figures(options.root)
    print(table(rows, options.verbose))
    if options.json:
        values = {row.name: {"now": row.now, "sign": row.sign, "limits": row.limits, "ok": row.met} for row in rows}
        options.json.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(options.check and any(row.met is False and row.binding for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
