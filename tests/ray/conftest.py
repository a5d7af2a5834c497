"""A Ray cluster of three nodes on this machine: a head that runs nothing, and two with two CPUs each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs Ray (make test-ray)")

NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    started = Cluster(True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        started.add_node(**NODE)
    os.environ["RAY_ADDRESS"] = started.address
    yield started
    del os.environ["RAY_ADDRESS"]
    ray.shutdown()
    started.shutdown()


@pytest.fixture
def two_nodes(cluster: Any) -> Any:
    """The cluster with both of its nodes, whatever a test before has killed."""
    for _ in range(2 - len(cluster.worker_nodes)):
        cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    return cluster


@pytest.fixture
def connected(two_nodes: Any) -> Iterator[Any]:
    """This process as one of the cluster's drivers."""
    from mmrl.system.ray_cluster import join_cluster

    join_cluster("auto")
    yield two_nodes
    ray.shutdown()
