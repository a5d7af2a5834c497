"""The processes of a run: how one tells that another has ended."""

from __future__ import annotations

from mmrl.system.processes import lost_a_process


def test_a_collective_without_its_peer_is_told_from_other_errors() -> None:
    from torch import distributed

    gone = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:35040"
    assert lost_a_process(RuntimeError(gone))
    assert lost_a_process(distributed.DistBackendError("NCCL error: remote process exited"))
    assert not lost_a_process(RuntimeError("size mismatch"))
