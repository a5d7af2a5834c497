"""Folders of configs, the choices of each group, and words of a command line, without Hydra.

Apart from `config`, whose import loads pydantic: `mmrl --help` lists choices and is to be there at once.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

GROUPS = ("task", "algo", "model", "hardware", "engine", "experiment")
"""Config groups: folders of `conf/`, in the order in which they are composed."""


def conf_dir() -> Path:
    """Return the folder of shipped configs: `mmrl/conf` of an installed wheel, `conf/` at the top of a checkout."""
    packaged = Path(__file__).resolve().parents[1] / "conf"
    return packaged if packaged.is_dir() else packaged.parent.parent / "conf"


def user_dirs(config_dir: str | None = None) -> list[Path]:
    """Return the folders over the shipped configs, first wins: `--config-dir`, then the current folder's `conf/`."""
    folders = [Path(config_dir).resolve()] if config_dir else []
    local = Path.cwd() / "conf"
    if local.is_dir() and local.resolve() != conf_dir().resolve():
        # In a checkout the current folder's conf/ may be the shipped one.
        folders.append(local.resolve())
    return folders


def options(group: str, config_dir: str | None = None) -> list[str]:
    """Return the names that `group=` accepts."""
    names: set[str] = set()
    for folder in [*user_dirs(config_dir), conf_dir()]:
        root = folder / group
        names |= {path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")}
    return sorted(names)


def row_keys(words: Iterable[str], config_dir: str | None = None) -> list[str]:
    """Return the keys and groups that the rows of a command line (`experiment=`) set."""
    from mmrl.config.base import iter_leaves

    folders = [*user_dirs(config_dir), conf_dir()]
    pairs = [word.lstrip("+").partition("=")[::2] for word in words]
    rows = [row for key, value in pairs if key == "experiment" for row in value.strip("[]").split(",")]
    paths, keys = [f"/experiment/{row.strip()}" for row in rows], list[str]()
    for path in paths:  # which grows
        group, _, name = path[1:].partition("/")
        if group != "experiment":
            keys.append(group)
            continue
        content = _content(group, name, folders)
        defaults = content.pop("defaults", None)
        for item in defaults if isinstance(defaults, list) else ():
            if isinstance(item, dict):
                keys += [key.removeprefix("override ").lstrip("/") for key in item]
                continue
            # Text alone is a file beside this one, or of any group behind a slash.
            named = posixpath.join(posixpath.dirname(path), str(item).partition("@")[0])
            paths += [named] if named not in paths else []
        keys += [key for key, _ in iter_leaves(content)]
    return keys


def algo_name(choice: str, config_dir: str | None = None) -> str:
    """Return `algo.name` of a choice of `algo=`: its file's, or that of the files in its defaults; else the choice."""
    names = [choice]
    for name in names:  # which grows
        content = _content("algo", name, [*user_dirs(config_dir), conf_dir()])
        section = content.get("algo", content)  # some files are of the whole config, others of their group
        if isinstance(section, dict) and isinstance(section.get("name"), str):
            return str(section["name"])
        defaults = content.get("defaults")
        bases = [str(base).removeprefix("/algo/") for base in (defaults if isinstance(defaults, list) else ())]
        names += [base for base in reversed(bases) if base not in names]  # the last one wins
    return choice


def set_by(key: str, value: object, choices: Mapping[str, object]) -> str:
    """Return the choice of a group whose file sets a key to a value, such as `algo=grpo`; empty where none does.

    Args:
        choices: group -> its choice in a run.
    """
    from mmrl.config.base import value_at

    for group in reversed(GROUPS):
        content = _content(group, str(choices.get(group)), [*user_dirs(), conf_dir()])
        # Some files are of the whole config, others of their group.
        if value is not None and value in (value_at(content, key), value_at({group: content}, key)):
            return f"{group}={choices[group]}"
    return ""


def later_wins(words: Iterable[str]) -> list[str]:
    """Keep each key once, at its first position with its last value: a command line takes no key twice.

    What was set below a key before goes, since Hydra would apply it later; a choice of a group comes first.
    """
    kept: dict[str, str] = {}
    for word in words:
        key = word.partition("=")[0].lstrip("+")
        if key not in GROUPS:
            kept = {other: earlier for other, earlier in kept.items() if not other.startswith(f"{key}.")}
        kept[key] = word
    return list(kept.values())


def _content(group: str, name: str, folders: Iterable[Path]) -> dict[str, Any]:
    """Return the content of a choice's file, of the first folder that has it; empty where Hydra will refuse it."""
    import yaml

    path = next((path for folder in folders if (path := folder / group / f"{name}.yaml").is_file()), None)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) if path is not None else None
    except yaml.YAMLError:
        content = None
    return content if isinstance(content, dict) else {}
