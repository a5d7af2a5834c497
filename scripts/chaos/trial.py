"""One trial: a run is started, disturbed, continued until it ends well, and compared with the undisturbed one."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.system.files import is_locked
from scripts.chaos import disk as disks
from scripts.chaos.cases import CASES, RUN, Case, make_folder
from scripts.chaos.children import Ended, adopt_orphans, run, run_fresh
from scripts.chaos.compare import differences
from scripts.chaos.damage import copy, damage, put_back
from scripts.chaos.hooks import SIGNALS, Fault

STARTS = 6
"""A run that has not ended well after so many starts never will."""
KINDS = {"SIGKILL": 7, "SIGTERM": 4, "SIGINT": 3, "full": 3, "limit": 1, "readonly": 1, "damage": 5}
"""What disturbs a run, and how often."""
INSTANT_SHARE = 0.15
"""Of the signals: those that come at any instant of the run, not in a phase."""


@dataclass(kw_only=True)
class Result:
    """What came of a trial; `problems` is empty when it passed."""

    number: int
    case: str
    kind: str
    phases: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    struck: int = 0
    codes: list[int] = field(default_factory=list)
    outcome: str = ""
    """`equal` to the undisturbed run, or `refused` by an error that names the damaged file: equal with it put back."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


CODES = {"SIGKILL": (0, -9), "SIGTERM": (0, 143, -15), "SIGINT": (0, 130, -2)}
"""How a run that was struck may end: done, stopped with its state saved, or by the signal while it was starting."""


class Place:
    """Where undisturbed runs, stopped ones and trials lie.

    Args:
        work: a folder of this campaign's own.
    """

    def __init__(self, work: Path):
        self.work = work

    def reference(self, case: str) -> Path:
        """The folder that the undisturbed run was started in."""
        return self.work / "reference" / case / "disk"

    def stopped(self, case: str) -> Path:
        """The same for the run that was killed, to be damaged."""
        return self.work / "stopped" / case / "disk"

    def events(self, case: str) -> Mapping[str, Any]:
        """What the undisturbed run went through: `seconds` by phase, `modules` that it imported, its `wall` time."""
        found: dict[str, Any] = json.loads((self.work / "reference" / case / "events").read_text())
        return found

    def env(self, case: str, folder: Path) -> dict[str, str]:
        """Variables of every process; all runs of a case share a cache, which the undisturbed one has filled."""
        cache = self.work / "cache" / case
        return {"MMRL_CACHE": str(cache), "TMPDIR": str(folder / "tmp"), "COLUMNS": "120", "HF_HUB_OFFLINE": "1"}


def make_reference(place: Place, name: str) -> str:
    """The undisturbed run of a case, and the stopped one; returns what is wrong, empty for nothing."""
    case, folder = CASES[name], place.reference(name)
    make_folder(case, folder)
    events, started = folder.parent / "events", time.monotonic()
    env = place.env(name, folder)
    found = run_fresh(case.words, folder, env=env) if case.marks else run(case.words, folder, env=env, events=events)
    if found.code:
        why = f"after {found.seconds:.0f} s, its time limit" if found.hung else f"with code {found.code}"
        return f"{name}: the undisturbed run ended {why}\n{found.err[-2000:]}"
    seen = json.loads(events.read_text()) if events.exists() else {"seconds": {}, "modules": []}
    events.write_text(json.dumps(seen | {"wall": time.monotonic() - started}))
    if case.stop is not None:
        stopped, (phase, call) = place.stopped(name), case.stop
        make_folder(case, stopped)
        fault = Fault(what="SIGKILL", phase=phase, call=call, when="before")
        found = run(case.words, stopped, env=place.env(name, stopped), fault=fault)
        if found.code != -signal.SIGKILL:
            return f"{name}: was to be stopped {fault}, but ended with code {found.code}\n{found.err[-2000:]}"
    return ""


def try_one(place: Place, seed: int, number: int, cases: Sequence[str], kinds: Sequence[str]) -> Result:
    """Trial `number`; a pure function of the seed, the number and the choice of cases and kinds."""
    adopt_orphans()
    noise, started = random.Random(f"{seed}/{number}"), time.monotonic()
    kind = noise.choices(kinds, [KINDS[one] for one in kinds])[0]
    # A fresh process is watched from outside alone: nothing in it counts phases, in which other faults strike.
    able = [name for name in cases if not CASES[name].marks or kind in SIGNALS or kind == "damage"]
    able = [name for name in able if kind != "damage" or CASES[name].stop is not None]
    name = noise.choices(able, [CASES[one].share for one in able])[0]
    result = Result(number=number, case=name, kind=kind)
    folder = place.work / "trials" / str(number) / "disk"
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    trial = _Trial(place, name, CASES[name], folder, noise, result)
    if kind == "damage":
        trial.damaged()
    elif CASES[name].marks:
        trial.fresh()
    else:
        trial.disturbed()
    result.seconds = time.monotonic() - started
    result.outcome = "FAILED" if result.problems else result.outcome or "equal"
    if not result.problems:
        shutil.rmtree(folder.parent, ignore_errors=True)
    return result


class _Trial:
    def __init__(self, place: Place, name: str, case: Case, folder: Path, noise: random.Random, result: Result):
        self.place, self.name, self.case, self.folder, self.noise = place, name, case, folder, noise
        self.result = result
        self.env = place.env(name, folder)
        self.events = place.events(name)

    # -- the ways of disturbing

    def disturbed(self) -> None:
        """Faults in phases, or at any instant: one, sometimes a second and a third while it is continued."""
        disk = None
        if self.result.kind in ("full", "readonly"):
            disk = disks.Disk(self.folder)
        make_folder(self.case, self.folder)
        faults = 1 if disk else self.noise.choices((1, 2, 3), (7, 2, 1))[0]

        def start(words: Sequence[str], number: int) -> Ended:
            if number >= faults:
                return run(words, self.folder, env=self.env)
            fault, after = self.draw()
            self.result.faults.append(f"{fault.what} after {after:.2f} s" if after is not None else str(fault))
            self.result.phases.append("any instant" if after is not None else fault.phase)
            found = run(words, self.folder, env=self.env, fault=fault, disk=disk, after=after)
            if disk:
                disk.release()
            return found

        self.until_done(start)
        self.check()
        if disk and self.result.problems:  # it is gone with this process
            copy(self.folder, self.folder.with_name("kept"))

    def draw(self) -> tuple[Fault, float | None]:
        """A fault, and the instant for one that is in no phase."""
        kind, noise = self.result.kind, self.noise
        rank = noise.choice(self.case.ranks)
        if kind in SIGNALS and ((rank is None and len(self.case.ranks) > 1) or noise.random() < INSTANT_SHARE):
            return Fault(what=kind, phase="", call=0, when=""), noise.uniform(0, self.events["wall"])
        phases = sorted(self.events["seconds"])
        if rank:  # what the main process alone does
            phases = sorted({*phases} & {"build", "collect", "rollout", "credit", "update", "sync", "evaluation"})
        phase = noise.choice(phases)
        seconds = self.events["seconds"][phase]
        call = noise.randint(1, len(seconds))
        when = noise.choice(
            ("before", "inside", "after") if kind in SIGNALS and phase != "file" else ("before", "after")
        )
        delay = noise.random() * seconds[call - 1] if when == "inside" else 0.0
        room = noise.choice((0, noise.randrange(1 << 15), noise.randrange(8 << 20)))
        if kind == "limit":  # what it prints goes into files too
            room = max(room, 1 << 16)
        return Fault(what=kind, phase=phase, call=call, when=when, delay=delay, room=room, rank=rank), None

    def fresh(self) -> None:
        """`python -m mmrl`, struck when a file of the run appears, or at any instant."""
        make_folder(self.case, self.folder)
        number = SIGNALS[self.result.kind]
        wanted = self.noise.choice(self.case.marks)
        delay = self.noise.uniform(0, 1.0) if wanted else self.noise.uniform(0, 15.0)
        self.result.faults.append(f"{self.result.kind} {delay:.2f} s after {wanted or 'the start'}, fresh process")
        self.result.phases.append("fresh process")
        due: list[float] = []

        def kill(now: float, pid: int) -> int | None:
            if not due and (not wanted or any(self.folder.glob(wanted))):
                due.append(now + delay)
            return number if due and now >= due[0] else None

        self.until_done(lambda words, n: run_fresh(words, self.folder, env=self.env, kill=None if n else kill))
        self.check()

    def damaged(self) -> None:
        """A stopped run, damaged, then continued: to equal numbers, or refused by an error that names the file.

        A refusal has changed nothing: with that file put back, the run continues to equal numbers.
        """
        if self.name == "index":  # whose unfinished builds know where their sources lie
            make_folder(self.case, self.folder)
            assert self.case.stop is not None
            stop = Fault(what="SIGKILL", phase=self.case.stop[0], call=self.case.stop[1], when="before")
            run(self.case.words, self.folder, env=self.env, fault=stop)
        else:
            copy(self.place.stopped(self.name), self.folder)
        target = next(self.folder / one for one in (RUN, f"{RUN}.partial") if (self.folder / one).is_dir())
        kind, file, held = damage(target, self.noise)
        self.result.faults.append(f"{file}: {kind}")
        self.result.phases.append(f"damage: {kind}")
        self.result.struck = 1
        found = run(self.case.again, self.folder, env=self.env)
        self.ended_well(found)
        if found.code == 0:
            self.check()
            return
        names = [file, file.rpartition("/")[2], file.partition("/")[0]]
        if target.name != RUN:  # an unfinished build is removed as a whole
            names.append(target.name)
        named = any(name in found.err for name in names)
        if found.code < 0 or not any(line.startswith("error: ") for line in found.err.splitlines()) or not named:
            self.problem(f"refused with code {found.code} and no error that names {file}: {found.err[-300:]!r}")
        self.result.outcome = "refused"
        put_back(target / file, held)
        found = run(self.case.again, self.folder, env=self.env)
        self.ended_well(found)
        if found.code == 0:
            self.check()
        else:
            self.problem(f"with {file} put back it ended with code {found.code}: {found.err[-300:]!r}")

    # -- until it is done, and what is checked

    def until_done(self, start: Callable[[Sequence[str], int], Ended]) -> None:
        """Start, and continue until it ends with 0."""
        words = self.case.words
        for number in range(STARTS):
            found = start(words, number)
            self.result.struck += found.struck
            self.ended_well(found)
            if found.code == 0:
                return
            # It was struck when all was written, before it could end.
            if number and any(said in found.err for said in ("is finished", "exists, and is left as it is")):
                return
            if number and not found.struck:
                self.problem(f"continuing ended with code {found.code}: {found.err[-400:]!r}")
                return
            words = self.case.again
            if not (self.folder / RUN / "config.yaml").is_file() and self.case.again != self.case.words:
                # Killed before there was a run: what there is of a folder is the user's to remove.
                shutil.rmtree(self.folder / RUN, ignore_errors=True)
                words = self.case.words
        self.problem(f"not done after {STARTS} starts")

    def ended_well(self, found: Ended) -> None:
        """No traceback, no hang, nothing left behind, an error in words where there is one."""
        self.result.codes.append(found.code)
        if found.hung:
            self.problem("hung")
        expected = CODES.get(self.result.kind, ())
        # Of several processes the first one ends with code 1 where another was killed.
        if found.struck and expected and found.code not in (*expected, *((1,) if len(self.case.ranks) > 1 else ())):
            self.problem(f"{self.result.kind} ended it with code {found.code}: {found.err[-200:]!r}")
        if (start := found.err.find("Traceback (most recent")) >= 0:
            self.problem(f"a traceback: {found.err[max(0, start - 200) : start + 3000]}")
        if found.left:
            self.problem(f"left processes: {found.left}")
        if found.code > 0 and not found.err.strip():
            self.problem(f"code {found.code} and not a word")
        if is_locked(self.folder / RUN / "run.lock"):
            self.problem("its lock is held")

    def check(self) -> None:
        """The folder is that of the undisturbed run, and nothing lies beside it."""
        expected = self.place.reference(self.name)
        for problem in differences(expected, self.folder)[:6]:
            self.problem(problem)

    def problem(self, text: str) -> None:
        """Note what is wrong."""
        self.result.problems.append(text)
