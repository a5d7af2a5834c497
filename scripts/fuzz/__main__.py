"""Bad input by the million: `python -m scripts.fuzz [inputs=1000000] [seed=0] [jobs=2] [only=tags,data] [at=17]`.

Every input follows from the seed, its target's name and its number, so that `only=tags at=17` repeats one. For each
the property is the same: it is taken, or refused by an error of mmrl's own, within a bound of time; and what is taken
keeps what its target promises (`scripts/fuzz/targets.py`). `data=FOLDER` starts from the first records of real files
instead of made-up ones. `engine=atheris` lets coverage choose the inputs, where that package is installed.
One table at the end, all findings in `outputs/fuzz/<time>.json`; exit code 1 when there is one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from scripts.fuzz.in_process import TooLong, time_limit
from scripts.fuzz.targets import TARGETS, Target, outcome

DEFAULTS = {
    "inputs": "1000000",
    "seed": "0",
    "jobs": "2",
    "only": "",
    "at": "",
    "data": "",
    "out": "",
    "engine": "seeded",
}
KEPT = 20
"""Findings of a target that are kept; all are counted."""


def main(arguments: Sequence[str]) -> int:
    """Run all inputs; 1 when something was found."""
    given = DEFAULTS | dict(argument.partition("=")[::2] for argument in arguments)
    if unknown := sorted(set(given) - set(DEFAULTS)):
        raise SystemExit(f"unknown option {', '.join(unknown)}: expected some of {'=, '.join(DEFAULTS)}=")
    chosen = given["only"].split(",") if given["only"] else list(TARGETS)
    if wrong := sorted(set(chosen) - set(TARGETS)):
        raise SystemExit(f"only: got {','.join(wrong)}, expected some of {','.join(TARGETS)}")
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    # What a library writes into the home folder when it is first used is no stray file of mmrl's.
    os.environ["MPLCONFIGDIR"] = tempfile.mkdtemp(prefix="mmrl-fuzz-")
    if given["data"]:
        from scripts.fuzz.real import read_real

        read_real(Path(given["data"]))
    seed, started = int(given["seed"]), time.monotonic()
    if given["engine"] == "atheris":
        from scripts.fuzz.guided import guide

        return guide(chosen, int(given["inputs"]), seed)
    if given["at"]:
        numbers = [(name, int(at)) for name in chosen for at in given["at"].split(",")]
        found = [one for name, at in numbers if (one := try_one(name, seed, at))]
        print("\n".join(found) or "nothing wrong")
        return int(bool(found))
    counts = shares(chosen, int(given["inputs"]))
    results = _forked(counts, seed, int(given["jobs"]))
    return _finish(results, given["out"], seed, time.monotonic() - started)


def shares(chosen: Sequence[str], inputs: int) -> dict[str, int]:
    """How many inputs each target gets; at least one."""
    whole = sum(TARGETS[name].share for name in chosen)
    return {name: max(1, round(inputs * TARGETS[name].share / whole)) for name in chosen}


def source(seed: int, name: str, number: int) -> Random:
    """The random source of one input."""
    return Random(f"{seed}/{name}/{number}")


def try_one(name: str, seed: int, number: int) -> str | None:
    """What is wrong with one input; None for nothing."""
    target = TARGETS[name]
    made = target.make(source(seed, name, number))
    problem = bounded(target, made)
    return None if problem is None else f"{name} {number}: {problem}\n  input: {repr(made)[:600]}"


def bounded(target: Target, made: Any) -> str | None:
    """`outcome` within the target's time."""
    try:
        with time_limit(target.limit_s) if target.limit_s else contextlib.nullcontext():
            return outcome(target, made)
    except TooLong:
        return f"took longer than {target.limit_s:g} s"


def _run(part: Mapping[str, range], seed: int) -> dict[str, Any]:
    """A process's part: per target, inputs, seconds, the slowest, and what was found."""
    results = {}
    for name, numbers in part.items():
        target, found, slowest, started = TARGETS[name], list[str](), 0.0, time.monotonic()
        wrong = 0
        for number in numbers:
            made, before = target.make(source(seed, name, number)), time.monotonic()
            problem = bounded(target, made)
            slowest = max(slowest, time.monotonic() - before)
            if problem is not None:
                wrong += 1
                if len(found) < KEPT:
                    found.append(f"{name} {number}: {problem}\n  input: {repr(made)[:600]}")
        seconds = time.monotonic() - started
        results[name] = {"inputs": len(numbers), "wrong": wrong, "seconds": seconds, "slowest": slowest, "found": found}
        print(f"{name}: {len(numbers)} inputs, {wrong} wrong, {seconds:.0f} s, slowest {slowest:.2f} s", flush=True)
    return results


def _forked(counts: Mapping[str, int], seed: int, jobs: int) -> dict[str, Any]:
    """All inputs, every `jobs`-th of them in each of `jobs` processes."""
    readers, pids = [], []
    for job in range(jobs):
        reader, writer = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(reader)
                part = {name: range(job, count, jobs) for name, count in counts.items()}
                with os.fdopen(writer, "w", encoding="utf-8") as file:
                    json.dump(_run(part, seed), file)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        os.close(writer)
        readers.append(os.fdopen(reader, encoding="utf-8"))
        pids.append(pid)
    texts = [reader.read() for reader in readers]
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(codes):
        raise SystemExit("a process of the campaign died")
    parts = [json.loads(text) for text in texts]
    return {name: _joined([part[name] for part in parts]) for name in counts}


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {key: sum(part[key] for part in parts) for key in ("inputs", "wrong", "seconds")}
    found = [one for part in parts for one in part["found"]]
    return joined | {"slowest": max(part["slowest"] for part in parts), "found": found}


def _finish(results: Mapping[str, Mapping[str, Any]], out: str, seed: int, spent: float) -> int:
    print(f"\n{'':16}{'inputs':>10}{'wrong':>8}{'µs each':>10}{'slowest s':>11}")
    for name, result in results.items():
        each = 1e6 * result["seconds"] / max(1, result["inputs"])
        print(f"{name:16}{result['inputs']:>10}{result['wrong']:>8}{each:>10.0f}{result['slowest']:>11.2f}")
    inputs, wrong = (sum(result[key] for result in results.values()) for key in ("inputs", "wrong"))
    for result in results.values():
        for one in result["found"][:5]:
            print(one)
    path = Path(out or f"outputs/fuzz/{time.strftime('%Y%m%d_%H%M%S')}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    summary = {"seed": seed, "inputs": inputs, "wrong": wrong, "wall_s": spent, "targets": dict(results)}
    path.write_text(json.dumps(summary, indent=1), encoding="utf-8")
    print(f"{inputs} inputs, {wrong} wrong, {spent:.0f} s; {path}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
