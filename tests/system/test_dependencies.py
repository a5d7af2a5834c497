"""pyproject.toml names what the package imports, and nothing else."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]

LOADED_BY_OTHERS = {
    "deepspeed": "accelerate",
    "hydra-submitit-launcher": "Hydra",
    "hydra-optuna-sweeper": "Hydra",
    "vllm-router": "a process that mmrl starts",
    **dict.fromkeys(
        ["wandb", "tensorboard", "mlflow", "comet-ml", "trackio", "aim", "clearml", "dvclive", "swanlab"],
        "accelerate's trackers",
    ),
}


def distribution(requirement: str) -> str:
    return re.split(r"[\[<>=]", requirement)[0].lower().replace("_", "-")


def imported() -> dict[str, str]:
    """Each top-level module that is not of the standard library, with a file that imports it."""
    found = {}
    for file in sorted((ROOT / "mmrl").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            found |= {name.split(".")[0]: str(file.relative_to(ROOT)) for name in names}
    return {name: file for name, file in found.items() if name not in {*sys.stdlib_module_names, "mmrl"}}


def test_dependencies_are_what_the_package_imports():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {name: group for name, group in project["optional-dependencies"].items() if name != "dev"}
    declared = {distribution(each) for group in [project["dependencies"], *groups.values()] for each in group}
    # Without those that are not installed; vLLM's build for CPUs calls itself otherwise.
    of_module = {name: [*packages, name] for name, packages in packages_distributions().items()}
    files = imported()
    needed = {name: {each.lower().replace("_", "-") for each in of_module.get(name, [name])} for name in files}
    assert {name: files[name] for name, packages in needed.items() if not packages & declared} == {}
    assert declared - set().union(*needed.values()) == set(LOADED_BY_OTHERS)
