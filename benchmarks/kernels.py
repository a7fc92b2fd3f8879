"""Portable kernels, which give the same digits on other CPUs, against those that are fastest on this one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.measure import Row, pair, together
from benchmarks.training import Case, repeated_training
from common.kernels import NATIVE, PORTABLE, variables

SECONDS = 4.0
# Model, batch size, training samples.
SIZES = (("mlp", 64, 640), ("cnn2", 64, 320), ("cnn3", 64, 320), ("cnn5", 64, 128), ("resnet18", 8, 16))


def run(repeats: int) -> list[Row]:
    """Return the rows of this benchmark: a client of FedPer that trains alone with one thread."""
    rows = []
    for size in SIZES:
        case = Case("fedper", *size)
        samples = [(speed(case, PORTABLE), speed(case, NATIVE)) for _ in range(repeats)]
        rows.append(pair(f"kernels: {case}; portable; native", "samples/s", samples, "times that"))
    return rows


def speed(case: Case, kernels: str) -> float:
    """Return the samples a second that a client trains in a process with these kernels."""
    with started_with(variables(kernels)):
        return together(1, SECONDS, repeated_training, case)


@contextmanager
def started_with(more: dict[str, str]) -> Iterator[None]:
    """Give processes that are started within this context more environment variables."""
    before = os.environ.copy()
    os.environ.update(more)
    try:
        yield
    finally:
        for name in more.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
