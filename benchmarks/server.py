"""The server's part of a round: memory and time of folding many replies."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from benchmarks.measure import Row, pair
from common.memory import return_freed_memory
from common.run_config import default_config
from common.seeds import torch_generator
from common.tensors import NamedArrays
from common.wire import to_record
from models import build_model
from server_app.settings import read_config
from strategies.core import Client, FloretStrategy, Roster, Session, Setup, StrategySetting

LARGE, SMALL = ("resnet18", (3, 32, 32), 200), ("mlp", (8,), 10_000)
# Replies that are in memory at once while time is measured; their content is used again and again.
POOL = 4
# Ours and theirs.
Measure = Callable[[], tuple[float, float]]


def run(repeats: int) -> list[Row]:
    """Return the rows of this benchmark."""
    memory = [_alone(_memory) for _ in range(repeats)]
    speed = [_alone(_speed) for _ in range(repeats)]
    small = [_alone(_small) for _ in range(repeats)]
    return [
        pair("peak memory of folding 200 replies of 45 MB, above the baseline", "MB", memory, "model sizes"),
        pair("folding and checking replies of 45 MB", "GB/s", speed, "of numpy's acc += w * x"),
        pair("folding small replies", "1/s", small, "of 10,000 a second"),
    ]


def _alone(measure: Measure) -> tuple[float, float]:
    """Run a measurement in a process of its own, so that memory and caches are its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_child, args=(there, measure))
    process.start()
    ours, theirs = here.recv()
    process.join()
    return ours, theirs


def _child(connection: Connection, measure: Measure) -> None:
    # As the ServerApp does at its start.
    torch.set_num_threads(1)
    return_freed_memory()
    connection.send(measure())


class Round:
    """A strategy in the middle of a round of FedAvg, and the replies that it gets."""

    def __init__(self, model: str, shape: tuple[int, ...], clients: int) -> None:
        values = default_config(Path(__file__).resolve().parents[1]) | {"method": "fedavg", "model": model}
        config, kind, parameters = read_config(values)
        net = build_model(model, shape, 10, 1, torch_generator(0, "model"))
        roster = Roster()
        for i in range(clients):
            roster.add(Client(str(i), 1000 + i, 100, 10, 10))
        setting = StrategySetting(Setup(config, parameters, net, 1, shape), roster, Session("benchmark"))
        self.strategy: FloretStrategy = kind(setting)
        self.clients = clients
        self.initial: NamedArrays = self.strategy.initial_arrays()
        self.bytes = sum(array.nbytes for array in self.initial.values())
        self._rng = np.random.default_rng(0)

    def begin(self) -> None:
        """Begin a round with all clients; nothing is sent."""
        self.strategy.configure_train(1, to_record(self.initial), ConfigRecord(), None)  # type: ignore[arg-type]

    def content(self) -> RecordDict:
        """Return the content of a client's reply, with newly drawn arrays."""
        arrays = {n: self._rng.standard_normal(a.shape, dtype=np.float32) for n, a in self.initial.items()}
        metrics = MetricRecord({"num-examples": 100, "loss": 1.0, "after.test": 0.5, "seconds": 1.0})
        return RecordDict({"arrays": to_record(arrays), "metrics": metrics})

    def reply(self, client: int, content: RecordDict) -> Message:
        """Return a reply of a client."""
        return Message(content, reply_to=Message(RecordDict(), 1000 + client, "train"))

    def again(self, client: int, content: RecordDict) -> Message:
        """Return a reply with the arrays of ``content``, which is not changed; a strategy empties what it folds."""
        arrays = ArrayRecord(dict(content.array_records["arrays"]))
        return self.reply(client, RecordDict({"arrays": arrays, "metrics": content["metrics"]}))


def _memory() -> tuple[float, float]:
    """Return peak above baseline, as measured by the operating system, and the model's size, in MB."""
    work = Round(*LARGE)
    work.begin()

    def replies() -> Iterator[Message]:
        for client in range(work.clients):
            yield work.reply(client, work.content())

    # One reply is made before, so that the baseline has what the first one leaves in memory; then the peak begins anew.
    work.content()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work.strategy.aggregate_train(1, replies())
    return (_status("VmHWM") - before) / 1e6, work.bytes / 1e6


def _status(key: str) -> float:
    """Return a field of ``/proc/self/status``, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _speed() -> tuple[float, float]:
    """Return bytes folded a second, by the strategy and by numpy, in GB."""
    work = Round(*LARGE)
    contents = [work.content() for _ in range(POOL)]
    plain = [{n: a.numpy() for n, a in content.array_records["arrays"].items()} for content in contents]
    total = work.bytes * work.clients / 1e9

    def ours() -> float:
        work.begin()
        replies = [work.again(client, contents[client % POOL]) for client in range(work.clients)]
        started = time.perf_counter()
        work.strategy.aggregate_train(1, replies)
        return total / (time.perf_counter() - started)

    def theirs() -> float:
        sums = {name: np.zeros_like(array) for name, array in work.initial.items()}
        started = time.perf_counter()
        for client in range(work.clients):
            for name, array in plain[client % POOL].items():
                sums[name] += np.float32(100.0) * array
        return total / (time.perf_counter() - started)

    return ours(), theirs()


def _small() -> tuple[float, float]:
    """Return small replies folded a second, and 10,000."""
    work = Round(*SMALL)
    content = work.content()
    work.begin()
    replies = [work.again(client, content) for client in range(work.clients)]
    started = time.perf_counter()
    work.strategy.aggregate_train(1, replies)
    return work.clients / (time.perf_counter() - started), 10_000.0
