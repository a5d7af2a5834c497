"""Weights per module through the command line: each group changes its own module's adapter alone, also after a kill."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmrl import rng
from mmrl.cli import main
from mmrl.errors import ConfigError
from mmrl.store.journal import read_step
from mmrl.store.policy import resolve
from mmrl.store.rundir import RunDir
from mmrl.tasks.search_program import MultihopQaTask
from tests.helpers.runs import EVAL, command, numbers, score_of_texts

MODULES = ("rewriter", "reranker", "answerer")
LORA = ["model.lora.r=4", "model.lora.alpha=8"]


@pytest.fixture
def varied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that texts differ in: what a random model learns from does not matter here."""
    monkeypatch.setattr(MultihopQaTask, "score", score_of_texts)


def checkpoint(run: Path, step: int = 2) -> Path:
    return run / "checkpoints" / f"checkpoint-{step}"


def weights(run: Path, name: str, step: int = 2) -> dict[str, torch.Tensor]:
    return load_file(checkpoint(run, step) / name / "adapter_model.safetensors")


def same(one: Path, other: Path, name: str, step: int, other_step: int | None = None) -> bool:
    """Whether an adapter is equal in two runs."""
    here, there = weights(one, name, step), weights(other, name, other_step or step)
    return all(torch.equal(here[key], there[key]) for key in here)


def still(run: Path, name: str, step: int = 2) -> bool:
    """Whether an adapter is as it starts: peft starts B at 0, so the module replies with the base model."""
    return not any(bool(tensor.any()) for key, tensor in weights(run, name, step).items() if "lora_B" in key)


def train(model: str, run: Path, *extra: str) -> int:
    return main(command(model, run, "algo=mhgpo_fof", "train.steps=2", *extra))


def evaluated(policy: Path, folder: Path, output_of: Any) -> tuple[dict[str, float], str]:
    text = output_of("eval", f"policy={policy}", f"run.dir={folder}", *EVAL)
    return RunDir.read(folder).summary["metrics"], text


def test_law_12_only_the_trained_modules_adapters_change(
    varied: None, random_model: str, tmp_path: Path, capsys: Any
) -> None:
    """One module trained, one frozen by the model's config, one by the algorithm's."""
    frozen = ["model.modules.reranker.frozen=true", "algo.freeze_modules=[rewriter]", "train.weight_decay=0.5"]
    assert train(random_model, tmp_path / "run", *LORA, *frozen) == 0
    assert "reranker: reranker (frozen), answerer: answerer" in capsys.readouterr().out
    assert [still(tmp_path / "run", name) for name in MODULES] == [True, True, False]
    assert train(random_model, tmp_path / "again", *LORA, *frozen, "train.steps=1") == 0
    for name in MODULES:
        assert same(tmp_path / "run", tmp_path / "again", name, 2, 1) == (name != "answerer")
    record = RunDir.read(tmp_path / "run").history()[-1]
    found = {key for key in record if key.startswith("adapter/")}
    assert found == {"adapter/answerer/grad_norm", "adapter/answerer/lr"}


def test_each_module_is_served_with_its_own_adapter_in_training_and_evaluation(
    varied: None, random_model: str, tmp_path: Path, output_of: Any
) -> None:
    """Sampler and trainer agree on every module's log-probabilities; `mmrl eval` gives the run's own last numbers."""
    extra = ["model.modules.rewriter.lr=0.1", "model.modules.reranker.adapter=answerer"]
    assert train(random_model, tmp_path / "run", *LORA, *extra, "algo.temperature=0.8") == 0
    run = RunDir.read(tmp_path / "run")
    before, *_, after = run.history()
    assert all(record["train/logprob_gap_max"] < 1e-4 for record in run.history()[1:])
    assert (after["adapter/rewriter/lr"], after["adapter/answerer/lr"]) == (0.1, 0.01)
    assert sorted(p.name for p in checkpoint(tmp_path / "run").iterdir() if p.is_dir()) == ["answerer", "rewriter"]

    metrics, text = evaluated(tmp_path / "run", tmp_path / "eval", output_of)
    assert metrics["f1"] == after["eval/dev/f1"] != before["eval/dev/f1"]
    assert "rewriter: rewriter, reranker: answerer, answerer: answerer" in text

    alone, _ = evaluated(checkpoint(tmp_path / "run") / "rewriter", tmp_path / "one", output_of)
    assert alone["f1"] != metrics["f1"], "one adapter of a checkpoint speaks for all modules"
    assert resolve(str(checkpoint(tmp_path / "run") / "rewriter")).step == 2


@pytest.mark.parametrize("lora", [[], LORA])
def test_frozen_serving_lets_a_frozen_module_act_with_the_initial_weights(
    lora: list[str], varied: None, random_model: str, tmp_path: Path, capsys: Any
) -> None:
    """Greedy calls of the frozen module on the same prompt are those of the initial model; so is `mmrl eval`."""
    frozen = ["algo.freeze_modules=[rewriter]", "algo.frozen_serving=true", *lora]
    assert train(random_model, tmp_path / "run", *frozen, "train.lr=0.3") == 0
    initial = first_texts(Path(random_model), tmp_path / "initial")
    found = first_texts(tmp_path / "run", tmp_path / "after")
    assert found["rewriter"] == initial["rewriter"]
    assert found["answerer"] != initial["answerer"]
    after = RunDir.read(tmp_path / "run").history()[-1]
    assert RunDir.read(tmp_path / "after").summary["metrics"]["f1"] == after["eval/dev/f1"]

    assert train(random_model, tmp_path / "current", "algo.freeze_modules=[rewriter]", *lora, "train.lr=0.3") == 0
    assert first_texts(tmp_path / "current", tmp_path / "moved")["rewriter"] != initial["rewriter"]


def first_texts(policy: Path, folder: Path) -> dict[str, list[str]]:
    """Texts of each module in an evaluation. The rewriter comes first, so its prompts are always the same."""
    assert main(["eval", f"policy={policy}", f"run.dir={folder}", *EVAL]) == 0
    forest = read_step(RunDir.read(folder), 0, evaluation="dev")[0]
    return {module: [call.text for call in forest.calls.values() if call.module == module] for module in MODULES}


def test_one_groups_update_leaves_the_other_modules_alone(varied: None, random_model: str, tmp_path: Path) -> None:
    """mmGRPO: from the same first step, freezing one module changes nothing in what another one learns."""
    options = ["algo=mmgrpo", "algo.rollouts=2", "algo.group_size=null", "train.steps=1", *LORA]
    for name, more in (("all", "model.modules={}"), ("some", "model.modules.reranker.frozen=true")):
        assert main(command(random_model, tmp_path / name, *options, more)) == 0
    for module in ("rewriter", "answerer"):
        assert same(tmp_path / "all", tmp_path / "some", module, 1)
        assert not still(tmp_path / "all", module, 1)
    assert still(tmp_path / "some", "reranker", 1) and not still(tmp_path / "all", "reranker", 1)


def test_stopped_and_resumed_adapters_per_module_give_bit_equal_numbers(
    varied: None, random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill, in one process: the sampler of step 4 stops the run; step 2 was saved."""
    extra = ["algo=mhgpo_fof", *LORA, "model.modules.reranker.frozen=true", "model.modules.rewriter.lr=0.1"]
    extra += ["train.steps=4", "eval.items=2"]
    assert main(command(random_model, tmp_path / "whole", *extra)) == 0
    works, orders = rng.stream, itertools.count(1)

    def stops(*key: Any) -> Any:
        if key[1] == "order" and next(orders) == 4:
            raise KeyboardInterrupt
        return works(*key)

    with monkeypatch.context() as patch:
        patch.setattr("mmrl.stages.collect.rng.stream", stops)
        assert main(command(random_model, tmp_path / "stopped", *extra)) != 0
    assert main(["train", f"resume={tmp_path / 'stopped'}"]) == 0
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "stopped")
    assert all(same(tmp_path / "whole", tmp_path / "stopped", name, 4) for name in MODULES)


def test_eval_refuses_modules_that_a_policy_has_no_weights_for(tmp_path: Path, errors_of: Any) -> None:
    folder = tmp_path / "checkpoint-3"
    (folder / "a").mkdir(parents=True)
    (folder / "extra.json").write_text(json.dumps({"modules": {"rewriter": "a"}}))
    with pytest.raises(ConfigError, match="lacks the adapters a of its modules"):
        resolve(str(folder))
    (folder / "a" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "tiny"}))
    found = resolve(str(folder))
    assert (found.base, found.step, found.adapters) == ("tiny", 3, {"a": str(folder / "a")})
    says = errors_of("eval", f"policy={folder}", f"run.dir={tmp_path / 'e'}", "model.modules={}")
    assert "none for reranker, answerer of task=hotpotqa" in says
    assert "model.modules: has no effect on mmrl eval" in says
