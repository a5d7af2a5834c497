"""Additions to accelerate's FSDP2: a second trained module, a frozen one, and state that one process reads too.

Part of `trainer`. accelerate shards one model together with its optimizer, and writes checkpoints that only as many
processes can load. Here the critic and the reference are sharded in the policy's manner (a unit per decoder layer, the
profile's offload), and weights and optimizer are gathered into the very files that one process writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from accelerate.utils import DistributedType, recursively_apply
from peft import PeftModel
from safetensors import safe_open
from torch.distributed.tensor import DTensor, distribute_tensor

from mmrl.errors import CheckpointError
from mmrl.models.load import saved_state

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

Model = TypeVar("Model", bound=torch.nn.Module)

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
"""transformers' names for what one process writes."""


def is_sharded(accelerator: Accelerator) -> bool:
    """Return True if this run's processes share weights by FSDP2."""
    return bool(accelerator.is_fsdp2)


def shares_weights(accelerator: Accelerator) -> bool:
    """Return True if no process of this run holds the weights whole: by FSDP, or by DeepSpeed."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


@contextmanager
def loaded_once() -> Iterator[None]:
    """Within it, FSDP2's processes load weights once on each machine, and the others hold zeros until they are sharded.

    Only for what is sharded, since that alone gets the main process's weights.
    """
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    before = os.environ.get(name, "false")
    os.environ[name] = "true"
    try:
        yield
    finally:
        # accelerate sets it anew for the rest of the process.
        os.environ[name] = before


def exact_outputs(accelerator: Accelerator) -> None:
    """Compute in the precision that accelerate chose, but sum gradients and hand on outputs as they are.

    accelerate would cast what a unit returns to bfloat16, and the head returns log-probabilities here.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin = accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy is not None:
        computed = plugin.mixed_precision_policy.param_dtype
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32)


def shard(model: Model, accelerator: Accelerator) -> Model:
    """Shard a whole transformer in place, as accelerate shards the policy; weights come from the main process."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    return cast("Model", fsdp2_prepare_model(accelerator, model))


def shard_head(module: torch.nn.Module, accelerator: Accelerator) -> torch.nn.Module:
    """Shard the root around a sharded backbone or none, in place: its own weights stay in full precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plugin = accelerator.state.fsdp_plugin
    # Not `shard`: a value head of one row is no decoder layer, and in bfloat16 its values would be too coarse.
    fully_shard(module, mp_policy=MixedPrecisionPolicy(), offload_policy=plugin.cpu_offload)
    return module


def gather_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its shards, on the CPU; all processes must call this."""
    if isinstance(value, DTensor):
        # Offloaded shards wait on the CPU, the processes meet on the mesh's device.
        value = cast("DTensor", value.to(value.device_mesh.device_type)).full_tensor()
    return value.detach().cpu()


def local(value: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this process holds."""
    return value.to_local() if isinstance(value, DTensor) else value


def like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a whole `value`, laid out as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return value
    mesh = parameter.device_mesh
    part = distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    return part.to(parameter.device)


def whole_norm(norm: torch.Tensor | float) -> float:
    """Convert a norm to a number; over shards, of all of them."""
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def without_tied(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gathered weights, each once: gathered one by one, tied weights have become two."""
    tied = dict(model.named_parameters(remove_duplicate=False)).keys()
    extra = tied - dict(model.named_parameters()).keys()
    return {name: value for name, value in state.items() if name not in extra}


def save_optimizer(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, folder: Path, main: bool
) -> None:
    """Write `optimizer.state_dict()` with whole tensors; all processes must call this, the main one writes."""
    state = optimizer.state_dict()
    # Every process walks the state in the same order: gathering a shard takes all of them at once.
    per_parameter = recursively_apply(gather_tensor, state["state"])
    if main:
        torch.save({**state, "state": per_parameter}, folder / OPTIMIZER)
        torch.save(scheduler.state_dict(), folder / SCHEDULER)


def load_optimizer(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, folder: Path
) -> None:
    """Read what `save_optimizer` wrote, or the Trainer of one process."""
    # Read where it is needed: of a large model, each process touches its own part of the file.
    state = torch.load(folder / OPTIMIZER, map_location="cpu", mmap=True, weights_only=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Step counters are scalars of no parameter's shape, and stay whole on every process.
    sharded = {
        index: {
            name: like(value, parameters[index]) if getattr(value, "shape", None) == parameters[index].shape else value
            for name, value in values.items()
        }
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": sharded})
    scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))


def load_full(model: PreTrainedModel, folder: Path) -> None:
    """Read full weights from a checkpoint into a sharded model; all processes must call this.

    Raises:
        CheckpointError: as `saved_state`.
    """
    with loaded_once():
        state = saved_state(model, folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            sharded = cast("DTensor", parameter)
            mesh = sharded.device_mesh
            # From the main process: those beside it on its machine hold zeros.
            part = distribute_tensor(state[name].to(mesh.device_type), mesh, sharded.placements)
            sharded.copy_(part.to(sharded.device))


def load_adapter(model: PeftModel, folder: Path) -> None:
    """Read the policy's adapter from a checkpoint's safetensors into a sharded model.

    Raises:
        CheckpointError: the file lacks a weight.
    """
    active = f".{model.active_adapter}."
    names = {name.replace(active, "."): p for name, p in model.named_parameters() if active in name}
    with torch.no_grad(), safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        if missing := sorted(names.keys() - file.keys()):
            raise CheckpointError(f"{folder}: lacks weights of this adapter, the first: {missing[0]}")
        for name, parameter in sorted(names.items()):  # one order on all processes
            parameter.copy_(like(file.get_tensor(name), parameter))
