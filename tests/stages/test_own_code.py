"""The first failure of a program's or a metric's own code is printed in training, with its place and what to do."""

from types import SimpleNamespace
from typing import Any

import pytest

from mmrl.config import EvalConfig
from mmrl.rollout.plans import fork_on
from mmrl.store.rundir import RunDir
from tests.helpers.configs import config_of, rl_stage_of
from tests.helpers.programs import Chain, FakeEngine, FakeTask, seeded_letter
from tests.stages.test_evaluate import evaluations, quiet_progress


class Sometimes(Chain):
    """Fails on one example of its own accord; on the others it answers."""

    def __init__(self, ill):
        super().__init__(("a",))
        self.ill = ill

    async def run(self, example, ctx):
        if example.id in self.ill:
            return dict[str, str]()["gold\x1b[2J"]
        return await super().run(example, ctx)


PLACE = "(tests/stages/test_own_code.py, line 25, in run)"


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setattr("mmrl.stages.collect.annotate", lambda forwards, forest: forest)
    made: Any = rl_stage_of(config_of({"train.batch_size": 4, "algo.group_size": 2}), FakeEngine(seeded_letter))
    made.notes = []
    made.log.progress.note = made.notes.append
    return made


def test_an_exception_of_the_program_is_printed_at_its_first_occurrence(collector):
    examples = collector._examples(1)
    collector.task.program = Sometimes({examples[2].id})
    collector.collect(1, lambda forest: None)
    (note,) = collector.notes
    assert note.startswith(
        "step 1: 25% of the rollouts fail in the program's or the metric's own code (KeyError: 'gold"
    )
    assert PLACE in note and "mend the line" in note and "task.program" in note and note.isprintable()
    collector.collect(2, lambda forest: None)
    assert len(collector.notes) == 1, "once"


def test_healthy_rollouts_and_failures_of_the_model_print_nothing(collector):
    collector.collect(1, lambda forest: None)
    assert collector.notes == []


def test_an_evaluation_prints_it_too(tmp_path, monkeypatch):
    task, quiet = FakeTask(Sometimes({"q1"})), quiet_progress()
    settings = EvalConfig(max_failed_share=1.0, samples=2, temperature=1.0)
    with RunDir.create(tmp_path / "run", {"algo": {}}, []) as rundir:
        run = evaluations(rundir, task, FakeEngine(seeded_letter), quiet, task.examples("train")[:2], settings)
        metrics = run.metrics(0)
    (note,) = quiet.said
    assert note.startswith("evaluation on dev at step 0: 50% of the rollouts") and PLACE in note
    assert metrics["eval/dev/failed/program"] == 0.5


class Fickle(Chain):
    """Asks something else each time that it runs."""

    runs = 0

    async def run(self, example, ctx):
        type(self).runs += 1
        reply = await ctx.call("a", [{"role": "user", "content": f"{example.id} {self.runs}"}])
        return (await ctx.call("b", [{"role": "user", "content": reply.text}])).text


def test_a_program_that_cannot_be_replayed_is_explained_in_words_of_its_user(collector, monkeypatch):
    collector.task.program = Fickle(("a", "b"))
    plan = SimpleNamespace(plan=lambda *_: fork_on("b", 2))
    monkeypatch.setattr("mmrl.stages.collect.ALGORITHMS", {collector.config.algo.name: plan})
    monkeypatch.setattr("mmrl.stages.collect.refuse_failures", lambda *_: None)
    collector.collect(1, lambda forest: None)
    (note,) = collector.notes
    assert "the program made call 'a' with other input as its request 1" in note
    assert "task.program" in note and "tape" not in note and "ctx" not in note and "position" not in note
