"""FedKD (Wu et al. 2022): a private teacher and a shared student, whose updates travel as factors of low rank."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp import Grid
from torch import Tensor, nn

from common.config import between, choice
from common.errors import ConfigError, FloretError
from common.names import without_prefix
from common.tensors import Free, NamedArrays, Specs, TensorSpec
from common.wire import check_sendable, pack, unpack
from models import MODELS, SplitModel, build_model, gain_of, output_widths
from strategies.core import Client, FloretStrategy, Network, Setup, StrategySetting

STUDENT, PROJECTION = "student", "projection"
LEFT, RIGHT = ".left", ".right"
# The student before the first one: what a client has that must be sent the whole student.
NOTHING = -1
Values = TypeVar("Values", np.ndarray, Tensor)


@dataclass(frozen=True, kw_only=True)
class FedKDParameters:
    """``student_model`` is a model, or ``"same"`` for that of the run; an update travels with the part of its energy
    that rises from ``energy_start`` to ``energy_end``; ``distill`` and ``hidden`` switch the two losses between teacher
    and student; gradients of teacher, student and projection are shortened to ``max_norm`` each.
    """

    student_model: str = choice("same", *MODELS)
    energy_start: float = between(0, 1, above=True)
    energy_end: float = between(0, 1, above=True)
    distill: bool
    hidden: bool
    max_norm: float = between(0, above=True)


def energy_at(parameters: FedKDParameters, server_round: int, rounds: int) -> float:
    """Return the part of an update's energy that travels: linear in the progress, ``energy_end`` in the last round."""
    return parameters.energy_start + server_round / rounds * (parameters.energy_end - parameters.energy_start)


def rank_for(singular: Tensor, energy: float) -> int:
    """Return how many of the singular values, (n,) and descending, have more than ``energy`` of the sum of squares.

    From 1, which is enough for nothing but zeros, to n, where no fewer suffice.
    """
    sums = singular.double().square().cumsum(0)
    return min(int((sums <= energy * sums[-1]).sum()) + 1, len(sums)) if sums[-1] > 0 else 1


def matrix_sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a tensor as a matrix: a kernel (O, I, h, w) is (O, I h w)."""
    return shape[0], math.prod(shape[1:])


def most_rank(shape: tuple[int, ...]) -> int:
    """Return up to which rank the factors of a tensor are smaller than the tensor; 0 if none are."""
    if len(shape) < 2:
        return 0
    rows, columns = matrix_sides(shape)
    return (rows * columns - 1) // (rows + columns)


def factors(update: Tensor, energy: float) -> tuple[Tensor, Tensor] | None:
    """Return the factors of an update, (rows, k) and (k, columns), that keep ``energy`` of it.

    None if the tensor itself is to travel: factors would not be smaller, or nothing is to be lost.
    """
    most = most_rank(tuple(update.shape))
    if not most or energy >= 1 or not torch.isfinite(update).all():
        return None
    left, singular, right = torch.linalg.svd(update.reshape(matrix_sides(tuple(update.shape))), full_matrices=False)
    rank = rank_for(singular, energy)
    if rank > most:
        return None
    root = singular[:rank].sqrt()
    return left[:, :rank] * root, root[:, None] * right[:rank]


def compressed(before: Mapping[str, Tensor], after: Mapping[str, Tensor], energy: float) -> dict[str, Tensor]:
    """Return what is sent of tensors that were ``before``: ``<name>.left`` and ``<name>.right``, else ``<name>``."""
    sent: dict[str, Tensor] = {}
    for name, tensor in after.items():
        found = factors(tensor - before[name], energy)
        sent |= {name: tensor} if found is None else {name + LEFT: found[0], name + RIGHT: found[1]}
    return sent


def whole(before: Mapping[str, Values], sent: Mapping[str, Values]) -> dict[str, Values]:
    """Return the tensors of a student that was ``before``, from those and the factors that were sent.

    Raises:
        FloretError: a tensor is missing, or is there twice.
    """
    student: dict[str, Values] = {}
    for name, tensor in before.items():
        found = sent.keys() & {name, name + LEFT, name + RIGHT}
        if found not in ({name}, {name + LEFT, name + RIGHT}):
            there = " and ".join(sorted(found)) or "nothing"
            raise FloretError(f"of tensor {name} there is {there}: it must be the tensor or both factors of its change")
        if name in found:
            student[name] = sent[name]
        else:
            student[name] = tensor + (sent[name + LEFT] @ sent[name + RIGHT]).reshape(tensor.shape)
    return student


class FedKD(FloretStrategy):
    """Up: of each matrix and kernel of the student ``<name>.left``, (O, k), and ``<name>.right``, (k, I h w), float32,
    whose product is its change in this round; of the rest, and where factors would be larger, the tensor itself. Down:
    the same of the last change of the global student, to a client that has the one before; else the whole student.
    Aggregate: mean weighted by training samples of the changed students; its change is compressed again.
    """

    shares = "nothing"
    Parameters = FedKDParameters
    parameters: FedKDParameters

    @classmethod
    def networks(cls, setup: Setup) -> dict[str, Network]:
        """Return the student, and the projection from its features to the teacher's, which is private."""
        kind = setup.parameters.student_model
        same = kind == "same"
        model, head_layers = (setup.config.model, setup.head_layers) if same else (kind, 1)

        def student() -> SplitModel:
            try:
                return build_model(model, setup.input_shape, setup.classes, head_layers, None)
            except ConfigError as error:
                if same:
                    raise
                raise ConfigError(f"fedkd.student-model = {kind!r}: {error}") from error

        def projection() -> nn.Module:
            features = setup.features if same else output_widths(student(), setup.input_shape)[0]
            return nn.Linear(features, setup.features, bias=False)

        return {
            STUDENT: Network(student, shared=True, gain=gain_of(model), as_model=same),
            PROJECTION: Network(projection, shared=False),
        }

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return the student's tensors, and the factors of their changes."""
        specs: dict[str, TensorSpec] = {}
        for name, spec in cls.shared_networks(setup).items():
            shape = tuple(side for side in spec.shape if isinstance(side, int))
            most = most_rank(shape)
            specs[name] = replace(spec, shape=shape, optional=most > 0)
            if most:
                rows, columns = matrix_sides(shape)
                rank = Free(most, f"rank of {name}")
                specs[name + LEFT] = TensorSpec((rows, rank), optional=True)
                specs[name + RIGHT] = TensorSpec((rank, columns), optional=True)
        return specs

    def __init__(self, setting: StrategySetting) -> None:
        super().__init__(setting)
        # The student of now was made in round ``version``, from that of round ``previous`` by the change.
        self._version, self._previous = 0, NOTHING
        self._change: dict[str, Array] = {}
        # Which student each client has, as far as is known, and what each is sent in this round is a change of.
        self._has: dict[str, int] = {}
        self._bases: dict[str, int] = {}

    def prepare(self, server_round: int, clients: list[Client], grid: Grid) -> list[Client]:
        """Return all of them; see who has the student that the last change is of, or the one after it."""
        known = (self._version, self._previous)
        # Whoever is refused may have kept what it was sent: what it has is not known until it is accepted.
        has = {client.name: self._has.pop(client.name, NOTHING) for client in clients}
        self._bases = {name: version if version in known else NOTHING for name, version in has.items()}
        return clients

    def payload(self, client: Client, server_round: int) -> Mapping[str, np.ndarray | Array]:
        """Return the whole student, its last change, or nothing if the client has it."""
        base = self._bases[client.name]
        return self.arrays if base == NOTHING else {} if base == self._version else self._change

    def instructions(self, client: Client, server_round: int) -> dict[str, Any]:
        """Return which student this is, and which one the client must have to take it."""
        return {"version": self._version, "base": self._bases[client.name]}

    def decoded(self, client: Client, arrays: NamedArrays) -> NamedArrays:
        """Return the client's student.

        Raises:
            FloretError: the factors make what cannot travel.
        """
        student = whole(self.arrays, arrays)
        check_sendable(student, self.shared_networks(self.setup), self.config.wire)
        return student

    def accumulate(self, client: Client, arrays: NamedArrays, samples: int) -> None:
        """Add the client's student to the mean; from now on the client has the student of this round's beginning."""
        super().accumulate(client, arrays, samples)
        self._has[client.name] = self._version

    def aggregate(self) -> NamedArrays:
        """Return the global student after the part of the mean change that clients are sent."""
        mean = {name: torch.from_numpy(array) for name, array in super().aggregate().items()}
        before = {name: torch.tensor(array) for name, array in self.arrays.items()}
        energy = energy_at(self.parameters, self.round, self.config.rounds)
        sent = {name: tensor.numpy() for name, tensor in compressed(before, mean, energy).items()}
        # The factors that are applied are those that travel: clients do not drift away where ``wire`` rounds them.
        self._change = dict(pack(sent, self._downlink, self.config.wire))
        rounded = {name: array for name, array in self._unpacked().items() if name.endswith((LEFT, RIGHT))}
        self._previous, self._version = self._version, self.round
        return whole(self.arrays, sent | rounded)

    def state_dict(self) -> NamedArrays:
        """Return the last change, and which student each client has."""
        return {
            "versions": np.array([self._version, self._previous]),
            **{f"change.{name}": array for name, array in self._unpacked().items()},
            **{f"has.{name}": np.array(version) for name, version in self._has.items()},
        }

    def load_state_dict(self, arrays: NamedArrays) -> None:
        """Take back what ``state_dict`` returned."""
        self._version, self._previous = arrays["versions"].tolist()
        self._change = dict(pack(without_prefix(arrays, "change."), self._downlink, self.config.wire))
        self._has = {name: int(version) for name, version in without_prefix(arrays, "has.").items()}

    def _unpacked(self) -> NamedArrays:
        return unpack(ArrayRecord(self._change), self._downlink, self.config.wire, whole=False)
