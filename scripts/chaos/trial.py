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
from scripts.chaos.cases import CASES, RUN, Case
from scripts.chaos.children import Ended, adopt_orphans, run, run_fresh
from scripts.chaos.compare import differences
from scripts.chaos.damage import damage, put_back
from scripts.chaos.hooks import SIGNALS, Fault

STARTS = 6
"""A run that has not ended well after so many starts never will."""
KINDS = {"SIGKILL": 7, "SIGTERM": 4, "SIGINT": 3, "full": 4, "readonly": 1, "damage": 5}
"""Kind of fault -> how often it is drawn, relative to the others."""
INSTANT_SHARE = 0.15
"""Share of signals that come at any instant of the run, not in a phase."""


@dataclass(kw_only=True)
class Result:
    """Outcome of a trial; `problems` is empty when it passed."""

    number: int = -1
    case: str = ""
    kind: str = ""
    phases: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    struck: int = 0
    codes: list[int] = field(default_factory=list)
    outcome: str = "equal"
    """`equal` to the undisturbed run, `refused` by an error that names the damaged file (equal with it put back), or
    `FAILED`."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


CODES = {"SIGKILL": (0, -9), "SIGTERM": (0, 143, -15), "SIGINT": (0, 130, -2)}
"""Exit codes of a run that was struck: done, stopped with its state saved, or by the signal while it was starting."""


@dataclass(frozen=True)
class Place:
    """Paths below `work`, the campaign's folder: undisturbed runs and trials."""

    work: Path

    def reference(self, case: str) -> Path:
        """Folder that the undisturbed run was started in."""
        return self.work / "reference" / case / "disk"

    def events(self, case: str) -> Mapping[str, Any]:
        """Record of the undisturbed run: `seconds` by phase, its `wall` time."""
        found: dict[str, Any] = json.loads((self.work / "reference" / case / "events").read_text())
        return found

    def env(self, case: str, folder: Path) -> dict[str, str]:
        """Variables of every process; all runs of a case share a cache, which the undisturbed one has filled."""
        cache = self.work / "cache" / case
        return {"MMRL_CACHE": str(cache), "TMPDIR": str(folder / "tmp"), "COLUMNS": "120", "HF_HUB_OFFLINE": "1"}


def make_reference(place: Place, name: str) -> Result:
    """Make the undisturbed run of a case."""
    case, folder, result = CASES[name], place.reference(name), Result(case=name)
    (folder / "tmp").mkdir(parents=True)
    events, started = folder.parent / "events", time.monotonic()
    env = place.env(name, folder)
    found = run_fresh(case.words, folder, env=env) if case.marks else run(case.words, folder, env=env, events=events)
    if found.code:
        why = "at its time limit" if found.hung else f"with code {found.code}"
        result.problems.append(f"{name}: the undisturbed run ended {why}\n{found.err[-2000:]}")
        return result
    counted = json.loads(events.read_text()) if events.exists() else {"seconds": {}}
    events.write_text(json.dumps(counted | {"wall": time.monotonic() - started}))
    return result


def try_one(place: Place, seed: int, number: int, cases: Sequence[str], kinds: Sequence[str]) -> Result:
    """Run trial `number`, which follows from the seed, the number and the choice of cases and kinds."""
    adopt_orphans()
    noise, started = random.Random(f"{seed}/{number}"), time.monotonic()
    kind = noise.choices(kinds, [KINDS[one] for one in kinds])[0]
    # A fresh process is watched from outside alone: nothing in it counts phases, in which other faults strike.
    if kind == "damage":
        able = [name for name in cases if CASES[name].stop is not None]
    else:
        able = [name for name in cases if kind in SIGNALS or not CASES[name].marks]
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
    if not result.problems:
        shutil.rmtree(folder.parent, ignore_errors=True)
    return result


class _Trial:
    def __init__(self, place: Place, name: str, case: Case, folder: Path, noise: random.Random, result: Result):
        self.place, self.name, self.case, self.folder, self.noise = place, name, case, folder, noise
        self.result = result
        self.env = place.env(name, folder)
        self.events = place.events(name)

    # -- ways of disturbing

    def disturbed(self) -> None:
        """Strike in phases, or at any instant: once, sometimes again while it is continued."""
        disk = disks.Disk(self.folder) if self.result.kind in ("full", "readonly") else None
        (self.folder / "tmp").mkdir()
        faults = 1 if disk else self.noise.choices((1, 2, 3), (7, 2, 1))[0]

        def start(words: Sequence[str], number: int) -> Ended:
            if number >= faults:
                return run(words, self.folder, env=self.env)
            fault = self.draw()
            self.result.faults.append(str(fault))
            self.result.phases.append(fault.phase or "any instant")
            found = run(words, self.folder, env=self.env, fault=fault, disk=disk)
            if disk:
                disk.release()
            return found

        self.until_done(start)
        self.check()
        if disk and self.result.problems:  # it is gone with this process
            shutil.copytree(self.folder, self.folder.with_name("kept"), symlinks=True)

    def draw(self) -> Fault:
        """Draw a fault."""
        kind, noise = self.result.kind, self.noise
        rank = noise.choice(self.case.ranks)
        if kind in SIGNALS and ((rank is None and len(self.case.ranks) > 1) or noise.random() < INSTANT_SHARE):
            return Fault(what=kind, delay=noise.uniform(0, self.events["wall"]))
        phases = sorted(self.events["seconds"])
        if rank:  # what the main process alone does
            phases = sorted({*phases} & {"build", "collect", "rollout", "credit", "update", "sync", "evaluation"})
        phase = noise.choice(phases)
        seconds = self.events["seconds"][phase]
        call = noise.randint(1, len(seconds))
        inside = ("inside",) if kind in SIGNALS and phase != "file" else ()
        when = noise.choice(("before", "after", *inside))
        delay = noise.random() * seconds[call - 1] if when == "inside" else 0.0
        room = noise.choice((0, noise.randrange(1 << 15), noise.randrange(8 << 20)))
        return Fault(what=kind, phase=phase, call=call, when=when, delay=delay, room=room, rank=rank)

    def fresh(self) -> None:
        """Strike a fresh `python -m mmrl` when a file of the run appears, or at any instant."""
        (self.folder / "tmp").mkdir()
        mark = self.noise.choice(self.case.marks)
        fault = Fault(what=self.result.kind, delay=self.noise.uniform(0, 1.0 if mark else 15.0))
        self.result.faults.append(f"{fault} of {mark or 'the start'}, fresh process")
        self.result.phases.append("fresh process")

        def start(words: Sequence[str], starts: int) -> Ended:
            return run_fresh(words, self.folder, env=self.env, fault=None if starts else fault, mark=mark)

        self.until_done(start)
        self.check()

    def damaged(self) -> None:
        """Damage a stopped run, then continue it: to equal numbers, or refused by an error that names the file.

        A refusal has changed nothing: with that file put back, the run continues to equal numbers.
        """
        assert self.case.stop is not None
        (phase, call), words = self.case.stop, self.case.words
        (self.folder / "tmp").mkdir()
        stop = Fault(what="SIGKILL", phase=phase, call=call, when="before")
        found = run(words, self.folder, env=self.env, fault=stop)
        if found.code != -signal.SIGKILL:
            self.problem(f"was to be stopped {stop}, but ended with code {found.code}: {found.err[-2000:]}")
            return
        target = next(self.folder / one for one in (RUN, f"{RUN}.partial") if (self.folder / one).is_dir())
        kind, file, held = damage(target, self.noise)
        self.result.faults.append(f"{file}: {kind}")
        self.result.phases.append(f"damage: {kind}")
        self.result.struck = 1
        found = self.continued()
        if found.code == 0:
            return
        self.result.outcome = "refused"
        names = [file, file.rpartition("/")[2], file.partition("/")[0]]
        if target.name != RUN:  # an unfinished build is removed as a whole
            names.append(target.name)
        named = any(name in found.err for name in names)
        if found.code < 0 or not any(line.startswith("error: ") for line in found.err.splitlines()) or not named:
            self.problem(f"refused with code {found.code} and no error that names {file}: {found.err[-300:]!r}")
        put_back(target / file, held)
        found = self.continued()
        if found.code:
            self.problem(f"with {file} put back it ended with code {found.code}: {found.err[-300:]!r}")

    def continued(self) -> Ended:
        """Continue the run, and compare it where it is done."""
        found = run(self.case.again, self.folder, env=self.env)
        self.ended_well(found)
        if found.code == 0:
            self.check()
        return found

    # -- until it is done, and what is checked

    def until_done(self, start: Callable[[Sequence[str], int], Ended]) -> None:
        """Start the run, and continue it until it ends with 0."""
        words = self.case.words
        for number in range(STARTS):
            found = start(words, number)
            self.result.struck += found.struck
            self.ended_well(found)
            if found.code == 0:
                return
            # It was struck when all was written, before it could end.
            if number and any(sentence in found.err for sentence in ("is finished", "exists, and is left as it is")):
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
        """Check an end: no traceback, no hang, nothing left behind, an error in words where there is one."""
        self.result.codes.append(found.code)
        if found.hung:
            self.problem("hung")
        expected = CODES.get(self.result.kind, ())
        # Of several processes the first one ends with code 1 where another was killed.
        if found.struck and expected and found.code not in (*expected, *((1,) if len(self.case.ranks) > 1 else ())):
            self.problem(f"{self.result.kind} ended it with code {found.code}: {found.err[-200:]!r}")
        # Python itself prints a Ctrl-C that comes while the interpreter leaves, when mmrl has ended.
        text = found.err.partition("Exception ignored in atexit callback")[0]
        if (start := text.find("Traceback (most recent")) >= 0:
            self.problem(f"a traceback: {text[max(0, start - 200) :][-5000:]}")
        if found.left:
            self.problem(f"left processes: {found.left}")
        if found.code > 0 and not found.err.strip():
            self.problem(f"code {found.code} and not a word")
        if is_locked(self.folder / RUN / "run.lock"):
            self.problem("its lock is held")

    def check(self) -> None:
        """Compare the folder with that of the undisturbed run."""
        for problem in differences(self.place.reference(self.name), self.folder)[:6]:
            self.problem(problem)

    def problem(self, text: str) -> None:
        """Record a failure."""
        self.result.problems.append(text)
        self.result.outcome = "FAILED"
