"""Keys of the run config act where they should: each test fails when its key does nothing, or something else."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord

from tests.harness import Outcome, federate


def trained_by(outcome: Outcome, server_round: int) -> set[str]:
    """Return the clients that were asked to train in a round."""
    asked = [m for m in outcome.grid.messages if m.metadata.message_type == "train"]
    return {str(m.metadata.dst_node_id - 1000) for m in asked if m.metadata.group_id == str(server_round)}


def rates(outcome: Outcome) -> dict[int, set[float]]:
    """Return the learning rates that messages said, by round."""
    found: dict[int, set[float]] = {}
    for message in outcome.grid.messages:
        config = message.content["config"]
        assert isinstance(config, ConfigRecord)
        if message.metadata.message_type == "train":
            found.setdefault(int(message.metadata.group_id), set()).add(float(str(config["lr"])))
    return found


def test_lr_decay_is_of_the_rounds_before(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 2, method="fedper", rounds=4, lr=0.08, lr_decay=0.5, local_epochs=1)
    assert rates(outcome) == {1: {0.08}, 2: {0.04}, 3: {0.02}, 4: {0.01}}


@pytest.mark.parametrize(
    ("keys", "drawn"),
    [
        ({"participation": 0.5}, 4),
        ({"participation": 0.01}, 1),
        ({"participation": 0.01, "min_replies": 3}, 3),
        ({"participation": 0.5, "min_replies": 3}, 4),
        ({"participation": 0.56}, 4),  # 4.48
        ({"participation": 0.57}, 5),  # 4.56
        ({"participation": 1.0}, 8),
    ],
)
def test_as_many_clients_are_drawn_as_participation_and_min_replies_say(
    tmp_path: Path, keys: dict[str, Any], drawn: int
) -> None:
    outcome = federate(tmp_path, 8, method="local", local_epochs=1, **keys)
    first, second = (trained_by(outcome, server_round) for server_round in (1, 2))
    assert len(first) == len(second) == drawn
    if drawn == 4:
        assert first != second


def test_evaluate_every_and_the_last_round(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 4, method="fedavg", rounds=5, evaluate_every=2, participation=0.5, local_epochs=1)
    measured = [len(line["clients"]) for line in outcome.history]
    asked = {m.metadata.group_id for m in outcome.grid.messages if m.metadata.message_type == "evaluate"}
    assert asked == {"2", "4", "5"}
    assert measured == [2, 4, 2, 4, 4]
