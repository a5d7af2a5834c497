"""Runs disturbed on purpose: `python -m scripts.chaos [trials=500] [seed=0] [jobs=2] [only=137] [cases=grpo,eval]`.

Each trial starts one of the small command lines of `cases`, disturbs it in one way (`kinds=`: SIGKILL, SIGTERM, SIGINT,
full, readonly, limit, damage) at a point that follows from the seed and the trial's number, continues it until it ends,
and compares everything that it left with the run that nobody disturbed. One table at the end, all results in
`outputs/chaos/<time>.json`; exit code 1 when a trial failed. Every failure prints the command that repeats it, and its
folder stays in `work=`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Before anything that computes is imported: trials are forks, and threads do not survive a fork.
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
DEFAULTS = {"trials": "500", "seed": "0", "jobs": "2", "only": "", "cases": "", "kinds": "", "work": "", "out": ""}


def main(arguments: Sequence[str]) -> int:
    """Run the trials; 1 when one failed."""
    os.environ.update(dict.fromkeys(ONE_THREAD, "1") | QUIET)
    given = DEFAULTS | dict(argument.partition("=")[::2] for argument in arguments)
    if unknown := sorted(set(given) - set(DEFAULTS)):
        raise SystemExit(f"unknown option {', '.join(unknown)}: expected some of {'=, '.join(DEFAULTS)}=")
    from scripts.chaos.cases import CASES
    from scripts.chaos.disk import available
    from scripts.chaos.trial import KINDS

    chosen = given["cases"].split(",") if given["cases"] else list(CASES)
    kinds = given["kinds"].split(",") if given["kinds"] else list(KINDS)
    for what, got, valid in (("cases", chosen, CASES), ("kinds", kinds, KINDS)):
        if wrong := sorted(set(got) - set(valid)):
            raise SystemExit(f"{what}: got {','.join(wrong)}, expected some of {','.join(valid)}")
    if not available():
        print("no disk of a trial's own can be made here: `full` and `readonly` are left out", flush=True)
        kinds = [kind for kind in kinds if kind not in ("full", "readonly")]
    started = time.monotonic()
    work = Path(given["work"] or tempfile.mkdtemp(prefix="mmrl-chaos-")).resolve()
    campaign = Campaign(work, int(given["seed"]), int(given["jobs"]), chosen, kinds, started)
    campaign.prepare()
    numbers = [int(one) for one in given["only"].split(",")] if given["only"] else list(range(int(given["trials"])))
    return campaign.finish(campaign.run(numbers), given["out"], bool(given["work"]))


class Campaign:
    """Trials as forks of this process, `jobs` at a time.

    Args:
        work: folder for everything that runs make.
        cases, kinds: what is drawn from.
        started: on the monotonic clock.
    """

    def __init__(self, work: Path, seed: int, jobs: int, cases: list[str], kinds: list[str], started: float):
        from scripts.chaos.trial import Place

        self.place, self.seed, self.jobs, self.cases, self.kinds = Place(work), seed, jobs, cases, kinds
        self.started = started

    def prepare(self) -> None:
        """Import what runs need, make the undisturbed runs, then import what they imported too."""
        from scripts.chaos.trial import make_reference

        _import_all()
        shutil.rmtree(self.place.work, ignore_errors=True)
        self.place.work.mkdir(parents=True)
        wrong = self._forked([lambda name=name: make_reference(self.place, name) for name in self.cases], self.jobs)
        if texts := [text for text in wrong if text]:
            raise SystemExit("\n".join(map(str, texts)))
        for name in self.cases:
            for module in self.place.events(name)["modules"]:
                if module not in sys.modules:
                    with contextlib.suppress(BaseException):
                        importlib.import_module(module)
        assert threading.active_count() == 1, threading.enumerate()
        print(
            f"{len(self.cases)} undisturbed runs in {time.monotonic() - self.started:.0f} s; {self.place.work}",
            flush=True,
        )

    def run(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Run the trials, each in a fork."""
        return self._forked([lambda n=n: self._trial(n) for n in numbers], self.jobs, _show)

    def _trial(self, number: int) -> dict[str, Any]:
        from scripts.chaos.trial import try_one

        words = f"seed={self.seed} cases={','.join(self.cases)} kinds={','.join(self.kinds)} only={number}"
        found = try_one(self.place, self.seed, number, self.cases, self.kinds)
        return asdict(found) | {"repeat": f"python -m scripts.chaos {words}"}

    def _forked(
        self, works: Sequence[Callable[[], Any]], jobs: int, done: Callable[[Any], None] = lambda result: None
    ) -> list[Any]:
        """The results of `works`, each in a fork."""
        results: list[Any] = [None] * len(works)
        waiting, running = list(range(len(works))), dict[int, int]()
        folder = self.place.work / "results"
        folder.mkdir(exist_ok=True)
        while waiting or running:
            while waiting and len(running) < jobs:
                index = waiting.pop(0)
                sys.stdout.flush()
                pid = os.fork()
                if pid == 0:
                    _work(works[index], folder / f"{index}.json")
                running[pid] = index
            pid, _ = os.wait()
            index = running.pop(pid)
            file = folder / f"{index}.json"
            results[index] = json.loads(file.read_text()) if file.is_file() else f"process {pid} died"
            file.unlink(missing_ok=True)
            done(results[index])
        return results

    def finish(self, results: Sequence[dict[str, Any]], out: str, keep: bool) -> int:
        """Print the table, write the JSON; 1 when a trial failed."""
        from scripts.bench.common import machine

        failed = [result for result in results if not isinstance(result, dict) or result["problems"]]
        spent = time.monotonic() - self.started
        print(f"\n{table([result for result in results if isinstance(result, dict)])}")
        path = Path(out or f"outputs/chaos/{time.strftime('%Y%m%d_%H%M%S')}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        summary = {"seed": self.seed, "trials": len(results), "failed": len(failed), "wall_s": spent, **machine()}
        path.write_text(json.dumps(summary | {"results": list(results)}, indent=1), encoding="utf-8")
        print(
            f"{len(results)} trials, {len(results) - len(failed)} passed, {len(failed)} failed, {spent:.0f} s; {path}"
        )
        if failed:
            print(f"their folders: {self.place.work}/trials")
        elif not keep:
            shutil.rmtree(self.place.work, ignore_errors=True)
        return int(bool(failed))


def _work(work: Callable[[], Any], file: Path) -> None:
    """In a fork: do it, leave the result, end."""
    try:
        try:
            result = work()
        except BaseException:
            result = {"problems": [traceback.format_exc()], "number": -1, "case": "", "kind": "", "outcome": "FAILED"}
            result |= {"phases": [], "faults": [], "struck": 0, "codes": [], "seconds": 0.0, "repeat": ""}
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(result), encoding="utf-8")
        temporary.rename(file)
    finally:
        os._exit(0)


def _show(result: Any) -> None:
    if not isinstance(result, dict):
        print(f"FAILED: {result}", flush=True)
    elif result["problems"]:
        faults = "; ".join(result["faults"])
        print(f"trial {result['number']} FAILED: {result['case']}, {faults}, codes {result['codes']}")
        for problem in result["problems"]:
            print(f"    {problem}")
        print(f"    repeat: {result['repeat']}", flush=True)


def table(results: Sequence[dict[str, Any]]) -> str:
    """By kind of fault, by case, by phase: trials, faults that struck, equal, refused, failed."""
    lines = [f"{'':32}{'trials':>8}{'struck':>8}{'equal':>8}{'refused':>8}{'failed':>8}{'s each':>8}"]
    keys: tuple[tuple[str, Callable[[dict[str, Any]], list[str]]], ...] = (
        ("fault", lambda r: [r["kind"]]),
        ("run", lambda r: [r["case"]]),
        ("phase", lambda r: sorted(set(r["phases"]))),
        ("", lambda r: ["all"]),
    )
    for title, key in keys:
        groups: dict[str, Counter[str]] = {}
        for result in results:
            for name in key(result):
                group = groups.setdefault(name, Counter())
                group.update({"trials": 1, result["outcome"]: 1, "struck": result["struck"]})
                group["ms"] += int(1000 * result["seconds"])
        for name, group in sorted(groups.items()):
            counts = (group[column] for column in ("trials", "struck", "equal", "refused", "FAILED"))
            numbers = "".join(f"{count:>8}" for count in counts)
            lines.append(f"{f'{title} {name}'.strip():32}{numbers}{group['ms'] / 1000 / group['trials']:>8.1f}")
    return "\n".join(lines)


def _import_all() -> None:
    """Everything of mmrl, and with it torch and the libraries, so that no fork has to."""
    import mmrl

    for found in pkgutil.walk_packages(mmrl.__path__, "mmrl."):
        if not found.name.endswith("__main__") and ".vllm" not in found.name:
            importlib.import_module(found.name)
    import torch

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
