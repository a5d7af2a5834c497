"""`mmrl.optimize.MMRL`: the run of `mmrl train` from Python, and the program that it returns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import dspy
import pytest

from mmrl.cli import main
from mmrl.errors import CheckpointError, ConfigError, MmrlError
from mmrl.optimize import MMRL, _split, load
from mmrl.run import build
from mmrl.store.rundir import RunDir
from mmrl.system import objects
from mmrl.system.notebook import outside_of_loops
from mmrl.system.objects import register
from mmrl.system.stop import look
from mmrl.tasks.dspy import notices
from mmrl.tasks.mini.examples import mini_records
from scripts.notebook import NOTEBOOK, executed
from tests.helpers.runs import numbers

LABELS = tuple(sorted({example.metadata["label"] for example in mini_records("train", "support")}))
SETTINGS: dict[str, Any] = {
    "hardware": {"name": "cpu", "threads": 1},
    "train": {"steps": 2, "batch_size": 2, "save_every": 1},
    "eval": {"bootstrap": 100, "every": 0},
    "algo.rollouts": 2,
    "task.max_tokens": 48,
}


class Router(dspy.Module):
    """text -> label, in the words that the shipped tiny_dspy has learned."""

    def __init__(self) -> None:
        super().__init__()
        label: object = Literal[LABELS]
        fields = {"text": (str, dspy.InputField()), "label": (label, dspy.OutputField())}
        self.classify = dspy.ChainOfThought(dspy.Signature(fields))

    def forward(self, text: str) -> dspy.Prediction:
        return self.classify(text=text)


def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:
    return float(example.label == prediction.label)


def examples(split: str, count: int) -> list[dspy.Example]:
    return [
        dspy.Example(text=example.inputs["text"], label=example.metadata["label"]).with_inputs("text")
        for example in mini_records(split, "support")[:count]
    ]


def trainset() -> list[dspy.Example]:
    return examples("train", 8)


DEVSET = examples("dev", 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dspy.Module, Path]:
    """A program trained below a running event loop, as in a notebook, and its run directory."""
    folder = tmp_path_factory.mktemp("optimize") / "run"

    async def cell() -> dspy.Module:
        return MMRL(metric, model="tiny_dspy", run_dir=folder, **SETTINGS).compile(
            Router(), trainset=trainset(), valset=DEVSET
        )

    return asyncio.run(cell()), folder


def test_the_run_is_that_of_the_command(made: Any, tmp_path: Path) -> None:
    """Every metric of every step, and every text of the evaluations, bit for bit."""
    _, folder = made
    here = "tests.run.test_optimize"
    words = [
        *("task=dspy", "algo=mmgrpo", "model.path=tiny_dspy", f"run.dir={tmp_path / 'run'}", "task.inputs=[text]"),
        *(f"task.program={here}:Router", f"task.metric={here}:metric"),
        *(f"task.data.train={here}:trainset", f"task.data.dev={here}:DEVSET"),
        *("hardware=cpu", "hardware.threads=1", "train.steps=2", "train.batch_size=2", "train.save_every=1"),
        *("eval.bootstrap=100", "eval.every=0", "algo.rollouts=2", "task.max_tokens=48"),
    ]
    assert main(["train", *words]) == 0
    assert numbers(tmp_path / "run") == numbers(folder)
    for step in (0, 2):
        one, two = (RunDir.read(path).eval_path(step, "dev").read_text() for path in (tmp_path / "run", folder))
        assert one == two


def test_the_program_speaks_with_the_trained_policy_in_plain_dspy(made: Any) -> None:
    """Greedy, it predicts what the run's last evaluation predicted; also called from several threads at once."""
    program, folder = made
    assert program.run_dir == folder
    items = [json.loads(line) for line in RunDir.read(folder).eval_path(2, "dev").read_text().splitlines()]
    scores = [item["metrics"]["score"] for item in sorted(items, key=lambda item: int(item["id"].split("-")[1]))]
    found = []
    for example in DEVSET:
        try:
            found.append(metric(example, program(**example.inputs())))
        except Exception:  # what does not parse scores 0 in the run
            found.append(0.0)
    assert found == scores and sum(scores) > 0
    lm = program.classify.predict.lm
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(lm, f"question {number}", max_tokens=4, n=2, temperature=1.0) for number in range(2)]
        assert [len(texts.result(60)) for texts in asked] == [2, 2]
    assert asyncio.run(lm.acall("question", max_tokens=4)) == lm("question", max_tokens=4)
    assert lm.history[-1]["usage"]["completion_tokens"] == 4
    with pytest.raises(dspy.utils.exceptions.LMUnsupportedFeatureError, match="logprobs: has no effect"):
        lm("question", logprobs=True)


def test_the_program_streams_as_its_tokens_come(made: Any) -> None:
    """By `forward` and awaited; listeners get the field, and what is streamed adds up to what is said without."""
    program, _ = made

    async def streamed(run: Any, **options: Any) -> list[Any]:
        return [part async for part in dspy.streamify(run, **options)(text=DEVSET[0].text)]

    for options in ({}, {"is_async_program": True}):
        run = program.classify if options else program
        *parts, last = asyncio.run(streamed(run, **options))
        said = run(text=DEVSET[0].text)
        assert dict(last) == dict(said) and len(parts) > 5
        lm = program.classify.predict.lm
        assert "".join(part.choices[0].delta.content or "" for part in parts) == lm.history[-1]["outputs"][0]
        assert parts[-1].choices[0].finish_reason == "stop"
    listener = dspy.streaming.StreamListener(signature_field_name="reasoning")
    heard = [part for part in asyncio.run(streamed(program, stream_listeners=[listener])) if hasattr(part, "chunk")]
    assert "".join(part.chunk for part in heard).strip() == program(text=DEVSET[0].text).reasoning
    assert len(heard) > 1


def test_what_is_too_long_and_what_is_cut_is_said_as_dspy_says_it(made: Any) -> None:
    lm = made[0].classify.predict.lm
    with pytest.raises(dspy.utils.exceptions.ContextWindowExceededError, match="leaves no room in a context of"):
        lm("word " * 5000)
    request = dspy.lm15.Request(
        model=lm.model, messages=(dspy.lm15.Message.user("question"),), config=dspy.lm15.Config(max_tokens=2)
    )
    assert lm.engine.complete(request).finish_reason == "length"


def test_a_program_that_is_saved_whole_opens_its_run_where_it_is_loaded(made: Any, tmp_path: Path) -> None:
    program, folder = made
    program.save(tmp_path / "whole", save_program=True)
    loaded = dspy.load(tmp_path / "whole", allow_pickle=True)
    predictor = loaded.classify.predict
    assert predictor.lm.served is not program.classify.predict.lm.served and loaded.run_dir == folder
    assert dict(loaded(text=DEVSET[0].text)) == dict(program(text=DEVSET[0].text))
    predictor.lm.served.close()


def test_an_export_loads_in_plain_dspy_and_has_the_names_of_the_objects_in_python(made: Any, tmp_path: Path) -> None:
    program, folder = made
    program.save(str(tmp_path / "own.json"))
    assert main(["export", str(folder), f"out={tmp_path / 'out'}"]) == 0
    for file in (tmp_path / "own.json", tmp_path / "out" / "program.json"):
        fresh = Router()
        fresh.load(str(file))
        assert fresh.classify.predict.lm is None
    card = (tmp_path / "out" / "README.md").read_text()
    assert '"classify.predict"' in card and "license: apache-2.0" in card
    facts = RunDir.read(folder).summary["facts"]
    named = [facts[name] for name in ("program", "metric", "data")]
    assert named == ["Router", "metric", "train a Python list, dev a Python list"]
    for text in ((folder / "report.html").read_text(), card):
        assert "Router" in text and "system.objects" not in text
    with pytest.raises(ConfigError, match=r"task\.metric: lambda takes \(example\), expected"):
        MMRL(lambda example: 1.0, run_dir=tmp_path / "other").compile(Router(), trainset=trainset(), valset=DEVSET)


class Refined(Router):
    """One predictor is never called; another is tried twice, with advice for the second attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.never = dspy.Predict("text -> label")
        self.classify = dspy.Refine(self.classify, N=2, reward_fn=lambda inputs, prediction: 0.0, threshold=1.0)


def test_a_predictor_that_is_never_called_gets_a_line_and_of_dspy_s_warnings_a_few_are_printed(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(notices, "_counts", Counter())
    monkeypatch.setattr(notices.log, "warning", lambda text, *values: logged.append(text % values))
    settings = {**SETTINGS, "train": {"steps": 1, "batch_size": 2}}
    MMRL(metric, model="tiny_dspy", run_dir=tmp_path / "run", **settings).compile(
        Refined(), trainset=trainset(), valset=DEVSET
    )
    said = capfd.readouterr()
    assert RunDir.read(tmp_path / "run").summary["facts"]["never called"] == "never (in no step of training)"
    lines = (said.out + said.err).splitlines()
    counts = [int(line.rpartition("(")[2].split()[0]) for line in logged if "Type mismatch" in line]
    assert len(counts) > 1 and counts == [1, 10, 100][: len(counts)]
    assert not [line for line in lines if "dspy.predict.predict" in line]


def test_a_run_that_stopped_is_continued_with_the_same_objects(
    made: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same numbers; other examples are refused, and the command, which has no objects, says how it goes on."""
    _, folder = made
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    shutil.rmtree(run / "checkpoints" / "checkpoint-2")
    for name in ("summary.json", "report.html"):
        (run / name).unlink()
    with monkeypatch.context() as elsewhere:
        for name in [name for name in vars(objects) if name.startswith(("program_", "metric_", "train_", "dev_"))]:
            elsewhere.delattr(objects, name)
        elsewhere.setattr(build, "_TASKS", {})
        assert main(["train", f"resume={run}"]) == 2
    assert "compile(program, trainset=…, valset=…, resume=RUN_DIR)" in capsys.readouterr().err
    optimizer = MMRL(metric)
    with pytest.raises(CheckpointError, match="the dev examples are not those that the run was started with"):
        optimizer.compile(Router(), trainset=trainset(), valset=DEVSET[:2], resume=run)
    again = optimizer.compile(Router(), trainset=trainset(), valset=DEVSET, resume=run)
    assert numbers(run) == numbers(folder) and again.run_dir == run
    again.classify.predict.lm.served.close()


STEPS: dict[str, Any] = SETTINGS | {
    "train": {"steps": 1, "batch_size": 2, "save_every": 1},
    "eval": {"bootstrap": 100},
    "miprov2": {"algo": {"auto": None, "num_candidates": 2, "num_trials": 2, "prompt_max_tokens": 16}},
    "mmgrpo.algo.rollouts": 2,
}
STEPS.pop("algo.rollouts")


def test_steps_run_one_after_the_other_and_go_on_where_they_were_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """With the objects of this process: prompts, then weights from there; the first step is not touched again."""
    folder = tmp_path / "run"
    optimizer = MMRL(metric, model="tiny_dspy", run_dir=folder, **STEPS)
    given: dict[str, Any] = {"trainset": trainset(), "valset": DEVSET, "algo": ["miprov2", "mmgrpo"]}
    write = RunDir.append_metrics

    def stops(run: RunDir, step: int, metrics: Any) -> None:
        write(run, step, metrics)
        if run.path.name == "2_mmgrpo":
            raise KeyboardInterrupt

    with monkeypatch.context() as stopping:
        stopping.setattr(RunDir, "append_metrics", stops)
        with pytest.raises(KeyboardInterrupt) as stopped:
            optimizer.compile(Router(), **given)
    assert stopped.value.__notes__ == [f"continue with: MMRL(…).compile(…, resume={str(folder)!r}) in Python"]
    assert not RunDir.read(folder / "2_mmgrpo").finished
    before = {path: path.stat().st_mtime_ns for path in (folder / "1_miprov2").rglob("*") if path.is_file()}

    def refused(by: MMRL, **changed: Any) -> str:
        with pytest.raises(MmrlError) as error:
            by.compile(Router(), **{**given, "resume": folder, **changed})
        return str(error.value)

    assert "exists and is not empty" in refused(optimizer, resume=None)
    assert "is a run itself, expected the folder of 1_miprov2, 2_mmgrpo" in refused(
        optimizer, resume=folder / "1_miprov2"
    )
    assert "has 1_miprov2, expected the folder of 1_gepa, 2_mmgrpo" in refused(optimizer, algo=["gepa", "mmgrpo"])
    assert "no such folder" in refused(optimizer, resume=tmp_path / "none")
    assert "the dev examples are not those" in refused(optimizer, valset=DEVSET[:2])
    other = MMRL(metric, model="tiny_dspy", **STEPS, **dotted({"train.lr": 0.5}))
    assert "train.lr=0.0003 (requested: 0.5)" in refused(other)
    assert "algo: got []" in refused(optimizer, algo=[])
    assert "algo=['miprov2', 'mmgrpo']" in refused(optimizer, algo="better_together", resume=None)
    trained = optimizer.compile(Router(), resume=folder, **given)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert trained.run_dir == folder / "2_mmgrpo" and RunDir.read(trained.run_dir).finished
    assert RunDir.read(trained.run_dir).config["start"]["run"] == str(folder / "1_miprov2")
    assert "miprov2+mmgrpo" in capsys.readouterr().out and (folder / "set.html").is_file()
    trained.classify.predict.lm.served.close()


def dotted(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys that no Python name could be."""
    return keys


def test_what_is_wrong_is_an_exception_with_the_command_s_sentence(tmp_path: Path, capsys: Any) -> None:
    """Nothing exits, nothing is written, and every problem of the config is named at once."""
    folder = tmp_path / "run"
    good: dict[str, Any] = {"trainset": trainset(), "valset": DEVSET}

    def refused(optimizer: MMRL, **given: Any) -> str:
        with pytest.raises(MmrlError) as error:
            optimizer.compile(Router(), **{**good, **given})
        assert not folder.exists()
        return str(error.value)

    wrong = refused(MMRL(metric, run_dir=folder, **dotted({"train.stepps": 1, "algo.clip": -1})))
    assert "train.stepps: " in wrong and "algo.clip: " in wrong
    assert "got 'mmgrp', expected one of" in refused(MMRL(metric, algo="mmgrp", run_dir=folder))
    few: dict[str, Any] = {"train.batch_size": 2}
    assert "model.path: " in refused(MMRL(metric, model=str(tmp_path / "none"), run_dir=folder, **few))
    assert "task.inputs: given more than once" in refused(MMRL(metric, run_dir=folder, **dotted({"task.inputs": 1})))
    assert "train.lr: got a object" in refused(MMRL(metric, run_dir=folder, **dotted({"train.lr": object()})))
    assert "got 1 examples, expected at least 2" in refused(MMRL(metric), trainset=trainset()[:1], valset=None)
    with pytest.raises(ValueError, match="Inputs have not been set"):
        MMRL(metric).compile(Router(), trainset=[dspy.Example(text="a", label="b")], valset=DEVSET)
    assert "hardware.processes: objects of this process" in refused(
        MMRL(metric, model="tiny_dspy", run_dir=folder, **dotted({"hardware.processes": 2, "hardware": "cpu"}))
    )


def test_without_a_valset_every_fifth_example_is_held_back(capsys: Any) -> None:
    every = examples("train", 12)
    kept, held = _split(every, None)
    assert [every.index(example) for example in held] == [4, 9] and len(kept) == 10
    assert "no valset: 2 of 12 examples of the trainset are held back" in capsys.readouterr().err


def test_load_names_predictors_that_the_run_has_no_weights_for(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmrl.store.policy import Policy

    monkeypatch.setattr("mmrl.run.check.served", lambda config: Policy(base="tiny", modules={"other": "other"}))
    with pytest.raises(ConfigError, match=r"has no weights for classify\.predict; its modules are other"):
        load(Router(), made[1])


class Locked(Router):
    """With what no copy can be made of."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_program_with_a_lock_is_loaded_and_has_the_layout_of_its_run(made: Any, tmp_path: Path) -> None:
    shutil.copytree(made[1], tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("prompt_layout: dspy", "prompt_layout: shared_first"))
    trained = load(Locked(), tmp_path / "run")
    lm = trained.classify.predict.lm
    with contextlib.suppress(dspy.utils.exceptions.AdapterParseError):  # a layout that it was not trained with
        trained(text=DEVSET[0].text)
    reminder = dspy.ChatAdapter().user_message_output_requirements(Router().classify.predict.signature)
    assert [reminder in message["content"] for message in lm.history[0]["messages"]] == [True, False]
    lm.served.close()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (["a", 3], r"\[0\] is a str, expected a mapping"),
        ("text", "is a str, expected a list of records"),
        (lambda: 1 / 0, r"\(\) raised ZeroDivisionError"),
    ],
)
def test_data_that_are_no_records_are_named(value: object, says: str) -> None:
    from mmrl.tasks.data.rows import Source

    with pytest.raises(ConfigError, match=says):
        Source("task.data.train", register("bad_data", value)).rows("train")


def test_the_stop_button_of_a_notebook_ends_the_run_below_it() -> None:
    """Ctrl-C asks the thread of the run to end, once, and the cell ends with it."""
    ended = []

    def work() -> None:
        try:
            while True:
                time.sleep(0.005)
                look()
        except KeyboardInterrupt:
            look()
            ended.append(threading.current_thread().name)
            raise

    async def cell() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        outside_of_loops(work)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    assert ended == ["mmrl-train"]


def test_the_notebook_runs_and_shows_what_its_cells_say_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python -m scripts.notebook` where it fails; scores and seconds of a machine are not compared."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    pages = [notebook, executed(notebook, names)]
    shown, today = [[cell["outputs"] for cell in page["cells"] if cell["cell_type"] == "code"] for page in pages]
    assert names["trained"].run_dir == Path("outputs/router") and RunDir.read(names["trained"].run_dir).finished
    assert [[o["output_type"] for o in cell] for cell in shown] == [[o["output_type"] for o in cell] for cell in today]
    assert (shown[1], shown[-1]) == (today[1], today[-1]), "the first example, and the refusal"
