"""Full weights from the trainer's GPU to the servers', by vLLM's weight transfer over NCCL (`engine.push=nccl`).

    trainer (rank 0) ── broadcast ──┬── server 1: ranks 1 … n
                                    └── server 2: ranks n + 1 …

vLLM's trainer side broadcasts. This module gives it one client for all servers, and the weights in order. Needs vLLM in
this interpreter. Checked against vLLM 0.31 without GPUs: nothing was sent.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import torch
from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from mmrl.engines.vllm.api import VllmApi
from mmrl.errors import EngineFailure
from mmrl.system.child_process import free_port


class Weights(WeightSource):
    """The weights of a push by name, each moved to the trainer's GPU as it is sent."""

    def __init__(self) -> None:
        self.tensors: Mapping[str, torch.Tensor] = {}

    def metadata(self) -> list[ParamMeta]:
        """Return name, type and shape of each weight."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        device = torch.accelerator.current_accelerator()
        for name, tensor in self.tensors.items():
            yield name, tensor.detach().to(device)


class Control:
    """Control of several servers as one, in the form of vLLM's `VLLMWeightSyncClient`.

    vLLM calls it from threads of its own; each call waits for all servers.

    Args:
        deadline: time (`time.monotonic`) at which a call gives up.
        failed: called with the first failure at once: vLLM looks at it after its broadcast, which a server that failed
            never joins.
    """

    def __init__(self, apis: Sequence[VllmApi], deadline: float, failed: Callable[[BaseException], None]):
        self.apis, self.deadline, self.failed = apis, deadline, failed
        replies = self._each("/get_world_size", [None] * len(apis))
        self.sizes = [int(reply["world_size"]) for reply in replies]
        """Processes of each server that hold weights."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have each server's processes join the group, after those of the servers before it."""
        first = int(init_info["rank_offset"])
        offsets = [first + sum(self.sizes[:index]) for index in range(len(self.sizes))]
        self._each("/init_weight_transfer_engine", [{"init_info": {**init_info, "rank_offset": at}} for at in offsets])

    def start_weight_update(self) -> None:
        """Have the servers expect new weights."""
        self._all("/start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have the servers receive the weights of these names, types and shapes; returns when they have."""
        self._all("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have the servers use them, and forget every cached prefix."""
        self._all("/finish_weight_update", {})
        self._all("/reset_prefix_cache", {})

    def _all(self, path: str, body: Mapping[str, Any]) -> None:
        self._each(path, [body] * len(self.apis))

    def _each(self, path: str, bodies: Sequence[Mapping[str, Any] | None]) -> list[Any]:
        async def ask() -> list[Any]:
            requests = (api.request(path, body) for api, body in zip(self.apis, bodies, strict=True))
            return await asyncio.gather(*requests)

        try:
            return list(self.apis[0].io.wait(ask(), max(0.0, self.deadline - time.monotonic())))
        except BaseException as error:
            self.failed(error)
            raise


class Transfer:
    """Pushes of full weights to servers, which form a group with the trainer for as long as they are the same."""

    def __init__(self) -> None:
        self._weights = Weights()
        self._control: Control | None = None
        self._trainer: Any = None
        """vLLM's side in this process, which holds the group's communicator."""

    def forget(self) -> None:
        """Form the group anew with the next push: NCCL lets nobody leave or join."""
        self._trainer = None

    def send(self, apis: Sequence[VllmApi], tensors: Mapping[str, torch.Tensor], deadline: float) -> None:
        """Send weights to all servers, which serve them when this returns.

        Raises:
            HttpFailure: a server does not answer.
            EngineFailure: a server refuses, or NCCL fails.
            TimeoutError: it took until `deadline`.
        """
        self._weights.tensors = tensors
        # The optimizer's step: vLLM's streams do not wait for the one that it ran on.
        torch.accelerator.synchronize()
        # In a thread, since a broadcast whose receiver has ended never returns; a daemon, so that the run can end.
        device, done = torch.accelerator.current_device_index(), Future[None]()

        def failed(error: BaseException) -> None:
            with suppress(InvalidStateError):  # the first one counts
                done.set_exception(error)

        def work() -> None:
            try:
                torch.accelerator.set_device_index(device)
                self._send(apis, deadline, failed)
            except BaseException as error:
                failed(error)
            else:
                done.set_result(None)

        threading.Thread(target=work, daemon=True, name="weights").start()
        try:
            done.result(max(0.0, deadline - time.monotonic()))
        except BaseException as error:
            self.forget()
            if isinstance(error, (RuntimeError, ValueError)):
                raise EngineFailure(f"vLLM's weight transfer failed: {error}") from error
            raise

    def _send(self, apis: Sequence[VllmApi], deadline: float, failed: Callable[[BaseException], None]) -> None:
        if self._trainer is None or self._control is None or [*self._control.apis] != [*apis]:
            self._control = Control(apis, deadline, failed)
            init = NCCLTrainerInitInfo(
                master_address=_address_for([api.url for api in apis]),
                master_port=free_port(),
                world_size=1 + sum(self._control.sizes),
                rank=0,
            )
            self._trainer = WeightTransferTrainerFactory.trainer_init(init, client=self._control, source=self._weights)
        self._control.deadline, self._control.failed = deadline, failed
        self._trainer.send_weights()


def _address_for(urls: Sequence[str]) -> str:
    """Return the address of this machine that all servers can reach: a local one only where all of them are local."""
    addresses = []
    for url in urls:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((urlsplit(url).hostname, 9))  # sends nothing
            addresses.append(str(probe.getsockname()[0]))
    return max(addresses, key=lambda address: not address.startswith("127."))
