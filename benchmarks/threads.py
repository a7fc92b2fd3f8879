"""Processes that share CPUs: each with one thread, and each with as many as there are CPUs."""

import os
import sys
from collections.abc import Callable

from benchmarks.measure import Row, pair, together
from benchmarks.training import Case, repeated_training

PROCESSES = 2
SECONDS = 4.0


def run(repeats: int) -> list[Row]:
    """Return the row of this benchmark: clients of FedPer that train on the same CPUs at the same time."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if len(cpus) < PROCESSES:
        print(f"threads: needs {PROCESSES} CPUs, there are {len(cpus)}", file=sys.stderr)
        return []
    samples = [
        (
            together(PROCESSES, SECONDS, prepare, 1, cpus[:PROCESSES]),
            together(PROCESSES, SECONDS, prepare, PROCESSES, cpus[:PROCESSES]),
        )
        for _ in range(max(repeats, 3))
    ]
    name = f"threads: {PROCESSES} clients at once on {PROCESSES} CPUs, 1 thread each; {PROCESSES} threads each"
    return [pair(name, "samples/s", samples, "times that")]


def prepare(threads: int, cpus: list[int]) -> Callable[[], float]:
    """Return a function that trains a client on ``cpus`` and no others, and returns the number of samples."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
    return repeated_training(Case("fedper", "cnn2", 64, 320, threads))
