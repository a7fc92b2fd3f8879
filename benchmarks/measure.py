"""What every benchmark needs: rows, their table, and what machine this is."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Row:
    """One ratio: ``ours`` and ``theirs`` are medians in ``unit``; ``ratio`` is what ``meaning`` says it is."""

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


def hardware() -> dict[str, object]:
    """Return what the figures depend on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cpu": cpu, "cores": cores, "python": platform.python_version()} | {
        name: version(name) for name in ("torch", "flwr", "ray", "numpy")
    }
