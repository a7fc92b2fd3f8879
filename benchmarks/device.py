"""Memory of a node between rounds: with the process that keeps PyTorch loaded, and at rest."""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.measure import Row, pair
from tests.deployment import Deployment, Process, below, until


def run(repeats: int) -> list[Row]:
    """Return the rows of this benchmark."""
    samples = [_memory() for _ in range(repeats)]
    meaning = "of the same node while it waits for the next round"
    return [pair("memory of a node without a message for --keep-warm minutes", "MB", samples, meaning)]


def _memory() -> tuple[float, float]:
    """Return proportional set sizes of all processes of a node, at rest and before, in MB."""
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder) / "floret")
        try:
            rng = np.random.default_rng(0)
            own = Path(folder) / "own"
            own.mkdir()
            for part in ("train", "test"):
                np.savez(own / f"{part}.npz", x=rng.random((100, 8), dtype=np.float32), y=np.arange(100) % 10)
            node = deployment.node("a", "--data-dir", own, "--keep-warm", "0.25")
            until(lambda: bool(below(node.popen.pid, "forkserver")), "no warm process")
            waiting = _together(node)
            until(lambda: not below(node.popen.pid, "forkserver"), "the warm process does not rest")
            return _together(node), waiting
        finally:
            deployment.end()


def _together(node: Process) -> float:
    sizes = []
    for pid in (node.popen.pid, *below(node.popen.pid, "")):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        sizes.append(next(int(line.split()[1]) for line in lines if line.startswith("Pss:")))
    return 1024 * sum(sizes) / 1e6
