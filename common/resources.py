"""The processes of a run of the local engine: how many clients share how many workers, and what each may use."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from common.config import nearest
from common.errors import ConfigError
from common.run_config import parse_federation_configs
from common.simulation import own_cpus

# The keys of a federation config, as Flower names them, with their defaults: clients, CPUs and GPUs of each client,
# CPUs and GPUs of all together (0: those of the machine).
_KEYS = {
    "num-supernodes": 10.0,
    "client-resources-num-cpus": 1.0,
    "client-resources-num-gpus": 0.0,
    "init-args-num-cpus": 0.0,
    "init-args-num-gpus": 0.0,
}

# What Flower's simulation has besides.
_FLOWERS = ("backend", "verbose", "init-args-logging-level", "init-args-log-to-driver")
# Keys that must not be 0.
_POSITIVE = ("num-supernodes", "client-resources-num-cpus")
# Every number is below it.
_MOST = 1_000_000

# Of runs that are made at the same time, which one from 0, and how many there are.
Part = tuple[int, int]
WHOLE: Part = (0, 1)


@dataclass(frozen=True)
class Resources:
    """The processes that clients share.

    Attributes:
        clients: how many there are.
        workers: how many of them are trained at a time, each in a process.
        cpus: of each worker.
        gpus: of each worker, the numbers of those that it sees.
    """

    clients: int
    workers: int
    cpus: int
    gpus: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, texts: Sequence[str], part: Part = WHOLE) -> Self:
        """Return those of ``--federation-config`` texts, with the keys that Flower's simulation has.

        Unlike there, a client gets one CPU if nothing is said. A client that gets a part of a GPU shares it.

        Args:
            texts: with keys and values.
            part: of what is there, if other runs are made at the same time.

        Raises:
            ConfigError: a text is not keys and values, a key is not known, or its value cannot be used on this
                machine, or in this part of it.
        """
        said = _KEYS | _numbers(parse_federation_configs(texts), "the local engine")
        clients, cpus = int(said["num-supernodes"]), int(said["client-resources-num-cpus"])
        place, runs = part
        total = int(said["init-args-num-cpus"]) or own_cpus()
        own = total // runs + (place < total % runs)
        if own < cpus:
            have = f"{runs} runs at once have {total} CPU(s) in all" if runs > 1 else f"there are {total}"
            raise _too_many(cpus, have)
        workers = max(1, own // cpus)
        share = said["client-resources-num-gpus"]
        if not share:
            workers = min(workers, clients)
            return cls(clients, workers, cpus, ((),) * workers)
        places = _gpus(share, int(said["init-args-num-gpus"]) or count_gpus())[place::runs][: min(workers, clients)]
        if not places:
            raise ConfigError(
                f"--federation-config client-resources-num-gpus={share:g}: too much for each of {runs} runs at once"
            )
        return cls(clients, len(places), cpus, tuple(places))


def clients_of_simulation(texts: Sequence[str]) -> int | None:
    """Return how many clients ``--federation-config`` texts for Flower's simulation say, None if they do not.

    Raises:
        ConfigError: a text is not keys and values, a key is not known, or its value cannot be used on any machine.
    """
    clients = _numbers_of_simulation(texts).get("num-supernodes")
    return None if clients is None else int(clients)


def check_cpus(texts: Sequence[str]) -> None:
    """Check that ``--federation-config`` texts for Flower's simulation give a client no more CPUs than there are.

    How many a cluster has that Ray is told of (``RAY_ADDRESS``) is not known here.

    Raises:
        ConfigError: they do: Ray would wait for such a machine, and end with a traceback.
    """
    said = _numbers_of_simulation(texts)
    cpus = int(said.get("client-resources-num-cpus", 0))
    total = int(said.get("init-args-num-cpus", 0)) or max(own_cpus(), os.cpu_count() or 1)
    if cpus > total and "RAY_ADDRESS" not in os.environ:
        raise _too_many(cpus, f"there are {total}")


def _numbers_of_simulation(texts: Sequence[str]) -> dict[str, float]:
    said = {key: value for key, value in parse_federation_configs(texts).items() if key not in _FLOWERS}
    return _numbers(said, "Flower's simulation", _FLOWERS)


def _too_many(cpus: int, have: str) -> ConfigError:
    return ConfigError(f"--federation-config client-resources-num-cpus={cpus}: {have}")


def _numbers(said: Mapping[str, str], engine: str, others: Iterable[str] = ()) -> dict[str, float]:
    """Return the values of keys that are numbers, checked; ``engine`` has these keys and the ``others``."""
    known, found = [*_KEYS, *others], dict[str, float]()
    for key, value in said.items():
        if key not in known:
            raise ConfigError(f"--federation-config {key}: {engine} knows {', '.join(known)}{nearest(key, known)}")
        least, part = int(key in _POSITIVE), key == "client-resources-num-gpus"
        try:
            found[key] = float(value) if part else int(value)
        except ValueError:
            found[key] = -1
        if not least <= found[key] < _MOST:
            raise ConfigError(
                f"--federation-config {key}={value}: must be a {'' if part else 'whole '}number, at least {least} "
                f"and below {_MOST}"
            )
    return found


def count_gpus() -> int:
    """Return how many GPUs this process sees."""
    # It asks the driver's library and leaves CUDA alone: what has used CUDA cannot be forked.
    import torch

    return torch.cuda.device_count()


def _gpus(share: float, gpus: int) -> list[tuple[int, ...]]:
    """Return the GPUs of each worker that has room when a client takes ``share`` of one, or so many."""
    if share > gpus:
        raise ConfigError(f"--federation-config client-resources-num-gpus={share:g}: this machine has {gpus}")
    if share <= 1:
        # In turn, so that few workers do not share one GPU while others idle.
        return [(gpu,) for _ in range(math.floor(1 / share)) for gpu in range(gpus)]
    if share % 1:
        raise ConfigError(f"--federation-config client-resources-num-gpus={share:g}: above 1 it must be a whole number")
    each = int(share)
    return [tuple(range(start, start + each)) for start in range(0, gpus - each + 1, each)]
