"""One Ray cluster for all tests, which must leave no name in shared memory."""

import os
import warnings
from collections.abc import Iterator

import pytest
import ray
from on_ray.nodes import Nodes


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    # Ray puts the current folder into its workers' path; the checkout has unbuilt source only.
    before = os.getcwd()  # noqa: PTH109
    os.chdir(tmp_path_factory.mktemp("ray"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = Nodes()
        try:
            with made.on(0):  # this process, the chief, is on that node
                yield made
            left = made.left()
        finally:
            made.end()
        for name in left:
            os.unlink(f"/dev/shm/{name}")  # noqa: PTH108, S108
        assert left == [], "names in shared memory that no node has removed"
    finally:
        os.chdir(before)


@pytest.fixture(autouse=True)
def on_the_chiefs_node(request: pytest.FixtureRequest, namespace: str) -> Iterator[None]:  # noqa: ARG001
    """Run a test that uses `nodes` in the namespace of the chief's node.

    Afterwards the three nodes must still be alive.
    """
    if "nodes" not in request.fixturenames:
        yield
        return
    nodes: Nodes = request.getfixturevalue("nodes")
    with nodes.on(0):
        yield
    alive = {each["NodeID"] for each in ray.nodes() if each["Alive"]}
    assert alive >= set(map(nodes.id, range(3))), "the next test finds a node less"
