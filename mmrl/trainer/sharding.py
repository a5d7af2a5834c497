"""FSDP2 beside what accelerate does of it: a second trained module, a frozen one, and state that one process reads too.

Part of `trainer`. accelerate shards one model together with its optimizer, and writes checkpoints that only as many
processes can load. Here the critic and the reference are sharded in the policy's manner (a unit per decoder layer, the
profile's offload), and weights and optimizer are gathered into the very files that one process writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from torch.distributed.tensor import DTensor, distribute_tensor

from mmrl.errors import CheckpointError

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
"""transformers' names for what one process writes."""


def is_sharded(accelerator: Any) -> bool:
    """Whether this run's processes share weights by FSDP2."""
    return bool(accelerator.is_fsdp2)


def exact_outputs(accelerator: Any) -> None:
    """Compute in the precision that accelerate chose, but sum gradients and hand on outputs as they are.

    accelerate would cast what a unit returns to bfloat16, and the head returns log-probabilities here.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin = accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy is not None:
        computed = plugin.mixed_precision_policy.param_dtype
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32)


def shard(model: Any, accelerator: Any) -> Any:
    """A whole transformer, in place, as accelerate shards the policy; weights come from the main process."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    return fsdp2_prepare_model(accelerator, model)


def shard_head(module: Any, accelerator: Any) -> Any:
    """The root around a sharded backbone or around none, in place: what it holds itself stays in full precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plugin = accelerator.state.fsdp_plugin
    return fully_shard(module, mp_policy=MixedPrecisionPolicy(), offload_policy=plugin.cpu_offload)


def whole(value: Any) -> Any:
    """A tensor with all its shards, on the CPU; all processes must ask. Anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        # Offloaded shards wait on the CPU, the processes meet on the mesh's device.
        together: Any = value.to(value.device_mesh.device_type)
        value = together.full_tensor()
    return value.detach().cpu()


def like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This process's part of a whole `value`, laid out as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return value
    mesh = parameter.device_mesh
    part = distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    return part.to(parameter.device)


def as_number(norm: Any) -> float:
    """A norm as a number; over shards, of all of them."""
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def gathered_optimizer(optimizer: Any) -> dict[str, Any]:
    """`optimizer.state_dict()` with whole tensors; all processes must ask."""
    state: dict[str, Any] = optimizer.state_dict()
    per_parameter = {
        index: {name: whole(value) for name, value in values.items()} for index, values in state["state"].items()
    }
    return {**state, "state": per_parameter}


def load_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Take over what `gathered_optimizer` gave, or one process's `optimizer.state_dict()`."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {
        index: {
            name: like(value, parameters[index]) if getattr(value, "shape", None) == parameters[index].shape else value
            for name, value in values.items()
        }
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": own})


def load_weights(model: Any, folder: Path) -> None:
    """Read the policy's weights, or its adapter, from a checkpoint's safetensors into a sharded model.

    Raises:
        CheckpointError: the files lack a weight.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    if isinstance(model, PeftModel):
        active = f".{model.active_adapter}."
        names = {name.replace(active, "."): p for name, p in names.items() if active in name}
    pattern = "adapter_model*.safetensors" if isinstance(model, PeftModel) else "model*.safetensors"
    loaded = set()
    with torch.no_grad():
        for file in sorted(folder.glob(pattern)):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys() & names.keys():
                    names[name].copy_(like(opened.get_tensor(name), names[name]))
                    loaded.add(names[name])
    missing = sorted(name for name, parameter in names.items() if parameter not in loaded)
    if missing:
        raise CheckpointError(f"{folder}: lacks weights of this model, the first: {missing[0]}")
