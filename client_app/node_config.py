"""What a node config says of whose data a client has: a partition of the run's, or its own."""

from collections.abc import Mapping
from typing import Any

from common.errors import ConfigError


def names_partition(node: Mapping[str, Any]) -> bool:
    """Return whether a node config says that the client has a partition of the run's dataset, not data of its own."""
    return "partition-id" in node and "num-partitions" in node


def partition_of(node: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return which partition of the run's dataset a node config names, from 0, and of how many; None if it names none.

    Raises:
        ConfigError: it has one of the two keys without the other, or there is no such partition.
    """
    if not names_partition(node):
        for key, other in (("partition-id", "num-partitions"), ("num-partitions", "partition-id")):
            if key in node:
                raise ConfigError(f"the node config has {key} without {other}; a node with data of its own has neither")
        return None
    place, count = node["partition-id"], node["num-partitions"]
    if type(count) is not int or count < 1:
        raise ConfigError(f"num-partitions = {count!r:.60} in the node config: must be a whole number, at least 1")
    if type(place) is not int or not 0 <= place < count:
        raise ConfigError(
            f"partition-id = {place!r:.60} in the node config: must be a whole number from 0 to num-partitions - 1 "
            f"= {count - 1}"
        )
    return place, count
