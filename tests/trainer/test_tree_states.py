"""Gated delta nets on tries: as the plain forward of each row alone, and as the recurrence written out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5 import modeling_qwen3_5

from mmrl.errors import ConfigError
from mmrl.trainer import tree_states, tries
from mmrl.trainer.objective import TrainCall
from mmrl.trainer.packing import token_budget
from mmrl.trainer.tree_attention import PrefixTree, install, unsupported_reason
from mmrl.trainer.tries import TrieLayout, build_tries, flatten
from tests.helpers.hybrids import HYBRIDS
from tests.helpers.trainer_cases import VOCAB, gradients, make_calls, make_trainer, tiny_model, with_changes
from tests.trainer.test_tries import sequences

Rows = list[tuple[int, ...]]
FREE: dict[str, Any] = {"MERGE_COST": 0.0, "NODE_COST": 0}
"""Sharing costs nothing, so all that can be is shared."""


@st.composite
def ragged(draw: st.DrawFn) -> Rows:
    """Rows that share, with nodes of one token and up to several chunks."""
    lengths = [draw(st.sampled_from([1, 2, 3, 5, 30, 70, 130])) for _ in range(3)]
    return [tuple(token for branch in row for token in [branch] * lengths[branch]) for row in draw(sequences())]


def shared(rows: Rows) -> TrieLayout:
    rows = [row for row in rows if not any(other != row and other[: len(row)] == row for other in rows)]
    with patch.multiple(tries, **FREE):
        return flatten(build_tries(rows), rows)


def by_path(
    layout: TrieLayout, tensors: Sequence[torch.Tensor], compute: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Results of each path's own computation, and gradients, of (N, ...) inputs."""
    inputs = [tensor.detach().double().requires_grad_() for tensor in tensors]
    places, parts = [], []
    for path in layout.paths.values():
        where = [at for span in path for at in range(span.begin, span.end)]
        places += where
        parts.append(compute(*(x[where] for x in inputs)))
    result = torch.cat(parts)
    weights = torch.linspace(1, 2, result[0].numel(), dtype=torch.float64).view(result[0].shape)
    return result, [*torch.autograd.grad((result * weights).sum(), inputs), torch.tensor(places), weights]


def recurrence(q: Any, k: Any, v: Any, g: Any, beta: Any) -> torch.Tensor:
    """The gated delta rule in float64, token by token: S = exp(g)·S; S += k ⊗ beta·(v - S·k); o = S·q."""
    state = torch.zeros(q.shape[1], q.shape[2], v.shape[2], dtype=torch.float64)
    outputs = []
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[2] ** -0.5)
    return torch.stack(outputs)


@settings(max_examples=10)
@given(ragged())
def test_the_delta_rule_follows_each_path(rows: Rows) -> None:
    layout = shared(rows)
    torch.manual_seed(len(layout.ids))
    tokens = len(layout.ids)
    q, k, v = (torch.randn(tokens, 2, width) for width in (3, 3, 4))
    g, beta = -0.2 * torch.rand(tokens, 2), torch.rand(tokens, 2)
    expected, (*expected_grads, places, weights) = by_path(layout, [q, k, v, g, beta], recurrence)
    inputs = [x[None].requires_grad_() for x in (q, k, v, g, beta)]
    found, state = tree_states._delta_rule(
        original("torch_chunk_gated_delta_rule"),
        *inputs,
        tree=PrefixTree(layout.spans),
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )
    assert state is None
    assert torch.allclose(found[0, places].double(), expected, atol=1e-5)
    grads = torch.autograd.grad((found[0, places] * weights).sum(), inputs)
    for one, two in zip(grads, expected_grads, strict=True):
        assert torch.allclose(one[0].double(), two, atol=1e-4 * max(1.0, float(two.abs().max())))


@settings(max_examples=10)
@given(ragged(), st.integers(1, 5), st.booleans())
def test_the_convolution_follows_each_path(rows: Rows, width: int, has_bias: bool) -> None:
    layout = shared(rows)
    torch.manual_seed(width)
    hidden, weight = torch.randn(len(layout.ids), 3).double(), torch.randn(3, width).double()
    bias = torch.randn(3).double() if has_bias else None

    def written_out(x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([x.new_zeros(width - 1, 3), x])
        total = sum((weight[:, back] * rows[back : back + len(x)] for back in range(width)), x.new_zeros(1))
        return torch.nn.functional.silu(total if bias is None else total + bias)

    expected, (expected_grad, places, weights) = by_path(layout, [hidden], written_out)
    packed = hidden.t()[None].clone().requires_grad_()
    tree = PrefixTree(layout.spans)
    found = tree_states._convolve(original("causal_conv1d_fn"), packed, weight, bias, activation="silu", tree=tree)
    assert torch.allclose(found[0].t()[places], expected, atol=1e-12)
    (grad,) = torch.autograd.grad((found[0].t()[places] * weights).sum(), packed)
    assert torch.allclose(grad[0].t(), expected_grad, atol=1e-11)


def original(name: str) -> Any:
    function = getattr(modeling_qwen3_5, name)
    return function.args[0] if isinstance(function, partial) else function


DEEP = [
    (*[3] * 20, *[4] * 70, 5, *[6] * 3, 7, 8),
    (*[3] * 20, *[4] * 70, 5, *[6] * 3, 9, 10, 11),
    (*[3] * 20, *[4] * 70, 5, 12),
    (*[3] * 20, *[4] * 70, 13, *[14] * 9),
    (*[3] * 20, 15, 16),
    (*[17] * 5,),
]
"""Five forks below each other, nodes of one to seventy tokens: shorter and longer than a chunk and the convolution."""


def calls_of(rows: Rows) -> list[TrainCall]:
    made = make_calls(len(rows))
    split = [max(1, len(row) - 8) for row in rows]
    return [
        with_changes(call, prompt_ids=row[:at], completion_ids=row[at:], entries=(), logprobs=None)
        for call, row, at in zip(made, rows, split, strict=True)
    ]


def plain(model: Any, calls: list[TrainCall]) -> list[torch.Tensor]:
    """Log-probabilities by the model's forward of each row alone."""
    found = []
    for train in calls:
        prompt, completion = train.call.prompt_ids, torch.tensor(train.call.completion_ids)
        logits = model(input_ids=torch.tensor([[*prompt, *completion.tolist()]]), use_cache=False).logits[0]
        found.append(logits[len(prompt) - 1 : -1].float().log_softmax(-1).gather(-1, completion[:, None])[:, 0])
    return found


def gradient(model: Any, logprobs: list[torch.Tensor]) -> torch.Tensor:
    """Of a sum in which every token has another weight, all parameters in one vector."""
    total = torch.stack([(torch.linspace(1, 2, len(part)) * part).sum() for part in logprobs]).sum()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([grad.flatten().double() for grad in grads])


def packed(trainer: Any, calls: list[TrainCall]) -> list[torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    with patch.multiple(tries, **FREE):
        packs = trainer.forwards.make_packs(calls, ["a", "b"], score_all=True, tries=True)
    assert sum(pack.forwarded for pack in packs) == len(flatten_ids(calls))
    for pack in packs:
        parts = trainer.forwards.score(trainer.model, pack).logprobs.split(
            [len(train.call.completion_ids) for train in pack.calls]
        )
        found |= {train.call.id: part for train, part in zip(pack.calls, parts, strict=True)}
    return [found[train.call.id] for train in calls]


def flatten_ids(calls: list[TrainCall]) -> set[tuple[int, ...]]:
    """Distinct prefixes, but for what follows the last scored token's place."""
    rows = [(train.call.prompt_ids + train.call.completion_ids)[:-1] for train in calls]
    return {row[: end + 1] for row in rows for end in range(len(row))}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_log_probabilities_and_gradients_are_those_of_each_row_alone(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    assert unsupported_reason(model) is None
    trainer = make_trainer(tmp_path, model, packing="trie")

    @settings(max_examples=8)
    @given(ragged())
    def check(rows: Rows) -> None:
        rows = [(*(2 + token for token in row[:100]), number + 5) for number, row in enumerate(rows)]
        compare(rows)

    def compare(rows: Rows) -> None:
        calls = calls_of(rows)
        expected = plain(model, calls)
        found = packed(trainer, calls)
        assert max(float((a - b).detach().abs().max()) for a, b in zip(found, expected, strict=True)) < 1e-4
        one, two = gradient(model, found), gradient(model, expected)
        assert float((one - two).norm()) < 2e-4 * float(two.norm())

    compare(DEEP)
    check()


@pytest.mark.parametrize("kind", HYBRIDS)
def test_in_bfloat16_packing_adds_no_more_than_rounding(kind: str, tmp_path: Path) -> None:
    exact = tiny_model(kind)
    half = tiny_model(kind, dtype=torch.bfloat16)
    for layer, like in zip(half.model.layers, exact.model.layers, strict=True):
        for mine, other in zip(layer.parameters(), like.parameters(), strict=True):
            other.data.copy_(mine.data)
    exact.load_state_dict({name: weight.float() for name, weight in half.state_dict().items()})
    trainer = make_trainer(tmp_path, half, packing="trie", selfcheck=False)
    calls = calls_of(DEEP)
    truth = plain(exact, calls)
    sides = packed(trainer, calls), plain(half, calls)
    far = [
        float(torch.cat([(a - b).detach().abs() for a, b in zip(side, truth, strict=True)]).mean()) for side in sides
    ]
    assert far[0] < 2 * far[1] + 1e-3
    reference = gradient(exact, truth)
    cosines = [torch.cosine_similarity(gradient(half, side), reference, dim=0) for side in sides]
    assert 1 - cosines[0] < 2 * (1 - cosines[1]) + 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_has_the_gradients_of_padded_rows(checkpointing: bool, tmp_path: Path) -> None:
    calls = make_calls(6)
    calls = [with_changes(call, prompt_ids=(*[3] * 30, *call.call.prompt_ids)) for call in calls]
    found = []
    for packing in ("trie", "padded"):
        model = tiny_model("qwen3_5")
        made = make_trainer(tmp_path / packing, model, packing=packing, checkpointing=checkpointing)
        found.append(gradients(made, calls))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    for name, expected in found[1][1].items():
        assert float((found[0][1][name] - expected).norm()) <= 1e-4 * float(expected.norm()) + 1e-6, name


@pytest.mark.parametrize("lost", ["states", "window"])
def test_the_self_check_refuses_nodes_that_forget_their_parents(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(tree_states.TreeStates):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            if lost == "states":
                self.batches = [tree_states.NodeBatch(b.nodes, (), b.tokens, b.chunk, b.ends) for b in self.batches]
            else:
                self.parents = [None] * len(self.parents)

    make_trainer(tmp_path, tiny_model("qwen3_5"), packing="trie")
    monkeypatch.setattr(tree_states, "TreeStates", Forgetful)
    with pytest.raises(ConfigError, match="log-probabilities of packed tries differ by"):
        make_trainer(tmp_path, tiny_model("qwen3_5"), packing="trie")


def test_without_a_pack_the_layers_are_as_before() -> None:
    ids = torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    model = tiny_model("qwen3_5")
    with pytest.MonkeyPatch.context() as patched:
        for name in tree_states.FUNCTIONS:
            patched.setattr(modeling_qwen3_5, name, original(name))
        expected = model(ids).logits, model.generate(ids, max_new_tokens=5, do_sample=False)
    install(model)
    install(model)
    assert not any(isinstance(original(name), partial) for name in tree_states.FUNCTIONS)
    assert torch.equal(model(ids).logits, expected[0])
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected[1])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_budget_counts_what_recurrent_layers_keep(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 2048 tokens' size; three layers of 4 bytes * (12 * 32 + 4 * 48), two of 24 tensors of 4 heads * 6 beside them.
    layer, states = 4 * (12 * 32 + 4 * 48), 24 * 4 * 24
    token = layer + states + 3 * 4 * 32 if checkpointing else 3 * layer + 2 * states
    monkeypatch.setattr(os, "sysconf", lambda name: 8 * 2048 * token if name == "SC_PHYS_PAGES" else 1)
    assert token_budget(None, tiny_model("qwen3_5"), checkpointing) == (2048, 4096)


def test_an_older_transformers_has_no_place_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmrl.models.load.version", lambda package: "5.14.2")
    assert unsupported_reason(tiny_model("qwen3_5")) == (
        "its recurrent layers need transformers 5.15, 5.14.2 is installed"
    )
    assert unsupported_reason(tiny_model()) is None
