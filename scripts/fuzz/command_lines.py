"""Random command lines: words of mmrl, of Hydra and of nobody, in every order; `in_process` runs them."""

from __future__ import annotations

import re
from random import Random

COMMANDS = (
    *("train",) * 8,
    *("eval",) * 4,
    *("plan", "doctor", "compare", "credit") * 3,
    "table",
    *("show", "report", "export", "serve", "serve-retriever", "new-task", "fetch") * 2,
    *("index build", "index info", "index search", "index") * 2,
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
    "doctor": ("examples",),
    "compare": ("plan", "algo", "task", "seed", "name", "jobs", "runs", "out", "docs"),
    "table": ("rows", "columns", "seed", "scale", "jobs", "do", "out", "papers"),
    "credit": ("rollouts", "run", "step", "algo"),
    "show": ("example", "step", "run_dir"),
    "export": ("run_dir", "out", "checkpoint", "form", "module", "push", "private"),
    "index build": ("corpus", "index", "retriever", "k1", "b", "model", "encoder", "faiss", "device", "plan"),
    "index search": ("index", "query", "top_k", "device", "candidates"),
    "index info": ("index",),
    "serve": ("policy", "host", "port", "token_env", "name", "parent", "model", "hardware", "engine"),
    "serve-retriever": ("index", "host", "port", "max_batch", "parent", "device"),
    "new-task": ("kind", "dir", "name"),
    "fetch": ("name", "wheel"),
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
        "-i",
    ),
    *(
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
    "doctor": (),
    "eval": ("policy=tiny",),
    "compare": ("algo=grpo", "seed=0"),
    "table": ("mhgpo-table6", "rows=4", "scale=mini", "seed=0"),
    "credit": ("algo=mhgpo_rr", "rollouts=file.json"),
}
"""Commands that compose a config, and words without which they refuse everything."""
_RIGHT = (
    *("seed=3", "task=hotpotqa", "task=search_agent", "algo=grpo", "algo=mmgrpo", "algo=mt_ppo", "model=tiny"),
    *("train.steps=2", "hardware=cpu", "engine=transformers", "plugins=[json]", "run.dir=outputs/x", "eval.every=0"),
    *("model.lora={}", "task.data.train=file.json", "experiment=mine", "train={}", "algo={}"),
)


def _nearly_right(random: Random, command: str) -> list[str]:
    """Words that are read and composed, and one or two strange ones among them."""
    words = [*_DEEP[command], *random.sample(_RIGHT, random.randint(0, 2))]
    strange = random.choice((KEYS, HYDRA_KEYS, GROUPS))
    for _ in range(random.choice((1, 1, 2))):
        words.append(f"{random.choice(('', '', '+', '++', '~'))}{random.choice(strange)}={random.choice(VALUES)}")
    if random.random() < 0.4:
        words += random.choice(("--cfg job", "--cfg=job", "-m", "--config-dir folder")).split(" ")
    random.shuffle(words)
    return words


def _setting(random: Random, command: str) -> str:
    own = OWN.get(command, ())
    keys = random.choice((own, own, KEYS, GROUPS)) if own else random.choice((KEYS, GROUPS, HYDRA_KEYS))
    if command in ("train", "eval", "plan", "doctor", "credit", "compare", "table") and random.random() < 0.5:
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
