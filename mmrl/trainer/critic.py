"""The critic of the PPO family: one scalar per token, from its own backbone or from the policy's.

Part of `trainer`. V_t is read where the policy predicts token t: it values the state before that token. Three kinds
(`algo.critic`), in falling cost:

- `separate`: a copy of the policy's backbone as it was at the start, all of it trained, and a linear head (the papers);
- `adapter`: a second LoRA adapter on the policy's frozen backbone, and a head;
- `head`: a head on the policy's own hidden states; its gradient stops there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from peft import PeftModel
from safetensors.torch import load_file

from mmrl.config.algo import CriticConfig
from mmrl.errors import CheckpointError
from mmrl.models.load import causal_lm
from mmrl.trainer.adapters import ParameterGroup
from mmrl.trainer.logprobs import hidden_states
from mmrl.trainer.objective import value_loss
from mmrl.trainer.packing import Pack
from mmrl.trainer.settings import Settings
from mmrl.trainer.sharding import gather_tensor, is_sharded, like, shard, shard_head, whole_norm

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedConfig, PreTrainedModel

    PolicyModel: TypeAlias = PreTrainedModel | PeftModel

FILE = "critic.safetensors"
ADAPTER = "critic"
"""Name of the critic's adapter inside the policy's peft model."""


class ValueHead(torch.nn.Module):
    """Hidden states to scalars in full precision, with or without a backbone of its own below."""

    def __init__(
        self,
        config: PreTrainedConfig,
        backbone: PreTrainedModel | None,
        dtype: torch.dtype,
        seed: int,
        zero: bool,
    ):
        super().__init__()
        text = config.get_text_config()
        self.backbone = backbone
        self.head = torch.nn.Linear(text.hidden_size, 1, dtype=dtype)
        # Its own generator: the head's start depends on the seed alone, not on what was drawn before it.
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            # The range of the whole model, as HF's token classification has it: 1.2 in the values of a 7B model.
            deviation = 0.0 if zero else getattr(text, "initializer_range", 0.02)
            self.head.weight.copy_(torch.randn(self.head.weight.shape, generator=generator) * deviation)
            self.head.bias.zero_()

    def forward(self, pack: Pack, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Compute (N,) values; `hidden` (N, H) without a backbone of its own."""
        if self.backbone is not None:
            states = self.backbone(**pack.inputs).last_hidden_state  # (R, W, H)
            hidden = states.reshape(-1, states.shape[-1])[pack.positions]
        assert hidden is not None
        # Full precision whatever the policy's: returns differ by less than a bfloat16 step of their size.
        with torch.autocast(hidden.device.type, enabled=False):
            values: torch.Tensor = self.head(hidden.to(self.head.weight.dtype))  # (N, 1)
        # A sum over one column: not a view, on which FSDP2's hooks could get lost.
        return values.sum(-1)


def trained_in_float32(model: torch.nn.Module) -> None:
    """Trained weights to float32: an AdamW update of 1e-6 is below bfloat16's resolution and would round to nothing."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


class Critic:
    """Owner of the value head and of whatever is trained with it.

    Build it before the policy is wrapped (`separate` copies the backbone), then `attach` it to the wrapped policy.
    """

    def __init__(self, settings: Settings, config: CriticConfig, model: PreTrainedModel):
        self.config = config
        self.lr = settings.train.lr * config.critic_lr_factor
        """Learning rate after the warm-up."""
        self.adapter = settings.lora(model, dropout=False) if config.critic == "adapter" else None
        dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        backbone = None
        if config.critic == "separate":
            # The transformer below the head, adapters included.
            backbone = copy.deepcopy(cast("PreTrainedModel", causal_lm(model).base_model)).requires_grad_(True)
            if settings.model.gradient_checkpointing:
                backbone.gradient_checkpointing_enable()
        self.module = ValueHead(model.config, backbone, dtype, settings.seed, config.critic_init == "zero")
        trained_in_float32(self.module)
        self.wrapped: torch.nn.Module = self.module
        self.policy: PolicyModel = model
        self.restart(torch.device("cpu"))

    def attach(self, policy: PolicyModel, accelerator: Accelerator) -> None:
        """Put the critic beside the policy: same device, same processes; adds its adapter."""
        self.policy = policy
        if self.adapter is not None:
            cast("PeftModel", policy).add_adapter(ADAPTER, self.adapter)
        if is_sharded(accelerator):
            if self.module.backbone is not None:
                shard(self.module.backbone, accelerator)
            self.wrapped = shard_head(self.module, accelerator)
        else:
            self.module.to(accelerator.device)
            self.wrapped = accelerator.prepare_model(self.module)
        self.restart(accelerator.device)

    def restart(self, device: torch.device) -> None:
        """Begin the sums of a step: loss, clipped tokens, tokens."""
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.grad_norms: list[float] = []

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return everything that the critic trains, by the name it is saved under."""
        parameters = dict(self.module.named_parameters())
        if self.adapter is not None:
            parameters |= {n: p for n, p in self.policy.named_parameters() if f".{ADAPTER}." in n}
        return parameters

    def groups(self, weight_decay: float) -> list[ParameterGroup]:
        """Return optimizer groups: matrices decay, vectors do not."""
        parameters = self.named_parameters().values()
        # Always two groups, even where one is empty: a checkpoint's optimizer state lists groups by number.
        matrices, vectors = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
        return [
            {"params": matrices, "weight_decay": weight_decay, "lr": self.lr},
            {"params": vectors, "weight_decay": 0.0, "lr": self.lr},
        ]

    def factor(self, update: int) -> float:
        """Return the learning-rate factor of optimizer step `update` (from 0): linear warm-up, then constant."""
        return min(1.0, update / self.config.critic_warmup_steps) if self.config.critic_warmup_steps else 1.0

    def values(self, pack: Pack, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Compute a pack's values, (N,). `hidden`: the policy's, detached, if known and the kind is `head`."""
        if self.config.critic == "separate":
            return cast("torch.Tensor", self.wrapped(pack))
        if self.config.critic == "adapter" or hidden is None:
            # The head's own gradient needs no graph of the policy; the adapter's does.
            with nullcontext() if self.config.critic == "adapter" else torch.no_grad():
                hidden = hidden_states(self.policy, self.policy.get_output_embeddings(), pack)
        return cast("torch.Tensor", self.wrapped(pack, hidden))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the policy's backbone with the critic's adapter, if there is one."""
        if self.adapter is None:
            yield
            return
        policy = cast("PeftModel", self.policy)
        before = policy.active_adapter
        policy.set_adapter(ADAPTER)
        try:
            yield
        finally:
            policy.set_adapter(before)

    def train_on(
        self, pack: Pack, hidden: torch.Tensor | None, accelerator: Accelerator, autocast: AbstractContextManager[None]
    ) -> None:
        """Forward and backward of the value loss of one pack; `hidden` as in `values`."""
        kept = pack.rewarded
        index = pack.entry_index[kept]  # (E,) into the pack's N, less the tokens of distillation
        self.module.train()
        # Backward inside `active` too: gradient checkpointing forwards again, and must do so with the same adapter.
        with self.active():
            with autocast:
                values = self.values(pack, hidden)
            result = value_loss(
                values[index], pack.old_values[index], pack.returns[kept], pack.weights[kept], self.config.value_clip
            )
            # Times the processes, whose gradients are averaged: the loss is a sum over all of them.
            accelerator.backward(result.loss * accelerator.num_processes)
        if not pack.filler:
            self.sums[0] += result.loss.detach().double()
            self.sums[1] += result.clipped.double().sum()
            self.sums[2] += index.numel()

    def clip(self, limit: float, accelerator: Accelerator) -> float:
        """Clip the critic's gradients on their own; returns the norm before."""
        norm = whole_norm(accelerator.clip_grad_norm_(list(self.named_parameters().values()), limit))
        self.grad_norms.append(norm)
        return norm

    def metrics(self, reduce: Callable[[torch.Tensor, str], torch.Tensor]) -> dict[str, float]:
        """Return the step's metrics `critic/…`."""
        loss, clipped, tokens = reduce(self.sums, "sum").tolist()
        updates = max(len(self.grad_norms), 1)
        return {
            "critic/loss": loss / updates,
            "critic/grad_norm": sum(self.grad_norms) / updates,
            "critic/clip_share": clipped / tokens if tokens else 0.0,
        }

    def state(self) -> dict[str, torch.Tensor]:
        """Return the critic's trained weights, whole and on the CPU; processes that share it must all call this."""
        return {name: gather_tensor(p).contiguous() for name, p in self.named_parameters().items()}

    def load(self, folder: Path) -> None:
        """Read a `state` from `folder/critic.safetensors`.

        Raises:
            CheckpointError: no critic there, or another kind.
        """
        parameters = self.named_parameters()
        try:
            saved = load_file(folder / FILE)
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: holds no critic ({FILE})") from None
        if saved.keys() != parameters.keys():
            raise CheckpointError(f"{folder}: its critic is of another kind than algo.critic={self.config.critic}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(like(saved[name], parameter))
