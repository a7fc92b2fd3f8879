"""Shared by all benchmarks: rows, their table, runs in several processes, and the machine's description."""

import multiprocessing
import os
import platform
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """One ratio: ``ours`` and ``theirs`` are medians in ``unit``; ``meaning`` describes ``ratio``."""

    name: str
    unit: str
    ours: float
    theirs: float
    ratio: float
    meaning: str
    samples: tuple[tuple[float, float], ...]


def pair(name: str, unit: str, samples: Sequence[tuple[float, float]], meaning: str, *, inverse: bool = False) -> Row:
    """Return the row of ``samples``, (ours, theirs) of each repeat.

    The ratio is that of the two medians: ours / theirs, or with ``inverse`` theirs / ours.
    """
    ours, theirs = (median(side) for side in zip(*samples, strict=True))
    return Row(name, unit, ours, theirs, theirs / ours if inverse else ours / theirs, meaning, tuple(samples))


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = ["| what | ours | theirs | ratio | |", "|---|---|---|---|---|"]
    for row in rows:
        figures = f"{row.ours:.4g} {row.unit} | {row.theirs:.4g} {row.unit} | {row.ratio:.3g}"
        lines.append(f"| {row.name} | {figures} | {row.meaning} |")
    return "\n".join(lines)


def together(processes: int, seconds: float, prepare: Callable[..., Callable[[], float]], *args: Any) -> float:
    """Return the work per second of several new processes that run at once, summed over them.

    Args:
        processes: how many.
        seconds: how long; it begins when all are ready.
        prepare: called with ``args`` in each process; returns a function that does some work and returns its amount.
        args: picklable.
    """
    context = multiprocessing.get_context("spawn")
    ready, speeds = context.Barrier(processes), context.SimpleQueue()
    others = [
        context.Process(target=_work, args=(seconds, ready, speeds, prepare, *args), daemon=True)
        for _ in range(processes)
    ]
    for process in others:
        process.start()
    for process in others:
        process.join()
        if process.exitcode:
            ready.abort()
            raise RuntimeError(f"a process ended with code {process.exitcode}")
    return sum(float(speeds.get()) for _ in others)


def _work(seconds: float, ready: Barrier, speeds: Any, prepare: Callable[..., Callable[[], float]], *args: Any) -> None:
    work = prepare(*args)
    ready.wait(300)
    started, done = time.perf_counter(), 0.0
    while time.perf_counter() - started < seconds:
        done += work()
    speeds.put(done / (time.perf_counter() - started))


def hardware() -> dict[str, object]:
    """Return CPU, cores and versions, which the figures depend on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cpu": cpu, "cores": cores, "python": platform.python_version()} | {
        name: version(name) for name in ("torch", "flwr", "ray", "numpy") if find_spec(name)
    }


def image_pool(folder: Path, n: int) -> Path:
    """Return a file of ``n`` random images like CIFAR-10's, 10 of them for testing; write it if it is not there."""
    file = folder / f"images-{n}.npz"
    if not file.exists():
        x = np.random.default_rng(0).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
        y = np.arange(n) % 10
        np.savez(file, x_train=x[10:], y_train=y[10:], x_test=x[:10], y_test=y[:10])
    return file


@contextmanager
def peak_memory(pid: int) -> Iterator[list[int]]:
    """Yield a list to which the memory of ``pid`` and its descendants, in bytes, is appended until the context ends.

    Shared memory is counted once: the sum is of proportional set sizes.
    """
    sums: list[int] = []
    over = threading.Event()

    def look() -> None:
        pause = 0.0
        while not over.wait(pause):
            started = time.thread_time()
            sums.append(sum(_proportional(process) for process in _tree(pid)))
            # At most a twentieth of a CPU, so that the run is not slowed.
            pause = max(0.5, 20 * (time.thread_time() - started))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield sums
    finally:
        over.set()
        watcher.join()


def _tree(pid: int) -> list[int]:
    """Return ``pid`` and its descendants."""
    below = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may have blanks; state and parent follow it.
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        below[parent].append(int(path.parent.name))
    found = [pid]
    for process in found:
        found += below[process]
    return found


def _proportional(pid: int) -> int:
    """Return the proportional set size of a process in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
