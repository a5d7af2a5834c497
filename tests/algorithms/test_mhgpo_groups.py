"""MHGPO: which calls are compared with which, and the options of a group."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrl import rng
from tests.algorithms.test_mhgpo import AGENTS
from tests.helpers.forests import Grow, advantage, by_call, chains, credit, forked


def single_rewriters(count, forks):
    """`count` round-robin trees with one single rewriter each; two reranker branches."""
    grow = Grow(AGENTS, step=4)
    for index in range(count):
        grow.call(f"q{index}/w", None, "rewriter")
        grow.call(f"q{index}/r", f"q{index}/w", "reranker")
        for branch in range(2):
            leaf = grow.call(f"q{index}/a{branch}", f"q{index}/r", "answerer")
            grow.end(leaf, (index * 7 + branch) % 5 / 4, fork=forks[index % len(forks)])
    return grow.forest


def test_zero_variance_groups_can_be_dropped_as_if_never_sampled():
    grow = Grow(("a", "b"))
    for branch, (outcome, penalty) in enumerate(((1.0, 0.0), (1.0, -0.5))):
        grow.call(f"q/{branch}a", None, "a")
        grow.call(f"q/{branch}b", f"q/{branch}a", "b", penalty=penalty)
        grow.end(f"q/{branch}b", outcome, fork="a")
    result = credit(grow.forest, "mhgpo_fof", group_size=2, zero_variance="drop")
    entries = by_call(result)
    assert not any(entries["q/0a"].weights)
    assert entries["q/0b"].weights == pytest.approx([0.5])
    assert result.metrics["credit/zero_variance_share"] == 0.5
    assert result.metrics["credit/a/zero_variance_share"] == 1.0
    assert result.metrics["credit/b/zero_variance_share"] == 0.0


def test_permutations_differ_between_steps_seeds_and_slots():
    def order(step, seed=0):
        forest = replace(single_rewriters(6, ["answerer"]), step=step)
        entries = by_call(credit(forest, "mhgpo_rr", seed=seed, group_size=3, regroup="agent_chunks"))
        return [[entries[f"q{i}/{agent}"].group[-1] for i in range(6)] for agent in "wr"]

    found = [order(step) for step in range(8)]
    assert len({tuple(writers) for writers, _ in found}) > 1
    assert any(writers != rankers for writers, rankers in found)
    assert found != [order(step, seed=1) for step in range(8)]


@pytest.mark.parametrize("options", [{"freeze_modules": ("a",)}, {"zero_variance": "drop"}])
def test_the_longest_sequence_is_one_of_the_loss(options):
    """Module a writes 9 tokens in each rollout, and is frozen or tells nothing; module b writes 3 and 2."""
    grow = Grow(("a", "b"))
    for index, (penalty, tokens) in enumerate(((0.0, 3), (-1.0, 2))):
        leaf = grow.call(f"q/{index}a", None, "a", 9)
        grow.end(grow.call(f"q/{index}b", leaf, "b", tokens, penalty=penalty), 1.0, fork="a")
    entries = by_call(credit(grow.forest, "mhgpo_fof", loss_mean="constant", **options))
    assert set(entries["q/0a"].weights) == {0.0}
    assert entries["q/0b"].weights == pytest.approx([1 / (2 * 3)] * 3)
    assert entries["q/1b"].weights == pytest.approx([1 / (2 * 3)] * 2)


SAMPLED = st.one_of(forked(sampler="rr", failures=False), chains(failures=False))
"""Trees, and chains of any length, in which a slot may have one call alone."""


def algorithm_3(forest, group_size, shuffle):
    """Arxiv 2506.02718, Algorithm 3, line by line: groups of call ids.

    A group identifier is a question, an agent and how often it was called before; a prefix is one node of its tree.
    """
    ids = {call.id: (call.example, call.module, call.invocation) for call in forest.calls.values()}
    counts = Counter(ids.values())
    single = [call for call, m in ids.items() if counts[m] == 1]
    valid = [call for call, m in ids.items() if counts[m] > 1]
    shuffle(single)
    groups: dict[object, set[str]] = {}
    for i in range(len(single) // group_size):
        for call in single[i * group_size : (i + 1) * group_size]:
            groups.setdefault(i + len(valid), set()).add(call)
    for call in valid:
        groups.setdefault(ids[call], set()).add(call)
    return list(groups.values())


@given(forest=SAMPLED, seed=st.integers(0, 3), size=st.integers(2, 4))
def test_algorithm_3_to_the_letter(forest, seed, size):
    """Also where a tree has no fork above a single call: another branch may not have come so far."""
    entries = by_call(credit(forest, "mhgpo_rr", group_size=size, regroup="alg3", seed=seed))
    found: dict[str, set[str]] = {}
    for entry in entries.values():
        if entry.group is not None:
            found.setdefault(entry.group, set()).add(entry.call)
    # The shuffle alone is our own: of (seed, step).
    literal = algorithm_3(forest, size, rng.stream(seed, forest.step, "regroup").shuffle)
    assert sorted(map(sorted, found.values())) == sorted(map(sorted, literal))
    assert not any(any(entry.weights) for entry in entries.values() if entry.group is None)


@pytest.mark.parametrize(("regroup", "expected"), [("by_agent_fork", 0), ("agent_chunks", 2), ("alg3", 2)])
def test_calls_below_the_fork_whose_siblings_failed_are_single_too(regroup, expected):
    """Four trees that fork at their first module; in two of them one branch of two has failed from outside."""
    grow = Grow(("a",))
    for example in range(4):
        for branch in range(2):
            failed = example < 2 and branch == 1
            reward, error = (None, "tool") if failed else (example / 4 + branch, None)
            grow.chain(f"q{example}/{branch}", "a", reward, fork="a", error=error)
    entries = by_call(credit(grow.forest, "mhgpo_rr", group_size=2, regroup=regroup))
    regrouped = [entry for entry in entries.values() if (entry.group or "").startswith("RR")]
    assert len(regrouped) == expected and {entry.call for entry in regrouped} <= {"q0/0#0", "q1/0#0"}
    alone = entries["q0/0#0"]
    assert any(alone.weights) == bool(expected) and (advantage(alone) != 0) == bool(expected)
