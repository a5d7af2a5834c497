"""Damaged run directories, looked at by `mmrl show`, `report`, `compare` and `credit`.

Property: each command shows what is left, or says in one line what cannot be read; no traceback, no hang, and no file
of the run is changed but `report.html` (and what `compare` writes beside it).
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import yaml
from hypothesis import strategies as st

from scripts.chaos.damage import damage_file
from tests.fuzz.in_process import call
from tests.fuzz.values import spoilt

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


def _damage(run_dir: Path, draw: st.DrawFn) -> str:
    """Damage one file in place; return what was done to it."""
    # Each kind of file alike: a run has one config and hundreds of journals.
    kinds: dict[str, list[Path]] = {}
    for path in sorted(path for path in run_dir.rglob("*") if path.is_file()):
        kinds.setdefault(f"{path.parent.relative_to(run_dir)}{path.suffix}", []).append(path)
    if not kinds:
        return "nothing is left"
    path = draw(st.sampled_from(kinds[draw(st.sampled_from(sorted(kinds)))]))
    try:
        how = "a value" if draw(st.booleans()) and _spoil_value(path, draw) else ""
    except (OSError, EOFError, ValueError, yaml.YAMLError):  # damaged before
        how = ""
    return f"{path.relative_to(run_dir)}: {how or damage_file(path, draw(st.randoms()))}"


def _spoil_value(path: Path, draw: st.DrawFn) -> bool:
    """Spoil a value of a YAML, JSON or JSON-lines file, packed or not; False for files of another kind."""
    if path.suffix == ".yaml":
        text = yaml.safe_dump(draw(spoilt(yaml.safe_load(path.read_bytes()))), allow_unicode=True)
        path.write_bytes(text.encode(errors="surrogatepass"))
        return True
    packed = path.suffix == ".gz"
    data = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    values = [json.loads(line) for line in ([data] if path.suffix == ".json" else data.split(b"\n")) if line]
    if not values:
        return False
    at = draw(st.integers(0, len(values) - 1))
    values[at] = draw(spoilt(values[at]))
    data = "".join(json.dumps(value) + "\n" for value in values).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if packed else data)
    return True


def finding(run_dir: Path, draw: st.DrawFn) -> str | None:
    """Damage a copy of a run directory and look at it by three commands; return what is wrong, None for nothing."""
    with tempfile.TemporaryDirectory(prefix="mmrl-fuzz-") as folder:
        copy, here = Path(folder) / "run", Path(folder) / "here"
        shutil.copytree(run_dir, copy)
        here.mkdir()
        what = "; ".join(_damage(copy, draw) for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))))
        before = _contents(copy)
        for command in draw(st.permutations(COMMANDS))[:3]:
            # A run that can be continued would be.
            with mock.patch("mmrl.run.session.begin", lambda *_, **__: (copy, 0)):
                if wrong := call([word.format(run=copy) for word in command], here):
                    return f"{what}\n  {wrong}"
        return None if _contents(copy) == before else f"{what}\n  a command that only looks has changed the run"


def _contents(run_dir: Path) -> dict[Path, bytes]:
    """Names and contents, without the report's; a folder has none."""
    paths = [path for path in run_dir.rglob("*") if path.name != "report.html" and not path.is_symlink()]
    return {path: path.read_bytes() if path.is_file() else b"" for path in paths}
