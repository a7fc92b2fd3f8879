"""The local engine against Flower's simulation on Ray: the same runs, one after another."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.measure import Row, image_pool, pair, peak_memory
from common.home import importing_from
from tests.conftest import BIN, Simulator, running_simulator
from tests.harness import ROOT

WORKERS = 2
CELLS = ("seed=[0, 1, 2, 3, 4, 5]", 'method=["fedper", "fedavg"]')
# Of each tiny client: 8 samples for training, 1 for validation, 3 for testing, as in ``benchmarks.scale``.
SAMPLES, FEATURES, CLASSES = 12, 8, 10
MANY, MORE = 1_000, 10_000
TINY = {"model": "mlp", "method": "fedper", "local-epochs": 1, "batch-size": 8, "evaluate-every": 1}
# As CIFAR-10, and a tenth of it.
POOLS = (60_000, 6_000)


@dataclass(frozen=True)
class Timed:
    """A run: seconds until its first round was written and until its end, those of its rounds, and peak memory."""

    first: float
    total: float
    rounds: tuple[float, ...]
    megabytes: float


def run(repeats: int) -> list[Row]:
    """Return the rows of this benchmark."""
    with tempfile.TemporaryDirectory() as name, running_simulator(Path(name)) as simulator:
        bench = _Bench(simulator, Path(name))
        sweeps = [*bench.sweep(), *bench.jobs(repeats)]
        return [*bench.main_job(repeats), *bench.rounds(repeats), *bench.pools(), *bench.tiny(), *sweeps]


class _Bench:
    def __init__(self, simulator: Simulator, folder: Path) -> None:
        self._simulator, self._folder = simulator, folder
        self._runs = 0

    def main_job(self, repeats: int) -> list[Row]:
        """Return the rows of the README's main job, in this checkout as it is, the SuperLink already there."""
        federation = "num-supernodes=10 client-resources-num-cpus=1"
        both = [(self._local({}, federation, ROOT), self._ray({}, federation, ROOT)) for _ in range(repeats)]
        name, than = "the README's main job", "of flwr run's"
        return [
            pair(f"{name}: to the end of round 1", "s", [(a.first, b.first) for a, b in both], than),
            pair(f"{name}: as a whole", "s", [(a.total, b.total) for a, b in both], than),
            pair(f"{name}: peak memory", "MB", [(a.megabytes, b.megabytes) for a, b in both], than),
        ]

    def rounds(self, repeats: int) -> list[Row]:
        """Return the row of rounds that are almost all training."""
        clients, samples = 20, 2000
        keys: dict[str, Any] = {"dataset": "npz", "data-dir": self._images(clients * samples), "partition": "iid"}
        keys |= {"model": "cnn3", "method": "fedper", "local-epochs": 5, "batch-size": 64, "rounds": 2}
        both = [
            (
                self._local(keys, f"num-supernodes={clients}").rounds[-1],
                self._ray(keys, f"num-supernodes={clients} client-resources-num-cpus=1").rounds[-1],
            )
            for _ in range(repeats)
        ]
        return [pair(f"a round: {clients} clients x {samples} samples, 5 epochs", "s", both, "of Ray's")]

    def pools(self) -> list[Row]:
        """Return the row of how often a pool of the size of CIFAR-10 is in memory."""
        keys: dict[str, Any] = {"dataset": "npz", "partition": "iid", "model": "mlp", "method": "local"}
        keys["batch-size"] = 500
        keys |= {"rounds": 4, "local-epochs": 4}
        federation = "num-supernodes=20 client-resources-num-cpus=1"
        copies = []
        for start in (self._local, self._ray):
            large, small = (start(keys | {"data-dir": self._images(n)}, federation).megabytes for n in POOLS)
            copies.append((large - small) / ((POOLS[0] - POOLS[1]) * 3 * 32 * 32 / 1e6))
        return [pair("copies of a pool like CIFAR-10 in memory", "", [(copies[0], copies[1])], "of Ray's")]

    def tiny(self) -> list[Row]:
        """Return the rows of many small clients."""
        share = {}
        for name, start, clients in (
            ("local", self._local, MANY),
            ("ray", self._ray, MANY),
            ("more", self._local, MORE),
        ):
            keys = {"dataset": "npz", "data-dir": str(self._vectors(clients)), "partition": "iid", "rounds": 5, **TINY}
            timed = start(keys, f"num-supernodes={clients} client-resources-num-cpus=1")
            # In the first round the models are new.
            share[name] = 1000 * median(timed.rounds[1:]) / clients
        what = "a tiny client's share of a round of"
        return [
            pair(f"{what} {MANY:,}", "ms", [(share["local"], share["ray"])], "of Ray's"),
            pair(f"{what} {MORE:,}", "ms", [(share["more"], share["local"])], f"times that of {MANY:,}; 1 is linear"),
        ]

    def sweep(self) -> list[Row]:
        """Return the row of a sweep of small runs."""
        seconds = [
            self._sweep(f"sweep-{engine[0]}", ["--engine", *engine], CELLS, "rounds=5 local-epochs=1")
            for engine in (["local"], ["ray", "--superlink", "test"])
        ]
        return [pair("a sweep of 12 small runs", "s", [(seconds[0], seconds[1])], "times faster", inverse=True)]

    def _sweep(self, name: str, options: list[str], grids: Sequence[str], keys: str) -> float:
        """Return how many seconds a sweep takes."""
        command = [sys.executable, "-m", "cli.main", "sweep", str(self._simulator.app), *options]
        command += [part for grid in grids for part in ("--grid", grid)]
        command += ["-c", keys, "-o", str(self._folder / name)]
        started = time.perf_counter()
        subprocess.run(command, env=self._env(), check=True, capture_output=True, cwd=self._folder)
        seconds = time.perf_counter() - started
        self._say(f"{name}: {seconds:.1f} s")
        return seconds

    def jobs(self, repeats: int) -> list[Row]:
        """Return the row of a sweep whose runs leave a worker without a client: three clients a round for two."""
        clients, samples = 10, 2000
        keys: dict[str, Any] = {"dataset": "npz", "data-dir": self._images(clients * samples), "partition": "iid"}
        keys |= {"model": "cnn3", "method": "fedper", "participation": 0.3, "rounds": 4, "evaluate-every": 4}
        said = " ".join(f"{key}={json.dumps(value)}" for key, value in keys.items())
        both = []
        for i in range(repeats):
            at_once, alone = (
                self._sweep(f"jobs-{jobs}-{i}", ["--jobs", str(jobs)], ["seed=[0, 1, 2, 3]"], said) for jobs in (2, 1)
            )
            both.append((at_once, alone))
        what = "a sweep of 4 runs of 3 clients a round, two at a time"
        return [pair(what, "s", both, "times faster than one by one", inverse=True)]

    def _local(self, keys: dict[str, Any], federation: str, app: Path | None = None) -> Timed:
        command = [sys.executable, "-m", "cli.main", "run", str(app or self._simulator.app), "--engine", "local"]
        return self._timed(command, keys, f"{federation} init-args-num-cpus={WORKERS}", None, app)

    def _ray(self, keys: dict[str, Any], federation: str, app: Path | None = None) -> Timed:
        command = [str(BIN / "flwr"), "run", str(app or self._simulator.app), "test", "--stream"]
        return self._timed(command, keys, f"{federation} init-args-num-cpus={WORKERS}", self._simulator.pid, app)

    def _timed(
        self, command: list[str], keys: dict[str, Any], federation: str, pid: int | None, app: Path | None
    ) -> Timed:
        self._runs += 1
        output = self._folder / f"run-{self._runs}"
        said = " ".join(f"{key}={json.dumps(value)}" for key, value in keys.items())
        command = [*command, "--run-config", f'{said} output-dir="{output}"', "--federation-config", federation]
        started = time.perf_counter()
        first = 0.0
        with (self._folder / "log.txt").open("w") as log:
            process = subprocess.Popen(command, env=self._env(app), stdout=log, stderr=log, cwd=self._folder)
            with peak_memory(pid or process.pid) as peak:
                while process.poll() is None:
                    time.sleep(0.01)
                    if not first and any(file.stat().st_size for file in output.glob("*/history.jsonl")):
                        first = time.perf_counter() - started
        total = time.perf_counter() - started
        files = list(output.glob("*/history.jsonl"))
        if process.returncode or not files:
            raise RuntimeError((self._folder / "log.txt").read_text())
        rounds = tuple(float(json.loads(line)["seconds"]) for line in files[0].read_text().splitlines())
        timed = Timed(first, total, rounds, max(peak) / 1e6)
        kind = "ray" if pid else "local"
        self._say(f"{kind} {said[:80]}: {first:.1f} s, {total:.1f} s, {timed.megabytes:.0f} MB")
        return timed

    def _env(self, app: Path | None = None) -> dict[str, str]:
        return self._simulator.env | {"PYTHONPATH": importing_from(app or self._simulator.app)["PYTHONPATH"]}

    def _images(self, n: int) -> str:
        return str(image_pool(self._folder, n))

    def _vectors(self, clients: int) -> Path:
        file = self._folder / f"vectors-{clients}.npz"
        if not file.exists():
            rng = np.random.default_rng(0)
            y = np.arange(clients * SAMPLES) % CLASSES
            x = rng.standard_normal((CLASSES, FEATURES))[y] + rng.standard_normal((len(y), FEATURES))
            x = x.astype(np.float32)
            np.savez(file, x_train=x[CLASSES:], y_train=y[CLASSES:], x_test=x[:CLASSES], y_test=y[:CLASSES])
        return file

    def _say(self, line: str) -> None:
        print(f"  {line}", file=sys.stderr, flush=True)
