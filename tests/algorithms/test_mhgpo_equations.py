"""MHGPO against a second implementation, slow and literal, on random forests."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.test_laws import LAW, TOLERANCE
from tests.helpers.forests import MODULES, credit, forked


@LAW
@given(st.data(), st.sampled_from(["rr", "is", "os"]), st.sampled_from(["mean", "max", "min"]), st.booleans())
def test_mhgpo_equals_a_literal_reading_of_its_equations(data, sampler, aggregate, full):
    forest = data.draw(forked(sampler=sampler))
    name = {"rr": "mhgpo_rr", "is": "mhgpo_is", "os": "mhgpo_fof_os"}[sampler]
    propagate = "full" if full else "shared"
    found = {e.call: e for e in credit(forest, name, aggregate=aggregate, propagate=propagate, eps=1e-6).entries}
    outcomes = {r.leaf: r.reward for r in forest.rollouts}
    fork_of = {call.id: rollout.fork for rollout in forest.rollouts for call in forest.path(rollout)}

    def shared(call_id):
        below = [call.id for call in forest.calls.values() if call.parent == call_id]
        if not below:
            return outcomes.get(call_id)
        values = []
        for child in below:
            value = shared(child)
            if value is not None:
                values.append(value + (forest.calls[child].penalty if full else 0.0))
        if not values:
            return None
        return {"mean": sum(values) / len(values), "max": max(values), "min": min(values)}[aggregate]

    groups = defaultdict(list)
    rewards = {}
    for call in forest.calls.values():
        base = shared(call.id)
        if base is None:
            continue
        rewards[call.id] = base + call.penalty
        position, fork = MODULES.index(call.module), MODULES.index(fork_of[call.id])
        if sampler == "is" and position != fork:
            continue
        single = sampler == "rr" and position < fork
        groups[("batch", call.module, fork) if single else (call.example, call.module)].append(call.id)
    assert rewards.keys() == found.keys()
    kept = {call: members for members in groups.values() if len(members) > 1 for call in members}
    for call_id, entry in found.items():
        call = forest.calls[call_id]
        assert entry.reward == pytest.approx(rewards[call_id], abs=TOLERANCE)
        if call_id not in kept:
            assert not any(entry.weights)
            continue
        values = [rewards[member] for member in kept[call_id]]
        mean = sum(values) / len(values)
        std = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
        assert entry.advantages[0] == pytest.approx((rewards[call_id] - mean) / (std + 1e-6), abs=1e-9)
        scored = {forest.calls[c].example for c in rewards}
        agents = {forest.calls[c].module for c in rewards if forest.calls[c].example == call.example}
        own = [c for c in kept if (forest.calls[c].example, forest.calls[c].module) == (call.example, call.module)]
        expected = 1 / (len(scored) * len(agents) * len(own) * call.completion_tokens)
        assert entry.weights == pytest.approx([expected] * call.completion_tokens, abs=TOLERANCE)
