"""Clients a second on a CUDA device: Floret's training by one and by several processes, and the same by hand."""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.measure import Row, pair, together
from benchmarks.training import Case, Ours, Theirs, check

CASES = (Case("fedper", "cnn2", 64, 640), Case("fedper", "resnet18", 64, 640), Case("pfakd", "resnet18", 64, 640))
AT_ONCE = (2, 4)
SECONDS = 10.0


def run(repeats: int) -> list[Row]:
    """Return the rows of this benchmark; without a GPU none, and print one line."""
    if not torch.cuda.is_available():
        print("gpu: PyTorch sees no CUDA device here; nothing is measured", file=sys.stderr)
        return []
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            rows.append(_by_hand(case, Path(folder), max(repeats, 5)))
    for case in CASES:
        for several in AT_ONCE:
            samples = [
                (together(several, SECONDS, prepare, case), together(1, SECONDS, prepare, case))
                for _ in range(max(repeats, 3))
            ]
            rows.append(pair(f"gpu: {case}; {several} processes at once, one", "clients/s", samples, "times one"))
    return rows


def prepare(case: Case) -> Callable[[], float]:
    """Return a function that runs a client's whole round on the GPU and returns 1, the clients done."""
    folder = tempfile.TemporaryDirectory()
    ours = Ours(case, Path(folder.name), "cuda")

    def work() -> float:
        assert folder  # holds the client's state for as long as it trains
        ours.fit()
        return 1.0

    return work


def _by_hand(case: Case, folder: Path, repeats: int) -> Row:
    """Compare the training of one client; a GPU sums in another order, so the check has a large tolerance."""
    ours = Ours(case, folder, "cuda")
    theirs = Theirs(ours)
    check(ours, theirs, tolerance=0.05)
    samples = []
    for _ in range(repeats):
        speeds = []
        sides: tuple[Ours | Theirs, ...] = (ours, theirs)
        for what in sides:
            what.prepare()
            torch.cuda.synchronize()
            started = time.perf_counter()
            what.train()
            torch.cuda.synchronize()
            speeds.append(1 / (time.perf_counter() - started))
        samples.append((speeds[0], speeds[1]))
    return pair(f"gpu: {case}; by hand", "clients/s", samples, "times by hand")
