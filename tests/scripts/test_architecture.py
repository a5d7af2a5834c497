"""docs/architecture.md names every room, in the order of the import contracts."""

import re
import tomllib

from tests.helpers import TOP

PAGE = (TOP / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_table_of_rooms_is_the_contract_of_layers():
    table = PAGE.partition("| room | answers |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    contracts = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [re.findall(r"mmrl\.(\w+)", layer) for layer in contracts[0]["layers"]]
    assert rows == layers
    package = TOP / "mmrl"
    rooms = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    assert {name for row in rows for name in row} == rooms - {"__init__", "__main__"}


def test_the_diagram_has_every_folder():
    diagram = PAGE.partition("```mermaid")[2].partition("```")[0]
    assert {path.parent.name for path in (TOP / "mmrl").glob("*/__init__.py")} <= set(re.findall(r"\w+", diagram))
