"""Runs disturbed on purpose: `python -m scripts.chaos [trials=500] [seed=0] [jobs=2] [only=137] [cases=grpo,eval]`.

Each trial starts one of the small command lines of `cases`, disturbs it in one way (`kinds=`: SIGKILL, SIGTERM, SIGINT,
full, readonly, damage) at a point that follows from the seed and the trial's number, continues it until it ends,
and compares everything that it left with the run that nobody disturbed. One table at the end, all results in
`outputs/chaos/<time>.json`; exit code 1 when a trial failed. Every failure prints the command that repeats it, and its
folder stays in `work=`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pandas as pd

import mmrl
from mmrl.store.machine import describe_environment
from scripts import expect_some_of, key_values
from scripts.chaos.cases import CASES
from scripts.chaos.children import Forked
from scripts.chaos.disk import available
from scripts.chaos.trial import KINDS, Place, Result, make_reference, try_one

DEFAULTS = {"trials": "500", "seed": "0", "jobs": "2", "only": "", "cases": "", "kinds": "", "work": "", "out": ""}


def main(arguments: Sequence[str]) -> int:
    """Run the trials, print the table, write the JSON; 1 when a trial failed."""
    args = key_values(arguments, DEFAULTS)
    cases = expect_some_of("cases", args["cases"], CASES)
    kinds = expect_some_of("kinds", args["kinds"], KINDS)
    if not available():
        print("a trial cannot mount a disk here: `full` and `readonly` are left out", flush=True)
        kinds = [kind for kind in kinds if kind not in ("full", "readonly")]
    numbers = [int(one) for one in args["only"].split(",")] if args["only"] else list(range(int(args["trials"])))
    seed, jobs, started = int(args["seed"]), int(args["jobs"]), time.monotonic()
    place = Place(Path(args["work"] or tempfile.mkdtemp(prefix="mmrl-chaos-")).resolve())
    _import_all()
    shutil.rmtree(place.work, ignore_errors=True)
    place.work.mkdir(parents=True)
    references = forked([partial(make_reference, place, name) for name in cases], place.work, jobs)
    if problems := [problem for reference in references for problem in reference.problems]:
        raise SystemExit("\n".join(problems))
    assert threading.active_count() == 1, threading.enumerate()
    print(f"{len(cases)} undisturbed runs in {time.monotonic() - started:.0f} s; {place.work}", flush=True)
    repeat = f"python -m scripts.chaos seed={seed} cases={','.join(cases)} kinds={','.join(kinds)} only="
    trials = [partial(try_one, place, seed, n, cases, kinds) for n in numbers]
    results = forked(trials, place.work, jobs, lambda result: _show(result, repeat))
    failed, spent = [result for result in results if result.problems], time.monotonic() - started
    print(f"\n{table(results)}")
    path = Path(args["out"] or f"outputs/chaos/{time.strftime('%Y%m%d_%H%M%S')}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    summary = {"seed": seed, "trials": len(results), "failed": len(failed), "wall_s": spent}
    found = describe_environment(sys.argv) | summary | {"results": [asdict(result) for result in results]}
    path.write_text(json.dumps(found, indent=1))
    print(f"{len(results)} trials, {len(results) - len(failed)} passed, {len(failed)} failed, {spent:.0f} s; {path}")
    if failed:
        print(f"their folders: {place.work}/trials")
    elif not args["work"]:
        shutil.rmtree(place.work, ignore_errors=True)
    return int(bool(failed))


def _import_all() -> None:
    """Import everything of mmrl, and with it torch and the libraries, so that no fork has to."""
    for found in pkgutil.walk_packages(mmrl.__path__, "mmrl."):
        if not found.name.endswith("__main__") and ".vllm" not in found.name:
            importlib.import_module(found.name)


def forked(
    works: Sequence[Callable[[], Result]], folder: Path, jobs: int, done: Callable[[Result], None] = lambda result: None
) -> list[Result]:
    """Results of `works`, each run in a fork of this process, `jobs` at a time."""
    results: dict[int, Result] = {}
    waiting, running = list(enumerate(works)), dict[int, Forked]()
    while waiting or running:
        while waiting and len(running) < jobs:
            index, work = waiting.pop(0)
            running[index] = Forked(partial(_work, work, folder / f"{index}.json"))
        time.sleep(0.01)
        for index in [index for index, process in running.items() if process.poll() is not None]:
            code, file = running.pop(index).returncode, folder / f"{index}.json"
            died = {"problems": [f"its process ended with code {code}"], "outcome": "FAILED"}
            results[index] = Result(**(json.loads(file.read_text()) if code == 0 else died))
            file.unlink(missing_ok=True)
            done(results[index])
    return [results[index] for index in range(len(works))]


def _work(work: Callable[[], Result], file: Path) -> int:
    """In a fork: do it, and leave the result."""
    try:
        result = work()
    except BaseException:
        result = Result(problems=[traceback.format_exc()], outcome="FAILED")
    file.write_text(json.dumps(asdict(result)), encoding="utf-8")
    return 0


def _show(result: Result, repeat: str) -> None:
    if result.problems:
        print(f"trial {result.number} FAILED: {result.case}, {'; '.join(result.faults)}, codes {result.codes}")
        print("\n".join(f"    {line}" for line in (*result.problems, f"repeat: {repeat}{result.number}")), flush=True)


def table(results: Sequence[Result]) -> str:
    """Trials, faults that struck, outcomes and mean seconds: by kind of fault, by run, by phase."""
    frame = pd.DataFrame([{**asdict(result), "trials": 1, "all": ""} for result in results])
    frame["phases"] = frame["phases"].map(lambda phases: sorted(set(phases)))
    outcomes = ["equal", "refused", "FAILED"]
    frame[outcomes] = pd.DataFrame({outcome: frame["outcome"] == outcome for outcome in outcomes}).astype(int)
    parts = []
    for title, column in (("fault", "kind"), ("run", "case"), ("phase", "phases"), ("all", "all")):
        groups = frame.explode(column).groupby(column)
        part = groups[["trials", "struck", *outcomes]].sum().assign(seconds=groups["seconds"].mean().round(1))
        parts.append(part.rename(lambda name, title=title: f"{title} {name}".strip()))
    return str(pd.concat(parts).to_string())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
