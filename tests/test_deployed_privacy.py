"""Differential privacy between real processes: what leaves, who stops, what a killed node has still paid for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.privacy.accounting import epsilon_of
from common.privacy.ledger import Ledger
from tests.deployment import Deployment, finish, until
from tests.local import histories, read_history

KEYS: dict[str, Any] = {"method": "fedper", "min_clients": 2, "num_classes": 3, "local_epochs": 2, "batch_size": 20}
KEYS |= {"privacy__unit": "example", "privacy__noise": 2.0, "privacy__epsilon": 0.0}


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Deployment]:
    """A SuperLink, and own data and policies for the nodes a and b."""
    deployment = Deployment(tmp_path / "deployment")
    for place, name in enumerate("ab"):
        rng = np.random.default_rng(place)
        folder = deployment.folder / f"data-{name}"
        folder.mkdir()
        for part, samples in (("train", 120), ("test", 60)):
            y = np.arange(samples) % 3
            x = rng.normal(size=(samples, 8)).astype(np.float32) + y[:, None]
            np.savez(folder / f"{part}.npz", x=x.astype(np.float32), y=y)
        (deployment.folder / f"policy-{name}.yaml").write_text("privacy: [example]\nmax-epsilon: 6\ndelta: 1e-5\n")
    try:
        yield deployment
    finally:
        deployment.end()


def join(deployment: Deployment, name: str) -> Any:
    data, policy = deployment.folder / f"data-{name}", deployment.folder / f"policy-{name}.yaml"
    return deployment.node(name, "--data-dir", data, "--policy", policy)


def ledger(deployment: Deployment, name: str) -> Ledger:
    return Ledger.of(deployment.folder / f"state-{name}", name)


@pytest.mark.slow
def test_nodes_stop_at_their_budget_over_all_runs(two: Deployment) -> None:
    for name in "ab":
        join(two, name)
    first = two.folder / "first"
    log = finish(two.run(output_dir=str(first), rounds=2, **KEYS))
    assert "Client a joined (it does not tell its samples; it rounds accuracies)" in log
    rounds = read_history(histories(first)[0].parent)
    for line in rounds:
        assert line["accuracy"]["after"]["test"] is None
        assert line["loss"] is None
        assert {one["seconds"] for one in line["clients"].values()} == {None}
    spent = {name: epsilon_of([line.release for line in ledger(two, name).lines()], 1e-5) for name in "ab"}
    assert {name: one["epsilon"] for name, one in rounds[-1]["clients"].items()} == spent
    # The second run goes on with the same ledgers, and ends where they do: after 9 more rounds with a noised count of
    # 120 examples, as there are, after 25 if it were 300.
    second = two.folder / "second"
    finish(two.run(output_dir=str(second), rounds=30, **KEYS))
    refused = read_history(histories(second)[0].parent)[-1]["refused"]
    assert {one["client"] for one in refused} == {"a", "b"}
    assert all(one["reason"].startswith("this node's policy has max-epsilon = 6 ") for one in refused)
    for name in "ab":
        releases = [line.release for line in ledger(two, name).lines()]
        assert spent[name] < epsilon_of(releases, 1e-5) <= 6
    # A run that protects nothing is none for them.
    plain = two.run(output_dir=str(two.folder / "plain"), rounds=1, method="fedper", min_clients=2, round_timeout=15.0)
    plain.wait_for("this node's policy has privacy = example, and privacy.unit = 'none'")
    plain.end()


@pytest.mark.slow
def test_what_a_killed_node_has_paid_for_stays_paid(two: Deployment) -> None:
    nodes = {name: join(two, name) for name in "ab"}
    run = two.run(rounds=6, **(KEYS | {"local_epochs": 60, "privacy__noise": 20.0}))
    until(lambda: len(ledger(two, "a").lines()) >= 4, "no third round")
    nodes["a"].kill()
    before = ledger(two, "a").lines()
    join(two, "a")
    finish(run)
    after = ledger(two, "a").lines()
    assert after[: len(before)] == before
    trained = [line["clients"]["a"] for line in two.history() if line["clients"].get("a", {}).get("trained")]
    # What it says at the end is what the ledger has, the round included that was lost with the process.
    releases = [line.release for line in after]
    assert trained[-1]["epsilon"] == epsilon_of(releases, 1e-5)
    assert sum(line.steps for line in after if line.rate < 1) >= len(trained) * before[-1].steps
