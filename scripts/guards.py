"""What a rebuild must not change: recorded once, then run again and compared, bit for bit.

    python -m scripts.guards record=DIR [only=credit,lines] [jobs=2] [checkout=FOLDER]
    python -m scripts.guards check=DIR  [only=credit,lines] [jobs=2] [checkout=FOLDER]

The code is that of the checkout (default: the current folder). `check` prints one line per item and ends with exit code
1 on any difference; its folder is DIR-check.

Parts (`only=`): `credit` (every algorithm and option on the files of `guard_forests/`), `lines` (the command lines of
the docs of the recorded checkout, composed), `runs` and `more` (short training runs: metrics, weights, evaluations,
journals), `resume` (a run killed after step 3), `old` (recorded run directories read, evaluated and resumed).
`mmrl` is reached by its command line alone, so nothing here depends on where its code lies. All texts are files:
`diff -r DIR/items DIR-check/items` shows differences in full.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from mmrl.system.conf import later_wins
from scripts.guard_cases import BATCH, COMMON, CREDIT, EVALS, MEASURED, MORE, NOT_COMPARED, RESUMED, RUNS

PARTS = ("credit", "lines", "runs", "more", "resume", "old")
FORESTS = Path(__file__).parent / "guard_forests"
Items = dict[str, str]


class Place:
    """The folder that commands run in, with a checkout's code.

    Args:
        checkout: folder that holds the package.
        work: current folder of all commands; run directories are relative to it, so that texts name the same paths.
    """

    def __init__(self, checkout: Path, work: Path):
        self.work = work
        # A cache of its own: an index that other code left must not be what this code is judged by.
        here = {"PYTHONPATH": str(checkout), "MMRL_CACHE": str(work / "cache")}
        self.env = os.environ | here | {"COLUMNS": "120", "HF_HUB_OFFLINE": "1"}
        shutil.copytree(FORESTS, work / "forests", dirs_exist_ok=True)  # a rebase may move them meanwhile
        where = self._python("-c", "import mmrl; print(mmrl.__file__)").stdout.strip()
        if not Path(where).is_relative_to(checkout):
            sys.exit(f"mmrl is {where}, not of {checkout}: start this in the checkout's folder")

    def _python(self, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=self.work, env=self.env, input=text, capture_output=True, text=True)

    def mmrl(self, *arguments: str) -> str:
        """One command; its exit code and what it printed on stdout. Failures are shown."""
        done = self._python("-m", "mmrl", *arguments)
        if done.returncode:
            print(f"  exit {done.returncode}: mmrl {shlex.join(arguments)}\n{done.stderr[-1500:]}", flush=True)
        return self.text(done.returncode, done.stdout)

    def text(self, code: int, out: str) -> str:
        """An item's text: exit code and stdout, with no path of this machine. Wording of stderr is free to change."""
        return f"exit code {code}\n{out}".replace(str(self.work), ".")

    def batch(self, commands: Sequence[Sequence[str]]) -> list[str]:
        """Many quick commands, as `mmrl` gives them."""
        if not commands:
            return []
        done = self._python("-c", BATCH, text="".join(json.dumps(list(one)) + "\n" for one in commands))
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        answers += [[71, f"no answer: {done.stderr[-500:]}", ""]] * (len(commands) - len(answers))
        return [self.text(code, out) for code, out, _ in answers]

    def killed(self, arguments: Sequence[str], metrics: Path, step: int) -> None:
        """Start a run and SIGKILL it once its metrics have a step."""
        command = [sys.executable, "-m", "mmrl", *arguments]
        null = subprocess.DEVNULL
        with subprocess.Popen(command, cwd=self.work, env=self.env, stdout=null, stderr=null) as run:
            while run.poll() is None and not (metrics.exists() and f'"step":{step},' in metrics.read_text()):
                time.sleep(0.02)
            run.send_signal(signal.SIGKILL)


def canonical(record: object) -> str:
    """One line of JSON, keys sorted, floats as Python prints them: equal texts are equal bits."""
    return json.dumps(record, sort_keys=True, ensure_ascii=False)


def metrics_text(run: Path) -> str:
    """The metrics of a run, one key per line."""
    lines = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        keys = sorted(key for key in record if not key.startswith(NOT_COMPARED))
        lines += [f"{record['step']} {key} {canonical(record[key])}" for key in keys]
    return "\n".join(lines)


def newest_checkpoint(run: Path) -> Path:
    """The checkpoint of a run with the highest step."""
    return max((run / "checkpoints").iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))


def weights_text(run: Path) -> str:
    """Digests of all tensors of the newest checkpoint."""
    lines = []
    for path in sorted(newest_checkpoint(run).rglob("*.safetensors")):
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        header.pop("__metadata__", None)
        for name, tensor in sorted(header.items()):
            first, last = tensor.pop("data_offsets")
            digest = hashlib.sha256(data[8 + size + first : 8 + size + last]).hexdigest()
            lines.append(f"{path.relative_to(run)} {name} {canonical(tensor)} {digest}")
    return "\n".join(lines)


def records_text(paths: Iterable[Path]) -> str:
    """All records of JSON-lines files (evaluations, journals)."""
    lines = []
    for path in sorted(paths):
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines += [f"{path.name} {canonical(json.loads(line))}" for line in raw.decode().splitlines()]
    return "\n".join(lines)


def numbers(text: str) -> str:
    """The numbers of a text or an HTML page, one per line: words may change, numbers may not."""
    text = re.sub(r"<(style|script|svg)\b.*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL)
    return "\n".join(re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", text))


def first_difference(expected: str, actual: str) -> str | None:
    """None for equal texts, else the number of the first differing line and both around the first differing column."""
    if expected == actual:
        return None
    pairs = itertools.zip_longest(expected.split("\n"), actual.split("\n"), fillvalue="(nothing)")
    number, (old, new) = next((n, pair) for n, pair in enumerate(pairs, start=1) if pair[0] != pair[1])
    column = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(0, column - 60)
    return f"line {number}: {old[start : column + 60]!r} is now {new[start : column + 60]!r}"


# -- the parts ---------------------------------------------------------------------------------------------------------


def credit_items(place: Place, cases: Sequence[tuple[str, str, str]]) -> Items:
    """Every algorithm and option on forest files, to the last bit that JSON prints."""
    jobs = [(a, f, o) for a, files, o in cases for f in files.split()]
    commands = [["credit", f"algo={a}", f"rollouts=forests/{f}.json", "--json", *o.split()] for a, f, o in jobs]
    texts = place.batch(commands)
    return {f"credit/{f}/{a} {o}".strip(): text for (a, f, o), text in zip(jobs, texts, strict=True)}


def doc_lines(checkout: Path) -> list[str]:
    """Command lines of README and docs: those of code blocks and those in running text."""
    lines: list[str] = []
    for path in [checkout / "README.md", *sorted((checkout / "docs").glob("*.md"))]:
        prose, *blocks = re.split(r"^```", path.read_text(), flags=re.MULTILINE)
        for number, block in enumerate(blocks):
            if number % 2:
                prose += block
                continue
            block = block.replace("\\\n", " ")
            lines += re.findall(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(mmrl [a-z].*)$", block, flags=re.MULTILINE)
        lines += [" ".join(code.split()) for code in re.findall(r"(?<!`)`(mmrl\s[^`]+)`", prose)]
    return list(dict.fromkeys(lines))


def commands_of(line: str) -> Iterator[list[str]]:
    """What composes a documented line without running it; none if it cannot be composed (placeholders, prose)."""
    try:
        words = shlex.split(line, comments=True)[1:]
    except ValueError:
        return
    words = [word for word in words if "…" not in word and "..." not in word and word not in ("--cfg", "job")]
    if not words or words[0] not in ("train", "eval", "plan"):
        return
    # A bare word is a placeholder of the prose (`<the same overrides>`, RUN_DIR); what `resume=` needs is not here.
    if any(word.startswith(("resume=", "<", "[")) or ("=" not in word and word[0] != "-") for word in words[1:]):
        return
    choices = []
    for word in words:
        if word == "-m":
            continue
        values = [word]
        while (match := re.search(r"\{([^{}:]*,[^{}:]*)\}", values[0])) and word.startswith("experiment="):
            values = [v.replace(match[0], part) for v in values for part in match[1].split(",")]
        if "-m" in words and re.fullmatch(r"[\w.]+=[^\[{]+", values[0]):
            key = word.partition("=")[0]
            values = [f"{key}={v}" for one in values for v in one.partition("=")[2].split(",")]
            values = list(dict.fromkeys(values)) if key == "experiment" else values[:1]
        choices.append(values)
    for chosen in itertools.product(*choices):
        yield [*chosen, "dry=0"] if words[0] == "plan" else [*dict.fromkeys([*chosen, "--cfg", "job"])]


def line_items(place: Place, lines: list[str]) -> Items:
    """Each documented command line that can be composed, composed."""
    commands = list(dict.fromkeys(tuple(c) for line in lines for c in commands_of(line)))
    texts = place.batch(commands)
    # `mmrl plan` without a device measures this one, and its time with it.
    texts = [
        text if "device=" in " ".join(c) else re.sub(MEASURED, "", text)
        for c, text in zip(commands, texts, strict=True)
    ]
    texts = [f"mmrl {shlex.join(command)}\n{text}" for command, text in zip(commands, texts, strict=True)]
    return {f"lines/{n:03} {commands[n][0]}": text for n, text in enumerate(texts)}


def run_items(place: Place, name: str, settings: str) -> Items:
    """One short training run."""
    run = place.work / "runs" / name
    shutil.rmtree(run, ignore_errors=True)
    out = place.mmrl("train", *later_wins([*COMMON.split(), *settings.split(), f"run.dir=runs/{name}"]))
    return {f"runs/{name}/exit": out.split("\n")[0], **directory_items(f"runs/{name}", run)}


def directory_items(item: str, run: Path) -> Items:
    """What a run directory holds."""
    readers = {
        "metrics": lambda: metrics_text(run),
        "weights": lambda: weights_text(run),
        "evaluations": lambda: records_text((run / "eval").glob("*.jsonl")),
        "journal": lambda: records_text((run / "journal").glob("*.jsonl.gz")),
        "config": lambda: (run / "config.yaml").read_text(),
    }
    items = {}
    for what, read in readers.items():
        try:
            items[f"{item}/{what}"] = read()
        except (OSError, ValueError, KeyError) as error:
            items[f"{item}/{what}"] = f"cannot be read: {error}"
    return items


def resume_items(place: Place) -> Items:
    """The default run, killed after step 3 and resumed: the metrics of one that was not."""
    run = place.work / "runs" / "killed"
    for folder in (run, run.with_name("killed_as_left"), place.work / "resume"):
        shutil.rmtree(folder, ignore_errors=True)
    settings = [*COMMON.split(), *RUNS["default"].split(), "run.dir=runs/killed"]
    place.killed(["train", *settings], run / "metrics.jsonl", 3)
    shutil.copytree(run, place.work / "runs" / "killed_as_left")  # what `old` resumes with later code
    (place.work / "resume").mkdir()
    run.rename(place.work / "resume" / "killed")
    return resumed_items(place, "resume/killed")


def old_items(place: Place, old: Path, name: str) -> Items:
    """A recorded run directory, read, evaluated and resumed by this code; on copies."""
    run = f"old/{name}"
    shutil.copytree(old / name, place.work / run)
    journal = gzip.decompress((old / name / "journal" / "step-000001.jsonl.gz").read_bytes()).decode()
    example = next(r["example"] for r in map(json.loads, journal.splitlines()) if r["line"] == "call")
    shown = [["show", run], ["show", run, "step=1"], ["show", run, "step=1", f"example={example}"]]
    exported = ["show", run, "step=1", "--json"]
    credit = [
        "credit",
        "algo=grpo,grpo_mr,mmgrpo,mhgpo_fof,mhgpo_rr",
        f"rollouts={run}/journal/step-000001.jsonl.gz",
        "--json",
    ]
    *texts, forest, credited = place.batch([*shown, exported, credit])
    items = {f"{run}/show {what}": numbers(text) for what, text in zip(("run", "step", "tree"), texts, strict=True)}
    items |= {f"{run}/show json": forest, f"{run}/credit": credited}
    code = place.mmrl("report", run).split("\n")[0]
    items[f"{run}/report"] = f"{code}\n{numbers((place.work / run / 'report.html').read_text())}"
    if name in EVALS:
        words = [f"policy={run}", *EVALS[name].split(), "eval.items=8", "hardware.threads=1", f"run.dir=evals/{name}"]
        code = place.mmrl("eval", *words).split("\n")[0]
        items[f"{run}/eval"] = f"{code}\n{records_text((place.work / 'evals' / name).rglob('*.jsonl'))}"
    if name in RESUMED:
        shutil.copytree(old / name, place.work / f"old/{name}_resumed")
        shutil.rmtree(newest_checkpoint(place.work / f"old/{name}_resumed"))  # as if killed before its last checkpoint
        (place.work / f"old/{name}_resumed" / "summary.json").unlink()
        items |= resumed_items(place, f"old/{name}_resumed")
    return items


def resumed_items(place: Place, run: str) -> Items:
    """An unfinished run directory, resumed."""
    code = place.mmrl("train", f"resume={run}").split("\n")[0]
    return {f"{run}/exit": code, **directory_items(run, place.work / run)}


def tasks(place: Place, parts: set[str], record: Path) -> Iterator[list[partial[Items]]]:
    """What is to be done, in phases: within one, all at once."""
    first: list[partial[Items]] = []
    runs = (RUNS if "runs" in parts else {}) | (MORE if "more" in parts else {})
    first += [partial(run_items, place, name, settings) for name, settings in runs.items()]
    if "resume" in parts:
        first.append(partial(resume_items, place))
    if "credit" in parts:
        first += [partial(credit_items, place, CREDIT[half::2]) for half in (0, 1)]
    if "lines" in parts:
        first.append(partial(line_items, place, (record / "lines.txt").read_text().splitlines()))
    yield first
    if "old" in parts:
        for folder in ("old", "evals"):
            shutil.rmtree(place.work / folder, ignore_errors=True)
        names = [name for name in RUNS if (record / "runs" / name).is_dir()]
        second = [partial(old_items, place, record / "runs", name) for name in names]
        if (record / "runs" / "killed_as_left").is_dir():
            shutil.copytree(record / "runs" / "killed_as_left", place.work / "old" / "killed")
            second.append(partial(resumed_items, place, "old/killed"))
        yield second


def perform(place: Place, parts: set[str], record: Path, jobs: int) -> Items:
    """Do everything; every item's text is kept below `items/`."""

    def done(task: partial[Items]) -> Items:
        try:
            result = task()
        except Exception as error:  # one broken part must not hide what the others show
            names = [str(word) for word in task.args if isinstance(word, str)]
            result = {f"failed/{task.func.__name__} {' '.join(names)}": repr(error)}
        for name, text in result.items():
            path = place.work / "items" / f"{name}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        results = [one for phase in tasks(place, parts, record) for one in list(pool.map(done, phase))]
    return {name: text for result in results for name, text in result.items()}


def unstopped(name: str) -> str:
    """The item of the run that was not stopped, for one of a resumed run; the name itself for others."""
    if name.endswith("/config"):  # has the run's own folder
        return name
    name = re.sub(r"^(resume|old)/killed/", "runs/default/", name)
    return re.sub(r"^old/(\w+)_resumed/", r"runs/\1/", name)


def compare(expected: Items, actual: Items) -> list[str]:
    """One line per item, those that differ with their first difference."""
    lines = []
    for name in sorted(actual):
        difference = first_difference(expected.get(name, "(not recorded)"), actual[name])
        lines.append(f"same     {name}" if difference is None else f"differs  {name}: {difference}")
    return lines


def main() -> int:
    """Record or check. Returns 1 if anything differs."""
    words = dict(word.partition("=")[::2] for word in sys.argv[1:])
    parts = set(words.pop("only", ",".join(PARTS)).split(","))
    checkout, jobs = Path(words.pop("checkout", ".")).resolve(), int(words.pop("jobs", "2"))
    mode, folder = next(iter(words.items()), ("", ""))
    if len(words) != 1 or mode not in ("record", "check") or not folder or parts - set(PARTS):
        sys.exit(__doc__)
    record, started = Path(folder).resolve(), time.monotonic()
    work = record if mode == "record" else record.with_name(f"{record.name}-check")
    if mode == "check":
        shutil.rmtree(work, ignore_errors=True)
    elif (record / "items").exists() and parts == set(PARTS):
        sys.exit(f"{record} is recorded already; remove it, or name the parts to record again: only=")
    place = Place(checkout, work)
    if mode == "record" and "lines" in parts:
        (record / "lines.txt").write_text("\n".join(doc_lines(checkout)) + "\n")
    items = perform(place, parts, record, jobs)
    if mode == "check":
        files = {name: record / "items" / f"{name}.txt" for name in items}
        expected = {name: path.read_text() for name, path in files.items() if path.is_file()}
    else:
        expected = {name: items.get(unstopped(name), text) for name, text in items.items()}
    lines = compare(expected, items)
    print("\n".join(lines))
    differing = sum(line.startswith("differs") for line in lines)
    print(f"{len(lines)} items, {differing} differ, {time.monotonic() - started:.0f} s")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
