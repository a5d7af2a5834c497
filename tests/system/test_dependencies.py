"""pyproject.toml names what the code imports, and nothing else."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT, OURS = Path(__file__).parents[2], ("mmrl", "scripts", "tests")

LOADED_BY_OTHERS = {
    "optuna": "DSPy, for MIPROv2",
    "deepspeed": "accelerate",
    "hydra-submitit-launcher": "Hydra",
    "hydra-optuna-sweeper": "Hydra",
    "vllm-router": "a process that mmrl starts",
    **dict.fromkeys(
        ["tensorboard", "mlflow", "comet-ml", "trackio", "aim", "clearml", "dvclive", "swanlab"],
        "accelerate's trackers",
    ),
}
TOOLS = {
    **dict.fromkeys(["ruff", "mypy", "import-linter"], "commands of make check"),
    **dict.fromkeys(["pytest-cov", "pytest-xdist"], "pytest's options"),
    **dict.fromkeys(["zensical", "mkdocstrings-python", "mermaidx"], "of make docs"),
    "setuptools": "what tests.system.test_wheel builds the wheel by",
    "mmrl": "its own extras",
}
ELSEWHERE = {
    **dict.fromkeys(["agents", "langchain_openai", "langgraph"], "of make test-agents"),
    **dict.fromkeys(["docs", "resilient"], "programs in docs/"),
    "slow_module": "written by its test",
}
"""Modules of tests and scripts that are no packages of `make setup`."""


def distribution(requirement: str) -> str:
    return re.split(r"[\[<>=]", requirement)[0].lower().replace("_", "-")


def declared(*leave_out: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [group for name, group in project["optional-dependencies"].items() if name not in leave_out]
    return {distribution(each) for group in [project["dependencies"], *groups] for each in group}


def imported(folder: str) -> dict[str, str]:
    """Each top-level module that is neither ours nor of the standard library, with a file that imports it."""
    found = {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            found |= {name.split(".")[0]: str(file.relative_to(ROOT)) for name in names}
    return {name: file for name, file in found.items() if name not in {*sys.stdlib_module_names, *OURS}}


def packages_of(modules: dict[str, str]) -> dict[str, set[str]]:
    """The names under which pyproject.toml may declare each module."""
    # Without those that are not installed; vLLM's build for CPUs calls itself otherwise.
    of_module = {name: [*packages, name] for name, packages in packages_distributions().items()}
    return {name: {each.lower().replace("_", "-") for each in of_module.get(name, [name])} for name in modules}


def test_dependencies_are_what_the_package_imports():
    files, names = imported("mmrl"), declared("dev", "docs")
    needed = packages_of(files)
    assert {name: files[name] for name, packages in needed.items() if not packages & names} == {}
    assert names - set().union(*needed.values()) == set(LOADED_BY_OTHERS)


def test_what_scripts_and_tests_import_is_there_for_developers():
    files = imported("scripts") | imported("tests")
    needed, names = packages_of(files), declared()
    assert {name: files[name] for name, packages in needed.items() if not packages & names}.keys() == set(ELSEWHERE)
    assert names - declared("dev", "docs") - set().union(*needed.values()) == set(TOOLS)
