"""Memory of a step's record, on a device that is not here."""

import torch

from mmrl.stages.step_log import memory


def test_without_a_gpu_the_host_alone():
    assert set(memory()) == {"memory/rss_mb"}


def test_the_peak_of_this_process_and_what_others_hold(monkeypatch):
    gib, reset = 2**30, []
    device = {
        "is_available": lambda: True,
        "mem_get_info": lambda: (30 * gib, 80 * gib),
        "memory_reserved": lambda: 10 * gib,
        "max_memory_reserved": lambda: 25 * gib,
        "reset_peak_memory_stats": lambda: reset.append(1),
    }
    for name, answer in device.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    found = memory()
    # 50 are in use, 10 of them ours; ours were 25 at most.
    assert found["memory/device_mb"] == 65 * gib / 1e6
    assert found["memory/device_share"] == 65 / 80
    assert reset == [1]
