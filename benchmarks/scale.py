"""How the time of a simulated round and the memory of a run grow with the number of clients."""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.measure import Row, pair, peak_memory
from tests.conftest import Simulator, running_simulator

CLIENTS = (10, 30, 100, 300, 1000)
ROUNDS = 6
ACTORS = 2
# Of each client: 8 for training, 1 for validation, 3 for testing.
SAMPLES, FEATURES, CLASSES = 12, 8, 10
_TIME, _MEMORY = "a round of {} clients", "peak memory with {} clients"


@dataclass(frozen=True)
class Point:
    """A run with ``clients`` clients: the median ``seconds`` of a round and the peak of memory in ``megabytes``."""

    clients: int
    seconds: float
    megabytes: float


def run(repeats: int) -> list[Row]:
    """Return the rows of this benchmark."""
    with tempfile.TemporaryDirectory() as name, running_simulator(Path(name)) as simulator:
        curves = [[_measure(simulator, Path(name), n, repeat) for n in CLIENTS] for repeat in range(repeats)]
    few, many = CLIENTS[0], CLIENTS[-1]
    rows = []
    for at, count in enumerate(CLIENTS[1:], start=1):
        samples = [(curve[at].seconds, curve[0].seconds) for curve in curves]
        rows.append(pair(_TIME.format(count), "s", samples, f"times that of {few}"))
    middle = CLIENTS.index(100)
    each = [(1000 * curve[-1].seconds / many, 1000 * curve[middle].seconds / CLIENTS[middle]) for curve in curves]
    rows.append(
        pair(f"a client's share of a round of {many}", "ms", each, f"times that of {CLIENTS[middle]}; 1 is linear")
    )
    lines = [_line(CLIENTS, [1000 * point.seconds for point in curve]) for curve in curves]
    rows.append(pair("each further client; a round without any", "ms", lines, "of the round without any"))
    for at, count in enumerate(CLIENTS[1:], start=1):
        samples = [(curve[at].megabytes, curve[0].megabytes) for curve in curves]
        rows.append(pair(_MEMORY.format(count), "MB", samples, f"times that with {few}"))
    lines = [_line(CLIENTS, [point.megabytes for point in curve]) for curve in curves]
    rows.append(pair("memory of each further client; without any", "MB", lines, "of the memory without any"))
    return rows


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw time, on logarithmic axes, and memory against clients, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "floret"
    from matplotlib import pyplot

    found = {row.name: row for row in rows}
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, name, label, digits in zip(
        axes, (_TIME, _MEMORY), ("seconds a round", "peak memory, MB"), (4, 2), strict=True
    ):
        curve = [found[name.format(count)] for count in CLIENTS[1:]]
        values = [curve[0].theirs, *(row.ours for row in curve)]
        slope, start = _line(CLIENTS, values)
        between = np.geomspace(CLIENTS[0], CLIENTS[-1])
        axis.plot(CLIENTS, values, "o", label="measured")
        axis.plot(between, start + slope * between, label=f"{start:.{digits}f} + {slope:.{digits}f} per client")
        axis.set(xscale="log", xlabel="clients", ylabel=label)
        axis.set_xticks(CLIENTS, [str(count) for count in CLIENTS])
        if name == _TIME:
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, 1.2 * max(values))
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _line(clients: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Return slope and intercept of the line with the least squares of relative errors."""
    slope, start = np.polyfit(clients, values, 1, w=1 / np.asarray(values))
    return float(slope), float(start)


def _measure(simulator: Simulator, folder: Path, clients: int, repeat: int) -> Point:
    output = simulator.output / f"{clients}-{repeat}"
    config = (
        f'dataset="npz" data-dir="{_data(folder, clients)}" partition="iid" model="mlp" method="fedper" '
        f'local-epochs=1 batch-size=8 rounds={ROUNDS} evaluate-every=1 output-dir="{output}"'
    )
    federation = f"num-supernodes={clients} client-resources-num-cpus=1 init-args-num-cpus={ACTORS}"
    with peak_memory(simulator.pid) as peak:
        log = simulator.run(config, federation, timeout=3600)
    histories = list(output.glob("*/history.jsonl"))
    if not histories:
        raise RuntimeError(log)
    lines = [json.loads(line) for line in histories[0].read_text().splitlines()]
    taking_part = min(len(line["clients"]) for line in lines)
    if len(lines) != ROUNDS or taking_part != clients:
        raise RuntimeError(f"{len(lines)} rounds, one of them with {taking_part} clients of {clients}:\n{log}")
    # In the first round the actors load the data.
    point = Point(clients, median(line["seconds"] for line in lines[1:]), max(peak) / 1e6)
    print(f"  {point}", file=sys.stderr, flush=True)
    return point


def _data(folder: Path, clients: int) -> Path:
    """Return a pool with ``SAMPLES`` feature vectors for each client, drawn around one mean for each class."""
    file = folder / f"{clients}.npz"
    if not file.exists():
        rng = np.random.default_rng(0)
        y = np.arange(clients * SAMPLES) % CLASSES
        x = (rng.standard_normal((CLASSES, FEATURES))[y] + rng.standard_normal((len(y), FEATURES))).astype(np.float32)
        np.savez(file, x_train=x[CLASSES:], y_train=y[CLASSES:], x_test=x[:CLASSES], y_test=y[:CLASSES])
    return file
