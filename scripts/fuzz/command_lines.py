"""Random command lines: words of mmrl, of Hydra and of nobody, in every order; `in_process` runs them."""

from __future__ import annotations

import re

from hypothesis import strategies as st
from typer.main import get_group

from mmrl.cli.commands import app

_COMMANDS = get_group(app).commands
COMMANDS = {
    name: re.findall(r"\b(\w+)=", command.help or "")
    for name, command in (*_COMMANDS.items(), *((f"index {n}", c) for n, c in _COMMANDS["index"].commands.items()))
    if not command.hidden
}
"""Command -> keys that its help names."""
NO_COMMANDS = ("worker", "trian", "", "--help", "-V", "help", "-x", "-sc", "index", "index burn")
_KEYS = """
    task algo model hardware engine experiment task.retriever compare
    seed train.steps train.lr train.batch_size train algo.group_size algo.eps algo.teachers task.data.train task.data
    task.name task.retriever.name task.retriever.url task.max_turns task.judge.url task.judge.key_env model.path
    model.modules model.lora.r model.lora model.name hardware.processes hardware.device engine.urls engine.endpoints
    engine.args eval.items eval.every run.dir run.name run.report_to plugins policy split defaults x a.b.c train.stepz
    0 a..b .seed seed. task@x _self_ task@_global_ algo@train task@a:b task@:b hydra@x /task task/ a/b/c algo/grpo
    hydra/launcher hydra/sweeper hydra/job_logging hydra/output hydra hydra.run.dir hydra.sweep.dir hydra.sweep.subdir
    hydra.output_subdir hydra.job.name hydra.mode hydra.job.chdir hydra.verbose hydra.searchpath hydra.callbacks
    hydra.launcher hydra.sweeper.max_batch_size hydra.sweeper.params hydra.runtime.output_dir hydra.job.env_set.X
"""
_VALUES = """
    null None true 0 1 -1 2 1e3 1e309 -0.0 0x10 1_000 inf nan 999999999999999999999999 [] {} [1,2] [a,[b,{c:d}]] {a:1}
    {a:{b:[1,{}]}} 1,2 , ,, 'unclosed " ' \\ \\' a\\ ??? _ ~ a=b = a:b : a@b ${seed} ${nope} ${ $ ${} ${oc.env:NOPE}
    ${oc.env:HOME} ${now:%Y} ${oc.select:a.b} ${oc.decode:x} ${oc.create:[1} ${.x} ${..seed} ${seed a${seed}b ${${seed}}
    ${train.steps} ${hydra:job.num} ${resolver:} $${seed} \\${seed} ${oc.dict.keys:train} range(1,3) range(0,1e9)
    range() choice(1,2) choice() glob(*) glob([a*,b],exclude=c) sort(3,1) shuffle(1,2) interval(0,1) tag(a,choice(1))
    int(x) str([1]) json_str(1) cast(1) extend_list(1) float(1,2) int(${seed}) range(1,2,0) range(1,x) f( ) ( ] }
    %s %(x)s {0} - -- -m * ? nothing/here ./x notes.txt folder file.json /proc/nope/x ~/nope tiny mini
    grpo mhgpo_rr mmgrpo ppo mt_ppo mappo hotpotqa search_agent banking77 qa_direct tool_agent vllm_server openai bm25
    remote cpu cuda h200 http://x http://[::1 http://a:b https://h:99999999 basic joblib submitit_slurm none default
    disabled RUN MULTIRUN mhgpo/table1/mhgpo_rr [json] [os.path]
"""
KEYS = _KEYS.split()
VALUES = (
    *_VALUES.split(),
    *("", "a b", "'a b'", '"a b"', "é", "日本", "\u202e", "\ufeff", "\x1b[31m", "\t", "\n", "a\nb", "\x7f", "\udcff"),
    *("💥", "x" * 5000),
)
_FLAGS = """
    -m --multirun -m=1 --cfg --cfg=job --cfg=x -c --info -i -p --hydra-help --config-dir --config-dir=folder
    --config-dir=nothing -cd --help -h --json --version -x -- - --run --config-name --config-path=x
    --experimental-rerun -sc --shell-completion --install-completion
"""
_RIGHT = """
    seed=3 task=hotpotqa task=search_agent algo=grpo algo=mmgrpo algo=mt_ppo model=tiny train.steps=2 hardware=cpu
    engine=transformers plugins=[json] run.dir=outputs/x eval.every=0 model.lora={} task.data.train=file.json
    experiment=mine train={} algo={}
"""
DEEP = {
    "train": "",
    "plan": "",
    "doctor": "",
    "eval": "policy=tiny",
    "compare": "algo=grpo seed=0",
    "table": "mhgpo-table6 rows=4 scale=mini seed=0",
    "credit": "algo=mhgpo_rr rollouts=file.json",
}
"""Commands that compose a config, and words without which they refuse everything."""
VALUE = st.sampled_from(VALUES) | st.lists(st.sampled_from(VALUES), min_size=2, max_size=3).map(",".join)
SIGNS = st.sampled_from(("", "", "", "", "+", "++", "~", "~~", "@"))
CONFIG_WORDS = st.sampled_from((["--cfg", "job"], ["--cfg=job"], ["-m"], ["--config-dir", "folder"]))


@st.composite
def _settings(draw: st.DrawFn, keys: list[str]) -> str:
    """A `KEY=VALUE`, at times with a piece of it dropped, doubled or replaced."""
    word = f"{draw(SIGNS)}{draw(st.sampled_from(keys))}={draw(VALUE)}"
    if draw(st.integers(0, 9)) == 5:
        at = draw(st.integers(0, len(word) - 1))
        word = word[:at] + draw(st.just("") | st.just(word[at] * 2) | st.sampled_from(VALUES)) + word[at + 1 :]
    return word


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command and some words that are keys, values, flags and names, mostly nearly right."""
    if draw(st.booleans()):  # one or two strange words in a line that is composed
        command = draw(st.sampled_from(sorted(DEEP)))
        right = st.lists(st.sampled_from(_RIGHT.split()), max_size=2)
        strange = st.lists(_settings(KEYS), min_size=1, max_size=2)
        words = [*DEEP[command].split(), *draw(right), *draw(strange), *draw(st.just([]) | CONFIG_WORDS)]
        return [command, *draw(st.permutations(words))]
    command = draw(st.sampled_from((*COMMANDS, *NO_COMMANDS)))
    keys = COMMANDS.get(command, [])
    a_word = _settings([*keys * (len(KEYS) // (len(keys) or 1)), *KEYS]) | st.sampled_from((*_FLAGS.split(), *VALUES))
    return [*(command.split(" ") if command else [""]), *draw(st.lists(a_word, max_size=6))]
