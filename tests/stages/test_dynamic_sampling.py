"""Dynamic sampling: what is sampled further, what is trained on, and that a whole run does it again after a kill."""

import json
from dataclasses import replace

from mmrl.algorithms import ALGORITHMS
from mmrl.cli import main
from mmrl.config import ALGO_SCHEMAS
from mmrl.records import Example
from mmrl.stages.collect import dynamic_sampling
from mmrl.stages.rl import RlStage
from mmrl.store.journal import read_step
from mmrl.store.rundir import RunDir
from scripts.chaos.compare import comparable
from tests.helpers.forests import Grow
from tests.helpers.runs import command

POOL = [Example(id=f"q{number}", inputs={}) for number in range(12)]


def run(first, settled, rounds, key=(0, 1)):
    asked = []

    def sample(examples):
        asked.append([example.id for example in examples])
        grow = Grow(("a",))
        for example in examples:
            for index, reward in enumerate((1.0 if example.id in settled else 0.0, 1.0)):
                grow.chain(f"{example.id}/{index}", ("a",), reward)
        return grow.forest

    algo = ALGO_SCHEMAS["grpo"].model_validate({"name": "grpo", "group_size": 2, "zero_variance": "refill"})
    return dynamic_sampling(
        first, POOL, sample, lambda forest: ALGORITHMS["grpo"].credit(forest, algo, 0), rounds=rounds, key=key
    ), asked


def test_a_step_with_signal_everywhere_is_left_alone():
    batch, asked = run(POOL[:3], (), 4)
    assert asked == [["q0", "q1", "q2"]]
    assert [example.id for example in batch.examples] == ["q0", "q1", "q2"]
    assert batch.metrics["refill/rounds"] == 0 and batch.trained.calls == batch.forest.calls


def test_as_many_others_as_are_missing_take_the_place_of_examples_without_signal():
    batch, asked = run(POOL[:3], ("q0", "q2"), 4)
    assert len(asked) == 2 and len(asked[1]) == 2
    assert not {"q0", "q1", "q2"} & set(asked[1])
    assert [example.id for example in batch.examples] == ["q1", *asked[1]]
    assert set(batch.forest.examples) == {"q0", "q1", "q2", *asked[1]}
    assert batch.trained.examples == ("q1", *asked[1])
    assert batch.forest.meta["refill"] == {"rounds": 1, "left_out": ["q0", "q2"]}
    assert batch.metrics == {"refill/rounds": 1.0, "refill/examples": 5.0, "refill/kept_share": 3 / 5}


def test_rounds_and_pool_bound_it():
    everything = [example.id for example in POOL]
    batch, asked = run(POOL[:4], everything, 1)
    assert [len(part) for part in asked] == [4, 4]
    assert batch.examples == () and batch.trained.calls == {} and batch.trained.rollouts == ()
    batch, asked = run(POOL[:4], everything, 50)
    assert sorted(name for part in asked for name in part) == sorted(everything), "each example once, then no more"
    assert batch.metrics["refill/rounds"] == 2


def test_what_is_sampled_further_depends_on_seed_and_step_alone():
    chosen = {key: run(POOL[:3], ("q0", "q1"), 1, key)[1][1] for key in ((0, 1), (0, 2), (1, 1), (0, 3))}
    assert run(POOL[:3], ("q0", "q1"), 1, (0, 2))[1][1] == chosen[0, 2]
    assert len({tuple(names) for names in chosen.values()}) > 1


def test_a_run_refills_journals_all_it_sampled_and_is_the_same_when_resumed(random_model, tmp_path, monkeypatch):
    # A random model earns nothing, so most groups are constant: penalties are all the signal there is.
    options = ["algo=mhgpo_rr", "algo.zero_variance=refill", "algo.refill_rounds=2", "train.steps=3", "eval.every=0"]
    assert main(command(random_model, tmp_path / "a", *options, "train.save_every=1")) == 0
    run_a = RunDir.read(tmp_path / "a")
    rebatch = [record["refill/rounds"] for record in run_a.history()[1:]]
    assert len(rebatch) == 3 and all(0 <= rounds <= 2 for rounds in rebatch) and any(rebatch)
    for step in (1, 2, 3):
        forest, entries = read_step(run_a, step)
        record = run_a.history()[step]
        assert record["refill/examples"] == len(forest.examples)
        trained = {forest.calls[e["call"]].example for e in entries if any(e["weights"])}
        assert not trained & set(forest.meta["refill"]["left_out"])
        assert record["rollouts/count"] == len(forest.rollouts)
    # The same run, stopped between its steps and continued.
    ends = RlStage.on_step_end

    def stops(self, step, update):
        if step == 2:
            raise KeyboardInterrupt
        ends(self, step, update)

    monkeypatch.setattr(RlStage, "on_step_end", stops)
    assert main(command(random_model, tmp_path / "b", *options, "train.save_every=1")) == 130
    monkeypatch.setattr(RlStage, "on_step_end", ends)
    assert main(["train", f"resume={tmp_path / 'b'}"]) == 0
    assert json.dumps([comparable(r) for r in run_a.history()]) == json.dumps(
        [comparable(r) for r in RunDir.read(tmp_path / "b").history()]
    )


def test_refill_without_effect_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "algo=grpo", "algo.zero_variance=refill", "task.data.train_items=8", "train.batch_size=8"]
    assert main(arguments) == 2
    assert "algo.zero_variance: got refill, which has no effect with train.batch_size=8" in capsys.readouterr().err
    assert main(["train", "algo=ppo", "task=search_agent", "algo.zero_variance=refill"]) == 2
    assert "it is an option of c3, ccpo, dr_mas, gigpo, grpo, " in capsys.readouterr().err


def test_failures_are_counted_over_the_step_and_not_over_a_round(random_model, tmp_path, monkeypatch):
    """Every later round's rollouts fail, of a single example or two: fewer than half of the step's."""
    rounds, sample = [], RlStage._roll_out

    async def failing(self, examples, step, version):
        forest, seconds = await sample(self, examples, step, version)
        rounds.append(len(examples))
        if len(examples) < 4:
            failed = [replace(rollout, reward=None, error="tool", error_message="down") for rollout in forest.rollouts]
            forest = replace(forest, rollouts=tuple(failed))
        return forest, seconds

    monkeypatch.setattr(RlStage, "_roll_out", failing)
    options = ["algo=mhgpo_rr", "algo.zero_variance=refill", "algo.refill_rounds=1", "train.steps=3", "eval.every=0"]
    options += ["train.batch_size=4", "train.max_failed_share=0.9"]
    assert main(command(random_model, tmp_path / "a", *options)) == 0
    assert any(size < 4 for size in rounds)
