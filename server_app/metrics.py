"""What is reported of the accuracies of many clients."""

import math
from collections.abc import Iterable

import numpy as np

from strategies.core import ClientResult


def spread(accuracies: list[float], samples: list[int]) -> dict[str, float]:
    """Return how accuracies in [0, 1] lie over clients.

    ``mean`` (every client counts the same), ``weighted_mean`` (by the samples that each accuracy was measured on),
    ``std`` (population standard deviation over clients), ``worst_decile`` (mean over the worst tenth of the clients,
    rounded up).
    """
    values = np.array(accuracies)
    worst = np.sort(values)[: math.ceil(len(values) / 10)]
    return {
        "mean": float(values.mean()),
        "weighted_mean": float(np.average(values, weights=samples)),
        "std": float(values.std()),
        "worst_decile": float(worst.mean()),
    }


def accuracies(results: Iterable[ClientResult]) -> dict[str, dict[str, dict[str, float] | None]]:
    """Return the spread before and after local training, on the test and the validation split; None if unmeasured."""
    results = list(results)
    table: dict[str, dict[str, dict[str, float] | None]] = {}
    for when in ("before", "after"):
        table[when] = {}
        for split in ("test", "validation"):
            measured = [result for result in results if f"{when}.{split}" in result.metrics]
            values = [result.metrics[f"{when}.{split}"] for result in measured]
            samples = [getattr(result.client, split) for result in measured]
            table[when][split] = spread(values, samples) if values else None
    return table
