"""`mmrl plan`: work counted by hand, known sizes, memory and time that follow the settings, evaluations, its words."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrl.cli import main
from mmrl.cli.configs import configured, train_configs
from mmrl.cli.overrides import read_line
from mmrl.commands.plan import problems_elsewhere
from mmrl.errors import ConfigError
from mmrl.plan.cost import GIB, GPUS, Device, Gpu, evaluation_seconds, known_gpu
from mmrl.plan.shapes import KNOWN, Shape
from mmrl.plan.workload import Lengths, Load, declared_rollout, mean_rollout, unique_tokens
from mmrl.records import Call, Forest, Rollout
from mmrl.system.conf import later_wins
from scripts.papers.spec import read_table, table_words
from tests.helpers.runs import fake_run


def planned(capsys, *arguments):
    assert main(["plan", *later_wins(arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


LENGTHS = "lengths=rewriter:10/2,reranker:50/3,answerer:30/4"


@pytest.mark.parametrize(
    ("words", "calls"),
    [
        (["algo=mhgpo_fof", "algo.group_size=4"], (4, 4, 4)),
        (["algo=mhgpo_is", "algo.group_size=4"], (6, 9, 12)),
        (["algo=mhgpo_fof_os", "algo.group_size=4"], (4, 4, 16)),
        (["algo=mappo"], (1, 1, 1)),
        # the expectation over draws
        (["algo=mhgpo_rr", "algo.group_size=4", "algo.fork_probs=[0,1,0]"], (1, 4, 4)),
        # 2 trees, 3 draws, one of them at the question: 1 + 1 rewriters, 1 + 2 rerankers, 1 + 3 answerers
        (["algo=tree_grpo", "algo.trees=2", "algo.nodes=3", "algo.group_size=4"], (4, 6, 8)),
        # 2 of the first two modules' calls, 4 of the last one's
        (["algo=c3"], (2, 4, 16)),
        (["algo=c3", "algo.fanout={reranker:3}"], (1, 3, 3)),
        # a second play costs what comes after the exchanged module
        (["algo=ccpo", "algo.group_size=2"], (2, 2 + 2, 2 + 4)),
    ],
)
def test_calls_of_a_question_are_those_of_the_paper(capsys, words, calls):
    plan = planned(capsys, *words, LENGTHS, "train.batch_size=1")
    assert tuple(plan["calls"][m]["calls"] for m in ("rewriter", "reranker", "answerer")) == pytest.approx(calls)


def test_tokens_by_hand(capsys):
    """FoF, G = 2, one question: the rewriter's prompt is shared, later prompts are not."""
    calls = planned(capsys, "algo=mhgpo_fof", "algo.group_size=2", LENGTHS, "train.batch_size=1")["calls"]
    rewriter = {"calls": 2, "prompt": 20, "prompt_unique": 10, "completion": 4, "decode_steps": 2, "continued": 0}
    assert calls["rewriter"] == pytest.approx(rewriter | {"trained": 24, "trained_unique": 14})
    assert calls["answerer"]["trained"] == calls["answerer"]["trained_unique"] == pytest.approx(68)


def test_independent_sampling_trains_the_forked_module_alone(capsys):
    """IS, G = 2: of 3 + 4 + 6 calls, 2 of each module enter the loss, each pair on one prompt."""
    calls = planned(capsys, "algo=mhgpo_is", "algo.group_size=2", LENGTHS, "train.batch_size=1")["calls"]
    assert [calls[m]["trained"] for m in calls] == pytest.approx([24, 106, 68])
    assert calls["reranker"]["trained_unique"] == pytest.approx(56)


def test_turns_of_one_context_are_forwarded_once(capsys):
    """Two turns of 5 tokens, 7 observed between them, prompt 20, two rollouts."""
    plan = planned(
        capsys, "algo=mt_grpo", "task=tool_agent", "algo.group_size=2", "train.batch_size=1", "lengths=agent:20/5/7x2"
    )
    load = plan["calls"]["agent"]
    assert load["calls"] == pytest.approx(4)
    assert load["prompt"] == pytest.approx(2 * (20 + 32))
    assert load["trained_unique"] == pytest.approx(20 + 2 * (5 + 7 + 5))
    assert load["continued"] == pytest.approx(2 * (20 + 32 + 5 + 5))


def test_dry_rollouts_are_counted(capsys):
    plan = planned(capsys, "algo=mhgpo_fof", "algo.group_size=2", "train.batch_size=2", "dry=2", "hardware.threads=1")
    assert plan["tokens_from"] == "counted in rollouts of 2 examples"
    assert plan["calls"]["rewriter"]["calls"] == 4
    assert 0 < plan["calls"]["answerer"]["trained_unique"] < plan["calls"]["answerer"]["trained"]


@given(st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), max_size=12))
def test_unique_tokens_are_the_distinct_prefixes(sequences):
    prefixes = {sequence[: length + 1] for sequence in sequences for length in range(len(sequence))}
    assert unique_tokens(sequences) == len(prefixes)


@pytest.mark.parametrize(
    ("path", "billions"),
    [("Qwen/Qwen3-8B", 8.19), ("meta-llama/Llama-3.1-8B-Instruct", 8.03), ("Qwen/Qwen2.5-7B", 7.62)],
)
def test_known_models_have_their_published_sizes(path, billions):
    assert KNOWN[path].parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_the_shipped_model_has_the_size_of_its_weights(capsys):
    from mmrl.config import ModelConfig
    from mmrl.models.load import load_model

    count = sum(p.numel() for p in load_model(ModelConfig(name="tiny", path="tiny"), "cpu").parameters())
    plan = planned(capsys, LENGTHS)
    assert plan["parameters"] == pytest.approx(count, rel=0.01)  # norms are left out


def test_weights_per_module_and_a_frozen_copy_are_counted(capsys):
    options = ["algo=mhgpo_fof", "task=hotpotqa", "model=tiny", "lengths=rewriter:20/5,reranker:20/5,answerer:20/5"]
    lora = [*options, "model.lora={r: 4}"]
    plan = planned(capsys, *lora)
    one, fused = plan["trained_parameters"], plan["memory_bytes"]["fused weights"]
    each = planned(capsys, *lora, "model.modules={}")
    assert (each["trained_parameters"], each["memory_bytes"]["fused weights"]) == (3 * one, 3 * fused)
    assert planned(capsys, *lora, "model.modules.reranker.frozen=true")["trained_parameters"] == 2 * one
    plain = planned(capsys, *options, "algo.freeze_modules=[reranker]")
    copied = planned(capsys, *options, "algo.freeze_modules=[reranker]", "algo.frozen_serving=true")
    assert copied["memory_bytes"]["initial weights"] > 0 and "initial weights" not in plain["memory_bytes"]


def test_teachers_are_counted_where_they_have_weights_of_their_own(capsys):
    """The policy, as it is or as it began, scores and holds nothing more; another model does, once for all modules."""
    base = ["algo=mhgpo_fof", "algo.beta=0.0", "task=hotpotqa", "model=tiny", LENGTHS]
    before = planned(capsys, *base)["memory_bytes"]
    for teachers, held in (("policy", set()), ("initial", {"reference"}), ("tiny", {"teachers"})):
        plan = planned(capsys, *base, f"algo.distill={{answerer: {teachers}, rewriter: {teachers}}}")
        more = {part: size for part, size in plan["memory_bytes"].items() if size and part not in before}
        assert set(more) == held and set(more.values()) <= {before["weights"]}
        assert plan["seconds_per_step"]["teachers"] > 0


def test_exact_divergences_cost_what_the_teachers_head_sees_and_beside_others_a_forward(capsys):
    base = ["algo=distill", "task=hotpotqa", "model=tiny", LENGTHS, "algo.distill={answerer: policy, reranker: policy}"]
    sampled = planned(capsys, *base)
    for more, held in ((["model.lora={}"], []), (["algo.epochs=2"], ["teacher's head"]), ([], [])):
        plan = planned(capsys, *base, "algo.distill_kl=exact", *more)
        parts = [part for part in plan["memory_bytes"] if "teacher" in part]
        assert parts == ["teachers' states", *held]
    two = planned(capsys, *base, "algo.distill_kl=exact", "hardware=cpu2")
    # Beside the update: how fast this machine is, is measured anew for each plan.
    before, alone, beside = (
        found["seconds_per_step"]["teachers"] / found["seconds_per_step"]["update"] for found in (sampled, plan, two)
    )
    assert alone == pytest.approx(before) and beside == pytest.approx(1.5 * before)


def test_turn_rewards_of_the_policy_itself_cost_its_forwards(capsys):
    base = ["algo=mt_grpo_variable", "task=search_agent", "model=tiny", "lengths=agent:100/20"]
    assert "teachers" not in planned(capsys, *base)["seconds_per_step"]
    evidence = ["task.reward=privileged", "algo.privileged={agent: answers}"]
    assert planned(capsys, *base, *evidence)["seconds_per_step"]["teachers"] > 0
    assert problems_elsewhere(train_configs(read_line([*base[:3], *evidence]))[0]) == []


def test_lora_parameters_of_a_known_adapter():
    """r 16 on all seven projections of Qwen3-8B: per layer 16 * (sum of inputs and outputs)."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj")
    sides = (4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 12288) * 3
    assert KNOWN["Qwen/Qwen3-8B"].lora_parameters(16, targets) == 36 * 16 * sides


def test_an_adapter_needs_less_memory_than_full_training(capsys):
    arguments = ["model=qwen3_8b", "device=h200", LENGTHS, "train.batch_size=4"]
    full = planned(capsys, *arguments)
    lora = planned(capsys, *arguments, "model.lora={r: 16, alpha: 64}")
    assert lora["memory_bytes"]["optimizer"] < 0.02 * full["memory_bytes"]["optimizer"]
    assert "reference" in full["memory_bytes"] and "reference" not in lora["memory_bytes"]
    assert lora["trained_parameters"] < 0.01 * lora["parameters"]
    assert lora["seconds_per_step"]["update"] < full["seconds_per_step"]["update"]


def test_what_cannot_fit_is_said_with_the_setting_to_change(capsys):
    plan = planned(capsys, "model=qwen25_72b_instruct", "device=h100", LENGTHS)
    (warning,) = plan["warnings"]
    assert "GiB" in warning and "model.lora" in warning


def test_memory_of_full_training_by_hand(capsys):
    parts = planned(capsys, "model=llama31_8b_instruct", "device=h200", LENGTHS)["memory_bytes"]
    assert parts["weights"] == parts["gradients"] == parts["optimizer"] / 2  # float32: trl_trainer trains no bfloat16
    assert parts["weights"] / GIB == pytest.approx(29.91, abs=0.01)
    assert parts["reference"] / GIB == pytest.approx(14.96, abs=0.01)


def test_sharded_states_are_shared_by_all_processes(capsys):
    model = ["model=llama31_8b_instruct", "device=h100", LENGTHS]
    whole = planned(capsys, *model)["memory_bytes"]
    eight = planned(capsys, *model, "hardware=h100x8")
    two_nodes = planned(capsys, *model, "hardware=multinode")
    assert (eight["processes"], two_nodes["processes"]) == (8, 16)
    for part in ("weights", "gradients", "optimizer", "reference"):
        assert eight["memory_bytes"][part] == whole[part] / 8
        assert two_nodes["memory_bytes"][part] == whole[part] / 16


def test_a_critic_is_sharded_with_the_policy(capsys):
    """Weights, gradient and two moments in float32: 16 bytes a parameter, over eight processes."""
    arguments = ["algo=mt_ppo", "task=tool_agent", "lengths=agent:20/5", "model=qwen25_7b", "hardware=h100x8"]
    plan = planned(capsys, *arguments, "device=h100")
    assert plan["memory_bytes"]["critic"] == 16 * plan["parameters"] / 8
    whole = planned(capsys, *arguments, "device=h100", "hardware.sharding=none")
    assert whole["memory_bytes"]["critic"] == 16 * plan["parameters"]


def test_rollout_devices_hold_the_engine_and_training_devices_do_not(capsys):
    """Seven train, one serves; vLLM fills what engine.gpu_memory gives it (0.4 of 79 GiB) beside the weights."""
    arguments = ["model=llama31_8b_instruct", "device=h100", LENGTHS, "algo=mhgpo_fof", "algo.group_size=2"]
    split = planned(capsys, *arguments, "train.batch_size=1", "hardware=h100x8_split")
    assert (split["processes"], split["rollout_devices"]) == (7, 1)
    rollout = split["rollout_memory_bytes"]
    assert rollout["KV cache"] == pytest.approx(0.4 * 79 * GIB - rollout["engine's copy"])
    assert rollout["engine's copy"] == 2 * split["parameters"]
    assert rollout["engine's copy"] / GIB == pytest.approx(14.96, abs=0.01)
    assert "KV cache" not in split["memory_bytes"] and "engine's copy" not in split["memory_bytes"]
    assert split["memory_bytes"]["weights"] == pytest.approx(4 * split["parameters"] / 7)
    shared = planned(capsys, *arguments, "train.batch_size=1", "hardware=h100x8")
    assert shared["rollout_memory_bytes"] == {} and shared["rollout_devices"] == 0
    assert shared["memory_bytes"]["engine's copy"] == rollout["engine's copy"]  # one copy on each GPU
    assert shared["memory_bytes"]["KV cache"] == rollout["KV cache"]  # its share of each GPU
    # One device prefills what eight would.
    assert split["seconds_per_step"]["prefill"] == pytest.approx(8 * shared["seconds_per_step"]["prefill"])


def test_rollout_devices_have_a_table_and_a_warning_of_their_own(capsys):
    arguments = ["model=llama31_8b_instruct", "device=h100", LENGTHS, "hardware=h100x8_split"]
    assert main(["plan", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "on 7 x h100, rollouts on 1 more" in shown
    assert "GiB per training device" in shown and "GiB per rollout device" in shown
    (warning,) = planned(capsys, *arguments, "engine.gpu_memory=0.1")["warnings"]
    assert "engine.gpu_memory=0.1" in warning and "15 GiB" in warning and "8 GiB" in warning


def gpu(name):
    return Gpu(name=name, memory=24 * GIB, free=20 * GIB, capability="8.9")


@pytest.mark.parametrize(
    ("name", "row"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-40GB", "a100"), ("NVIDIA H200", "h200")],
)
def test_a_gpu_of_the_table_is_planned_with_its_own_memory(name, row, capsys, monkeypatch):
    monkeypatch.setattr("mmrl.commands.plan.gpus", lambda: [gpu(name)])
    assert known_gpu(gpu(name)) == replace(GPUS[row], memory=24 * GIB)
    assert main(["plan", LENGTHS, "hardware=gpu1"]) == 0
    assert " of 24 GiB per device\n" in capsys.readouterr().out
    # a profile of several GPUs is of another machine
    assert main(["plan", LENGTHS, "hardware=h100x2"]) == 0
    assert " of 79 GiB per device\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090", "NVIDIA GH200 480GB", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H20", "NVIDIA B200"]
)
def test_a_gpu_of_unknown_speed_is_no_h100(name):
    with pytest.raises(ConfigError, match=f"device: the speed of this machine's GPU, {name}, is not known; expected "):
        known_gpu(gpu(name))


def test_a_device_that_is_named_takes_the_place_of_a_gpu_of_unknown_speed(capsys, monkeypatch):
    monkeypatch.setattr("mmrl.commands.plan.gpus", lambda: [gpu("NVIDIA B200")])
    assert main(["plan", LENGTHS, "hardware=gpu1"]) == 2
    assert "NVIDIA B200, is not known; expected one of cpu, h200, h100, a100" in capsys.readouterr().err
    assert main(["plan", LENGTHS, "hardware=gpu1", "device=a100"]) == 0
    assert " of 79 GiB per device\n" in capsys.readouterr().out


def test_lengths_need_no_data_not_even_a_file_of_labels(capsys):
    files = ["task.data.train=train.csv", "task.data.dev=test.csv", "task.labels=labels.json"]
    words = ["task=banking77", "algo=mmgrpo", "dry=0", "device=h100"]
    there, here = planned(capsys, *words, *files), planned(capsys, *words)
    # How many messages a file has shows only when it is read; those of the mini world are known.
    assert there.pop("evaluations") is None and here.pop("evaluations")["times"] > 1
    assert there.pop("hours") < here.pop("hours")
    assert there == here


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("dry=many", "dry: got 'many'"),
        ("device=h2000", "device"),
        ("lengths=rewriter:10", "lengths: got 'rewriter:10'"),
        ("lengths=writer:10/2", "no module writer"),
        (f"dry=2 {LENGTHS}", "leave one of the two out"),
        ("hardware=h100x8 device=cpu", "hardware.sharding: got fsdp2, which accelerate does not do on a CPU"),
        ("dry=3000", "dry: got 3000, the train split has 2400 examples"),
        ("dry=0 train.staleness=1", "train.staleness: got 1 with engine=transformers"),
        ("dry=0 train.warmup_steps=3", "no effect with train.schedule=constant"),
        ("dry=0 model.lora={r:8,targets:[q_proj,lm_head]}", "model.lora.targets: an adapter can be put on no layer"),
        ("model=qwen3_8b dry=2", "not on this machine"),
        ("model=hf model.path=someone/unknown-model", "does not know the sizes"),
        ("algo.group_size=1", "algo.group_size"),
        ("-m seed=1,2", "-m: not for mmrl plan"),
        ("run=/nowhere", "run: /nowhere: no such run directory"),
        ("run=RUN dry=2", "run: got RUN, which has no effect with dry=2"),
        ("run=RUN lengths=rewriter:1/1", "run: got RUN, which has no effect beside lengths="),
        ("run=RUN task=search_agent", "run: RUN has modules"),
    ],
)
def test_bad_input_is_refused(tmp_path, capsys, words, expected):
    fake_run(tmp_path / "run", steps=1)
    place = str(tmp_path / "run")
    assert main(["plan", *words.replace("RUN", place).split()]) == 2
    assert expected.replace("RUN", place) in capsys.readouterr().err


def test_rollouts_without_a_call_are_refused_with_their_reason(tmp_path, capsys, monkeypatch):
    (tmp_path / "broken.py").write_text(
        "async def run(example, ctx):\n    raise KeyError('inputs')\ndef metric(record, prediction):\n    return 1.0\n"
    )
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"question": "{name}"}}\n')
    monkeypatch.syspath_prepend(tmp_path)
    words = ["task=dspy", "algo=grpo", "task.program=broken:run", "task.metric=broken:metric", "task.inputs=[question]"]
    words += ["task.modules=[m]", f"task.data.train={tmp_path}/train.jsonl", f"task.data.dev={tmp_path}/dev.jsonl"]
    assert main(["plan", "dry=1", "hardware.threads=1", *words]) == 2
    assert "error: dry: none of the rollouts has made a call (KeyError: 'inputs' (" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b'{"hidden_size": 8}', b'{"model_type": "qwen2", "layer_types": 0}', b"{", b"\xb3"]
)
def test_a_config_that_builds_no_model_is_refused(content, tmp_path, errors_of):
    (tmp_path / "config.json").write_bytes(content)
    assert "error: model.path: " in errors_of("plan", "model=hf", f"model.path={tmp_path}", "dry=0")


EIGHT = ("model=llama31_8b_instruct", LENGTHS, "hardware=h100x8", "device=h100")


@pytest.mark.parametrize(
    ("sharding", "moved"),
    [
        ("fsdp2", {"weights", "reference", "gradients", "optimizer"}),
        ("zero3", {"weights", "gradients", "optimizer"}),
        ("zero2", {"gradients", "optimizer"}),
    ],
)
def test_what_is_offloaded_is_counted_in_host_memory(capsys, sharding, moved):
    plain = planned(capsys, *EIGHT, f"hardware.sharding={sharding}")
    away = planned(capsys, *EIGHT, f"hardware.sharding={sharding}", "hardware.cpu_offload=true")
    assert plain["memory_bytes"].keys() - away["memory_bytes"].keys() == moved
    assert all(away["memory_bytes"][part] == size for part, size in plain["memory_bytes"].items() if part not in moved)
    assert plain["host_memory_bytes"] == 0
    assert away["host_memory_bytes"] == pytest.approx(8 * sum(plain["memory_bytes"][part] for part in moved))


def test_offloaded_memory_is_told(capsys):
    """Weights, gradients and two moments of 8.03e9 in float32, the reference in bfloat16: 18 bytes a parameter."""
    assert main(["plan", *EIGHT, "hardware.cpu_offload=true"]) == 0
    assert f"host memory: {18 * 8029995008 / GIB:.2f} GiB per machine" in capsys.readouterr().out


def test_gathered_layers_of_sharded_weights_by_hand(capsys):
    """Two of 32 layers and both embeddings in bfloat16; nothing is gathered where every process holds all weights."""
    layer = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336
    found = planned(capsys, *EIGHT)["memory_bytes"]
    assert found["gathered layers"] == 2 * (2 * layer + 2 * 128256 * 4096)
    assert "gathered layers" not in planned(capsys, *EIGHT, "hardware.sharding=none")["memory_bytes"]


def test_each_process_s_own_engine_holds_its_share_of_the_cache(capsys):
    """FoF, G = 2, 32 questions: 32 * 188 tokens over two processes, of 147,456 bytes each; `engine.batch_tokens` bounds
    each process on its own."""
    arguments = ["model=qwen3_8b", LENGTHS, "algo=mhgpo_fof", "algo.group_size=2", "train.batch_size=32"]
    arguments += ["hardware=h100x2", "eval.items=1"]
    memory = planned(capsys, *arguments)["memory_bytes"]
    assert memory["KV cache"] == 16 * 188 * 147456 and "stored turns" not in memory
    few = planned(capsys, *arguments, "engine.batch_tokens=1000")
    assert few["memory_bytes"]["KV cache"] == 1000 * 147456


def test_caches_hold_the_larger_of_a_step_and_an_evaluation_and_turns_that_go_on(capsys):
    """Two turns of 5 tokens, 7 observed between them, prompt 20: 27 + 10 tokens of a rollout are computed, its two
    turns of 25 and 37 tokens stored. A step has 2 rollouts on one prompt, an evaluation 9 on prompts of their own."""
    arguments = ["model=qwen3_8b", "algo=mt_grpo", "task=tool_agent", "algo.group_size=2", "train.batch_size=1"]
    arguments += ["lengths=agent:20/5/7x2", "hardware=gpu1", "device=h100"]

    def held(*words):
        memory = planned(capsys, *arguments, *words)["memory_bytes"]
        return [memory[part] / 147456 for part in ("KV cache", "stored turns")]

    assert held("eval.items=1") == pytest.approx([20 + 2 * (7 + 10), 2 * 62])
    assert held("eval.items=9") == pytest.approx([9 * 37, 9 * 62])
    assert held("eval.items=9", "engine.batch_tokens=400") == pytest.approx([9 * 37, 400])
    # Transformers' own loop neither stores turns nor puts projections side by side.
    assert not {"stored turns", "fused weights"} & planned(capsys, *arguments, "engine.loop=hf")["memory_bytes"].keys()


def test_vllm_that_sleeps_does_not_add_to_the_update(capsys):
    arguments = ["model=qwen3_8b", "model.lora={r: 16}", LENGTHS, "hardware=gpu1", "engine=vllm_colocated"]
    awake = planned(capsys, *arguments, "engine.sleep=false")["memory_bytes"]
    asleep = planned(capsys, *arguments)["memory_bytes"]
    engine = {"KV cache", "engine's copy"}
    update = {"gradients", "activations", "logits"}
    assert engine | update <= awake.keys()
    larger = max((engine, update), key=lambda parts: sum(awake[part] for part in parts))
    assert asleep.keys() & (engine | update) == larger
    assert main(["plan", *arguments]) == 0
    assert "vLLM sleeps during the update" in capsys.readouterr().out


def test_dropout_stores_the_input_of_each_adapted_layer_once_more(capsys):
    """SmolLM2: of 30 layers six inputs of 576 numbers and one of 1,536, in float32. Measured: 0.5 MB a token."""
    arguments = ["model=smollm2_135m", LENGTHS, "train.microbatch_tokens=4096"]
    without, dropped = (
        planned(capsys, *arguments, f"model.lora.dropout={share}")["memory_bytes"]["activations"]
        for share in ("0", "0.05")
    )
    tokens = without / (30 * (8 * 576 + 3 * 1536) * 4)
    assert dropped - without == pytest.approx(tokens * 30 * (6 * 576 + 1536) * 4)


def stepping(plan):
    """Hours without evaluations."""
    return plan["hours"] - plan["evaluations"]["times"] * plan["evaluations"]["seconds"] / 3600


def test_rollouts_beside_the_update_cost_the_longer_of_the_two(capsys):
    arguments = [*EIGHT, "hardware=h100x8_split", "train.steps=3600"]
    lockstep, ahead = planned(capsys, *arguments), planned(capsys, *arguments, "train.staleness=1")
    assert stepping(lockstep) == pytest.approx(sum(lockstep["seconds_per_step"].values()))
    rollouts = ahead["seconds_per_step"]["prefill"] + ahead["seconds_per_step"]["decode"]
    assert stepping(ahead) == pytest.approx(max(rollouts, ahead["seconds_per_step"]["update"]))


def row(column):
    """The words of the row mmGRPO of the paper's table."""
    return table_words(read_table("mmgrpo-table1"), "mmGRPO", column, "paper", "train")


def test_hover_calls_each_module_three_times_and_a_guess_is_called_one(capsys, monkeypatch):
    plan = planned(capsys, *row("HoVer qwen3"))
    assert sum(load["calls"] for load in plan["calls"].values()) == 4 * 12 * 6
    assert "guess" not in plan["tokens_from"]
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert planned(capsys, *row("PAPILLON qwen3"))["calls"], "no key, no judge asked"
    plan = planned(capsys, *row("Banking77 qwen3"))
    assert "from a guess at the lengths of classify.predict" in plan["tokens_from"]


@pytest.mark.parametrize(
    ("task", "calls"), [("r1_searcher", {"searcher": 3}), ("search_o1", {"reasoner": 3, "condenser": 2})]
)
def test_reasoners_take_turns(capsys, task, calls):
    words = ["algo=grpo", "algo.group_size=2", "train.batch_size=1", "model=llama31_8b_instruct", "device=h100"]
    plan = planned(capsys, f"task={task}", *words)
    assert {module: load["calls"] for module, load in plan["calls"].items()} == {m: 2 * n for m, n in calls.items()}
    assert "guess" not in plan["tokens_from"]


def test_offloading_is_advised_where_it_is_enough(capsys):
    """A critic beside policy and reference: more than 80 GB hold, and less once sharded states wait in host memory."""
    arguments = ["algo=mappo", "model=llama31_8b_instruct", "hardware=h100x8", "task.max_context=8192", "device=h100"]
    (warning,) = [text for text in planned(capsys, *arguments)["warnings"] if "GiB per device" in text]
    assert ": hardware.cpu_offload=true (" in warning and warning.endswith("GiB then), or more devices (hardware=)")
    assert not planned(capsys, *arguments, "hardware.cpu_offload=true")["warnings"]


def test_weights_larger_than_a_device_are_served_elsewhere(capsys):
    arguments = ["model=qwen25_72b_instruct", LENGTHS, "hardware=multinode", "hardware.cpu_offload=true"]
    first, second = planned(capsys, *arguments)["warnings"]
    assert "rollouts on devices of their own" in first
    assert "the weights alone take 135 GiB" in second and "engine.urls" in second and "gpu_memory" not in second
    given = planned(capsys, *arguments, "engine.urls=[http://host:8000]")
    assert given["warnings"] == [] and not {"KV cache", "engine's copy"} & given["memory_bytes"].keys()


def test_calls_that_share_most_of_themselves_have_a_wider_pack_on_a_cpu(capsys):
    """The tiny model's packs have 4,096 tokens: 3,000 of demonstrations would leave room for little else."""
    words = ["task=qa_direct", "algo=grpo", "algo.group_size=8", "train.batch_size=4", "device=cpu"]
    name = next(iter(planned(capsys, *words, "dry=0")["calls"]))
    narrow = planned(capsys, *words, f"lengths={name}:1500/2000")["memory_bytes"]["activations"]
    assert planned(capsys, *words, f"lengths={name}:3000/500")["memory_bytes"]["activations"] == 2 * narrow
    typed = planned(capsys, *words, f"lengths={name}:3000/500", "train.microbatch_tokens=4096")
    assert typed["memory_bytes"]["activations"] == narrow


# --- evaluations


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
    few = planned(capsys, *words[1:], "task.data.dev_items=50", "eval.items=1000")
    assert few["evaluations"]["rollouts"] == 50, "fewer than asked for are all"


def test_one_rollout_by_hand():
    """Two turns of 5 tokens with 7 observed between them: 20 prompt tokens, then 32, of which 7 are new."""
    config = configured(["task=tool_agent"])
    loads = declared_rollout(config, ["agent"], {"agent": Lengths(prompt=20, completion=5, observation=7, calls=2)})
    expected = Load(calls=2, prompt=52, prompt_unique=27, completion=10, decode_steps=10, continued=62)
    assert loads == {"agent": expected}
    assert declared_rollout(config, ["agent"], {}, answered=["agent"]) == {}
    ids = tuple(range(100))
    first = Call(id="a", example="x", module="agent", parent=None, completion_tokens=5, prompt_ids=ids[:20])
    then = replace(first, id="b", parent="a", turn=1, prompt_ids=ids[:32])
    short = replace(first, id="c", completion_tokens=3)
    calls = {call.id: call for call in (first, then, short)}
    rollouts = tuple(Rollout(id=f"r{leaf}", example="x", leaf=leaf, reward=0.0) for leaf in "bc")
    forest = Forest(calls=calls, rollouts=rollouts, modules=("agent",))
    mean = Load(calls=1.5, prompt=36, prompt_unique=23.5, completion=6.5, decode_steps=10, continued=42.5)
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


def test_runs_without_credit_are_counted(capsys):
    prompts = planned(capsys, "algo=miprov2", "task=banking77")
    assert prompts["rollouts_at_most"] == prompts["trials"] * prompts["validation_examples"] + 240
    sft = planned(capsys, "algo=sft", "task=banking77", "train.steps=3", "train.batch_size=4")
    assert sft == {"version": 1, "steps": 3, "sequences": 12}
    assert main(["plan", "algo=sft", "task=banking77"]) == 0
    assert "steps" in capsys.readouterr().out
