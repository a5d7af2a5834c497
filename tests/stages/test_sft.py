"""stages.sft: what is trained on, from which source; a killed stage continues to the same weights."""

from collections import Counter
from typing import Any

import pytest
import torch

from mmrl.engines.base import Completion
from mmrl.errors import CheckpointError, ConfigError, DataError, Stopped
from mmrl.models.chat import encode_text, render_prompt
from mmrl.report.console import overview_text
from mmrl.report.overview import Overview
from mmrl.report.stats import learning
from mmrl.stages.sft import SftStage
from mmrl.stages.sft_data import best_rollouts, read_examples
from mmrl.store.policy import newest_checkpoint, resolve
from mmrl.store.rundir import RunDir
from mmrl.trainer import checkpoint
from tests.helpers.forests import Grow
from tests.helpers.programs import FakeEngine, make_dspy, seeded_letter
from tests.helpers.stages import CHAT, LORA, MINE, OWN, TOKENIZER, config_of, run, stage_of, train, weights, written

# --- what is trained on


def test_demonstrations_of_the_task_are_trained_as_a_rollout_would_send_them(tmp_path):
    stage, notes = stage_of(tmp_path / "run")
    sequences = dict(stage._demonstrated())
    assert len(stage._demonstrated()) == 16
    last = sequences["example q7"]
    assert last.prompt_ids == render_prompt(TOKENIZER, [{"role": "user", "content": "train7 again"}])
    assert last.completion_ids == (*encode_text(TOKENIZER, "7"), TOKENIZER.eos_token_id)
    path = train(stage)
    assert path == tmp_path / "run/checkpoints/checkpoint-4" and checkpoint.unusable(path) == ""
    assert notes == ["training on 16 sequences from demonstrations of the task: a 8, b 8"]
    history = stage.log.rundir.history()
    assert [record["step"] for record in history] == [0, 1, 2, 3, 4]
    assert history[0]["sft/sequences"] == 16 and history[0]["sft/too_long"] == 0
    assert history[4]["train/loss"] < history[1]["train/loss"] and history[1]["train/lr"] == 1e-3
    assert history[1]["train/sequences"] == 3
    assert 0 <= history[1]["module/a/token_accuracy"] <= 1 and "time/generate" not in history[1]


def test_its_curve_is_the_loss(tmp_path):
    _, _, history = run(tmp_path / "run")
    name, steps, values = learning(history)
    assert (name, steps.tolist()) == ("loss", [1, 2, 3, 4]) and values[0] == history[1]["train/loss"]
    assert learning([{"step": 1, "reward/mean": 0.5, "train/token_accuracy": 0.1}])[0] == "reward"
    assert learning([{"step": 1, "train/loss": 0.5}])[0] == "reward"
    shown = overview_text(Overview.from_run(RunDir.read(tmp_path / "run")))
    assert "loss" in shown and "token_accuracy" in shown


def test_a_mini_world_task_and_labelled_rows_make_demonstrations(tmp_path):
    task = make_dspy("banking77")
    first: Any = read_examples(config_of(), task)[0][1]
    assert first.module == "classify.predict" and "[[ ## label ## ]]" in first.completion
    rows = tmp_path / "rows.csv"
    rows.write_text("text,category\nwhere is my card,card_arrival\nis it open,hours\n", encoding="utf-8")
    labelled = make_dspy("banking77", data={"train": str(rows)})
    found: Any = read_examples(config_of(), labelled)
    completions = [demonstration.completion for _, demonstration in found]
    assert completions[0].split("\n")[4] == "card_arrival" and "hours" in completions[1]


def test_a_chat_trains_the_last_message_of_the_assistant(tmp_path):
    talk: Any = {"messages": [*CHAT["messages"], MINE, {"role": "assistant", "content": "3"}], "module": "b"}
    stage, _ = stage_of(tmp_path / "run", written(tmp_path / "chat.jsonl", talk, CHAT))
    (_, first), (where, second) = stage._demonstrated()
    assert first.module == "b" and second.module == "" and where.endswith("chat.jsonl line 2")
    assert first.prompt_ids == render_prompt(TOKENIZER, talk["messages"][:-1])
    assert first.completion_ids == (*encode_text(TOKENIZER, "3"), TOKENIZER.eos_token_id)


def test_fields_of_a_dspy_module_are_sent_as_a_rollout_sends_them(tmp_path):
    task = make_dspy("banking77")
    label = task.labels[1]
    fields = {"inputs": {"text": "where is it"}, "outputs": {"reasoning": "asks", "label": label}}
    stage, _ = stage_of(tmp_path / "run", written(tmp_path / "dspy.jsonl", fields), task=task)
    ((_, item),) = stage._demonstrated()
    engine = FakeEngine(lambda request: task.program.written(request.module, fields["outputs"]))
    live, _ = stage_of(tmp_path / "live", {"algo.source": "rollouts", "algo.rollouts": 1}, task=task, engine=engine)
    asked = task.examples("train")[0]
    live._roll_out([type(asked)(id="x", inputs=fields["inputs"], metadata=asked.metadata)])
    assert item.prompt_ids == engine.requests[0].prompt_ids
    assert TOKENIZER.decode(item.completion_ids[:-1]) == task.program.written(item.module, fields["outputs"]).strip()


class Ids(FakeEngine):
    """Samples ids that no text of theirs would be encoded to again."""

    async def generate(self, request):
        made = await super().generate(request)
        return Completion(ids=(*made.ids, 101, 104), logprobs=(-0.5,) * (len(made.ids) + 2), finish="stop")


def test_own_rollouts_are_trained_on_the_sampled_ids(tmp_path):
    engine = Ids(seeded_letter)
    stage, _ = stage_of(tmp_path / "run", OWN, engine=engine)
    sequences = stage._sampled()
    sent = Counter((request.module, request.prompt_ids) for request in engine.requests)
    assert len(engine.requests) == 8 * 4 * 2 and len(sequences) == 8 * 2  # one rollout of each example, two calls
    for _, item in sequences:
        assert sent[item.module, item.prompt_ids] and item.completion_ids[-2:] == (101, 104)
    assert stage.facts["sft/rollouts"] == 8 and stage.facts["rollouts/count"] == 32


def test_the_best_of_each_example_are_chosen():
    grown = Grow(("a",))
    for example, rewards in {"q1": (0.2, 1.0, 0.6, 1.0), "q2": (0.1, 0.2), "q3": (0.7,)}.items():
        for number, reward in enumerate(rewards):
            grown.end(grown.call(f"{example}/{number}#0", None, "a"), reward)
    grown.end(grown.call("q3/1#0", None, "a"), 1.0, error="parse")
    forest = grown.forest

    def chosen(**options):
        algo = config_of({"algo.source": "rollouts", **{f"algo.{key}": value for key, value in options.items()}}).algo
        return sorted(rollout.reward for rollout in best_rollouts(forest, algo, 0))

    assert chosen(min_reward=0.5) == [0.7, 1.0]
    assert chosen(min_reward=0.5, per_example=2) == [0.7, 1.0, 1.0]
    assert chosen(min_reward=0.5, per_example=None) == [0.6, 0.7, 1.0, 1.0]
    with pytest.raises(ConfigError, match=r"algo.min_reward: none of the 8 rollouts has 2 or more, the best has 1;"):
        chosen(min_reward=2.0)


def test_modules_are_chosen_and_mixed(tmp_path):
    stage, _ = stage_of(tmp_path / "run", {"algo.modules": {"b": 1.0}})
    assert {item.module for _, item in stage._demonstrated()} == {"b"}
    stage, _ = stage_of(tmp_path / "own", {**OWN, "algo.modules": {"b": 1.0}})
    assert {item.module for _, item in stage._sampled()} == {"b"}
    _, _, history = run(
        tmp_path / "mix", {"algo.modules": {"a": 0.25, "b": 1.0}, "train.steps": 1, "train.batch_size": 100}
    )
    assert history[1]["train/sequences"] == 100
    loss = history[1]
    assert "module/a/loss" in loss and "module/b/loss" in loss


def test_sequences_longer_than_the_context_are_counted_and_named(tmp_path):
    long = {"messages": [{"role": "user", "content": "the cat " * 400}, CHAT["messages"][1]]}
    stage, notes = stage_of(tmp_path / "run", written(tmp_path / "chat.jsonl", CHAT, long))
    train(stage)
    assert notes[0].startswith(
        "warning: 1 of 2 sequences have more than the 256 tokens of the context and are left out"
    )
    assert notes[0].endswith("chat.jsonl line 2)")
    assert stage.log.rundir.history()[0]["sft/too_long"] == 1
    stage, _ = stage_of(
        tmp_path / "short", {**written(tmp_path / "chat.jsonl", CHAT), "task.name": "dspy", "task.max_context": 16}
    )
    with pytest.raises(DataError, match="nothing is left to train on"):
        train(stage)


# --- the checkpoint, and a stage that was killed


APART = {**LORA, "model.modules": {"a": {"adapter": "first"}, "b": {"adapter": "second", "lr": 1e-2}}}


@pytest.mark.parametrize(
    "options", [{}, {**LORA, "model.lora.dropout": 0.5}, APART], ids=["full", "lora", "weights per module"]
)
def test_a_killed_stage_continues_to_the_same_weights(tmp_path, options):
    path, whole, history = run(tmp_path / "whole", options)
    killed = tmp_path / "killed"
    with pytest.raises(ZeroDivisionError):
        run(killed, {**options, "eval.every": 3}, evaluate=lambda step: {"x": 1 / (step - 3)})
    assert newest_checkpoint(killed).name == "checkpoint-2"
    RunDir.read(killed).truncate_after(2)
    again, continued, resumed = run(killed, options, resumed=True)
    assert all(torch.equal(whole[name], continued[name]) for name in whole)
    assert not all(
        torch.equal(whole[name], first) for name, first in weights(stage_of(killed, options)[0].trainer.model).items()
    )
    exact = {name for name in history[4] if not name.startswith(("time/", "rate/", "memory/"))}
    assert [{name: record[name] for name in exact & set(record)} for record in resumed] == [
        {name: record[name] for name in exact & set(record)} for record in history
    ]
    assert sorted(file.name for file in again.iterdir()) == sorted(file.name for file in path.iterdir())
    # Once more from the last step: nothing is left to do, and the weights are those of the checkpoint.
    _, loaded, _ = run(killed, options, resumed=True)
    assert all(torch.equal(whole[name], loaded[name]) for name in whole)


def test_a_stop_saves_the_step_under_way(tmp_path):
    folder = tmp_path / "run"
    stage, _ = stage_of(folder, stopping=3)
    with pytest.raises(Stopped):
        train(stage)
    assert newest_checkpoint(folder).name == "checkpoint-3"
    _, continued, _ = run(folder, resumed=True)
    _, whole, _ = run(tmp_path / "whole")
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_sampled_rollouts_are_never_sampled_again(tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.stages.evaluate.CHUNK", 3)
    folder, first, second = tmp_path / "run", FakeEngine(seeded_letter), FakeEngine(seeded_letter)
    roll_out = SftStage._roll_out

    def killed_in_the_second_chunk(stage, examples):
        if first.requests:
            raise ZeroDivisionError
        return roll_out(stage, examples)

    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(SftStage, "_roll_out", killed_in_the_second_chunk)
        run(folder, OWN, engine=first)
    _, continued, _ = run(folder, OWN, resumed=True, engine=second)
    assert (len(first.requests), len(second.requests)) == (3 * 4 * 2, 5 * 4 * 2)
    _, whole, _ = run(tmp_path / "whole", OWN)
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_weights_per_module_are_trained_by_their_own_modules_and_saved_apart(tmp_path):
    before = weights(stage_of(tmp_path / "start", APART)[0].trainer.model)
    path, after, history = run(tmp_path / "run", APART)
    _, alone, _ = run(tmp_path / "alone", {**APART, "algo.modules": {"a": 1.0}})
    moved = {name for name in before if "lora_B" in name and not torch.equal(before[name], after[name])}
    assert {part for name in moved for part in ("first", "second") if f".{part}." in name} == {"first", "second"}
    assert all(torch.equal(before[name], alone[name]) for name in before if ".second." in name)
    assert history[1]["adapter/second/lr"] == 1e-2 and history[1]["adapter/first/lr"] == 1e-3
    # A model that was made in memory has no name; a run's config.yaml says what its adapters are for.
    (tmp_path / "run" / "config.yaml").write_text("model: {path: tiny}\n", encoding="utf-8")
    policy = resolve(str(path))
    assert policy.base == "tiny"
    assert policy.modules == {"a": "first", "b": "second"} and set(policy.adapters) == {"first", "second"}


def test_a_checkpoint_of_other_sequences_is_refused(tmp_path):
    run(tmp_path / "run", written(tmp_path / "chat.jsonl", CHAT, CHAT))
    with pytest.raises(CheckpointError, match="made with other data"):
        run(tmp_path / "run", written(tmp_path / "chat.jsonl", CHAT), resumed=True)


def test_evaluations_are_due_between_the_first_and_the_last_step(tmp_path):
    seen = []
    _, _, history = run(
        tmp_path / "run", {"eval.every": 2}, evaluate=lambda step: seen.append(step) or {"eval/dev/x": 1}
    )
    assert seen == [2] and [record["step"] for record in history if "eval/dev/x" in record] == [2]
