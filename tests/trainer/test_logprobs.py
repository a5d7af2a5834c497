"""Log-probabilities of targets: values, entropies and gradients against PyTorch's own log-softmax."""

from __future__ import annotations

import pytest
import torch

from mmrl.trainer import logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients_are_those_of_log_softmax(
    temperature: float, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "ENTROPY_CHUNK", 3)  # 3, 3 and 1 positions
    torch.manual_seed(0)
    logits = (torch.randn(7, 5, dtype=torch.float64) * 50).requires_grad_()
    targets, grad = torch.tensor([0, 4, 4, 2, 1, 0, 3]), torch.randn(7, dtype=torch.float64)
    found, entropies = logprobs._measure(logprobs._tempered(logits, temperature), targets, entropy)
    found.backward(grad)
    of_ours, logits.grad = logits.grad, None
    expected = torch.log_softmax(logits / temperature, dim=-1)
    expected[torch.arange(7), targets].backward(grad)
    assert of_ours is not None and logits.grad is not None
    torch.testing.assert_close(found, expected[torch.arange(7), targets])
    torch.testing.assert_close(of_ours, logits.grad)
    if entropy:
        assert entropies is not None and not entropies.requires_grad
        torch.testing.assert_close(entropies, -(expected.exp() * expected).sum(-1).detach())
    else:
        assert entropies is None


def test_a_second_backward_pass_is_refused() -> None:
    # The first wrote the gradient over what a second would read.
    logits = torch.randn(2, 3, requires_grad=True)
    found, _ = logprobs._measure(logits, torch.tensor([0, 2]), False)
    found.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()
