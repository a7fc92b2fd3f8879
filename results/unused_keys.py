"""Keys that were given and that no run uses."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.config import own_keys
from data.partition import BY_ALPHA, BY_CLASSES

# Keys that only some values of another key use.
_USED_BY = {
    "alpha": ("partition", BY_ALPHA),
    "classes-per-client": ("partition", BY_CLASSES),
    "shards-per-client": ("partition", ("shards",)),
    "trim": ("aggregation", ("trimmed-mean",)),
}


def without_effect(keys: Iterable[str], configs: Sequence[Mapping[str, Any]], given: str) -> list[str]:
    """Return a line for each of ``keys`` that no run with these whole run configs uses; ``given`` says where it was."""
    found = []
    for key in keys:
        other, values = _USED_BY.get(key, ("", ()))
        if key.startswith("privacy.") and key != "privacy.unit":
            other, values = "privacy.unit", ("example", "client")
        elif key != "privacy.unit" and not any(key in own_keys(config) for config in configs):
            other, values = "method", (key.partition(".")[0],)
        if other and not any(config[other] in values for config in configs):
            found.append(f"{given} {key} changes nothing: it needs {other} = {' or '.join(map(repr, values))}")
    return found
