"""Linear layers whose float32 products on a CPU are oneDNN's (`model.matmul=onednn`).

PyTorch takes MKL for them, which on AMD's processors reaches half of the speed (docs/performance.md). `load` makes the
layers, so engine, update, reference and critic all compute with them; the embedded engine's native decoder reads
their weights and takes `onednn` for them too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmrl.errors import ConfigError

NARROW = 64
"""A weight's gradient with a side below this is MKL's: oneDNN would spend more on laying the factors out anew."""


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `F.linear` in float32 on a CPU, without gradient: (…, in), (out, in), (out,) -> (…, out)."""
    # Of a weight with gaps between its rows oneDNN takes its reference kernel: 250 ms instead of 0.6 were seen.
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


class _Product(torch.autograd.Function):
    """`onednn` with a gradient, whose two products are oneDNN's as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # As `nn.Linear`: the input is for the weight's gradient alone, and frozen weights have none.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        grad = outputs[0]
        x, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = onednn(grad, weight.t(), None)  # (…, out) times (out, in)
        rows = grad.reshape(-1, grad.shape[-1])  # (N, out)
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])  # (N, in)
            narrow = min(*weight.shape, len(rows)) < NARROW
            of_weight = rows.t() @ inputs if narrow else onednn(rows.t(), inputs.t(), None)  # (out, in)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias


class OneDnnLinear(nn.Linear):
    """`nn.Linear`, multiplied by oneDNN; under autocast, or with an input of another type, as `nn.Linear` does it."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply (…, in) -> (…, out)."""
        if input.dtype != torch.float32 or input.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return F.linear(input, self.weight, self.bias)
        product: Tensor = _Product.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return product


def use_onednn(model: nn.Module) -> None:
    """Make all plain linear layers of `model` `OneDnnLinear`, in place; weights and their names stay.

    Raises:
        ConfigError: weights that are not float32 on a CPU, or a torch without oneDNN.
    """
    weight = next(model.parameters())
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        kind = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
        raise ConfigError(
            f"model.matmul: got onednn, which computes float32 on a CPU by a torch with oneDNN; the weights are {kind}"
        )
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear
