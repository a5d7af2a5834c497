"""Install the newest release of every dependency in this environment, whatever the caps of pyproject.toml say.

`make newest` runs it in an environment of its own. A requirement as an argument stands for the one of that name:
`python -m scripts.newest 'torch<2.14'`. What is not the newest is printed with the packages whose requirements keep it.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import distributions, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip")


def uncapped(lines: Iterable[str], extras: Mapping[str, Sequence[str]]) -> Iterator[Requirement]:
    """Yield the requirements of `lines` without caps: lower bounds alone; for `mmrl[…]`, those of its extras."""
    for requirement in map(Requirement, lines):
        if requirement.name == "mmrl":
            for extra in sorted(requirement.extras):
                yield from uncapped(extras[extra], extras)
        elif requirement.marker is None or requirement.marker.evaluate():
            lower = [str(one) for one in requirement.specifier if one.operator == ">="]
            requirement.specifier = SpecifierSet(",".join(lower))
            yield requirement


def keepers(name: str, newest: str) -> list[str]:
    """Return the requirements of installed packages, mmrl's apart, that do not allow version `newest` of `name`."""
    return [
        f"{package.name} ({requirement.specifier})"
        for package in distributions()
        for requirement in map(Requirement, package.requires or ())
        if canonicalize_name(requirement.name) == name and not requirement.specifier.contains(newest)
        if package.name != "mmrl" and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    ]


def main(arguments: Sequence[str]) -> None:
    """Install, then print a table of versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = uncapped([*project["dependencies"], "mmrl[dev]"], project["optional-dependencies"])
    wanted = {canonicalize_name(each.name): str(each) for each in (*found, *map(Requirement, arguments))}
    subprocess.run([*PIP, "install", "-q", "--upgrade", "--upgrade-strategy=eager", *wanted.values()], check=True)
    subprocess.run([*PIP, "install", "-q", "--no-deps", "--editable", str(ROOT)], check=True)
    outdated = json.loads(subprocess.check_output([*PIP, "list", "--outdated", "--format=json"]))
    newest = {canonicalize_name(each["name"]): each["latest_version"] for each in outdated}
    print("\n| package | installed | newest, kept back by |\n|---|---|---|")
    for name in sorted(wanted):
        kept = (
            f"{newest[name]}, {', '.join(keepers(name, newest[name])) or 'pip (its own constraints, or this platform)'}"
            if name in newest
            else ""
        )
        print(f"| {name} | {version(name)} | {kept} |")


if __name__ == "__main__":
    main(sys.argv[1:])
