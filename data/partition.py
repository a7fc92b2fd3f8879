"""Partition of the pool's samples among clients: flwr-datasets' partitioners on a table of labels."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from common.config import RunConfig
from common.errors import ConfigError, DataError
from common.extras import require
from common.partitioners import Indices, draw
from common.seeds import derive_seed, numpy_generator

PARTITIONS = {
    "iid": "every client a random sample of the pool, sizes equal to within one",
    "dirichlet": "each class is divided by proportions from Dirichlet(alpha); the smaller alpha, the more they differ",
    "dirichlet-balanced": "as dirichlet, but a client above the mean size gets nothing of the classes that follow",
    "pfllib": "as dirichlet-balanced, and the very clients that PFLlib's generators of datasets make with this seed",
    "pathological": "every client has exactly classes-per-client classes",
    "extreme": "as pathological, but two clients have the same classes or none in common; leftover classes stay unused",
    "shards": "the pool sorted by label is cut into equal shards, shards-per-client of them for each client",
}

_MAX_DRAWS = 100
BY_ALPHA = ("dirichlet", "dirichlet-balanced", "pfllib")
_RANDOM_SIZES = (*BY_ALPHA, "pathological", "extreme")
BY_CLASSES = ("pathological", "extreme")
# The library's classes.
_LIBRARY = {
    "iid": "IidPartitioner",
    "dirichlet": "DirichletPartitioner",
    "dirichlet-balanced": "DirichletPartitioner",
    "pathological": "PathologicalPartitioner",
    "shards": "ShardPartitioner",
}


@dataclass(frozen=True)
class Scheme:
    """What determines a partition of given labels among a given number of clients."""

    name: str
    alpha: float
    classes_per_client: int
    shards_per_client: int
    min_samples: int
    seed: int

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the part of the run config that determines the partition."""
        return cls(
            config.partition,
            config.alpha,
            config.classes_per_client,
            config.shards_per_client,
            config.min_samples,
            config.seed_of_data,
        )

    @property
    def needed(self) -> int:
        """The minimum number of samples of a client, at least 2: one for training and one for testing."""
        return max(self.min_samples, 2)

    def __str__(self) -> str:
        parameter = {
            "dirichlet": f" with alpha = {self.alpha:g}",
            "dirichlet-balanced": f" with alpha = {self.alpha:g}",
            "pfllib": f" with alpha = {self.alpha:g}",
            "pathological": f" with classes-per-client = {self.classes_per_client}",
            "extreme": f" with classes-per-client = {self.classes_per_client}",
            "shards": f" with shards-per-client = {self.shards_per_client}",
        }
        return f"partition {self.name}{parameter.get(self.name, '')}"


def partition(
    labels: npt.NDArray[np.int64], scheme: Scheme, num_clients: int, dataset: str, max_samples: int = 0
) -> tuple[Indices, ...]:
    """Return for each client the sorted positions of its samples in ``labels`` (n,).

    No sample has two clients. ``iid``, ``dirichlet``, ``dirichlet-balanced`` and ``pfllib`` assign every sample.
    ``dirichlet-balanced`` deals out the classes in ascending order and gives nothing more to a client that has more
    samples than the mean (Li et al., Federated Learning on Non-IID Data Silos, ICDE 2022, in their code; not in their
    text). Sizes differ less then, and a client has fewer classes than with ``dirichlet`` and the same alpha.
    ``pathological`` gives client i class i modulo the number of classes and draws its other classes; the samples of a
    class that no client has stay unused. ``shards`` leaves unused what remains after cutting equal shards. ``extreme``
    and ``pfllib`` are described in ``_extreme`` and ``_PFLlib``.

    Every client needs ``min_samples`` samples, and at least 2: one for training and one for testing. If
    ``min_samples`` > 1, a partition with random sizes is redrawn, up to 100 times, until this holds; with 1 the first
    draw is final. ``dataset`` is the name in error messages; if there are ``max_samples``, that is a cause of too few.

    Raises:
        ConfigError: ``classes_per_client`` is larger than the number of classes.
        DataError: a client would have too few samples; says how few and what to change.
    """
    check_counts(scheme, num_clients, len(np.unique(labels)), len(labels), dataset, max_samples)
    # The library gives consecutive samples to a client (its IID partitioner does nothing else): shuffle them first, or
    # the partition would depend on the order of the files, training part before test part. PFLlib's depends on it.
    pfllib = _PFLlib(scheme) if scheme.name == "pfllib" else None
    shuffle = numpy_generator(scheme.seed, "partition", "order")
    order = np.arange(len(labels)) if pfllib else shuffle.permutation(len(labels))
    needed = scheme.needed
    draws = _MAX_DRAWS if scheme.min_samples > 1 and scheme.name in _RANDOM_SIZES else 1
    parts: list[Indices] = []
    refusal = ""
    for attempt in range(draws):
        # The last draw is made in full, so that its smallest client can be named.
        at_least = needed if attempt + 1 < draws else 0
        seed = derive_seed(scheme.seed, "partition", attempt) % 2**32
        try:
            parts = (
                pfllib.draw(labels, num_clients)
                if pfllib
                else _draw(labels[order], scheme, num_clients, seed, at_least)
            )
        except ValueError as error:
            parts, refusal = [], " ".join(str(error).split())
            if scheme.name == "pathological":  # the library names parameters of its own
                remedy = "change classes-per-client or use fewer clients"
                refusal = f"a class has fewer samples than clients that need it; {remedy}"
            continue
        if len(parts) == num_clients and min(map(len, parts)) >= needed:
            return tuple(np.sort(order[part]) for part in parts)
    if not parts:
        raise DataError(f"{scheme}, {num_clients} clients, {len(labels)} samples of {dataset}: {refusal}")
    raise DataError(_too_few(scheme, [len(part) for part in parts], needed, draws, len(labels) == max_samples))


def check_counts(
    scheme: Scheme, num_clients: int, classes: int, samples: int, dataset: str, max_samples: int = 0
) -> None:
    """Check from the numbers of classes and samples alone whether a partition is possible.

    If there are ``max_samples``, that is a cause of too few.

    Raises:
        ConfigError, DataError: as ``partition``; it may still find that a draw leaves a client with too few samples.
    """
    if scheme.name in BY_CLASSES and scheme.classes_per_client > classes:
        raise ConfigError(
            f"classes-per-client = {scheme.classes_per_client}: must be at most {classes}, "
            f"the number of classes of {dataset}"
        )
    cut = samples == max_samples
    have = f"{dataset} with max-samples = {max_samples}" if cut else dataset
    more = "raise max-samples, " if cut else ""
    shards = scheme.shards_per_client * num_clients
    if scheme.name == "shards" and shards > samples:
        raise DataError(
            f"{scheme}: {num_clients} clients need {shards} shards, but {have} has "
            f"{samples} samples; {more}lower shards-per-client or use fewer clients"
        )
    sizes: list[int] = []
    if scheme.name == "iid":
        sizes = [samples // num_clients + (i < samples % num_clients) for i in range(num_clients)]
    elif scheme.name == "shards":
        sizes = [scheme.shards_per_client * (samples // shards)] * num_clients
    if sizes and min(sizes) < scheme.needed:
        raise DataError(_too_few(scheme, sizes, scheme.needed, 1, cut))
    if scheme.needed * num_clients > samples:
        lower = "lower min-samples, " if scheme.min_samples > 2 else ""
        *remedies, last = f"{more}{lower}use fewer clients".split(", ")
        raise DataError(
            f"{scheme}: {num_clients} clients need {scheme.needed} samples each, but {have} has "
            f"{samples}; {', '.join(remedies)}{' or ' if remedies else ''}{last}"
        )


def _too_few(scheme: Scheme, sizes: list[int], needed: int, draws: int, cut: bool) -> str:
    remedies = ["raise max-samples"] if cut else []
    if scheme.name in BY_ALPHA:
        remedies.append("raise alpha")
    elif scheme.name in BY_CLASSES:
        remedies.append("change classes-per-client")
    if scheme.min_samples > 2:
        remedies.append("lower min-samples")
    elif scheme.min_samples == 1 and scheme.name in _RANDOM_SIZES:
        remedies.insert(
            0, "set min-samples to 2 or more (the partition is then redrawn until every client has that many)"
        )
    smallest = int(np.argmin(sizes))
    return (
        f"{scheme}: client {smallest} of {len(sizes)} has {sizes[smallest]} samples"
        f"{f' in the last of {draws} draws' if draws > 1 else ''}, it needs {needed}; "
        f"{', '.join([*remedies, 'use fewer clients'])}"
    )


def _draw(labels: npt.NDArray[np.int64], scheme: Scheme, num_clients: int, seed: int, at_least: int) -> list[Indices]:
    """Return the positions of each client, up to the first client with fewer than ``at_least``."""
    if scheme.name == "extreme":
        return _extreme(labels, scheme.classes_per_client, num_clients, seed)
    require("flwr_datasets", "datasets", f"partition = {scheme.name!r}")
    arguments: dict[str, Any] = {"num_partitions": num_clients}
    if scheme.name != "iid":
        arguments |= {"partition_by": "label", "seed": seed}
    if scheme.name in BY_ALPHA:
        balanced = scheme.name == "dirichlet-balanced"
        arguments |= {"alpha": scheme.alpha, "min_partition_size": 0, "self_balancing": balanced}
    elif scheme.name == "pathological":
        arguments["num_classes_per_partition"] = scheme.classes_per_client
        arguments["class_assignment_mode"] = "first-deterministic"
    elif scheme.name == "shards":
        arguments["num_shards_per_partition"] = scheme.shards_per_client
    return draw(labels, _LIBRARY[scheme.name], arguments, num_clients, at_least)


class _PFLlib:
    """The clients of PFLlib's generators of datasets (TsingZ0/PFLlib, dataset/utils/dataset_utils.py, "dir").

    They divide class after class, each in random order, by proportions from Dirichlet(alpha); a client that has the
    mean size or more gets nothing. All is drawn by one generator of NumPy's older kind, so that a seed gives the same
    clients as there, if labels are in the order of the files, training part first, and none is missing. Theirs is 1
    where nobody changed it. Which of a client's samples are for test is Floret's own draw.
    """

    def __init__(self, scheme: Scheme) -> None:
        self._alpha = scheme.alpha
        self._random = np.random.RandomState(scheme.seed % 2**32)

    def draw(self, labels: npt.NDArray[np.int64], num_clients: int) -> list[Indices]:
        """Return each client's positions in ``labels``; another call makes the next draw of the same generator.

        Raises:
            ValueError: alpha is so small that all clients that may still get samples have proportion 0.
        """
        parts = [labels[:0]] * num_clients
        for label in range(labels.max() + 1):
            positions = np.flatnonzero(labels == label)
            self._random.shuffle(positions)
            shares = self._random.dirichlet(np.repeat(self._alpha, num_clients))
            shares *= [len(part) < len(labels) / num_clients for part in parts]
            if not shares.sum() > 0:
                raise ValueError(f"class {label}: no client that may have it gets a share; raise alpha")
            bounds = (np.cumsum(shares / shares.sum()) * len(positions)).astype(np.int64)[:-1]
            parts = [np.append(*both) for both in zip(parts, np.split(positions, bounds), strict=True)]
        return parts


def _extreme(labels: npt.NDArray[np.int64], k: int, num_clients: int, seed: int) -> list[Indices]:
    """Return each client's positions in the extreme split (UA-PDFL section 5.1.2), which flwr-datasets does not have.

    The paper says "samples from only a few classes, with significant non-overlap" and prints no numbers; this is its
    strict reading. The classes, in random order, are cut into groups of ``k``; the classes left over, fewer than ``k``,
    stay unused, so that no client has an easier task than another. Client i belongs to group i modulo the number of
    groups; with fewer clients than groups, the other groups stay unused; with more, the clients of a group share its
    samples, each with as many of every class as the others to within one.

    Raises:
        ValueError: a class has fewer samples than clients that need one.
    """
    classes = np.random.default_rng(seed).permutation(np.unique(labels))
    groups = len(classes) // k
    parts = [labels[:0]] * num_clients
    for group in range(min(groups, num_clients)):
        members = range(group, num_clients, groups)
        rows = [np.flatnonzero(labels == c) for c in classes[group * k : (group + 1) * k]]
        smallest = min(map(len, rows))
        if smallest < len(members):
            raise ValueError(f"a class has {smallest} samples for {len(members)} clients")
        # Round-robin, one class after the other: sizes are balanced within each class and in total.
        pooled = np.concatenate(rows)
        for place, i in enumerate(members):
            parts[i] = pooled[place :: len(members)]
    return parts
