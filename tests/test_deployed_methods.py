"""Every method between real processes: a SuperLink, three nodes and gRPC give the numbers of one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strategies import METHODS
from tests.deployment import Deployment, finish
from tests.harness import ON_MLP, federate, timeless
from tests.local import histories, read_history

NODES = 3


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("three") / "deployment")
    try:
        nodes = [deployment.node(str(i), "--partition", f"{i}/{NODES}", wait=False) for i in range(NODES)]
        for node in nodes:
            node.wait_for("SuperNode ID")
        yield deployment
    finally:
        deployment.end()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_real_nodes_give_the_numbers_of_one_process(three: Deployment, tmp_path: Path, method: str) -> None:
    keys: dict[str, Any] = {"method": method, "rounds": 3, "local_epochs": 1, "min_clients": NODES}
    # In each round somebody is absent, and measures what it has.
    keys |= {"participation": 0.7, "evaluate_every": 1, **ON_MLP.get(method, {})}
    output = three.folder / method
    finish(three.run(output_dir=str(output), **keys))
    (history,) = histories(output)
    assert timeless(read_history(history.parent)) == timeless(federate(tmp_path, NODES, **keys).history)
    taken = {name for line in read_history(history.parent) for name, c in line["clients"].items() if c["trained"]}
    for name in taken:
        assert three.rounds_kept(name, method), name
