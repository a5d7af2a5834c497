"""The enumerated programs of `tests.helpers.tabular`: hand numbers, and the same policy in engine and trainer."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from mmrl.rollout.plans import independent
from mmrl.stages.collect import train_calls
from tests.helpers.forests import credit
from tests.helpers.programs import forest_of
from tests.helpers.tabular import TABLES, bifurcation, two
from tests.helpers.tabular_model import entries, tabular_environment, tabular_model
from tests.helpers.trainer_cases import gradients, make_trainer

EVEN = {(): (0.0, 0.0), (0,): (0.0, 0.0, 0.0), (1,): (0.0, 0.0, 0.0)}


def test_two_modules_by_hand():
    """Replies alike; outcome 1 where the second module says 2 after a 0. So V is 1/6, and 1/3 after the 0."""
    table = two(given=EVEN, outcome=lambda example, history: float(history == (0, 2)))
    assert table.v(0, ()) == pytest.approx(1 / 6)
    assert [table.d(0, (), reply) for reply in (0, 1)] == pytest.approx([1 / 6, -1 / 6])
    assert [table.d(0, (0,), reply) for reply in (0, 1, 2)] == pytest.approx([-1 / 3, -1 / 3, 2 / 3])
    # Var R = 5/36; Var of Q is 1/36 at the first module, and 2/9 at the second, which is there half the time
    assert table.variance(0) == pytest.approx(5 / 36)
    assert [table.influence(module) for module in table.modules] == pytest.approx([1 / 5, 4 / 5])
    assert table.gradient()[()] == pytest.approx([1 / 12, -1 / 12])
    assert table.gradient()[0,] == pytest.approx([-1 / 18, -1 / 18, 1 / 9])
    assert table.gradient()[1,] == pytest.approx([0, 0, 0])


def test_only_one_module_of_a_bifurcation_matters():
    for module in "abcd":
        table = bifurcation(module)
        assert [table.influence(name) for name in "abcd"] == pytest.approx([float(name == module) for name in "abcd"])


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_gradient_is_the_derivative_and_influences_add_up(name, temperature):
    table = replace(TABLES[name], temperature=temperature)
    assert math.fsum(chance for chance, _ in table.paths()) == pytest.approx(1)
    assert math.fsum(table.influence(module) for module in table.modules) == pytest.approx(1)

    def value(history, logits):
        moved = replace(table, given={**table.given, history: logits})
        return math.fsum(moved.v(e, ()) for e in range(table.examples)) / table.examples

    for history, gradient in table.gradient().items():
        logits = list(table.logits(history))
        for reply, expected in enumerate(gradient):
            up, down = ([*logits[:reply], logits[reply] + step, *logits[reply + 1 :]] for step in (1e-5, -1e-5))
            assert (value(history, up) - value(history, down)) / 2e-5 == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("name", TABLES)
def test_enumerated_forests_are_all_there_are(name):
    table = TABLES[name]
    forests = list(table.forests(lambda history: 1))
    assert math.fsum(chance for chance, _ in forests) == pytest.approx(1)
    assert math.fsum(chance * f.rollouts[0].reward for chance, f in forests) == pytest.approx(table.v(0, ()))


@pytest.mark.parametrize("name", TABLES)
def test_the_engine_plays_the_policy_of_the_table(name):
    table, count = TABLES[name], 600
    forest = forest_of(tabular_environment(table), plans=independent(count))
    assert all(rollout.error is None for rollout in forest.rollouts)
    played = Counter(tuple(rollout.prediction) for rollout in forest.rollouts)
    for chance, path in table.paths():
        assert played[path] / count == pytest.approx(chance, abs=4.5 * math.sqrt(chance * (1 - chance) / count))
        assert all(r.reward == table.outcome(0, path) for r in forest.rollouts if tuple(r.prediction) == path)
    for call in forest.calls.values():
        history = tuple(map(int, call.prompt_text.removeprefix("[user] h")))
        reply = int(call.text.removeprefix("r"))
        assert call.logprobs[0] == pytest.approx(math.log(table.probabilities(history)[reply]), abs=1e-6)
        assert (call.finish, call.completion_tokens) == ("eos", 1)


def test_the_trainers_gradient_is_that_of_the_table(tmp_path):
    """A batch of RLOO: its loss's gradient is the sum of weight times advantage times the table's own scores."""
    table = TABLES["stops"]
    env = tabular_environment(table, model=tabular_model(table, torch.float64))
    forest = forest_of(env, env.task.examples("train"), independent(4))
    found = credit(forest, "grpo", scale=False, baseline="leave_one_out", loss_mean="constant", loss_length=1)
    trainer = make_trainer(tmp_path, tabular_model(table, torch.float64))
    _, gradient = gradients(trainer, train_calls(forest, found, dict.fromkeys(forest.examples, 0)))
    expected = {history: [0.0] * len(table.logits(history)) for history in table.histories}
    for entry in found.entries:
        call = forest.calls[entry.call]
        history = tuple(map(int, call.prompt_text.removeprefix("[user] h")))
        scores = table.score_gradient(history, int(call.text.removeprefix("r")))
        push = entry.advantages[0] * entry.weights[0]
        expected[history] = [e - push * score for e, score in zip(expected[history], scores, strict=True)]
    assert any(any(row) for row in expected.values())
    for history, row in entries(table, gradient["head.weight"]).items():
        assert row == pytest.approx(expected[history], abs=1e-7)
    assert float(gradient["head.weight"].abs().sum()) == pytest.approx(
        math.fsum(abs(value) for row in expected.values() for value in row), abs=1e-6
    )
