"""The laws that reduce one algorithm to another, as far as they concern losses and gradients (1 to 4).

Float64, one small model; tolerances 1e-10 on losses, 1e-8 on gradients. Law 1 against TRL is in test_trl, law 9
on gradients and law 11 in test_update_loss, law 12 in test_adapters.
"""

import random

import pytest
import torch

from mmrl.algorithms import ALGORITHMS
from mmrl.config import ALGO_SCHEMAS
from mmrl.stages.collect import train_calls
from tests.helpers.forests import Grow
from tests.helpers.trainer_cases import (
    VOCAB,
    assert_close,
    gradients,
    make_trainer,
    sampled,
    tiny_model,
    train_call,
    train_entry,
    with_changes,
)

SHARED = {"eps": 1e-4, "ddof": 1}
MODULES = ("writer", "ranker", "answerer")


def forest_of(modules, lengths, seed=0, examples=2, rollouts=3, transcript=False):
    """Linear rollouts with token ids; `lengths(draw)` is the number of tokens of a call.

    With `transcript`, each prompt is everything said so far and two observation tokens.
    """
    draw = random.Random(seed)

    def ids(count):
        return tuple(draw.randrange(2, VOCAB) for _ in range(count))

    grow = Grow(modules)
    for example in range(examples):
        question = ids(4)
        for rollout in range(rollouts):
            parent, context = None, question
            for position, module in enumerate(modules):
                size = lengths(draw)
                prompt = context if transcript else (*question, *ids(position + 1))
                said = ids(size)
                old = tuple(-3.7 + draw.uniform(-0.3, 0.3) for _ in said)
                parent = grow.call(
                    f"q{example}/{rollout}#{position}",
                    parent,
                    module,
                    size,
                    prompt_ids=prompt,
                    completion_ids=said,
                    logprobs=old,
                    observation_tokens=2 if transcript and position < len(modules) - 1 else 0,
                )
                context = (*prompt, *said, *ids(2))
            grow.end(parent, draw.choice([0.0, 0.3, 1.0]) + 0.1 * rollout)
    return grow.forest


def calls_of(forest, name, **options):
    algo = ALGO_SCHEMAS[name].model_validate({"name": name, **SHARED, **options})
    credit = ALGORITHMS[name].credit(forest, algo, 0)
    return train_calls(forest, credit, dict.fromkeys(forest.examples, 0))


def trainer_for(folder, **algo):
    return make_trainer(folder, tiny_model("gpt2", dtype=torch.float64), algo={"beta": 0.05, **algo}, packing="padded")


def assert_equal(found, expected):
    (loss, gradient), (other_loss, other) = found, expected
    assert loss == pytest.approx(other_loss, abs=1e-10) and abs(loss) > 1e-4
    assert_close(gradient, other)


def some(draw):
    return draw.randint(1, 6)


@pytest.mark.parametrize("name", ["mmgrpo", "mhgpo_fof"])
def test_laws_1_and_2_one_module_called_once_has_grpos_gradient(name, tmp_path):
    forest = forest_of(("only",), some)
    trainer = trainer_for(tmp_path)
    assert_equal(gradients(trainer, calls_of(forest, name)), gradients(trainer, calls_of(forest, "grpo")))


def test_law_2_fork_on_first_has_ragged_mmgrpos_gradient(tmp_path):
    forest = forest_of(MODULES, some, seed=1)
    trainer = trainer_for(tmp_path)
    ragged = calls_of(forest, "mmgrpo", padding_mode="ragged")
    assert_equal(gradients(trainer, calls_of(forest, "mhgpo_fof")), gradients(trainer, ragged))


def test_law_3_agents_that_read_the_whole_transcript_are_grpo_on_that_transcript(tmp_path):
    """Same ratio and advantage for every generated token: so with every token weighing the same, the same gradient."""
    forest = forest_of(MODULES, some, seed=2, transcript=True)
    agents = calls_of(forest, "mhgpo_fof", loss_mean="token")
    rollouts = calls_of(forest, "grpo", loss_mean="token")
    trainer = trainer_for(tmp_path)
    whole = transcripts(forest, rollouts)
    scores = [trainer.forwards.policy_logprobs(sampled(calls)) for calls in (agents, whole)]
    apart = {train.call.id: row for train, row in zip(agents, scores[0], strict=True)}
    joined = {train.call.id: row for train, row in zip(whole, scores[1], strict=True)}
    for rollout in forest.rollouts:
        path = forest.path(rollout)
        row, start = joined[rollout.id], 0
        for call in path:
            end = start + call.completion_tokens
            assert apart[call.id] == pytest.approx(row[start:end], abs=1e-10), "the ratio's numerator"
            start = end + call.observation_tokens
    assert_equal(gradients(trainer, agents), gradients(trainer, whole))


def transcripts(forest, calls):
    """Each rollout as one sequence: what its calls say is trained, what stands between is read only."""
    of = {train.call.id: train for train in calls}
    found = []
    for rollout in forest.rollouts:
        path = forest.path(rollout)
        ids, old, advantages, weights = [], [], [], []
        for position, call in enumerate(path):
            entry = of[call.id].entries[0]
            ids += call.completion_ids
            old += call.logprobs
            advantages += entry.advantages
            weights += entry.weights
            if position < len(path) - 1:
                observed = path[position + 1].prompt_ids[-call.observation_tokens :]
                ids += observed
                old += [0.0] * len(observed)
                advantages += [7.0] * len(observed)
                weights += [0.0] * len(observed)
        entry = train_entry(advantages=tuple(advantages), weights=tuple(weights))
        found.append(
            train_call(
                id=rollout.id,
                module="whole",
                prompt_ids=path[0].prompt_ids,
                completion_ids=tuple(ids),
                logprobs=tuple(old),
                entries=(entry,),
            )
        )
    return found


def cosine(forest, folder):
    """Between the gradients of the summed module-level and of the trajectory-level objective; no KL, ratio 1."""
    trainer = trainer_for(folder, beta=0.0)
    flat = []
    for name, options in (("mmgrpo", {"padding_mode": "ragged"}), ("grpo", {})):
        calls = [with_changes(call, logprobs=None) for call in calls_of(forest, name, **options)]
        _, found = gradients(trainer, calls)
        flat.append(torch.cat([value.flatten() for value in found.values()]))
    return float(torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0))


def test_law_4_module_and_trajectory_objectives_are_parallel_with_equal_lengths_and_not_with_others(tmp_path):
    equal = [cosine(forest_of(MODULES, lambda draw: 4, seed=seed), tmp_path / f"e{seed}") for seed in (0, 1)]
    assert equal == pytest.approx([1.0, 1.0], abs=1e-9)
    other = [cosine(forest_of(MODULES, lambda draw: draw.choice([1, 12]), seed=s), tmp_path / f"o{s}") for s in (0, 1)]
    assert max(other) < 0.95, other
