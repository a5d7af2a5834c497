"""Several processes: shares and their union, what a launcher is told, refusals, and runs of two against one."""

import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest
from torch import distributed

from mmrl.cli import main
from mmrl.config import HardwareConfig, ModelConfig
from mmrl.config.engines import TransformersConfig, VllmServerConfig
from mmrl.config.rules import across_sections
from mmrl.engines.base import EngineSetup
from mmrl.engines.vllm.command import server_environment
from mmrl.errors import ConfigError
from mmrl.models.load import load_model
from mmrl.records import Example
from mmrl.run import session
from mmrl.run.build import server_devices
from mmrl.run.launch import environment, hardware_problems, missing_packages, wrapping
from mmrl.store.rundir import RunDir
from mmrl.system.conf import later_wins
from mmrl.system.processes import ALONE, Processes, join, merge_forests
from mmrl.trainer.sharding import loaded_once
from scripts.chaos.compare import comparable
from tests.helpers import TOP
from tests.helpers.forests import Grow
from tests.helpers.runs import change_config, command
from tests.helpers.watch import running, started, until

SMALL = (
    "train.steps=2",
    "train.batch_size=4",
    "train.save_every=1",
    "eval.items=6",
    "eval.every=0",
    "hardware.threads=1",
    "algo.beta=0.001",
)


def profile(**values):
    return HardwareConfig(name="test", **{"device": "cuda", **values})


def test_shares_make_up_the_whole():
    items = list(range(7))
    shares = [Processes(rank, 3).share(items) for rank in range(3)]
    assert sorted(item for share in shares for item in share) == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_only_processes_that_reach_the_servers_sample():
    processes = [Processes(rank, 4, samplers=2) for rank in range(4)]
    assert [one.share([1, 2, 3]) for one in processes] == [[1, 3], [2], [], []]
    assert [one.part([1, 2, 3]) for one in processes] == [[1], [2], [3], []]


@pytest.mark.parametrize(
    ("engine", "samplers"),
    [
        (TransformersConfig(name="transformers"), 0),
        (VllmServerConfig(name="vllm_server"), 8),
        (VllmServerConfig(name="vllm_server", urls=("http://a:1",)), 0),
        (VllmServerConfig(name="vllm_server", urls=("http://a:1", "http://b:1")), 8),
        (VllmServerConfig(name="vllm_server", urls=("http://a:1", "http://b:1"), router="http://a:2"), 0),
    ],
)
def test_what_mmrl_starts_is_reached_on_one_machine(monkeypatch, engine, samplers):
    monkeypatch.setattr(session, "join", lambda *arguments: ALONE)
    assert session._join(profile(processes=8, nodes=2), engine).samplers == samplers


@pytest.mark.parametrize(
    ("values", "devices"),
    [
        ({"processes": 7, "rollout_devices": 1}, (7,)),
        ({"processes": 2}, (0, 1)),
        ({"processes": 1}, ()),
        ({"device": "cpu", "processes": 2}, ()),
    ],
)
def test_gpus_of_the_managed_server(values, devices, monkeypatch):
    assert server_devices(profile(**values)) == devices
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,0,1,2,3")
    setup = EngineSetup(device=values.get("device", "cuda"), devices=devices)
    seen = server_environment(VllmServerConfig(), setup).get("CUDA_VISIBLE_DEVICES")
    assert seen == {(7,): "3", (0, 1): "4,5", (): None}[devices]


def test_a_run_of_one_needs_nobody():
    alone = Processes()
    assert alone.main and alone.gather("x") == ["x"] and alone.first("x") == "x"
    assert join(1, "cpu") == alone


def test_shares_of_a_forest_are_put_together_in_the_batch_s_order():
    examples = [Example(id=name, inputs={}) for name in "abc"]
    shares = [Grow(["m"]), Grow(["m"])]
    for share, names in zip(shares, (("c/0", "a/0"), ("b/0",)), strict=True):
        for name in names:
            share.chain(name, ["m"], 1.0)
    whole = merge_forests([share.forest for share in shares], examples)
    assert list(whole.calls) == ["a/0#0", "b/0#0", "c/0#0"]
    assert [found.id for found in whole.rollouts] == ["a/0", "b/0", "c/0"]


def test_a_launcher_that_started_another_number_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="asks for 2 processes in all, the launcher started 3"):
        join(2, "cpu")


def test_what_a_process_is_told():
    found = environment(profile(processes=2, sharding="fsdp2", cpu_offload=True), 1, 29500)
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_PORT"]) == ("1", "2", "29500")
    assert found["FSDP_VERSION"] == "2" and found["FSDP_OFFLOAD_PARAMS"] == "true"
    assert wrapping(profile(sharding="zero3"))["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert wrapping(profile(device="cpu")) == {"ACCELERATE_USE_CPU": "true"}
    assert wrapping(profile()) == {}


def test_what_is_not_sharded_is_loaded_by_every_process(tmp_path, monkeypatch):
    """transformers gives zeros to all local ranks but the first, if asked to load once: a teacher would stay zero."""
    for name, value in {**wrapping(profile(sharding="fsdp2")), "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        tiny = ModelConfig(name="tiny", path="tiny")
        with loaded_once():
            assert not any(weight.any() for weight in load_model(tiny, "cpu").parameters())
        assert all(weight.any() for weight in load_model(tiny, "cpu").parameters())
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("sharding", ["fsdp2", "zero2", "zero3"])
def test_accelerate_launch_sets_the_same_variables(sharding, offload):
    """By accelerate's real parser and launcher, from the flags that a user would type for the profile."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    common = "--num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    if sharding == "fsdp2":
        flags = (
            "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_state_dict_type "
            "FULL_STATE_DICT --fsdp_reshard_after_forward true --fsdp_cpu_ram_efficient_loading false "
            f"--fsdp_offload_params {str(offload).lower()}"
        )
    else:
        device = "cpu" if offload else "none"
        flags = (
            f"--use_deepspeed --zero_stage {sharding[-1]} --offload_optimizer_device {device} "
            f"--offload_param_device {device if sharding == 'zero3' else 'none'} --gradient_accumulation_steps 1"
            f" --zero3_save_16bit_model {str(sharding == 'zero3').lower()}"
        )
    arguments = launch_command_parser().parse_args(f"{common} {flags} train.py".split())
    arguments.deepspeed_fields_from_accelerate_config = ""  # as the launcher does, which reads no file here
    found = prepare_multi_gpu_env(arguments) if sharding == "fsdp2" else prepare_deepspeed_cmd_env(arguments)[1]
    expected = wrapping(profile(processes=2, sharding=sharding, cpu_offload=offload))
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("values", "engine", "more", "expected"),
    [
        ({"device": "cpu", "processes": 2, "sharding": "fsdp2"}, "vllm_server", {}, "on a CPU"),
        ({"sharding": "zero2"}, "vllm_server", {}, "one process"),
        ({"processes": 2, "sharding": "fsdp2"}, "transformers", {}, "engine=vllm_server"),
        ({"cpu_offload": True}, "transformers", {}, "hardware.cpu_offload"),
        ({"rollout_devices": 1}, "transformers", {}, "hardware.rollout_devices"),
        ({"processes": 2}, "transformers", {"modules": True}, "weights per module"),
        ({"processes": 8, "sharding": "zero3"}, "vllm_server", {"critic": "separate"}, "got zero3, which DeepSpeed"),
        ({"processes": 8}, "vllm_server", {"critic": "adapter"}, "algo.critic: got adapter, which needs one process"),
        *(
            ({"processes": 8, "sharding": "fsdp2"}, "vllm_server", {"critic": kind}, "")
            for kind in (None, "separate", "adapter", "head")
        ),
        ({"processes": 8}, "vllm_server", {"critic": "head"}, ""),
        ({}, "vllm_server", {"critic": "adapter"}, ""),
        ({"processes": 7, "sharding": "fsdp2", "rollout_devices": 1}, "vllm_server", {}, ""),
    ],
)
def test_profiles_that_cannot_work_are_refused(values, engine, more, expected):
    sections = {"hardware": profile(**values), "engine": {"name": engine}}
    problems = hardware_problems(profile(**values), engine, **{"modules": False, **more}) + across_sections(sections)
    assert len(problems) == bool(expected) and expected in "".join(problems)


@pytest.mark.parametrize(
    ("missing", "line", "said"),
    [
        *(
            (
                "deepspeed",
                f"hardware=h100x8 hardware.sharding={stage} engine.urls=[http://127.0.0.1:1]",
                [f"sharding: got {stage}, which needs DeepSpeed", "'mmrl[deepspeed]'", "hardware.sharding=fsdp2"],
            )
            for stage in ("zero2", "zero3")
        ),
        # both at once, the second of the profile's own engine
        ("deepspeed vllm", "hardware=h100x8 hardware.sharding=zero2", ["needs DeepSpeed", "server needs vLLM"]),
        ("ray", "hardware=ray", ["hardware.ray: profile 'ray' needs Ray, which"]),
        # numbers of processes that would change
        ("ray", "hardware=ray hardware.processes=[1,4]", ["processes: got [1,4], expected integer"]),
        ("ray", "hardware=ray hardware.nodes=1-4", ["hardware.nodes: got '1-4', expected integer"]),
        ("ray", "hardware=ray hardware.ray.address=ray://head:1", ["address: got 'ray://head:1', expected"]),
        ("ray", "hardware=ray algo=sft hardware.processes=1", ["hardware.ray: has no effect with algo=sft"]),
        ("", "hardware=cpu2 hardware.nodes=2", ["torchrun --nnodes 2 --nproc-per-node 2"]),
    ],
)
def test_a_profile_that_cannot_run_here_is_refused_before_anything_loads(
    missing, line, said, monkeypatch, errors_of, tmp_path
):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing.split() else find(name))
    monkeypatch.setattr("mmrl.models.load.load_model", None)
    shown = errors_of("train", *line.split(), f"run.dir={tmp_path / 'run'}")
    assert all(text in shown for text in said) and "Traceback" not in shown, shown
    assert not (tmp_path / "run").exists()


def test_a_package_that_is_there_or_not_needed_is_not_missed(monkeypatch):
    assert missing_packages(profile(processes=8, sharding="fsdp2")) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert missing_packages(profile(processes=8, sharding="zero3")) == []


def test_a_launcher_s_processes_wrap_the_model_as_the_profile_says(monkeypatch):
    """torchrun and SLURM say who the processes are; without accelerate's variables it would be DDP, in silence."""
    monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": "16"})
    monkeypatch.setattr(session, "join", lambda *arguments: ALONE)
    session._join(profile(processes=8, nodes=2, sharding="fsdp2"), VllmServerConfig(name="vllm_server"))
    assert os.environ["ACCELERATE_USE_FSDP"] == "true" and os.environ["FSDP_VERSION"] == "2"


def test_more_gpus_than_the_machine_has_are_refused(monkeypatch, errors_of, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 7)
    monkeypatch.setattr("mmrl.models.load.load_tokenizer", None)
    monkeypatch.setattr("mmrl.engines.vllm.command._has_vllm", lambda python: True)
    for line, said in (
        ("hardware=h100x2 hardware.processes=8", "8 GPUs to train and 0 to serve rollouts, this machine has 7"),
        ("hardware=h100x8_split engine.python=python", "asks for 7 GPUs to train and 1 to serve rollouts, this"),
    ):
        shown = " ".join(errors_of("train", *line.split(), f"run.dir={tmp_path / 'run'}").split())
        assert "hardware.processes: profile" in shown and said in shown
    assert not (tmp_path / "run").exists()


STARTER = """
import sys
from mmrl.config import HardwareConfig
from mmrl.run import launch
sys.executable = sys.argv[1]
sys.exit(launch.start({}, HardwareConfig(name="two", device="cpu", processes=2), "run"))
"""


def workers_of(folder, script):
    """A process that has started two others, which run `script`; and these, by what each has added to PIDS."""
    worker, pids = folder / "worker", folder / "pids"
    worker.write_text(script.replace("PIDS", str(pids)))
    worker.chmod(0o755)
    variables = {**os.environ, "PYTHONPATH": str(TOP)}
    process = subprocess.Popen([sys.executable, "-c", STARTER, str(worker)], env=variables, start_new_session=True)
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2, process)
    return process, [int(pid) for pid in pids.read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent has died")
def test_processes_end_when_who_started_them_is_killed_outright(tmp_path):
    process, left = workers_of(tmp_path, "#!/bin/sh\necho $$ >> PIDS\nexec sleep 600\n")
    process.kill()
    process.wait()
    try:
        until(lambda: not any(map(running, left)))
    finally:
        for pid in filter(running, left):
            os.kill(pid, signal.SIGKILL)


def assert_numbers_of_one(two, *words):
    """A run of two processes has the numbers that the same command gives in this one, which evaluates at its end."""
    folder = two.with_name("one")
    assert main(["train", *later_wins([*SMALL, *words, "hardware=cpu", f"run.dir={folder}"])]) == 0
    one, two = RunDir.read(folder), RunDir.read(two)
    for mine, theirs in zip(one.history(), two.history(), strict=True):
        assert all(key.startswith(("eval/", "time/eval")) for key in mine.keys() ^ theirs.keys())
        for key, value in comparable(theirs).items():
            if key != "train/tokens_forwarded" and not key.startswith("train/logprob_gap"):
                assert mine[key] == pytest.approx(value, rel=1e-4, abs=1e-4, nan_ok=True), key
    assert one.journal_steps() == two.journal_steps() == [record["step"] for record in one.history()[1:]]


@pytest.mark.slow
def test_two_processes_that_are_terminated_save_and_have_the_numbers_of_one(tmp_path):
    run = tmp_path / "two"
    words = ["task=tool_agent", "algo=ppo", "algo.critic_warmup_steps=0", "train.schedule=constant"]
    words += ["train.warmup_steps=0", "train.save_every=100"]
    process = started("train", *later_wins([*SMALL, *words, "train.steps=50", "hardware=cpu2", f"run.dir={run}"]))
    until(lambda: (run / "metrics.jsonl").exists() and len(RunDir.read(run).history()) > 2, process)
    process.terminate()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert f"mmrl train resume={run}" in err and "Traceback" not in out + err
    steps = RunDir.read(run).history()[-1]["step"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"checkpoint-{steps}"]
    assert_numbers_of_one(run, *words, f"train.steps={steps}")


@pytest.mark.slow
def test_a_killed_process_ends_the_run_and_it_continues_to_the_numbers_of_one(tmp_path, capsys):
    run, words = tmp_path / "two", ("algo=mhgpo_rr", "train.steps=3")
    process = started("train", *later_wins([*SMALL, *words, "hardware=cpu2", f"run.dir={run}"]))
    until((run / "checkpoints" / "checkpoint-1").is_dir, process)
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
    os.kill(int(workers.split()[1]), signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "killed by signal 9 (SIGKILL)" in err and f"mmrl train resume={run}" in err
    assert "Traceback" not in out + err
    resumed = started("train", f"resume={run}")
    out, err = resumed.communicate(timeout=600)
    assert resumed.returncode == 0 and "Warning" not in err, err
    assert "before" in out and out.count("training reward") == 1  # one process speaks
    assert json.loads((run / "summary.json").read_text())
    assert_numbers_of_one(run, *words)
    assert capsys.readouterr().out.count("training reward") == 1


def test_the_defaults_of_accelerate_launch_do_not_reach_a_run(random_model, tmp_path, monkeypatch):
    """It sets them by the user's `accelerate config`, and the trainer's `Accelerator` reads them."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    flags = "--num_processes 2 --num_machines 1 --mixed_precision bf16 --dynamo_backend inductor --use_fsdp"
    defaults = prepare_multi_gpu_env(launch_command_parser().parse_args([*flags.split(), "train.py"]))
    found = {name: value for name, value in defaults.items() if name.startswith(("ACCELERATE_", "FSDP_"))}
    assert found["ACCELERATE_MIXED_PRECISION"] == "bf16" and found["ACCELERATE_USE_FSDP"] == "true"
    for name, value in {**found, "ACCELERATE_LOG_LEVEL": "info"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("mmrl.run.session.build_stage", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(command(random_model, tmp_path / "run")) == 130
    assert not found.keys() & os.environ.keys() and "ACCELERATE_LOG_LEVEL" in os.environ


def test_a_run_resumed_where_its_gpu_is_not_is_refused(random_model, tmp_path, errors_of, monkeypatch):
    monkeypatch.setattr("mmrl.run.session.build_stage", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    run = tmp_path / "run"
    assert main(command(random_model, run)) == 130
    change_config(run, hardware={"device": "cuda"})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "hardware.device: got cuda" in errors_of("train", f"resume={run}")
