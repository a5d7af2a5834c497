"""Random command lines, run in this process with nothing behind them that trains, samples or serves.

Property: every line is served or refused. The exit code is 0, 1 or 2, there is no traceback, the line is done within
`LIMIT_S`, and nothing is written outside of the current folder, except where the line itself names a place.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from types import FrameType
from unittest import mock

LIMIT_S = 20.0
"""Longest time of one line."""
CODES = (0, 1, 2)

COMMANDS = (
    *("train",) * 8,
    *("eval",) * 4,
    *("plan", "compare", "credit") * 3,
    *("show", "report", "index build", "index info", "index search", "index", "serve-retriever", "new-task") * 2,
    *("worker", "trian", "", "--help", "-V", "help", "-x", "-sc", "index burn"),
)
GROUPS = ("task", "algo", "model", "hardware", "engine", "experiment", "task.retriever", "compare")
HYDRA_KEYS = (
    *("hydra/launcher", "hydra/sweeper", "hydra/job_logging", "hydra/hydra_logging", "hydra/output", "hydra/env"),
    *("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.job.name", "hydra.mode"),
    *("hydra.job.chdir", "hydra.verbose", "hydra.searchpath", "hydra.job.env_set.X", "hydra.callbacks", "hydra"),
    *("hydra.launcher", "hydra.sweeper.max_batch_size", "hydra.sweeper.params", "hydra.runtime.output_dir"),
)
KEYS = (
    *("seed", "train.steps", "train.lr", "train.batch_size", "train", "algo.group_size", "algo.eps", "algo.teachers"),
    *("task.data.train", "task.data", "task.name", "task.retriever.name", "task.retriever.url", "task.max_turns"),
    *(
        "task.judge.url",
        "task.judge.key_env",
        "model.path",
        "model.modules",
        "model.lora.r",
        "model.lora",
        "model.name",
    ),
    *("hardware.processes", "hardware.device", "hardware.threads", "engine.url", "engine.name", "engine.endpoints"),
    *("engine.args", "eval.items", "eval.every", "run.dir", "run.name", "run.report_to", "run.progress", "plugins"),
    *(
        "policy",
        "split",
        "defaults",
        "x",
        "a.b.c",
        "train.stepz",
        "",
        "0",
        "a..b",
        ".seed",
        "seed.",
        "task@x",
        "_self_",
    ),
    *(
        "task@_global_",
        "algo@train",
        "task@a:b",
        "task@:b",
        "hydra@x",
        "/task",
        "task/",
        "seed@y",
        "a/b/c",
        "algo/grpo",
    ),
)
OWN = {
    "train": ("resume",),
    "eval": ("resume", "policy", "split"),
    "plan": ("lengths", "dry", "device"),
    "compare": ("plan", "algo", "task", "seed", "name", "jobs", "runs", "out", "docs"),
    "credit": ("rollouts", "run", "step", "algo"),
    "show": ("example", "step", "run_dir"),
    "index build": ("corpus", "index", "retriever", "k1", "b", "model", "encoder", "faiss", "device", "plan"),
    "index search": ("index", "query", "top_k", "device", "candidates"),
    "index info": ("index",),
    "serve-retriever": ("index", "host", "port", "max_batch", "parent", "device"),
    "new-task": ("kind", "dir", "name"),
}
"""Keys that a command reads itself."""
VALUES = (
    *("", "null", "None", "true", "True", "0", "1", "-1", "2", "1e3", "1e309", "-0.0", "0x10", "1_000", "inf", "nan"),
    *(
        "999999999999999999999999",
        "[]",
        "{}",
        "[1,2]",
        "[a,[b,{c:d}]]",
        "{a:1}",
        "{a:{b:[1,{}]}}",
        "1,2",
        "a,b",
        ",",
        ",,",
    ),
    *(
        "a b",
        "'a b'",
        '"a b"',
        "'unclosed",
        '"',
        "'",
        "\\",
        "\\'",
        "a\\",
        "???",
        "_",
        "~",
        "a=b",
        "=",
        "a:b",
        ":",
        "a@b",
    ),
    *(
        "${seed}",
        "${nope}",
        "${",
        "$",
        "${}",
        "${oc.env:NOPE_NOPE}",
        "${oc.env:HOME}",
        "${oc.env:NOPE_NOPE,1}",
        "${now:%Y}",
    ),
    *(
        "${oc.select:a.b}",
        "${oc.decode:x}",
        "${oc.create:[1}",
        "${.x}",
        "${..seed}",
        "${seed",
        "a${seed}b",
        "${${seed}}",
    ),
    *(
        "${train.steps}",
        "${hydra:job.num}",
        "${python_version:}",
        "${resolver:}",
        "$${seed}",
        "\\${seed}",
        "${oc.dict.keys:train}",
    ),
    *(
        "range(1,3)",
        "range(0,1e9)",
        "range(3)",
        "range()",
        "choice(1,2)",
        "choice(a)",
        "glob(*)",
        "glob([a*,b],exclude=c)",
    ),
    *(
        "sort(3,1)",
        "shuffle(1,2)",
        "interval(0,1)",
        "tag(a,choice(1))",
        "int(3)",
        "int(x)",
        "str([1])",
        "json_str(1)",
        "cast(1)",
    ),
    *(
        "extend_list(1)",
        "float(1,2)",
        "bool(x)",
        "int(${seed})",
        "range(1,2,0)",
        "range(1,x)",
        "choice()",
        "f(",
        ")",
        "(",
        "]",
        "}",
    ),
    *(
        "é",
        "日本",
        "\u202e",
        "\ufeff",
        "\x1b[31m",
        "\t",
        "\n",
        "a\nb",
        "\x7f",
        "\udcff",
        "💥",
        "%s",
        "%(x)s",
        "{0}",
        "x" * 5000,
    ),
    *(
        "-",
        "--",
        "-m",
        "*",
        "?",
        "nothing/here",
        "./x",
        "notes.txt",
        "folder",
        "file.json",
        "/proc/nope/x",
        "~/nope",
        "tiny",
        "mini",
    ),
    *(
        "grpo",
        "mhgpo_rr",
        "mmgrpo",
        "ppo",
        "mt_ppo",
        "mappo",
        "hotpotqa",
        "search_agent",
        "banking77",
        "qa_direct",
        "tool_agent",
    ),
    *(
        "vllm_server",
        "openai",
        "bm25",
        "remote",
        "cpu",
        "cuda",
        "h200",
        "http://x",
        "http://[::1",
        "http://a:b",
        "https://h:99999999",
    ),
    *(
        "basic",
        "joblib",
        "submitit_slurm",
        "none",
        "default",
        "disabled",
        "RUN",
        "MULTIRUN",
        "mhgpo/table1/mhgpo_rr",
        "[json]",
        "[os.path]",
    ),
)
FLAGS = (
    *(
        "-m",
        "--multirun",
        "-m=1",
        "--cfg",
        "--cfg=job",
        "--cfg=x",
        "-c",
        "--info",
        "--info=all",
        "--info=defaults-tree",
        "-i",
    ),
    *(
        "--info=config",
        "--info=plugins",
        "--info=searchpath",
        "--resolve",
        "--package",
        "--package=train",
        "-p",
        "--hydra-help",
    ),
    *(
        "--config-dir",
        "--config-dir=folder",
        "--config-dir=nothing",
        "-cd",
        "--help",
        "-h",
        "--json",
        "--version",
        "-x",
        "--",
        "-",
    ),
    *(
        "--cfg job",
        "--cfg all",
        "--cfg hydra",
        "--cfg job --resolve",
        "--cfg job --package train",
        "--cfg job -p nope",
        "--run",
    ),
    *(
        "--config-name",
        "--config-path=x",
        "--experimental-rerun",
        "-sc",
        "-sc install=bash",
        "--shell-completion",
        "--install-completion",
    ),
)
_PIECES = re.compile(r"(\W)")


def command_line(random: Random) -> list[str]:
    """A command and up to six words that are keys, values, flags and names, mostly nearly right."""
    command = random.choice(COMMANDS)
    if command in _DEEP and random.random() < 0.4:
        return [command, *_nearly_right(random, command)]
    words = command.split(" ") if command else [""]
    for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        kind = random.random()
        if kind < 0.75:
            words.append(_setting(random, command))
        elif kind < 0.9:
            words += random.choice(FLAGS).split(" ")
        else:
            words.append(random.choice(VALUES))
    if len(words) > 2 and random.random() < 0.1:  # a key twice
        words.append(random.choice(words[1:]))
    return words


_DEEP = {
    "train": (),
    "plan": (),
    "eval": ("policy=tiny",),
    "compare": ("algo=grpo", "seed=0"),
    "credit": ("algo=mhgpo_rr", "rollouts=file.json"),
}
"""Commands that compose a config, and words without which they refuse everything."""
_RIGHT = (
    *("seed=3", "task=hotpotqa", "task=search_agent", "algo=grpo", "algo=mmgrpo", "algo=mt_ppo", "model=tiny"),
    *("train.steps=2", "hardware=cpu", "engine=transformers", "plugins=[json]", "run.dir=outputs/x", "eval.every=0"),
    *("model.lora={}", "task.data.train=file.json", "experiment=mhgpo/table1/mhgpo_rr", "train={}", "algo={}"),
)


def _nearly_right(random: Random, command: str) -> list[str]:
    """Words that are read and composed, and one or two strange ones among them."""
    words = [*_DEEP[command], *random.sample(_RIGHT, random.randint(0, 2))]
    strange = random.choice((KEYS, HYDRA_KEYS, GROUPS))
    for _ in range(random.choice((1, 1, 2))):
        words.append(f"{random.choice(('', '', '+', '++', '~'))}{random.choice(strange)}={random.choice(VALUES)}")
    if random.random() < 0.4:
        words += random.choice(
            ("-m", "--cfg job", "--cfg job --resolve", "--info=defaults", "--config-dir=folder")
        ).split(" ")
    random.shuffle(words)
    return words


def _setting(random: Random, command: str) -> str:
    own = OWN.get(command, ())
    keys = random.choice((own, own, KEYS, GROUPS)) if own else random.choice((KEYS, GROUPS, HYDRA_KEYS))
    if command in ("train", "eval", "plan", "credit", "compare") and random.random() < 0.5:
        keys = random.choice((KEYS, GROUPS, HYDRA_KEYS))
    sign = random.choice(("",) * 12 + ("+", "++", "~", "~~", "@"))
    value = random.choice(VALUES)
    if random.random() < 0.1:
        value = ",".join(random.choice(VALUES) for _ in range(random.randint(2, 3)))
    word = f"{sign}{random.choice(keys)}{'' if random.random() < 0.04 else '='}{value}"
    if random.random() < 0.08:  # pieces dropped or doubled: half of a bracket, of a quote, of a name
        pieces = _PIECES.split(word)
        place = random.randrange(len(pieces))
        pieces[place] = random.choice(("", pieces[place] * 2, random.choice(VALUES)))
        word = "".join(pieces)
    return word


def run(words: Sequence[str]) -> str | None:
    """One line in a folder of its own; None, or what was wrong."""
    with tempfile.TemporaryDirectory(prefix="mmrl-fuzz-") as top:
        here = Path(top) / "above" / "here"
        (here / "folder").mkdir(parents=True)
        (here / "notes.txt").write_text("mine")
        (here / "file.json").write_text("{}")
        with nothing_runs():
            finding = call(words, here)
        if finding is None and (here / "notes.txt").read_text() != "mine":
            return f"{shown(words)}: a file of the user's was overwritten"
        return finding


def call(words: Sequence[str], here: Path, limit_s: float = LIMIT_S) -> str | None:
    """`mmrl WORDS` in the folder `here`; None, or what was wrong with its end, its time, or what it wrote."""
    from mmrl.cli import main

    out, err = io.StringIO(), io.StringIO()
    before, argv, environment = Path.cwd(), sys.argv, dict(os.environ)
    os.chdir(here)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            _limit(limit_s),
            _watched(here) as strays,
        ):
            try:
                code: object = main(list(words))
            except SystemExit as end:
                code = end.code if end.code is not None else 0
    except TimeLimit:
        return f"{shown(words)}: not done after {limit_s:g} s"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = "".join(traceback.format_tb(error.__traceback__)[-2:])
        return f"{shown(words)}: {type(error).__name__}: {str(error)[:300]}\n{where}"
    finally:
        os.chdir(before)
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)
        logging.disable(logging.NOTSET)
    if code not in CODES:
        return f"{shown(words)}: exit code {code!r}"
    if "Traceback (most recent call last)" in err.getvalue() + out.getvalue():
        return f"{shown(words)}: a traceback was printed: {err.getvalue()[-600:]}"
    if code and not err.getvalue().strip():
        return f"{shown(words)}: exit code {code} without a word"
    strays = [
        path for path in strays if not any(path.startswith(word.partition("=")[2] or word) for word in words if word)
    ]
    return f"{shown(words)}: wrote {strays[:3]}" if strays else None


def shown(words: Sequence[str]) -> str:
    """A line as one would send it on."""
    return repr([word if len(word) < 200 else f"{word[:60]}… ({len(word)} characters)" for word in words])


@contextlib.contextmanager
def nothing_runs() -> Iterator[None]:
    """What would train, sample, build an index, serve or plan from rollouts is a stand-in that ends at once."""
    with contextlib.ExitStack() as stack:
        for target, value in _STAND_INS.items():
            stack.enter_context(mock.patch(target, lambda *args, _value=value, **options: _value))
        yield


_STAND_INS: Mapping[str, object] = {
    "mmrl.run.train.train": 0,
    "mmrl.run.train.resume": 0,
    "mmrl.run.eval.evaluate_policy": 0,
    "mmrl.run.eval.evaluate_columns": 0,
    "mmrl.run.eval.resume_evaluation": 0,
    "mmrl.run.check.check_all": None,
    "mmrl.run.compare.check_all": None,
    "mmrl.run.compare.RunQueue.run": 0,
    "mmrl.run.plan.make_plan": mock.Mock(text=lambda: "plan", as_json=lambda: "{}"),
    "mmrl.retrieval.serving.serve": None,
    "mmrl.retrieval.index_folder.build_index": mock.Mock(build_seconds=0.0, kind="bm25"),
    "mmrl.models.hub.encoder_problems": [],
}
"""What a command hands over to -> what its stand-in returns."""


class TimeLimit(BaseException):
    """A line took too long; not an `Exception`, which something might catch."""


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_WRITES = {
    "os.mkdir": 0,
    "os.rename": 1,
    "os.remove": 0,
    "os.rmdir": 0,
    "os.symlink": 1,
    "os.link": 1,
    "os.truncate": 0,
}
"""Audit event -> which of its arguments is the path that changes."""
_watching: list[tuple[str, list[str]]] = []


def _audit(event: str, args: tuple[object, ...]) -> None:
    if not _watching or (event != "open" and event not in _WRITES):
        return
    if event == "open":
        path, flags = args[0], args[2]
        if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
    else:
        path = args[_WRITES[event]]
    if not isinstance(path, str | bytes | os.PathLike):
        return
    here, strays = _watching[-1]
    full = os.path.abspath(os.fsdecode(path))
    if not full.startswith(here) and not full.startswith("/dev/") and not _CACHES.search(full):
        strays.append(full)


@contextlib.contextmanager
def _watched(here: Path) -> Iterator[list[str]]:
    """Paths outside of `here` that are made, changed or removed meanwhile."""
    if not _audit_added:
        sys.addaudithook(_audit)  # stays for the life of the process, and does nothing while nobody watches
        _audit_added.append(True)
    strays: list[str] = []
    _watching.append((str(here), strays))
    try:
        yield strays
    finally:
        _watching.pop()


_CACHES = re.compile(r"__pycache__|/matplotlib\b")
"""What libraries keep for themselves."""
_audit_added: list[bool] = []
