"""Alignment from inner products: against simulations whose true cosine is known, and programs that are enumerated."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmrl.audit.alignment import Estimate, alignment, strength
from mmrl.audit.gradients import Projection, Reference, gradient, reference_calls
from mmrl.audit.settings import BLOCKS
from mmrl.records import Forest
from mmrl.rollout.plans import independent
from mmrl.stages.collect import train_calls
from mmrl.trainer.objective import TrainCall
from tests.algorithms.test_turn_baselines import ESTIMATORS, TRUE_GRADIENT, UNBIASED, stopping
from tests.helpers.forests import credit
from tests.helpers.programs import forest_of
from tests.helpers.tabular import TABLES, Table
from tests.helpers.tabular_model import entries, tabular_environment, tabular_model
from tests.helpers.trainer_cases import make_trainer

near: Any = pytest.approx

RLOO: dict[str, Any] = {"scale": False, "baseline": "leave_one_out", "loss_mean": "constant"}
SIZE = 40


def projected(blocks: np.ndarray, vectors: np.ndarray) -> list[Projection]:
    return [Projection(float(g @ g), tuple((blocks @ g).tolist())) for g in vectors]


def simulated(draw: np.random.Generator, noise: float, batches: int, spread: float, length: float = 1.0):
    """Blocks of a reference around the first axis, and gradients around an axis at 0.3 radians from it."""
    blocks = np.eye(SIZE)[0] + noise * draw.standard_normal((BLOCKS, SIZE))
    mean = length * (math.cos(0.3) * np.eye(SIZE)[0] + math.sin(0.3) * np.eye(SIZE)[1])
    vectors = mean + spread * draw.standard_normal((batches, SIZE))
    return blocks, vectors


def true_cosine(spread: float, length: float) -> float:
    vectors = simulated(np.random.default_rng(99), 0.0, 100_000, spread, length)[1]
    return float((vectors[:, 0] / np.linalg.norm(vectors, axis=1)).mean())


def covered(estimate: Estimate | None, value: float) -> bool:
    assert estimate is not None and estimate.low is not None and estimate.high is not None
    return estimate.low <= value <= estimate.high


def test_a_noisy_reference_does_not_shift_cosine_and_length():
    """The noise of their mean has a quarter of |G|²: cosines with it would be a tenth too small."""
    draw, expected = np.random.default_rng(0), true_cosine(0.05, 0.5)
    noise = math.sqrt(BLOCKS / 4 / SIZE)
    found = []
    for _ in range(400):
        blocks, vectors = simulated(draw, noise, 8, 0.05, length=0.5)
        gram = (blocks @ blocks.T).tolist()
        found.append(alignment(projected(blocks, vectors), gram, unit=2.0))
        assert strength(gram).measurable
    cosines = np.array([a.cosine.mean for a in found])
    lengths = np.array([a.length.mean for a in found])
    # First-order noise of <G1, G2> shifts a ratio by a few of its squared relative errors: 0.02 here.
    assert cosines.mean() == pytest.approx(expected, abs=0.02)
    assert lengths.mean() == pytest.approx(math.cos(0.3), abs=0.05)
    raw = expected / math.sqrt(1 + noise**2 * SIZE / BLOCKS)
    assert raw < expected - 0.08, "naively: cosine with the mean of all blocks, noise and all"
    assert np.mean([covered(a.cosine, expected) for a in found]) > 0.92
    assert np.mean([covered(a.length, math.cos(0.3)) for a in found]) > 0.92


def test_different_blocks_have_no_bias_and_the_whole_has():
    draw = np.random.default_rng(1)
    products, wholes = [], []
    for _ in range(2000):
        blocks, _ = simulated(draw, 1.0, 1, 0.0)
        products.append(strength((blocks @ blocks.T).tolist()).product)
        wholes.append(float(blocks.mean(0) @ blocks.mean(0)))
    assert np.mean(products) == pytest.approx(1.0, abs=4 * float(np.std(products)) / math.sqrt(2000))
    assert np.mean(wholes) == pytest.approx(1 + SIZE / BLOCKS, abs=0.1)


@pytest.mark.parametrize("noise", [0.2, 1.0])
def test_the_jackknifes_error_is_that_of_repeated_references(noise):
    draw = np.random.default_rng(2)
    found = [strength(b @ b.T) for b, _ in (simulated(draw, noise, 1, 0.0) for _ in range(1000))]
    spread = float(np.std([s.product for s in found]))
    # The part that is the product of both halves' noise is counted twice: too large rather than too small.
    assert spread * 0.97 <= np.mean([s.error for s in found]) <= spread * 1.3


def test_strength_by_hand():
    """Blocks 1, 3, 2, 4: halves (1 + 3) / 2 · (2 + 4) / 2 = 6, 1.5 · 3.5 and 2.5 · 2.5, on average 35 / 6.

    Without one block, pairs of the others: (6 + 12 + 8) / 3, (2 + 4 + 8) / 3, (3 + 4 + 12) / 3, (3 + 2 + 6) / 3.
    """
    numbers = np.array([1.0, 3.0, 2.0, 4.0])
    found = strength(np.outer(numbers, numbers).tolist())
    assert found.product == pytest.approx(35 / 6)
    left_out = np.array([26, 14, 19, 11]) / 3
    assert left_out.mean() == pytest.approx(35 / 6)
    assert found.error == pytest.approx(math.sqrt(3 / 4 * ((left_out - 35 / 6) ** 2).sum()))
    assert not found.measurable and found.needed == pytest.approx((4 * found.error / found.product) ** 2)


def test_all_halves_say_more_than_one_way_to_halve():
    """Where noise prevails, products of all pairs have less noise than those of the first half with the second."""
    draw, one, every = np.random.default_rng(6), [], []
    for _ in range(1000):
        blocks, _ = simulated(draw, 1.0, 1, 0.0)
        one.append(float(blocks[: BLOCKS // 2].mean(0) @ blocks[BLOCKS // 2 :].mean(0)))
        every.append(strength((blocks @ blocks.T).tolist()).product)
    assert np.mean(every) == pytest.approx(np.mean(one), abs=0.1)
    assert np.std(every) < 0.85 * np.std(one)


def test_no_gradient_is_not_measurable_and_gets_no_number():
    draw, measurable = np.random.default_rng(3), 0
    for _ in range(400):
        blocks = draw.standard_normal((BLOCKS, SIZE))
        found = alignment(projected(blocks, draw.standard_normal((3, SIZE))), (blocks @ blocks.T).tolist(), 1.0)
        measurable += found.cosine is not None
        assert (found.cosine is None) == (found.length is None)
    assert measurable / 400 < 0.02


def test_needed_is_enough_where_it_is_said():
    """A reference that falls short, played that much longer: mostly measurable then."""
    draw, told = np.random.default_rng(4), []
    for _ in range(300):
        blocks, _ = simulated(draw, 0.8, 1, 0.0)
        first = strength((blocks @ blocks.T).tolist())
        if not first.measurable and first.needed is not None:
            longer = simulated(draw, 0.8 / math.sqrt(first.needed), 1, 0.0)[0]
            told.append(strength(longer @ longer.T).measurable)
    assert len(told) > 50 and np.mean(told) > 0.7


def test_a_batch_without_gradient_counts_as_cosine_0():
    blocks = np.tile(np.eye(3)[0], (BLOCKS, 1))
    vectors = np.array([[2.0, 0, 0], [0, 0, 0], [3.0, 4.0, 0], [-1.0, 0, 0]])
    found = alignment(projected(blocks, vectors), (blocks @ blocks.T).tolist(), unit=1.0)
    assert (found.batches, found.zero) == (4, 1)
    # t of 3 degrees of freedom times the standard error of 1, 0, 0.6, -1
    width = 3.182 * float(np.std([1, 0, 0.6, -1], ddof=1)) / 2
    assert found.cosine == Estimate(mean=near(0.15), low=near(0.15 - width), high=near(0.15 + width))
    assert found.length is not None and found.length.mean == pytest.approx((2 + 0 + 3 - 1) / 4)
    single = alignment(projected(blocks, vectors[:1]), (blocks @ blocks.T).tolist())
    assert single.cosine == Estimate(mean=near(1.0), low=None, high=None) and single.length is None


# --- enumerated programs


def with_ids(forest: Forest) -> Forest:
    """The forest with a token for each that it counts."""
    calls = {n: replace(c, prompt_ids=(0,), completion_ids=(0,) * c.completion_tokens) for n, c in forest.calls.items()}
    return replace(forest, calls=calls)


def scored(table: Table, forest: Forest, calls: Iterable[TrainCall]) -> Mapping[tuple[int, ...], list[float]]:
    """The sum of w · A · grad log pi in the table's logits."""
    total = {history: [0.0] * len(table.logits(history)) for history in table.histories}
    for train in calls:
        call = forest.calls[train.call.id]
        scores = table.score_gradient(call.facts["history"], int(call.text.removeprefix("r")))
        push = math.fsum(entry.weights[0] * entry.advantages[0] for entry in train.entries)
        total[call.facts["history"]] = [a + push * s for a, s in zip(total[call.facts["history"]], scores, strict=True)]
    return total


def flat(table: Table, rows: Mapping[tuple[int, ...], Sequence[float]]) -> np.ndarray:
    return np.concatenate([rows[history] for history in table.histories])


def expected_gradient(table: Table, calls_of, width: int) -> np.ndarray:
    """The exact mean over all forests of `width` independent rollouts of the first example."""
    at_root = table.forests(lambda history: width if not history else 1)
    total = np.zeros(len(flat(table, table.gradient())))
    for chance, forest in at_root:
        total += chance * flat(table, scored(table, forest, calls_of(with_ids(forest))))
    return total


def one_example(name: str) -> Table:
    return replace(TABLES[name], examples=1)


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("name", ["two", "stops", "skipping"])
def test_the_reference_is_the_gradient_of_the_expected_outcome(name, width):
    """Also where paths differ in the number of their calls: nothing is divided by it."""
    table = one_example(name)

    def calls(forest):
        return reference_calls(forest, {rollout.id: rollout.reward for rollout in forest.rollouts})

    truth = flat(table, table.gradient())
    assert expected_gradient(table, calls, width) == pytest.approx(truth, abs=1e-12)
    assert np.abs(truth).max() > 0.01


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


def test_what_is_divided_by_lengths_or_deviations_has_a_limit_below_1():
    """The expected gradient of each row over all forests, in a program whose second reply ends it at once."""
    table = one_example("stops")
    truth = flat(table, table.gradient())

    def limit(**options):
        def calls(forest):
            found = credit(forest, "grpo", **{**RLOO, **options})
            return train_calls(forest, found, dict.fromkeys(forest.examples, 0))

        return expected_gradient(table, calls, 3)

    unbiased = limit(loss_length=5)
    assert 5 * unbiased == pytest.approx(truth, abs=1e-12)
    for options in ({"loss_mean": "seq"}, {"loss_mean": "token"}, {"loss_length": 5, "scale": True}):
        assert cosine(limit(**options), truth) < 0.999, options
    # Each rollout in its own baseline: 2/3 of the length in the same direction.
    own = limit(loss_length=5, baseline="mean")
    assert cosine(own, truth) == pytest.approx(1) and 5 * own == pytest.approx(2 / 3 * truth, abs=1e-12)


ROWS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "rloo": ("grpo", {**RLOO, "loss_length": 5}),
    "grpo": ("grpo", {}),
    "mmgrpo": ("mmgrpo", {"rollouts": 3}),
    "mhgpo_fof": ("mhgpo_fof", {"loss_mean": "constant", "loss_length": 5, "scale": False}),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", ["stops", "skipping"])
def test_estimates_are_those_of_all_forests(name, row):
    """Audits of 12 batches of 8 groups, each against a reference of its own: cosine and length have the mean that
    they have with the enumerated gradient, and intervals hold it about as often as they say."""
    table, (algorithm, options) = one_example(name), ROWS[row]
    chances, rows, references = [], [], []
    for chance, forest in table.forests(lambda history: 1 if history else 3):
        forest = with_ids(forest)
        found = credit(forest, algorithm, **options)
        calls = train_calls(forest, found, dict.fromkeys(forest.examples, 0))
        chances.append(chance)
        rows.append(flat(table, scored(table, forest, calls)))
        outcomes = {rollout.id: rollout.reward for rollout in forest.rollouts}
        references.append(flat(table, scored(table, forest, reference_calls(forest, outcomes))))
    p, g, r, truth = np.array(chances), np.array(rows), np.array(references), flat(table, table.gradient())
    g[np.abs(g) < 1e-12] = 0.0
    draw = np.random.default_rng(5)

    def batches(count: int) -> np.ndarray:
        vectors: np.ndarray = draw.multinomial(8, p, count) @ g / 8
        vectors[np.abs(vectors) < 1e-12] = 0.0
        return vectors

    many = batches(50_000)
    norms = np.linalg.norm(many, axis=1)
    cosines = np.divide(many @ truth, norms * np.linalg.norm(truth), out=np.zeros(len(many)), where=norms > 0)
    expected = {"cosine": cosines.mean(), "length": 5 * (p @ g) @ truth / (truth @ truth)}
    audits = []
    for _ in range(200):
        blocks = np.array([draw.multinomial(100, p) @ r / 100 for _ in range(BLOCKS)])
        audits.append(alignment(projected(blocks, batches(12)), (blocks @ blocks.T).tolist(), unit=5.0))
    assert all(a.cosine is not None and a.length is not None for a in audits)
    # Cosines near 1 have a long tail to the left, and 12 of them an interval that is somewhat too narrow.
    for what, least in (("cosine", 0.82), ("length", 0.9)):
        estimates = [getattr(a, what) for a in audits]
        means = np.array([e.mean for e in estimates])
        # Beside chance, 3 % for the noise of <G1, G2>, by which is divided.
        error = 4 * means.std(ddof=1) / math.sqrt(len(means)) + 0.03 * abs(expected[what])
        assert means.mean() == pytest.approx(expected[what], abs=error), what
        assert np.mean([covered(e, expected[what]) for e in estimates]) >= least, what
    assert np.mean([a.zero for a in audits]) / 12 == pytest.approx((norms == 0).mean(), abs=0.02)
    if row == "rloo":
        assert expected["length"] == pytest.approx(1)


def test_rloo_is_aligned_and_as_long_as_the_reference(tmp_path):
    """Engine, trainer and files: more rollouts bring the cosine towards 1, and the length is 1 at any number."""
    table = TABLES["stops"]
    model = tabular_model(table)
    trainer = make_trainer(tmp_path / "trainer", model)
    environment = tabular_environment(table, model=model)
    examples = environment.task.examples("train")
    truth = flat(table, table.gradient())

    def played(step: int, rollouts: int) -> Forest:
        environment.key = (0, step)
        return forest_of(environment, examples, independent(rollouts))

    reference = Reference(tmp_path / "reference")
    for block in range(BLOCKS):
        forest = played(1000 + block, 64)
        vector = gradient(trainer.forwards, reference_calls(forest, {r.id: r.reward for r in forest.rollouts}))
        reference.put(block, vector)
    gram = reference.gram()
    found = {}
    for rollouts in (4, 32):
        projections = []
        for batch in range(6):
            forest = played(10 * rollouts + batch, rollouts)
            row = credit(forest, "grpo", **RLOO, loss_length=5)
            vector = gradient(trainer.forwards, train_calls(forest, row, dict.fromkeys(forest.examples, 0)))
            projections.append(reference.project(vector))
        found[rollouts] = alignment(projections, gram, unit=5.0)
    assert strength(gram).product == pytest.approx(truth @ truth, abs=4 * strength(gram).error)
    assert found[4].cosine.mean < found[32].cosine.mean > 0.9
    assert all(covered(a.length, 1.0) for a in found.values())
    assert found[32].length.high - found[32].length.low < 0.8
    rows = entries(table, vector.reshape(model.head.weight.shape))
    assert cosine(flat(table, rows), truth) > 0.8, "the vector is in the weight's own order"


def test_a_policy_that_decides_when_to_stop():
    """docs/algorithms.md's table by another way: lengths 1, 0.687 and none; `exclude` has no gradient to turn."""
    examples, batch = 1200, 8
    blocks, lengths = [], {}
    forest, scores = stopping(examples, False, False)
    forest = with_ids(forest)
    for block in range(BLOCKS):
        part = forest.part([f"q{block * 40 + n}" for n in range(40)])
        calls = reference_calls(part, {r.id: r.reward for r in part.rollouts})
        blocks.append(sum(scores[c.call.id] * c.entries[0].advantages[0] * c.entries[0].weights[0] for c in calls))
    gram = np.outer(blocks, blocks).tolist()
    assert strength(gram).product == pytest.approx(TRUE_GRADIENT**2, abs=4 * strength(gram).error)
    turns, scores = stopping(examples, True, False)
    for name in ("absorb, leave_one_out", "zero, leave_one_out", "exclude, leave_one_out"):
        algorithm, options = ESTIMATORS[name]
        rows = []
        for start in range(BLOCKS * 40, examples, batch):
            part = turns.part([f"q{start + n}" for n in range(batch)])
            found = credit(part, algorithm, **UNBIASED, **options).entries
            rows.append([sum(scores[e.call] * e.advantages[0] * e.weights[0] for e in found)])
        vectors = np.array(rows)
        vectors[np.abs(vectors) < 1e-12] = 0.0
        lengths[name] = alignment(projected(np.array(blocks)[:, None], vectors), gram, unit=1.0)
    assert covered(lengths["absorb, leave_one_out"].length, 1.0)
    assert covered(lengths["zero, leave_one_out"].length, 0.327 / 0.476)
    assert not covered(lengths["zero, leave_one_out"].length, 1.0)
    excluded = lengths["exclude, leave_one_out"]
    assert excluded.zero == excluded.batches == 70
    assert excluded.cosine is not None and excluded.cosine.mean == 0.0
