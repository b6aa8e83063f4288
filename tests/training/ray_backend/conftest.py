"""Clusters for the tests here: threads that look like Ray, and Ray itself where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from fake_ray import fake_cluster
from ray_environment import join_cluster

CPUS = 8
"""Places for actors; they wait far more than they work."""


@pytest.fixture(scope="session")
def real_ray() -> Iterator[None]:
    """A cluster that every backend of the tests joins, since one that starts its own takes seconds."""
    join_cluster(CPUS)
    import ray

    yield
    ray.shutdown()


@pytest.fixture(params=["threads", pytest.param("ray", marks=pytest.mark.slow)])
def cluster(request: pytest.FixtureRequest) -> Iterator[str]:
    """Once with threads, once with Ray; its name."""
    if request.param == "ray":
        if find_spec("ray") is None:
            pytest.skip("Ray is not installed")
        request.getfixturevalue("real_ray")
        yield "ray"
    else:
        with fake_cluster():
            yield "threads"
