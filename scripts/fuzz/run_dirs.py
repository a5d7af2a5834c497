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
from unittest import mock

import yaml
from hypothesis import strategies as st

from scripts.fuzz.in_process import call
from scripts.fuzz.values import spoilt, spoilt_bytes

COMMANDS = (
    ("show", "{run}"),
    ("report", "{run}"),
    ("show", "{run}", "step=1"),
    ("show", "{run}", "example=q0"),
    ("show", "{run}", "step=1", "--json"),
    ("compare", "{run}", "out=compared"),
    ("credit", "algo=mhgpo_rr", "rollouts={run}/journal/step-000001.jsonl.gz"),
    ("credit", "run={run}", "step=1"),
    ("train", "resume={run}"),
    ("eval", "resume={run}"),
)
TEXTS = (b"", b"\n", b"null", b"[]", b"{}", b"3", b'"x"', b"\xff\xfe\x00", b"[" * 20_000, b"{]", b"- a: *x", b"\0" * 99)


def _damage(run_dir: Path, draw: st.DrawFn) -> str:
    """Damage one file or folder in place; return what was done to it."""
    # Each kind of file alike: a run has one config and hundreds of journals.
    kinds: dict[str, list[Path]] = {}
    for path in sorted(run_dir.rglob("*")):
        kinds.setdefault(f"{path.parent.relative_to(run_dir)}{path.suffix}", []).append(path)
    if not kinds:
        return "nothing is left"
    path = draw(st.sampled_from(kinds[draw(st.sampled_from(sorted(kinds)))]))
    name = path.relative_to(run_dir)
    how = draw(st.sampled_from(("bytes", "value", "value", "value", "text", "replaced")))
    if how == "replaced" or path.is_symlink() or not path.is_file():
        return f"{name}: {_replace(path, draw)}"
    data = path.read_bytes()
    packed = path.suffix == ".gz" and data[:2] == b"\x1f\x8b" and draw(st.booleans())
    try:
        inner = gzip.decompress(data) if packed else data
        made = draw(st.sampled_from(TEXTS)) if how == "text" else _other_value(path, inner, draw)
    except (OSError, EOFError, ValueError, yaml.YAMLError):
        packed, made = False, None
    if made is None or how == "bytes":
        how, made = "bytes", draw(spoilt_bytes(data))
        packed = False
    path.write_bytes(gzip.compress(made, mtime=0) if packed else made)
    return f"{name}: {how}"


def _other_value(path: Path, data: bytes, draw: st.DrawFn) -> bytes | None:
    """Spoil a value of a YAML, JSON or JSON-lines file; None for files of another kind."""
    if path.suffix == ".yaml":
        text: str = yaml.safe_dump(draw(spoilt(yaml.safe_load(data))), allow_unicode=True)
        return text.encode(errors="surrogatepass")
    lines = [data] if path.suffix == ".json" else data.split(b"\n")
    values = [json.loads(line) for line in lines if line]
    if not values:
        return None
    at = draw(st.integers(0, len(values) - 1))
    values[at] = draw(spoilt(values[at]))
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def _replace(path: Path, draw: st.DrawFn) -> str:
    """Put something else where a file or folder was."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    how = draw(st.sampled_from(("missing", "folder", "file", "nowhere", path.name, "..", "/proc/self/task")))
    if how == "folder":
        path.mkdir()
    elif how == "file":
        path.write_text("x")
    elif how != "missing":
        path.symlink_to(how)
    return how


def finding(run_dir: Path, draw: st.DrawFn) -> str | None:
    """Damage a copy of a run directory and look at it by three commands; return what is wrong, None for nothing."""
    with tempfile.TemporaryDirectory(prefix="mmrl-fuzz-") as folder:
        copy, here = Path(folder) / "run", Path(folder) / "here"
        shutil.copytree(run_dir, copy)
        here.mkdir()
        what = "; ".join(_damage(copy, draw) for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))))
        before = _digest(copy)
        for command in draw(st.permutations(COMMANDS))[:3]:
            # A run that can be continued would be.
            with mock.patch("mmrl.run.session.begin", lambda *_, **__: 0):
                if wrong := call([word.format(run=copy) for word in command], here):
                    return f"{what}\n  {wrong}"
        return None if _digest(copy) == before else f"{what}\n  a command that only looks has changed the run"


def _digest(run_dir: Path) -> str:
    """Names and contents, without the report's, as one digest."""
    found = hashlib.sha256()
    for path in sorted(run_dir.rglob("*")):
        if path.name == "report.html" or path.is_symlink():
            continue
        found.update(f"{path.relative_to(run_dir)}\0".encode("utf-8", "surrogateescape"))
        if path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()
