"""What the config says of single modules: factors of penalties and advantages, frozen modules."""

import json
from dataclasses import replace
from typing import Any

import pytest

from mmrl.algorithms import problems
from mmrl.cli import main
from mmrl.config.algo import ALGO_SCHEMAS
from mmrl.errors import DataError
from mmrl.store.forest import dump_forest
from tests.helpers.forests import REWARDED, Grow, by_call
from tests.helpers.forests import credit as credit_by

MODULES = ("rewriter", "answerer")


def forest():
    """Two branches: outcomes 1 and 0; the second rewriter has a penalty of -0.5."""
    grow = Grow(MODULES)
    for name, reward, penalty in (("q/0", 1.0, 0.0), ("q/1", 0.0, -0.5)):
        first = grow.call(f"{name}#0", None, "rewriter", 2, penalty=penalty, example="q")
        grow.end(grow.call(f"{name}#1", first, "answerer", 1), reward, id=name)
    return grow.forest


def credit(name="mhgpo_fof", **options):
    return by_call(credit_by(forest(), name, **options))


def test_a_penalty_times_its_factor_worked_by_hand():
    """Rewards of the rewriter: 1 and 0 - 0.4 · 0.5 = -0.2; mean 0.4, deviation 1.2 / sqrt 2 = 0.848528."""
    found = credit(penalty_scale={"rewriter": 0.4}, eps=0.0)
    assert [found[c].reward for c in ("q/0#0", "q/1#0")] == pytest.approx([1.0, -0.2])
    assert (found["q/1#0"].mean, found["q/1#0"].std) == pytest.approx((0.4, 0.848528), abs=1e-6)
    assert found["q/1#0"].parts == {"shared": 0.0, "penalty": -0.2}
    assert credit()["q/1#0"].reward == -0.5
    unscaled = credit(penalty_scale={"rewriter": 0.0}, eps=0.0)
    assert [unscaled[c].reward for c in ("q/0#0", "q/1#0")] == [1.0, 0.0]


def test_advantages_times_their_factor_worked_by_hand():
    """A = ±1 / sqrt 2 = ±0.707107 for the answerer, tripled or doubled; nothing else moves."""
    plain, found = credit(eps=0.0), credit(eps=0.0, advantage_scale={"answerer": 3.0})
    assert found["q/0#1"].advantages == pytest.approx((2.121320,), abs=1e-6)
    assert found["q/1#1"].advantages == pytest.approx((-2.121320,), abs=1e-6)
    doubled = credit(eps=0.0, advantage_scale={"answerer": 2.0})
    assert doubled["q/0#1"].advantages == pytest.approx((1.414214,), abs=1e-6)
    for call in ("q/0#0", "q/1#0"):
        assert found[call] == plain[call]
    assert all(found[c].weights == plain[c].weights and found[c].reward == plain[c].reward for c in plain)


@pytest.mark.parametrize(("name", "weight"), [("mmgrpo", 1 / 4), ("grpo", 1 / 2)])
def test_a_frozen_module_has_no_weight_and_moves_no_other(name, weight):
    """mmGRPO: 2 groups of 2 calls with 1 token. GRPO: 2 rollouts, of whose 3 tokens the frozen module has 2."""
    plain, found = credit(name), credit(name, frozen=("rewriter",))
    for call in ("q/0#0", "q/1#0"):
        assert not any(found[call].weights)
        assert found[call].advantages == plain[call].advantages
    for call in ("q/0#1", "q/1#1"):
        assert found[call] == replace(plain[call], weights=(weight,))


def test_mhgpo_counts_a_frozen_module_out_of_n():
    """Eq. 6: B = 1, n = 1 instead of 2, G = 2, |o| = 1."""
    assert credit()["q/0#1"].weights == pytest.approx((0.25,))
    frozen = credit(frozen=("rewriter",))
    assert frozen["q/0#1"].weights == pytest.approx((0.5,))
    assert frozen == credit(freeze_modules=("rewriter",)) == credit(train_modules=("answerer",))


@pytest.mark.parametrize("name", REWARDED)
def test_unknown_modules_and_wrong_factors_are_named(name):
    algo = ALGO_SCHEMAS[name](name=name, advantage_scale={"rewritr": 1.0, "answerer": -1.0})
    found = "\n".join(problems(algo, MODULES, ("outcome", "turn")))
    assert "algo.advantage_scale: got 'rewritr'" in found and "did you mean 'rewriter'" in found
    assert "algo.advantage_scale.answerer: got -1.0, expected a finite number from 0" in found


@pytest.mark.parametrize("key", ["advantage_scale", "penalty_scale"])
def test_factors_from_zero_to_the_largest_are_taken_and_what_is_beyond_refused(key):
    schema: Any = ALGO_SCHEMAS["mhgpo_fof"]
    zero, largest, beyond = (
        problems(schema(name="mhgpo_fof", **{key: {"answerer": factor}}), MODULES, ("outcome",))
        for factor in (0.0, 1e30, 1.1e30)
    )
    assert zero == largest == []
    assert beyond == [f"algo.{key}.answerer: got 1.1e+30, expected a finite number from 0 to 1e+30"]


def test_a_factor_of_advantages_that_nothing_takes_is_refused():
    """A penalty is passed on to the calls before (`propagate=full`), so its factor is another matter."""
    schema: Any = ALGO_SCHEMAS["mhgpo_fof"]
    for out in ({"freeze_modules": ("rewriter",)}, {"train_modules": ("answerer",)}):
        algo = schema(
            name="mhgpo_fof",
            advantage_scale={"rewriter": 2.0, "answerer": 3.0},
            penalty_scale={"rewriter": 2.0, "answerer": 3.0},
            **out,
        )
        assert problems(algo, MODULES, ("outcome",)) == [
            "algo.advantage_scale.rewriter: got 2.0, which has no effect: the module is not trained"
        ]


def test_mmrl_credit_takes_the_factors(tmp_path, capsys):
    path = tmp_path / "f.json"
    path.write_text(json.dumps(dump_forest(forest())))
    arguments = ["credit", "algo=mhgpo_fof", f"rollouts={path}", "--json"]
    assert main([*arguments, "algo.penalty_scale.rewriter=0.4", "algo.advantage_scale={answerer: 3.0}"]) == 0
    found = {c["id"]: c for c in json.loads(capsys.readouterr().out)["calls"]}
    assert found["q/1#0"]["reward"] == pytest.approx(-0.2)
    assert found["q/0#1"]["advantages"] == pytest.approx([2.121320], abs=1e-5)
    assert main([*arguments, "algo.penalty_scale.rewritr=0.4"]) == 2
    assert "did you mean 'rewriter'" in capsys.readouterr().err


def test_what_an_endpoint_said_has_no_kl_term_and_moves_nobody():
    """Its calls have no log-probabilities; frozen, they need none (of a trained module they are missed)."""
    annotated = {
        key: replace(
            call,
            values=(0.0,) * call.completion_tokens,
            logprobs=(-1.0,) * call.completion_tokens if call.module == "answerer" else None,
            ref_logprobs=(-3.0,) * call.completion_tokens,
        )
        for key, call in forest().calls.items()
    }
    said = replace(forest(), calls=annotated)
    found = by_call(credit_by(said, "mappo", beta=0.1, kl="reward", frozen=("rewriter",)))
    assert [found[c].parts["kl"] for c in ("q/0#0", "q/0#1")] == pytest.approx([0.0, 0.1 * (-3.0 + 1.0)])
    assert set(found["q/0#0"].weights) == {0.0} and found["q/0#1"].weights[0] > 0
    with pytest.raises(DataError, match=r"logprobs: missing"):
        credit_by(said, "mappo", beta=0.1, kl="reward")
