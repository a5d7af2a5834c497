"""What TRL and Hugging Face want to have or to show, and mmrl does not: inert stand-ins.

Part of `trainer`; used by `trl_trainer` alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import logging as hf_logging

# torch 2.13's newer name for it is not one that accelerate passes on, nor one that torch 2.9 knows.
warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)


def no_reward(*args: Any, **kwargs: Any) -> list[float | None]:
    """Stands where TRL wants a reward source."""
    raise RuntimeError("rewards come from mmrl.credit; TRL's own reward path must never run")


def one_device(args: Any) -> Any:
    """One process trains on one device, however many are visible (`Trainer` would wrap in DataParallel)."""
    if args.n_gpu > 1:
        args._n_gpu = 1
    if args.device.type == "cpu":
        # Several processes call it cpu:0, a name under which torch cannot load the optimizer of a checkpoint.
        args.__dict__["_setup_devices"] = torch.device("cpu")
    return args


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Saving shows a bar per shard, in the middle of mmrl's own display."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
