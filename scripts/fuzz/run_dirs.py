"""Damaged run directories, looked at by `mmrl show`, `report`, `compare` and `credit`.

Property: each command shows what is left, or says in one line what cannot be read; no traceback, no hang, and no file
of the run is changed but `report.html` (and what `compare` writes beside it).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from random import Random
from unittest import mock

from scripts.fuzz.in_process import call

STRANGE: tuple[object, ...] = (
    *(None, True, 0, -1, 10**400, 1.5, -1e308, "", "x", "\u202e", "\ud800", "<b>&", "nan", "a\nb" * 50, [], {}, [[]]),
    *([None], {"a": None}, {"": {}}, ["x", 1], {"name": 3}, {"mean": "x"}, [{"a": [1]}], "0" * 3000),
)
"""Values of every type where another one was."""


def damaged(run_dir: Path, random: Random) -> str:
    """Damage one to three files of `run_dir` in place; what was done to them."""
    return "; ".join(_damage(run_dir, random) for _ in range(random.choice((1, 1, 1, 2, 3))))


def _damage(run_dir: Path, random: Random) -> str:
    entries = sorted(path for path in run_dir.rglob("*") if path != run_dir)
    if not entries:
        return "nothing is left"
    # Each kind of file alike: a run has one config and hundreds of journals.
    kinds: dict[str, list[Path]] = {}
    for path in entries:
        kinds.setdefault(f"{path.parent.relative_to(run_dir)}{path.suffix}", []).append(path)
    path = random.choice(kinds[random.choice(sorted(kinds))])
    name = str(path.relative_to(run_dir))
    if path.is_dir() and not path.is_symlink():
        return f"{name}: {_replace(path, random)}"
    if path.is_symlink() or not path.exists():
        path.unlink(missing_ok=True)
        return f"{name}: link removed"
    how = random.choice(("bytes", "cut", "value", "value", "value", "value", "lines", "replace", "text"))
    if how == "replace":
        return f"{name}: {_replace(path, random)}"
    data = path.read_bytes()
    packed = path.suffix == ".gz" and how != "bytes" and data[:2] == b"\x1f\x8b"
    try:
        inner = gzip.decompress(data) if packed else data
    except (OSError, EOFError, ValueError):
        packed, inner = False, data
    if how == "value" and (made := _other_value(path, inner, random)) is not None:
        inner, said = made
    elif how == "lines" and inner.count(b"\n") > 1:
        lines = inner.split(b"\n")
        place = random.randrange(len(lines))
        lines[place : place + 1] = random.choice(
            ([], [lines[place]] * 2, [b""], [b"[]"], [b"{}"], [b"null"], lines[::-1][:1])
        )
        inner, said = b"\n".join(lines), f"line {place + 1} of another kind"
    elif how == "text":
        inner = random.choice(
            (
                b"",
                b"\n",
                b"null",
                b"[]",
                b"{}",
                b"3",
                b'"x"',
                b"\xff\xfe\x00",
                b"[" * 20_000,
                b"{]",
                b"- a: *x",
                b"\0" * 99,
            )
        )
        said = f"is {inner[:10]!r}"
    elif how == "cut" or not inner:
        end = random.randrange(len(inner) + 1)
        inner, said = inner[:end], f"cut after {end} bytes"
    else:
        changed = bytearray(inner)
        for _ in range(random.choice((1, 1, 8, 64))):
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        inner, said = bytes(changed), "bits flipped"
    path.write_bytes(gzip.compress(inner, mtime=0) if packed else inner)
    return f"{name}: {said}"


def _replace(path: Path, random: Random) -> str:
    """Something else where a file or folder was."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    how = random.choice(("missing", "folder", "file", "dangling link", "link to itself", "link to a folder"))
    if how == "folder":
        path.mkdir()
    elif how == "file":
        path.write_text("x")
    elif how == "dangling link":
        path.symlink_to("nowhere")
    elif how == "link to itself":
        path.symlink_to(path.name)
    elif how == "link to a folder":
        path.symlink_to("/proc/self/task" if random.random() < 0.2 else path.parent)
    return how


def _other_value(path: Path, data: bytes, random: Random) -> tuple[bytes, str] | None:
    """One value of a JSON, JSON-lines or YAML file replaced, dropped, or its key renamed; None where it is none."""
    try:
        if path.suffix == ".yaml":
            import yaml

            whole = yaml.safe_load(data)
            said = _change(whole, random)
            return yaml.safe_dump(whole, allow_unicode=True).encode("utf-8", "surrogatepass"), said
        lines = (
            [json.loads(line) for line in data.split(b"\n") if line] if path.suffix != ".json" else [json.loads(data)]
        )
        chosen = random.choice(lines)
        said = _change(chosen, random)
        return b"\n".join(json.dumps(line).encode() for line in lines) + b"\n", said
    except (ValueError, TypeError, IndexError, RecursionError, ImportError):
        return None


def _change(value: object, random: Random, path: str = "") -> str:
    keys: list[object] = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    if not keys:
        raise ValueError("nothing to change")
    key = random.choice(keys)
    inner = value[key]  # type: ignore[index, call-overload]
    here = f"{path}.{key}".lstrip(".")
    if isinstance(inner, dict | list) and inner and random.random() < 0.6:
        return _change(inner, random, here)
    if isinstance(value, dict) and random.random() < 0.25:
        moved = value.pop(key)
        if random.random() < 0.5:
            value[random.choice(("", "x", "step", f"{key}x"))] = moved
        return f"{here} gone"
    put = random.choice(STRANGE)
    value[key] = put  # type: ignore[index, call-overload]
    return f"{here} is {str(put)[:30]!r}"


COMMANDS = (
    ("show", "{run}"),
    ("report", "{run}"),
    ("show", "{run}", "step=1"),
    ("show", "{run}", "example={example}"),
    ("show", "{run}", "step=1", "--json"),
    ("compare", "{run}", "out=compared"),
    ("credit", "algo=mhgpo_rr", "rollouts={run}/journal/step-000001.jsonl.gz"),
    ("credit", "run={run}", "step=1"),
    ("train", "resume={run}"),
    ("eval", "resume={run}"),
)
"""What is done with each run; `{example}` is one of its first step's."""


def run(run_dir: Path, example: str = "q0") -> str | None:
    """Three of the commands on a damaged run directory; None, or the first finding."""
    before = _digest(run_dir)
    # Three of them: drawing takes a second, and a million runs are many. Which ones depends on the run alone.
    some = Random(before).sample(COMMANDS, 3)
    with tempfile.TemporaryDirectory(prefix="mmrl-fuzz-") as here:
        for command in some:
            words = [word.format(run=run_dir, example=example) for word in command]
            # A run that can be continued would be.
            with mock.patch("mmrl.run.session.begin", lambda *_, **__: 0):
                if finding := call(words, Path(here)):
                    return finding
    return None if _digest(run_dir) == before else f"{run_dir}: a command that only looks has changed the run"


def copy_and_run(run_dir: Path, random: Random, example: str = "q0") -> str | None:
    """Damage a copy of `run_dir` and look at it; None, or what was damaged and the finding."""
    with tempfile.TemporaryDirectory(prefix="mmrl-fuzz-") as folder:
        copy = Path(folder) / "run"
        shutil.copytree(run_dir, copy)
        what = damaged(copy, random)
        finding = run(copy, example)
    return f"{what}\n  {finding}" if finding else None


def _digest(run_dir: Path) -> str:
    """Of names and contents, without the report."""
    found = hashlib.sha256()
    for path in sorted(run_dir.rglob("*")):
        if path.name == "report.html" or path.is_symlink():
            continue
        found.update(f"{path.relative_to(run_dir)}\0".encode("utf-8", "surrogateescape"))
        if path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()
