"""Local training: Floret's clients against the same mathematics written by hand, in one process, in turns."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn

from benchmarks import byhand
from benchmarks.measure import Row, pair
from client_app.app import Request
from client_app.client import FloretClient
from common.prototypes import stack
from common.seeds import torch_generator
from models import build_model, tensor_names
from tests.harness import run_config

CLASSES = 10
SHAPES = {"mlp": (1, 28, 28), "cnn2": (1, 28, 28), "cnn3": (3, 32, 32), "cnn5": (3, 32, 32), "resnet18": (3, 32, 32)}
# Model, batch size, training samples.
SIZES = (("cnn2", 64, 640), ("cnn2", 10, 200), ("cnn3", 64, 640), ("resnet18", 8, 16))
EPOCHS = 2
# Largest difference of losses and weights: in places the two add the same floats in another order.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A method's training of a model on random images; their content does not affect the time."""

    method: str
    model: str
    batch_size: int
    samples: int
    threads: int = 1

    def __str__(self) -> str:
        with_threads = f", {self.threads} threads" if self.threads > 1 else ""
        return f"{self.method}, {self.model}, batch {self.batch_size}{with_threads}"


class Ours:
    """A client of Floret at the beginning of its second round, so that it has a teacher and prototypes."""

    def __init__(self, case: Case, folder: Path, device: str = "cpu", **keys: Any) -> None:
        self.case = case
        shape, rest = SHAPES[case.model], 2 * CLASSES
        rng = np.random.default_rng(0)
        file = folder / f"{case.model}-{case.samples}.npz"
        if not file.exists():
            x = rng.integers(0, 256, (case.samples + rest, *shape), dtype=np.uint8)
            y = np.arange(len(x)) % CLASSES
            np.savez(file, x_train=x[rest:], y_train=y[rest:], x_test=x[:rest], y_test=y[:rest])
        keys |= {"method": case.method, "model": case.model, "batch_size": case.batch_size, "threads": case.threads}
        keys |= {"dataset": "npz", "data_dir": str(file), "partition": "iid", "local_epochs": EPOCHS}
        split = (rest / 2 + 0.01) / (case.samples + rest)
        keys |= {"test_fraction": split, "validation_fraction": split, "device": device}
        self.values = run_config(folder, **keys)
        node: dict[str, Any] = {"partition-id": 0, "num-partitions": 1, "data-dir": str(file)}
        node["state-dir"] = tempfile.mkdtemp(dir=folder)
        context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=self.values)
        self.client: FloretClient = Request(context).client()
        self.message: dict[str, Any] = {"round": 1, "num-classes": CLASSES, "head-layers": 1}
        self.message |= {"session.lineage": "benchmark", "session.resumed": []}
        model = build_model(case.model, shape, CLASSES, 1, torch_generator(0, "model"))
        names = tensor_names(model, self.client.setting.method.shares)
        first = [model.state_dict()[name].numpy() for name in names]
        self.client.begin(self.message)
        self.arrays, _, metrics = self.client.fit(first, self.message | {"names": names})
        self.message |= {"names": metrics["names"], "round": 2}

    def prepare(self) -> None:
        """Do the part of a client's round that precedes local training."""
        self.client.begin(self.message)
        self.client.take("train", self.arrays, self.message)
        self.client.receive()

    def train(self) -> float:
        """Train; return the mean loss."""
        return self.client.train()

    def fit(self) -> None:
        """Do a client's whole round."""
        self.client.begin(self.message)
        self.client.fit(self.arrays, self.message)


def repeated_training(case: Case) -> Callable[[], float]:
    """Return a function that trains a client of Floret and returns the number of samples, for ``together``."""
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(case, Path(folder))

    def work() -> float:
        ours.prepare()
        ours.train()
        return EPOCHS * case.samples

    return work


class Theirs:
    """The same by hand, from the same weights, with the same data in the same order."""

    def __init__(self, ours: Ours, layout: torch.memory_format = torch.channels_last) -> None:
        self.ours, self.layout = ours, layout
        self.task: byhand.Task

    def prepare(self) -> None:
        """Prepare networks and data for training."""
        client, case, values = self.ours.client, self.ours.case, self.ours.values
        client.begin(self.ours.message)
        client.take("train", self.ours.arrays, self.ours.message)
        teacher = self._network(list(client.model.state_dict().values()))
        memory = {name: t for module in client.networks.values() for name, t in module.state_dict().items()}
        memory = {f"distillation.{name}": t for name, t in memory.items()} | client.memory
        client.receive()
        width = client.training_features(client.model.extractor).shape[1]
        self.task = byhand.Task(
            net=self._network(list(client.model.state_dict().values())),
            x=client.setting.data.train.x.to(client.device).contiguous(memory_format=self.layout),
            y=client.data.train.y,
            order=torch_generator(int(values["seed"]), "batches", client.setting.name, 2),
            batch_size=case.batch_size,
            epochs=EPOCHS,
            lr=float(values["lr"]),
            momentum=float(values["momentum"]),
            weight_decay=float(values["weight-decay"]),
            layout=self.layout,
            teacher=teacher,
            received=stack(client.received, CLASSES, width, client.device),
            kept=stack(memory, CLASSES, width, client.device),
        )
        if case.method == "fedcpd":
            zeros = torch.zeros(1, *client.data.input_shape, device=client.device)
            channels = [m.shape[1] for m in teacher.eval().stages(zeros)[1]]
            kept = [tensor for name, tensor in memory.items() if name.startswith("distillation.")]
            self.task.blocks, self.task.teacher_blocks = (
                self._filled(byhand.Blocks(channels, 32), kept) for _ in range(2)
            )

    def train(self) -> float:
        """Train; return the mean loss."""
        return byhand.METHODS[self.ours.case.method](self.task)

    def _network(self, tensors: list[Tensor]) -> Any:
        return self._filled(byhand.NETWORKS[self.ours.case.model](), tensors).to(memory_format=self.layout)

    def _filled(self, module: nn.Module, tensors: list[Tensor]) -> Any:
        module.to(self.ours.client.device)
        for own, tensor in zip(module.state_dict().values(), tensors, strict=True):
            own.copy_(tensor)
        return module


def run(repeats: int) -> list[Row]:
    """Return the rows of this benchmark; every pair is run at least seven times, in turns."""
    repeats = max(repeats, 7)
    rows = []
    with tempfile.TemporaryDirectory() as name, _threads():
        folder = Path(name)
        cases = [Case(method, *size) for size in SIZES for method in byhand.METHODS]
        for case in (*cases, Case("fedper", "cnn2", 64, 640, threads=2)):
            ours = Ours(case, folder)
            theirs = Theirs(ours)
            check(ours, theirs)
            rows.append(_row(f"training: {case}; by hand", case, ours, theirs, repeats, "times by hand"))
        for size in SIZES:
            case = Case("fedper", *size)
            ours = Ours(case, folder)
            theirs = Theirs(ours, torch.contiguous_format)
            rows.append(_row(f"training: {case}; plain PyTorch", case, ours, theirs, repeats, "times plain"))
            faster = Ours(case, folder, precision="bfloat16")
            rows.append(_row(f"training: {case}; bfloat16, float32", case, faster, ours, repeats, "times float32"))
    return rows


def check(ours: Ours, theirs: Theirs, tolerance: float = TOLERANCE) -> None:
    """Check that both compute the same.

    Raises:
        RuntimeError: mean loss or a trained weight differs by more than ``tolerance``.
    """
    ours.prepare()
    loss = ours.train()
    trained = [tensor.clone() for tensor in ours.client.model.state_dict().values()]
    theirs.prepare()
    apart = abs(loss - theirs.train())
    for own, tensor in zip(theirs.task.net.state_dict().values(), trained, strict=True):
        apart = max(apart, float((own.double() - tensor.double()).abs().max()))
    if not apart <= tolerance:
        raise RuntimeError(f"{ours.case}: loss or weights differ by {apart:.2g} from those by hand")


def _row(name: str, case: Case, ours: Any, theirs: Any, repeats: int, meaning: str) -> Row:
    """Time both in turns, each going first in every other repeat; in samples a second."""
    samples = []
    for i in range(repeats):
        sides = [(0, ours), (1, theirs)]
        speeds = [0.0, 0.0]
        for side, what in sides if i % 2 else reversed(sides):
            what.prepare()
            speeds[side] = EPOCHS * case.samples / _seconds(what.train, case.threads)
        samples.append((speeds[0], speeds[1]))
    row = pair(name, "samples/s", samples, meaning)
    print(f"  {name}: {row.ratio:.3f}", file=sys.stderr, flush=True)
    return row


def _seconds(call: Callable[[], object], threads: int) -> float:
    """Return the seconds of a call: CPU time with one thread, which a busy machine hardly changes; wall-clock time with
    several.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    started = clock()
    call()
    return clock() - started


@contextmanager
def _threads() -> Iterator[None]:
    """Restore PyTorch's number of threads at the end."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
