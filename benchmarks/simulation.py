"""What a simulated round costs beside the training of its clients."""

import json
import multiprocessing
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import byhand
from benchmarks.measure import Row, image_pool, pair
from common.seeds import torch_generator
from data import load_client
from server_app.settings import read_config
from tests.conftest import running_simulator
from tests.harness import run_config

ROUNDS = 4
ACTORS = 2


@dataclass(frozen=True)
class Case:
    """A federation: ``clients`` with ``samples`` images of 32 x 32 x 3 each, for training, validation and test."""

    clients: int
    samples: int
    epochs: int = 5

    def __str__(self) -> str:
        return f"{self.clients} clients x {self.samples} samples, {self.epochs} epochs"


def run(repeats: int) -> list[Row]:
    """Return the rows of this benchmark."""
    rows = []
    with tempfile.TemporaryDirectory() as name, running_simulator(Path(name)) as simulator:
        for case in (Case(20, 2000), Case(100, 100)):
            file = image_pool(Path(name), case.clients * case.samples)
            keys: dict[str, Any] = {
                "dataset": "npz",
                "data_dir": str(file),
                "partition": "iid",
                "model": "cnn3",
                "method": "fedper",
            }
            keys |= {"local_epochs": case.epochs, "batch_size": 64, "rounds": ROUNDS, "evaluate_every": ROUNDS}
            samples = []
            for repeat in range(repeats):
                output = simulator.output / f"{case.clients}-{repeat}"
                config = " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in keys.items())
                federation = f"num-supernodes={case.clients} client-resources-num-cpus=1 init-args-num-cpus={ACTORS}"
                log = simulator.run(f'{config} output-dir="{output}"', federation, timeout=1200)
                histories = list(output.glob("*/history.jsonl"))
                if not histories:
                    raise RuntimeError(log)
                lines = [json.loads(line) for line in histories[0].read_text().splitlines()]
                # The first round loads data and the last evaluates nobody else: all take part.
                seconds = [line["seconds"] for line in lines[1:]]
                samples.append((median(seconds), _bare(case, keys, Path(name))))
                print(
                    f"  {case}: a round {samples[-1][0]:.2f} s, bare {samples[-1][1]:.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
            rows.append(pair(f"a round: {case}", "s", samples, "times the bare training"))
    return rows


def _bare(case: Case, keys: dict[str, Any], folder: Path) -> float:
    """Return the seconds in which as many processes as there are actors train all clients by hand."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(ACTORS + 1)
    values = run_config(folder, **keys)
    workers = [
        context.Process(target=_train, args=(case, values, list(range(i, case.clients, ACTORS)), barrier))
        for i in range(ACTORS)
    ]
    for worker in workers:
        worker.start()
    barrier.wait()
    started = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - started
    for worker in workers:
        worker.join()
    return seconds


def _train(case: Case, values: dict[str, Any], clients: list[int], barrier: Barrier) -> None:
    torch.set_num_threads(1)
    config, _, _ = read_config(values)
    tasks = []
    for i in clients:
        train = load_client(config, i, case.clients).train
        tasks.append(
            byhand.Task(
                net=byhand.NETWORKS["cnn3"]().to(memory_format=torch.channels_last),
                x=train.x,
                y=train.y,
                order=torch_generator(0, "batches", str(i)),
                batch_size=config.batch_size,
                epochs=config.local_epochs,
                lr=config.lr,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
            )
        )
    barrier.wait()
    for task in tasks:
        byhand.fedper(task)
    barrier.wait()
