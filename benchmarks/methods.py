"""A round of every method against FedAvg's, with the same clients on the local engine."""

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.measure import Row, pair
from strategies import METHODS
from tests.local import Local

CLIENTS, SAMPLES = 20, 400
# With many clients those whose cost depends on how many others there are.
MANY, FEW_SAMPLES = 100, 80
OF_OTHERS = ("apple", "dfedavgm", "dispfl", "fedcac", "fedpac", "fedpa", "fedgh", "ua-pdfl")
KEYS: dict[str, Any] = {"dataset": "npz", "partition": "iid", "model": "cnn2", "local_epochs": 1, "rounds": 4}


def run(repeats: int) -> list[Row]:
    """Return a row for each method with 20 clients, and for some with 100."""
    seconds: dict[tuple[str, int], list[float]] = {}
    local = Local()
    try:
        with tempfile.TemporaryDirectory() as name:
            for clients, samples, methods in ((CLIENTS, SAMPLES, METHODS), (MANY, FEW_SAMPLES, OF_OTHERS)):
                data = _images(Path(name) / str(clients), clients * samples)
                for _ in range(repeats):
                    for method in ["fedavg", *(m for m in methods if m != "fedavg")]:
                        result = local.run(Path(name) / "runs", clients, method=method, data_dir=str(data), **KEYS)
                        # The first round builds models, and most methods have less to do in it.
                        spent = median(float(line["seconds"]) for line in result.history[1:])
                        seconds.setdefault((method, clients), []).append(spent)
                        print(f"  {method}, {clients} clients: {spent:.2f} s", file=sys.stderr, flush=True)
    finally:
        local.close()
    return [
        pair(
            f"{method}: a round of {clients} clients",
            "s",
            list(zip(found, seconds["fedavg", clients], strict=True)),
            "of FedAvg's",
        )
        for (method, clients), found in seconds.items()
        if method != "fedavg"
    ]


def _images(folder: Path, n: int) -> Path:
    """Write ``n`` random images of ten classes as one pool."""
    folder.mkdir()
    x = np.random.default_rng(0).integers(0, 256, (n, 28, 28), dtype=np.uint8)
    y = np.arange(n) % 10
    np.savez(folder / "pool.npz", x_train=x[10:], y_train=y[10:], x_test=x[:10], y_test=y[:10])
    return folder / "pool.npz"
