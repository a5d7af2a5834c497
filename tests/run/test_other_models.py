"""A model that was made elsewhere, and data of one's own: trained, evaluated, and refused before anything loads."""

import json

import pytest

from mmrl.cli import main
from mmrl.run.build import build_task, evaluated
from mmrl.run.eval import unsuited
from mmrl.store.rundir import RunDir
from tests.helpers.lines import evaluation, refused
from tests.helpers.llama import llama_like
from tests.helpers.programs import saved
from tests.models.test_templates import RAISING
from tests.tasks.test_data import record


@pytest.fixture(scope="module")
def random_llama(random_model, tmp_path_factory):
    """Folder of a random Llama whose chat template takes no system message."""
    return llama_like(tmp_path_factory.mktemp("random_llama"), random_model, RAISING)


def test_any_causal_model_is_trained_and_evaluated_by_its_path_alone(random_llama, tmp_path, capsys):
    small = ["task=qa_direct", "eval.items=2", "hardware=cpu", "hardware.threads=1", "task.max_tokens=6"]
    run, evaluation = tmp_path / "run", tmp_path / "eval"
    sizes = "algo=grpo train.warmup_steps=0 train.steps=1 train.batch_size=2 algo.group_size=2 algo.beta=0.001"
    assert main(["train", "model=hf", f"model.path={random_llama}", f"run.dir={run}", *sizes.split(), *small]) == 0
    (checkpoint,) = (run / "checkpoints").glob("checkpoint-*")
    adapter = json.loads((checkpoint / "adapter_config.json").read_text())
    layers = {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"}
    assert set(adapter["target_modules"]) == layers and adapter["r"] == 16
    assert all(record["rollouts/failed_share"] == 0 for record in RunDir.read(run).history() if record["step"])
    assert main(["eval", f"policy={run}", f"run.dir={evaluation}", *small]) == 0
    assert RunDir.read(evaluation).config["model"]["name"] == "hf"
    metrics, before = RunDir.read(evaluation).summary["metrics"], RunDir.read(run).history()[-1]
    assert metrics["f1"] == before["eval/dev/f1"]


# --- data of one's own


def test_an_absent_split_is_refused_by_name_where_it_is_needed(tmp_path):
    path = saved(tmp_path / "data.json", [record(number) for number in range(4)])
    hf = ("model=hf", "model.path=a/b", "train.batch_size=2")
    train, dev = f"task.data.train={path}", f"task.data.dev={path}"
    assert refused(*hf, train, dev, "task.data.test=null") == refused(*hf, train, "eval.split=train") == []
    assert refused(*hf, train) == [
        "eval.split: got dev, and there is no such split (task.data.dev=null); set task.data.dev, or eval.split=train"
    ]
    (problem,) = refused(*hf, dev)
    assert problem.startswith("task.data.train: got train, and there is no such split (task.data.train=null)")
    (problem,) = refused(*hf, train, dev, "task.data.test_items=2")
    assert problem.startswith("task.data.test_items: got 2, which has no effect with task.data.test=null")
    assert refused("policy=tiny", dev, command="eval") == []
    (problem,) = refused("policy=tiny", dev, "split=test", command="eval")
    assert problem.startswith("split: got test, and there is no such split (task.data.test=null)")
    assert "split=dev" in problem


def test_some_items_of_a_file_are_drawn_the_same_ones_in_every_run(tmp_path):
    rows = [{"text": f"query {n} about {label}", "label": label} for label in "abc" for n in range(20)]
    path = saved(tmp_path / "data.jsonl", rows)
    words = ("policy=tiny", "task=banking77", f"task.data.dev={path}")

    def drawn(*more):
        config = evaluation(*words, *more)
        task = build_task(config.task, config.seed)
        examples, facts = evaluated(task, config, "dev")
        return examples[: config.eval.items], facts

    nine, said = drawn("eval.items=9")
    assert {example.metadata["label"] for example in nine} == {"a", "b", "c"}
    assert said == {"evaluated": "9 of the 60 dev items, drawn; the same ones in every run"}
    assert drawn("eval.items=9", "seed=5")[0] == nine
    assert drawn("eval.items=20")[0][:9] == nine
    whole, said = drawn()
    assert [example.metadata["label"] for example in whole] == ["a"] * 20 + ["b"] * 20 + ["c"] * 20 and said == {}


def test_the_first_items_of_the_mini_world_stay_the_first():
    config = evaluation("policy=tiny", "eval.items=7")
    task = build_task(config.task, config.seed)
    examples, facts = evaluated(task, config, "dev")
    assert (list(examples[:7]), facts) == (list(task.examples("dev")[:7]), {})


@pytest.mark.parametrize(("policy", "said"), [("tiny", True), ("some/model", False)])
def test_only_of_the_tiny_model_an_evaluation_says_that_it_cannot_read_real_text(policy, said):
    assert bool(unsuited(policy, {"data": "dev FILE"})) == said
    assert not unsuited(policy, {"data": "mini world"})


def test_a_packing_that_this_device_cannot_do_is_refused_before_a_run_begins(tmp_path, capsys):
    words = ["algo=grpo", "task=qa_direct", "model=tiny", "model.dtype=float32", "hardware=cpu"]
    assert main(["train", *words, "train.packing=trie_varlen", f"run.dir={tmp_path / 'run'}"]) == 2
    err = capsys.readouterr().err
    assert "train.packing: got 'trie_varlen', whose kernel is for CUDA" in err and "model.dtype=float32" in err
    assert not (tmp_path / "run").exists()
