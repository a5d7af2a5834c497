"""What `mmrl plan` and `mmrl table do=plan` say of evaluations: how often, how many rollouts, how long."""

import json
from dataclasses import replace

import pytest

from mmrl.cli import main
from mmrl.cli.configs import configured
from mmrl.errors import ConfigError
from mmrl.plan.cost import GIB, GPUS, Device
from mmrl.plan.evaluation import declared_rollout, evaluation_seconds, mean_rollout
from mmrl.plan.shapes import KNOWN, Shape
from mmrl.plan.workload import Lengths, Load
from mmrl.records import Call, Forest, Rollout

LENGTHS = "lengths=rewriter:10/2,reranker:50/3,answerer:30/4"


def planned(capsys, *arguments):
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("steps", "every", "times"), [(20, 5, 5), (21, 5, 6), (4, 5, 2), (20, 0, 2), (1, 1, 2), (3, 1, 4)]
)
def test_before_every_so_many_steps_and_after(capsys, steps, every, times):
    plan = planned(capsys, LENGTHS, f"train.steps={steps}", f"eval.every={every}", "eval.items=30")
    assert plan["evaluations"]["times"] == times and plan["evaluations"]["rollouts"] == 30
    spent = steps * sum(plan["seconds_per_step"].values()) + times * plan["evaluations"]["seconds"]
    assert plan["hours"] == pytest.approx(spent / 3600)


def test_rollouts_are_items_and_samples_of_what_there_is(capsys):
    samples = ["eval.samples=3", "eval.temperature=1"]
    assert planned(capsys, LENGTHS, "eval.items=10", *samples)["evaluations"]["rollouts"] == 30
    whole = planned(capsys, LENGTHS)["evaluations"]["rollouts"]
    assert planned(capsys, LENGTHS, "eval.items=100000")["evaluations"]["rollouts"] == whole


def test_files_that_nobody_has_counted_are_said(capsys):
    words = ["plan", "dry=0", LENGTHS, "device=h100", "task.data.dev=dev.json", "task.dataset=hotpotqa"]
    assert main([*words, "train.steps=4", "eval.every=2"]) == 0
    assert "3 evaluations of the whole split not counted (eval.items)" in capsys.readouterr().out
    assert main([*words, "train.steps=4", "eval.every=2", "task.data.dev_items=50"]) == 0
    assert "with 3 evaluations of 50 rollouts, " in capsys.readouterr().out


def test_one_rollout_by_hand():
    """Two turns of 5 tokens with 7 observed between them: 20 prompt tokens, then 32, of which 7 are new."""
    config = configured(["task=tool_agent"])
    loads = declared_rollout(config, ["agent"], {"agent": Lengths(prompt=20, completion=5, observation=7, calls=2)})
    expected = Load(calls=2, prompt=52, prompt_unique=27, completion=10, decode_steps=10)
    assert loads == {"agent": expected}
    assert declared_rollout(config, ["agent"], {}, answered=["agent"]) == {}
    ids = tuple(range(100))
    first = Call(id="a", example="x", module="agent", parent=None, completion_tokens=5, prompt_ids=ids[:20])
    then = replace(first, id="b", parent="a", turn=1, prompt_ids=ids[:32])
    short = replace(first, id="c", completion_tokens=3)
    calls = {call.id: call for call in (first, then, short)}
    rollouts = tuple(Rollout(id=f"r{leaf}", example="x", leaf=leaf, reward=0.0) for leaf in "bc")
    forest = Forest(calls=calls, rollouts=rollouts, modules=("agent",))
    mean = Load(calls=1.5, prompt=36, prompt_unique=23.5, completion=6.5, decode_steps=10)
    assert mean_rollout(forest) == {"agent": mean}
    assert mean_rollout(forest, answered=["agent"])["agent"].calls == 0


def test_seconds_by_hand():
    """A device that does 1 GFLOP/s and reads 1 GB/s; a model of one layer of which 4 bytes a number are read."""
    config = configured(["engine.batch_tokens=6000", "hardware.threads=1"])
    shape = Shape(layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, intermediate=16, vocab=64, tied=True)
    device = Device(name="x", flops=1e9, bandwidth=1e9, memory=GIB, utilisation=1.0)
    rollout = {"agent": Load(calls=1, prompt=100, prompt_unique=100, completion=20, decode_steps=20)}
    # 100 rollouts of 120 tokens are 12,000, of which 6,000 fit at once: two rounds of 20 steps with 50 rows each.
    prefill = 2 * shape.block_parameters * 100 * 100 / (1e9 * 0.5)
    read = (4 * shape.parameters + 50 * 120 * shape.kv_bytes(4)) / 1e9
    decode = 40 * max(read, 2 * shape.parameters * 50 / 1e9)
    assert evaluation_seconds(config, shape, rollout, 100, device, 1) == pytest.approx(prefill + decode)
    assert evaluation_seconds(config, shape, {}, 100, device, 1) == 0


def test_no_room_for_a_call_is_said(capsys):
    words = ["engine=vllm_server", "model=llama31_8b_instruct", "hardware=gpu1", "engine.gpu_memory=0.1"]
    config = configured(words)
    rollout = {"agent": Load(calls=1, prompt=100, prompt_unique=100, completion=20, decode_steps=20)}
    with pytest.raises(ConfigError, match=r"engine\.gpu_memory: got 0\.1, which leaves no room .* 15 GiB"):
        evaluation_seconds(config, KNOWN["meta-llama/Llama-3.1-8B-Instruct"], rollout, 10, GPUS["h100"], 1)
    spread = configured([*words, "engine.args=['--tensor-parallel-size=8']"])
    assert evaluation_seconds(spread, KNOWN["meta-llama/Llama-3.1-8B-Instruct"], rollout, 10, GPUS["h100"], 8) > 0
    plan = planned(capsys, *words)
    assert plan["evaluations"] is None and any("engine.gpu_memory" in warning for warning in plan["warnings"])


def test_fewer_items_than_asked_for_are_all(capsys):
    words = ["dry=0", LENGTHS, "device=h100", "task.data.dev=dev.json", "task.dataset=hotpotqa", "eval.items=1000"]
    assert planned(capsys, *words, "task.data.dev_items=50")["evaluations"]["rollouts"] == 50
