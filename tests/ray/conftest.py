"""A Ray cluster of three nodes on this machine: a head that runs nothing, and two with two CPUs each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

collect_ignore_glob = ["test_*"] if find_spec("ray") is None else []
NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
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
    import ray

    from mmrl.system.ray_cluster import join_cluster

    join_cluster("auto")
    yield two_nodes
    ray.shutdown()
