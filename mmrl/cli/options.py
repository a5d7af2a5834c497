"""Where configs are found and which choices each group has, without Hydra."""

from __future__ import annotations

from pathlib import Path

GROUPS = ("task", "algo", "model", "hardware", "engine", "experiment")
"""Config groups: folders of `conf/`, in the order in which they are composed."""


def conf_dir() -> Path:
    """The shipped configs: `mmrl/conf` of an installed wheel, `conf/` at the top of a checkout."""
    packaged = Path(__file__).resolve().parent.parent / "conf"
    return packaged if packaged.is_dir() else packaged.parent.parent / "conf"


def user_dirs(config_dir: str | None = None) -> list[Path]:
    """Folders that overlay the shipped configs, first wins: `--config-dir`, then the current folder's `conf/`."""
    found = [Path(config_dir).resolve()] if config_dir else []
    local = Path.cwd() / "conf"
    if local.is_dir() and local.resolve() != conf_dir().resolve():
        found.append(local.resolve())
    return found


def options(group: str, config_dir: str | None = None) -> list[str]:
    """Names that `group=` accepts."""
    names: set[str] = set()
    for folder in [*user_dirs(config_dir), conf_dir()]:
        root = folder / group
        names |= {path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")}
    return sorted(names)
