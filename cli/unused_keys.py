"""Keys that a user gave and that no run uses; imported when a command runs, for it imports PyTorch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from common.config import own_keys
from data.partition import BY_ALPHA, BY_CLASSES

# Keys that only some values of another key use.
_USED_BY = {
    "alpha": ("partition", BY_ALPHA),
    "classes-per-client": ("partition", BY_CLASSES),
    "shards-per-client": ("partition", ("shards",)),
    "trim": ("aggregation", ("trimmed-mean",)),
}


def tell_unused(given: Mapping[str, Iterable[str]], configs: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each key that no run with these whole run configs uses.

    Args:
        given: keys by where they were given, such as ``--grid``.
        configs: of all runs.
    """
    for place, keys in given.items():
        for line in without_effect(keys, configs, place):
            click.echo(f"floret: {line}", err=True)


def without_effect(keys: Iterable[str], configs: Sequence[Mapping[str, Any]], place: str) -> list[str]:
    """Return a line for each of ``keys`` that no run uses; ``place`` says where they were given."""
    found = []
    for key in keys:
        other, values = _USED_BY.get(key, ("", ()))
        if key.startswith("privacy.") and key != "privacy.unit":
            other, values = "privacy.unit", ("example", "client")
        elif key != "privacy.unit" and not any(key in own_keys(config) for config in configs):
            other, values = "method", (key.partition(".")[0],)
        if other and not any(config[other] in values for config in configs):
            found.append(f"{place} {key} changes nothing: it needs {other} = {' or '.join(map(repr, values))}")
    return found
