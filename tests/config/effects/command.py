"""Effects of the sections that every run has: seed, plugins, `model.*`, `hardware.*`, `eval.*`, `run.*`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from hashlib import sha256
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from mmrl.config import StartConfig
from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import EngineSetup
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from mmrl.engines.vllm.command import resources
from mmrl.errors import MmrlError, ToolFailure
from mmrl.models.chat import render_prompt
from mmrl.models.load import load_model, load_tokenizer
from mmrl.models.policy import resolve, write_policy
from mmrl.report.doctor import Played
from mmrl.report.overview import Overview
from mmrl.report.progress import Progress
from mmrl.report.trackers import trackers
from mmrl.run.build import server_devices
from mmrl.run.doctor import check_before_training
from mmrl.run.launch import hardware_problems, must_start, wrapping
from mmrl.run.ray_launch import start_on_ray
from mmrl.run.settle import import_plugins, module_assignment, run_folder, settle
from mmrl.run.start import config_of_resumed
from mmrl.stages.evaluate import Evaluations, evaluate, evaluation_metrics, too_many_failed
from mmrl.stages.step_log import StepLog
from mmrl.system import ray_cluster
from mmrl.tasks import TASKS
from mmrl.trainer import checkpoint
from mmrl.trainer.adapters import make_adapters
from tests.config.effects import Options, acts, refused
from tests.config.effects.algo import requests
from tests.config.effects.training import BOTH, EVAL, TRAIN, collected, collector_of, config_of, root
from tests.helpers.engines import model, tokenizer
from tests.helpers.programs import Chain, FakeEngine, FakeTask, environment, seeded_letter
from tests.helpers.runs import fake_run
from tests.helpers.trainer_cases import make_calls, make_trainer

# --- seed, plugins


def plugged(name: str, options: Options, folder: Path) -> object:
    """Tasks that there are once the plugins are imported."""
    package = f"plugin_of_a_test_{folder.name}"
    text = "from mmrl.tasks import TASKS\nTASKS['of_a_plugin'] = lambda config, seed: None\n"
    (folder / f"{package}.py").write_text(text, encoding="utf-8")
    with patch.object(sys, "path", [str(folder), *sys.path]), patch.dict(TASKS), patch.dict(sys.modules):
        import_plugins([package if p == "HERE" else p for p in config_of(options).plugins])
        return sorted(TASKS)


acts(TRAIN, "seed", collected, 0, 1)
acts(BOTH, "plugins", plugged, (), ("HERE",))


# --- the model


def rendered(name: str, options: Options, folder: Path) -> object:
    """The ids of a prompt."""
    thinks = "{% if enable_thinking %}<think>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "shout.jinja").write_text("{% for m in messages %}!{{ m.content }}!{% endfor %}", encoding="utf-8")
    (folder / "thinks.jinja").write_text(thinks, encoding="utf-8")
    if template := options.get("model.chat_template"):
        options = {**options, "model.chat_template": str(folder / template)}
    return render_prompt(load_tokenizer(root(name, options).model), [{"role": "user", "content": "Who made it?"}])


def loaded(name: str, options: Options, folder: Path) -> object:
    """The weights: their type and sum; and what computes with them."""
    model = load_model(root(name, options).model, "cpu")
    weights = next(model.parameters())
    parts = {type(part).__name__ for part in model.modules()}
    return weights.dtype, weights.double().sum().item(), parts, model.config._attn_implementation


def asked_for(name: str, options: Options, folder: Path) -> object:
    """The revision that is asked for at the hub."""
    with (
        patch("transformers.AutoTokenizer.from_pretrained", side_effect=OSError("no")) as read,
        patch("mmrl.models.load.hub_answers", lambda: True),
        suppress(MmrlError),
    ):
        load_tokenizer(root(name, {"model.name": "hf", "model.path": "owner/name", **options}).model)
    return read.call_args.kwargs["revision"]


def adapted(name: str, options: Options, folder: Path) -> object:
    """Layers of the model that is trained: names, shapes, scaling and dropout of its adapters."""
    lora = config_of(options).model.lora
    trainer = make_trainer(folder, calls=make_calls(), lora=lora)
    layers = [m for m in trainer.model.modules() if hasattr(m, "lora_dropout")]
    facts = [(list(m.scaling.values()), [getattr(d, "p", 0) for d in m.lora_dropout.values()]) for m in layers]
    return facts, sorted((n, tuple(p.shape)) for n, p in trainer.model.named_parameters() if p.requires_grad)


def assigned(name: str, options: Options, folder: Path) -> object:
    """Adapters of the modules: names, learning rates, and those that are not trained."""
    # a section for each module: `model.modules.<module>.lr`
    of_module = {key.replace("modules.", "modules.a."): value for key, value in options.items()}
    config = config_of({"model.lora": {}, **of_module})
    found = module_assignment(config, ("a", "b"))
    adapters = make_adapters(found)
    assert adapters is not None
    return found.adapters, found.rates, found.frozen, adapters.trained


def recomputing(name: str, options: Options, folder: Path) -> object:
    """Whether the update keeps activations, or forwards again."""
    with patch.object(checkpoint, "save"):
        trainer = make_trainer(
            folder, calls=make_calls(), checkpointing=config_of(options).model.gradient_checkpointing
        )
        trainer.train()
    return any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules())


def titled(name: str, options: Options, folder: Path) -> object:
    """What reports call a run."""
    stored = config_of(options).model_dump(mode="json")
    run = fake_run(folder / "run", steps=1, config=stored, evaluate=False)
    seen = Overview.from_run(run)
    return seen.name, seen.description


acts(TRAIN, "model.path", loaded, "tiny", "tiny_dspy")
acts(BOTH, "model.chat_template", rendered, None, "shout.jinja")
acts(BOTH, "model.thinking", rendered, False, True, model__chat_template="thinks.jinja")
acts(BOTH, "model.dtype", loaded, "float32", "bfloat16")
acts(BOTH, "model.matmul", loaded, "torch", "onednn")
acts(BOTH, "model.attention", loaded, "auto", "eager")
acts(BOTH, "model.revision", asked_for, None, "v2")
acts(TRAIN, "model.lora.r model.lora.alpha", adapted, 4, 8)
acts(TRAIN, "model.lora.dropout", adapted, 0.0, 0.5)
acts(TRAIN, "model.lora.targets", adapted, ("q_proj",), ("v_proj",))
acts(TRAIN, "model.gradient_checkpointing", recomputing, False, True)


def checked(name: str, options: Options, folder: Path) -> object:
    """Ways that an engine and a trainer compare with the plain forward."""
    section = config_of(options).model
    engine = TransformersEngine(
        model(),
        tokenizer(),
        TransformersConfig(),
        EngineSetup(threads=1, weights=section.model_copy(update={"lora": None})),
    )
    return [way.name for way in (*engine.ways, *make_trainer(folder, selfcheck=section.selfcheck).ways)]


acts(BOTH, "model.selfcheck", checked, True, False)
acts(TRAIN, "model.name", titled, "one", "other")
acts(TRAIN, "model.modules.adapter", assigned, None, "mine")
acts(TRAIN, "model.modules.lr", assigned, None, 0.5)
acts(TRAIN, "model.modules.frozen", assigned, False, True)
for key, value in {"adapter": "x", "lr": "0.5", "frozen": "true"}.items():
    typed = f"model.modules.rewriter.{key}"
    refused(EVAL, f"model.modules.{key}", value, "a checkpoint says which", typed=typed, starts="model.modules")
refused(EVAL, "model.path model.name", "tiny_dspy", "policy= names the weights")
refused(EVAL, "model.lora.r model.lora.alpha", "4", "policy= names the weights")
refused(EVAL, "model.lora.dropout", "0.5", "policy= names the weights")
refused(EVAL, "model.lora.targets", "[q_proj]", "policy= names the weights")


# --- the hardware


def worked_on(name: str, options: Options, folder: Path) -> object:
    """The device and engine that a run settles on, or why it cannot; and the weights' type there."""
    try:
        settled = settle(root(name, options))
    except MmrlError as error:
        return str(error)
    return next(load_model(settled.model, settled.hardware.device).parameters()).device.type, settled.engine.name


def started(name: str, options: Options, folder: Path) -> object:
    """Whether processes are started, and what they are told."""
    hardware = config_of({"hardware.device": "cuda", **options}).hardware
    try:
        return must_start(hardware.processes, hardware.nodes), wrapping(hardware), server_devices(hardware)
    except MmrlError as error:
        return str(error)


def threads(name: str, options: Options, folder: Path) -> object:
    """Threads that an engine beside the trainer gets."""
    settled = settle(root(name, options))
    with patch.dict("os.environ"):
        os.environ.pop("OMP_NUM_THREADS", None)
        return resources(settled.engine, EngineSetup(device="cpu", threads=settled.hardware.threads))


def profile(name: str, options: Options, folder: Path) -> object:
    """How a message names the profile."""
    return hardware_problems(root(name, {"hardware.processes": 2, **options}).hardware, "vllm_colocated", modules=False)


def cluster_joined(name: str, options: Options, folder: Path) -> object:
    """The cluster that is asked for."""
    with patch.dict(sys.modules, ray=SimpleNamespace(is_initialized=lambda: False)):
        try:
            return ray_cluster.connect(root(name, options).hardware)
        except MmrlError as error:
            return str(error)


def started_on_ray(name: str, options: Options, folder: Path) -> object:
    """The lost processes that Ray Train is told to replace."""
    ray, train = MagicMock(exceptions=SimpleNamespace(RayError=RuntimeError)), MagicMock()
    ray.get = lambda answer: answer
    board = ray.remote().options().remote()
    board.read.remote.return_value, board.state.remote.return_value = [], (0, 0)
    modules = {
        "ray": ray,
        "ray.train": train,
        "ray.train.backend": SimpleNamespace(Backend=object, BackendConfig=object),
    }
    others = ("ray.train.v2.api.data_parallel_trainer", "ray.util.scheduling_strategies")
    with patch.dict(sys.modules, modules | {other: MagicMock() for other in others}), patch.dict("os.environ"):
        assert start_on_ray({}, root(name, options).hardware, "run") == 0
    return str(train.FailureConfig.call_args)


acts(TRAIN, "hardware.ray.address", cluster_joined, "127.0.0.1:1", "127.0.0.1:2")
acts(TRAIN, "hardware.ray.max_failures", started_on_ray, 1, 2)
refused(EVAL, "hardware.ray.address", "a:1", "mmrl eval, which runs in one process of this machine", starts="hardware")
refused(EVAL, "hardware.ray.max_failures", "1", "mmrl eval, which runs in one process", starts="hardware")
acts(BOTH, "hardware.name", profile, "one", "other")
acts(BOTH, "hardware.device", worked_on, "cpu", "cuda")
acts(BOTH, "hardware.engine", worked_on, "transformers", "vllm_server")
acts(BOTH, "hardware.threads", threads, 1, 2, engine__name="vllm_server")
acts(TRAIN, "hardware.processes hardware.nodes", started, 1, 2)
acts(TRAIN, "hardware.rollout_devices", started, 0, 1)
acts(TRAIN, "hardware.sharding", started, "none", "fsdp2")
acts(TRAIN, "hardware.cpu_offload", started, False, True, hardware__sharding="fsdp2")
refused(EVAL, "hardware.processes hardware.nodes", "2", "mmrl eval runs in one", starts="hardware")

# --- evaluation


def _evaluation(config: Any, task: FakeTask) -> tuple[Any, FakeEngine]:
    engine = FakeEngine(seeded_letter)
    items = evaluate(
        lambda key: environment(task, engine, key=key), task.examples("dev"), config.eval, config.seed, "outcome"
    )
    return items, engine


def evaluated(name: str, options: Options, folder: Path) -> object:
    """Items and rollouts of an evaluation."""
    config = root(name, options)
    items, engine = _evaluation(config, FakeTask(Chain(("a",))))
    return len(items), len(engine.requests), evaluation_metrics(items, config.eval, config.seed)


def evaluated_split(name: str, options: Options, folder: Path) -> object:
    """Names of the metrics of a training run's evaluations."""
    config = config_of(options)
    collector = collector_of(config, FakeEngine(seeded_letter))
    collector.log.rundir.eval_path = lambda step, split: folder / f"{split}.jsonl"
    examples = collector.task.examples(config.eval.split)
    run = Evaluations(examples=examples, last_step=9, stage=collector)
    return sorted(run.metrics(0)), [step for step in range(1, 10) if run.due(step)]


def evaluation_requests(name: str, options: Options, folder: Path) -> object:
    """What an engine is asked for in one rollout of an evaluation."""
    return requests(root(name, options).eval)


def broken_evaluation(name: str, options: Options, folder: Path) -> object:
    """Items of an evaluation whose rollouts all fail, until that is too much."""
    config = root(name, options)

    def broken(text: str) -> str:
        raise ToolFailure("down")

    with patch("mmrl.stages.evaluate.CHUNK", 2):
        items, _ = _evaluation(config, FakeTask(Chain(), tools={"echo": broken}))
    return len(items), too_many_failed(items, config.eval)


acts(BOTH, "eval.max_failed_share", broken_evaluation, 0.5, 1.0)
acts(TRAIN, "eval.split", evaluated_split, "dev", "test")
acts(TRAIN, "eval.every", evaluated_split, 0, 2)
acts(BOTH, "eval.items", evaluated, None, 3)
acts(BOTH, "eval.samples", evaluated, 1, 2, eval__temperature=1.0)
acts(BOTH, "eval.bootstrap", evaluated, 100, 1000)
acts(BOTH, "eval.temperature", evaluation_requests, 0.0, 1.0)
acts(BOTH, "eval.top_p", evaluation_requests, 1.0, 0.5, eval__temperature=1.0)
acts(BOTH, "eval.top_k eval.parse_retries", evaluation_requests, 0, 2, eval__temperature=1.0)
refused(EVAL, "eval.split", "test", "use split=")


def policy_and_examples(name: str, options: Options, folder: Path) -> object:
    """Where the weights of an evaluation come from, and its examples."""
    config = root(name, options)
    return resolve(config.policy).base, [example.inputs for example in FakeTask(Chain()).examples(config.split)]


acts(EVAL, "seed", evaluated, 0, 1)
acts(EVAL, "policy", policy_and_examples, "tiny", "tiny_dspy")
acts(EVAL, "split", policy_and_examples, "dev", "test")


# --- the run

PLAYED = Played(title="x", examples=1, seconds=1.0, metrics={"rollouts/count": 1.0}, max_tokens=1, max_failed_share=0.5)


def placed(name: str, options: Options, folder: Path) -> object:
    """The run directory."""
    with patch("mmrl.run.settle.allocate", lambda parent, stem: parent / "new"):
        return run_folder(root(name, options).run.dir, "task", "algo")


def shown(name: str, options: Options, folder: Path) -> object:
    """What is written to a pipe while a run trains."""
    pipe = StringIO()
    with patch("sys.stderr", pipe), Progress(total=1, title="run", live=config_of(options).run.progress) as progress:
        progress.step(1, {"reward/mean": 0.5})
    return "\x1b[" in pipe.getvalue()


def looked(name: str, options: Options, folder: Path) -> object:
    """Whether a few examples are played before training."""
    log = StepLog(rundir=MagicMock(path=folder), progress=MagicMock(), trackers=MagicMock())
    with patch("mmrl.run.doctor._examined", lambda built, examples: PLAYED):
        check_before_training(SimpleNamespace(config=config_of(options), task=FakeTask(Chain())), log)
    return log.progress.note.called, [path.name for path in folder.iterdir()]


def tracked(name: str, options: Options, folder: Path) -> object:
    """What trackers are started with."""
    config, run = config_of(options), SimpleNamespace(path=folder, config={}, history=list, summary={})
    with (
        patch("mmrl.report.trackers._started") as started,
        trackers(config.run, run, name="run", group="g", device="cpu", warn=lambda text: None) as opened,
    ):
        of_trackers = (
            [call.args[0] for call in started.call_args_list],
            [call.args[3] for call in started.call_args_list],
        )
        return of_trackers, opened.calls


def continued(name: str, options: Options, folder: Path) -> object:
    """Where a run that is continued finds what it started from, or why it does not."""
    start = folder / "start"
    start.mkdir()
    (start / "prompts.yaml").write_text("a: b\n", encoding="utf-8")
    write_policy(start, weights="tiny", prompts=str(start / "prompts.yaml"), task="hotpotqa")
    known = {"run": "start", "weights": None, "prompts": sha256(b"a: b\n").hexdigest()}
    typed = {key.removeprefix("start."): value for key, value in options.items() if key.startswith("start.")}
    config = config_of({key: value for key, value in options.items() if not key.startswith("start.")})
    config = config.model_copy(update={"start": StartConfig(**{**known, **typed})})
    try:
        return Path(str(config_of_resumed(config, folder / "run").task.prompts)).name
    except MmrlError as error:
        return str(error)


acts(TRAIN, "start.run", continued, "start", "gone")
acts(TRAIN, "start.weights", continued, None, "0" * 64)
acts(TRAIN, "start.prompts", continued, sha256(b"a: b\n").hexdigest(), None)
acts(BOTH, "run.dir", placed, None, "outputs/mine")
acts(TRAIN, "run.name", titled, None, "mine")
acts(TRAIN, "run.progress", shown, None, True)
acts(TRAIN, "run.doctor", looked, False, True)
acts(TRAIN, "run.report_to", tracked, (), ("tensorboard",))
acts(TRAIN, "run.report_calls", tracked, 16, 0, run__report_to=("tensorboard",))
acts(TRAIN, "run.group", tracked, None, "mine", run__report_to=("wandb",))
acts(TRAIN, "run.tags", tracked, (), ("a", "b"), run__report_to=("wandb",))
acts(TRAIN, "run.wandb_project", tracked, "mmrl", "mine", run__report_to=("wandb",))
OF_TRAIN = "it is an option of mmrl train"
refused(EVAL, "model.gradient_checkpointing hardware.cpu_offload run.progress run.doctor", "true", OF_TRAIN)
refused(EVAL, "run.name run.group run.wandb_project", "x", OF_TRAIN)
refused(EVAL, "eval.every hardware.rollout_devices run.report_calls", "3", OF_TRAIN)
refused(EVAL, "hardware.sharding", "fsdp2", OF_TRAIN)
refused(EVAL, "run.report_to", "[tensorboard]", OF_TRAIN)
refused(EVAL, "run.tags", "[x]", OF_TRAIN)
