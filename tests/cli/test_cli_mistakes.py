"""What a clumsy user types: each mistake is named in the words that were typed, exit code 2, nothing is written."""

import json

import pytest

from mmrl.cli import main
from mmrl.errors import unknown
from mmrl.system.conf import GROUPS

LONG = "x" * 300
MISTAKES = [
    (
        "train algo=mhgpo_fo task=hotpot seed=abc train.lrr=3 train.lr=x modl=tiny",
        "algo: got 'mhgpo_fo', expected one of ",
        "task: got 'hotpot', expected one of ",
        "seed: got 'abc', expected integer",
        "train.lrr: unknown key; did you mean 'lr'?",
        "train.lr: got 'x', expected number",
        "modl: unknown key; did you mean 'model'?",
    ),
    ("train =1", "=1: expected key=value"),
    ("train algo={", "algo={: not an override"),
    ("train seed=1,2", "seed: got several values; run a sweep with -m"),
    ("train --config-dir nowhere", "--config-dir: no folder 'nowhere'"),
    (f"doctor --config-dir {'x' * 500}", "--config-dir: no folder 'xxx"),
    ("train algo.group_size=1", "algo.group_size: got 1, expected greater than or equal to 2"),
    ("train algo.group_size=2.5", "algo.group_size: got 2.5, expected integer"),
    ("train algo.fork_probs=[.5,.1,.1]", "algo.fork_probs: got [0.5, 0.1, 0.1] (sum 0.7), expected non-negative"),
    ("train algo.clip=-1", "algo.clip: got -1, expected greater than 0"),
    ("train train.steps=true", "train.steps: got True, expected integer"),
    ("train eval.split=validation", "eval.split: got 'validation', expected 'train', 'dev' or 'test'"),
    ("train run.report_to=[comet]", "run.report_to.0: got 'comet', expected 'wandb'"),
    ("train model.path=null", "model.path: got None, expected string"),
    ("train train.lr=${nope}", "train.lr: Interpolation key 'nope' not found"),
    ("train task.data.trian=x", "task.data.trian: unknown key; did you mean 'train'? (valid here: dev, "),
    ("train task.retriever.top=3", "task.retriever.top: unknown key; did you mean 'top_k'? (valid here: b, "),
    ("train task=papillon task.judge.modl=x", "task.judge.modl: unknown key; did you mean 'model'? (valid here: "),
    ("train engine.endpoint.url=http://x", "engine.endpoint.url: got http://x, which has no effect with engine="),
    ("train task.retriever.name=bm26 task.retriever.k1=2.0", "task.retriever.name: got 'bm26', expected 'bm25', "),
    ("train task.retriever.name=remote", "task.retriever.url: missing, a value is required"),
    ("train task.retriever={name:remote,url:x}", "task.retriever.url: got 'x', expected http://HOST"),
    ("train engine.name=vlm", "engine.name: got 'vlm', expected 'auto', "),
    ("train engine=vllm_server hardware.processes=x", "hardware.processes: got 'x', expected"),
    *((f"train ~{group} seed=x", f"{group}: got no name, expected one of ", "seed: got 'x'") for group in GROUPS[:-1]),
    (
        "serve policy=nope engine=foo host=0.0.0.0 port=x",
        "engine: got 'foo', expected one of auto, openai",
        "host: got '0.0.0.0', which other machines reach",
        "port: got 'x', expected integer",
    ),
    (
        "compare algo=grpoo task=hotpotq seed=0,x,y train.stepz=3 rows=q",
        "grpoo: algo: got 'grpoo', expected one of ",
        "grpoo: task: got 'hotpotq', expected one of ",
        "grpoo: train.stepz: unknown key",
        "rows: got 'q', expected one of grpoo",
        "seed: got 'x', expected integer",
        "seed: got 'y', expected integer",
    ),
    ("compare set=mni jobs=0", "set: got 'mni', expected one of ", "jobs: got '0', expected greater than"),
    (
        "audit algo=grpoo examples=0 budgets=1,x task=hotpotq grop.algo.clip=1",
        "algo: got 'grpoo', expected one of ",
        "budgets: got 'x', expected integer",
        "examples: got '0', expected greater than or equal to 2",
        "grop.algo.clip: got 'grop', expected one of grpoo",
        "task: got 'hotpotq', expected one of ",
    ),
    ("doctor examples=0 train.stepz=3", "examples: got '0', expected greater than", "train.stepz: unknown key"),
    ("plan dry=-1 task=hotpotq", "dry: got '-1', expected greater than", "task: got 'hotpotq', expected one of "),
    ("train steps=10", "steps: unknown key; did you mean train.steps?"),
    ("train set=mini seed=x", "set: unknown key; a run is composed of task, algo, model, ", "seed: got 'x'"),
    ("eval policy=tiny limits=tiny", "limits: unknown key; a run is composed of task, algo, model, "),
    ("train --steps=10", "--steps: unknown flag; did you mean train.steps? Keys are typed as KEY=VALUE"),
    ("train --group-size=4", "--group-size: unknown flag; did you mean algo.group_size?"),
    ("train --nothing 10", "10: expected key=value", "--nothing: unknown flag (known: -m"),
    ("train algo=null task=", "algo: got 'null'", "task: got ''"),
    (
        "train -m seed=1,2,1 algo=grpo,grpo train.steps=x",
        "seed: got 1 more than once, which would be the same run",
        "algo: got grpo more than once",
        "train.steps",
    ),
    ("train seed=4294967296", "seed: got 4294967296, expected less than or equal to 4294967295"),  # numpy's largest
    (
        "credit algo=grpo rollouts=x seed=18446744073709551616",
        "seed: got '18446744073709551616', expected less than or equal to 4294967295",
    ),
    ("train train.lr=inf algo.beta=nan", "train.lr: got inf", "algo.beta: got nan"),
    (
        "train task=search_agent task.data=mini model.modules=5 run.report_to=wandb task.em_needs_format=maybe",
        "task.data: got 'mini', expected a section: task.data.KEY=VALUE",
        "model.modules: got 5, expected a section: model.modules.KEY=VALUE",
        "run.report_to: got 'wandb', expected a list: run.report_to=[a,b]",
        "task.em_needs_format: got 'maybe', expected boolean",
    ),
    (
        "train task.retriever.url=http://x task.retriever.encoder=e5 seed=x",
        "task.retriever.encoder: got e5",
        "task.retriever.url: got http://x",
        "seed: got 'x'",
    ),
    ("train -m seed=0,1 --cfg job", "--cfg: prints one job, without -m"),
    ("train --cfg=x", "argument --cfg/-c: invalid choice: 'x'"),
    ("train algo=mmgrpo algo.teachers=[{name:a}]", "algo.teachers.0: got neither"),
    (
        "train task=search_agent algo=grpo task.reward=judge_turn task.judge.url=foo",
        "task.judge.url: got 'foo', expected http://",
    ),
    ("train train.steps=${oc.env:NOPE_NOPE}", "train.steps: KeyError raised"),
    (
        "eval policy=tiny train.steps=3 algo=grpo seed=x",
        "algo: has no effect on mmrl eval",
        "train.steps: has no effect on mmrl eval",
        "seed: got 'x'",
    ),
    ("eval policy=tiny hardware=cpu2", "hardware: profile 'cpu2' has several processes, mmrl eval runs in one"),
    (
        "credit -m algo=mhgpo_rr rollouts=x task=hotpotqa train.steps=3 seed=-1",
        "-m: has no effect on mmrl credit",
        "task: has no effect on mmrl credit",
        "train.steps: has no effect",
        "seed: got '-1'",
    ),
    (
        "credit algo=grpo algo=ppo rollouts=x rollouts=y algo.eps=1 algo.eps=2",
        "algo: given more than once",
        "rollouts: given more than once",
        "algo.eps: given more than once",
    ),
    (
        "credit algo=grpo,mhgpo_rr algo.aggregate=max rollouts=x",
        "algo.aggregate: has no effect with grpo; it is an option of mhgpo_fof",
    ),
    (
        "train seed=1 ++seed=2 experiment=null experiment=mine",
        "seed: given more than once",
        "experiment: given more than once",
    ),
    (
        "train model.lora={r:4,r:8} task.params={x:[{y:1,y:{z:1,z:2}}]}",
        "model.lora.r: given more than once",
        "task.params.x.0.y: given more than once",
        "task.params.x.0.y.z: given more than once",
    ),
    ("train -m algo.distill={a:policy,a:x},{a:initial} seed=1", "algo.distill.a: given more than once"),
    (
        "train --config-dir . --cfg job --config-dir=nowhere -c full",
        "--config-dir: given more than once",
        "--config-dir: no folder 'nowhere'",
        "--cfg: given more than once",
    ),
    ("train -m train.lr=interval(0,1)", "train.lr=interval(0,1): an interval is for a sweeper that searches"),
    ("train -m hydra/launcher=1e3 seed=1,2", "these words cannot be composed (ValueError: "),
    (
        "plan hydra.run.dir=tiny hydra/launcher=basic",
        "hydra.run.dir: has no effect here; a run's folder is run.dir=",
        "hydra/launcher: has no effect here",
    ),
    ("train task@_global_=hotpotqa", "Could not override 'task@_global_'"),
    ("train task.api_key=abcdefgh1", "task.api_key: got a text that api_key says is a secret"),
    ("show --text x", "--text: unknown flag"),
    ("show --json step=1 example=x x", "--json: writes the rollouts of one step; give step=N, and no example"),
    ("show --json x", "--json: writes the rollouts of one step; give step=N"),
    ("train run.dir=", "run.dir: got '', expected"),
    ("train run.dir=notes.txt/run", "run.dir: notes.txt/run lies below"),
    ("train hardware.engine=foo", "hardware.engine: got 'foo'"),
    ("trian", "No such command 'trian'. Did you mean 'train'?"),
    ("eval", "policy: missing"),
    ("eval policy=./nowhere", "policy: got './nowhere'"),
    ("show", "mmrl show: got 0 names, expected one: mmrl show RUN_DIR"),
    ("show nowhere", "nowhere: no such run directory"),
    ("show run step=x", "mmrl show: step: got 'x', expected integer"),
    ("show run exmple=x", "mmrl show: exmple: unknown key; did you mean 'example'?"),
    ("report", "Missing parameter: run_dir"),
    ("report a b", "Got unexpected extra argument(s) (b)"),
    ("train resume=nowhere", "nowhere: no such run directory"),
    ("train resume=nowhere seed=3", "resume: a run continues with the config it was started with (but train.steps: "),
    ("train task.data.train=missing.json", "task.data.train: 'missing.json': no such file"),
    ("train train.batch_size=1000000", "train.batch_size: got 1000000"),
    ("train algo.minibatches=25", "algo.minibatches: got 25"),
    ("train model=hf model.path=./nowhere", "model.path: './nowhere' is no folder"),
    (
        "train model.path=tinny",
        "model.path: got 'tinny', and model=tiny has the learning rate, steps and limits of the ",
    ),
    ("train -m seed=1,2 run.dir=x", "run.dir: the runs of a sweep need a directory each"),
    ("train run.dir=/dev/null", "run.dir: /dev/null is a file"),
    ("train -m hydra/sweeper=nothing seed=1,2", "In 'hydra/config': Could not find 'hydra/sweeper/nothing'"),
    ("credit algo=mhgpo_fof", "rollouts: expected a file"),
    ("credit rollouts=x.json", "algo: missing"),
    ("credit algo=mhgpo_fof rollouts=x.json", "rollouts: x.json cannot be read (No such file or directory)"),
    ("credit algo=grpo rollouts=x.json page=no/x.html", "page: no folder 'no'"),
    ("credit algo=grpo rollouts=x.json page=x.txt", "page: got 'x.txt', expected a file ending in"),
    ("credit algo=grpo rollouts=x.json step=7", "step: got 7, which has no effect without run=RUN_DIR"),
    (
        "train model.matmul=onednn model.dtype=bfloat16 task.reward=nope",
        "model.matmul: got onednn, which computes float32 on a CPU, beside model.dtype=bfloat16",
        "task.reward: got 'nope'",
    ),
    (
        "train algo=mhgpo_fof model.modules.rewritr.lr=0.1 model.modules.reranker={frozen:true,lr:0.1}",
        "model.modules: got 'rewritr', expected one of answerer, reranker, rewriter; did you mean 'rewriter'?",
        "model.modules: weights per module are LoRA adapters, and model.lora is null; set model.lora",
        "model.modules.reranker.lr: has no effect on a frozen module",
    ),
    ("train model.modules.reranker.froze=true", "model.modules.reranker.froze: unknown key; did you mean 'frozen'?"),
    *((f"doctor examples={text}", f"examples: got '{text}', expected ") for text in ("0", "-1", "x", "²")),
    # names that no file can have
    (f"show {LONG}", f"{LONG}: File name too long"),
    (f"train run.dir={LONG}", f"{LONG}: File name too long"),
    (f"credit algo=grpo rollouts={LONG}", f"{LONG}: File name too long"),
    ("new-task", "mmrl new-task: got 0 names"),
    ("new-task a b", "mmrl new-task: got 2 names"),
    *(
        (f"new-task {name}", f"mmrl new-task: got '{name}', expected a name for a Python package")
        for name in ("my-task", "class", "../x", "null", "NaN")
    ),
    *(
        (f"new-task {name}", f"mmrl new-task: '{name}' is a task of mmrl or an installed")
        for name in ("hotpotqa", "json")
    ),
    ("new-task route kind=torch", "mmrl new-task: kind: got 'torch'"),
    ("new-task route colour=red", "mmrl new-task: colour: unknown key"),
    ("new-task route dir=nowhere", "dir: no folder 'nowhere'"),
    ("new-task --force route", "--force: unknown flag of mmrl new-task"),
]


@pytest.mark.parametrize(("line", "starts"), [(line, starts) for line, *starts in MISTAKES])
def test_each_mistake_has_one_line_and_nothing_is_written(line, starts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert main(line.split()) == 2
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert not shown.out and len(lines) == len(starts), lines
    for start in starts:
        assert any(line.startswith(f"error: {start}") for line in lines), (start, lines)
    assert [path.name for path in tmp_path.rglob("*")] == ["notes.txt"]


def test_of_very_many_names_only_the_nearest_are_printed():
    rows = [f"row/{number}" for number in range(60)] + ["mt_ppo"]
    said = unknown("experiment", "mtppo", rows)
    assert said.startswith("experiment: got 'mtppo', expected one of 61 names, the nearest are mt_ppo, ")
    assert said.endswith("; did you mean 'mt_ppo'?") and said.count("row/") == 4
    assert unknown("algo", "pp", ["mappo", "ppo"]) == "algo: got 'pp', expected one of mappo, ppo; did you mean 'ppo'?"


def test_what_a_package_prints_is_no_part_of_the_json(tmp_path, monkeypatch, capsys):
    (tmp_path / "loud_plugin.py").write_text("print('hello')")
    monkeypatch.syspath_prepend(tmp_path)
    forest = tmp_path / "empty.json"
    forest.write_text('{"version": 1, "modules": ["a"], "calls": [], "rollouts": []}')
    assert main(["credit", "algo=grpo", "plugins=[loud_plugin]", f"rollouts={forest}", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["calls"] == [] and "hello" in printed.err


@pytest.mark.parametrize(
    ("command", "config", "says"),
    [
        ("train", "policy: tiny\n", "this is a run of mmrl eval; continue it with: mmrl eval resume="),
        ("eval", "algo: {name: grpo}\n", "this is a run of mmrl train; continue it with: mmrl train resume="),
        ("train", "algo: {name: grpo}\n", "config.yaml: task: missing"),
        ("eval", "seed: 0\ntask: {name: 2wiki}\n", "run/config.yaml: has neither algo nor policy, expected one"),
        ("eval", "", "config.yaml: holds no settings, expected those that the run was started with"),
        (
            "eval",
            "policy: [unclosed\n",
            "config.yaml:2: cannot be read: not YAML (expected ',' or ']', but got '<stream end>')",
        ),
    ],
)
def test_what_cannot_be_resumed_is_left_as_it_is(command, config, says, tmp_path, errors_of):
    run = tmp_path / "run"
    (run / "journal").mkdir(parents=True)
    (run / "config.yaml").write_text(config)
    lines = errors_of(command, f"resume={run}").splitlines()
    assert says in "\n".join(lines)
    assert all(line.startswith("error: ") for line in lines)
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "journal"]


def test_a_folder_of_runs_that_cannot_be_made_is_named(tmp_path):
    from mmrl.errors import ConfigError
    from mmrl.run.settle import allocate

    (tmp_path / "outputs").write_text("a file")
    with pytest.raises(ConfigError, match=r"run\.dir: cannot make a folder below"):
        allocate(tmp_path / "outputs" / "hotpotqa", "x")


def test_a_current_folder_that_is_gone_is_named(tmp_path, monkeypatch, errors_of):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert errors_of("--help") == "error: the current folder has been deleted: change to another one\n"


def test_an_interrupt_within_the_composition_is_one(monkeypatch, capsys):
    """OmegaConf's own clean-up may fail on what Ctrl-C left half-way, and that is no mistake of the user's."""

    def interrupted(*arguments, **named):
        try:
            raise KeyboardInterrupt
        finally:
            None.flags  # type: ignore[attr-defined]  # noqa: B018

    monkeypatch.setattr("mmrl.cli.hydra.compose", interrupted)
    for words in (["--cfg", "job"], ["seed=1"]):
        assert main(["train", *words]) == 130
        assert capsys.readouterr().err == "interrupted\n"
