"""Whether this process belongs to a simulation, and the grid of the local engine as a ServerApp sees it.

A simulation is one of Flower's, on Ray, or one of Floret's own local engine (``engine``). In both, the clients run on
the user's own machine, so they may write where the server says.
"""

import os
import sys
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr.serverapp import Grid

from common.starts import Start

# The CPUs of one client, in a process of the local engine.
_cpus = 0


def enter_simulation(cpus: int) -> None:
    """Make this process one of the local engine's, in which a client may use so many CPUs."""
    global _cpus
    _cpus = cpus


def in_simulation() -> bool:
    """Return whether this process belongs to a simulation.

    Only two things decide: that Ray was initialised, as Flower's simulation does before a client's code runs, or that
    the local engine made this process. ``floret node`` does neither, and no server can make it.
    """
    return in_local_engine() or _on_ray()


def in_local_engine() -> bool:
    """Return whether this process is one of the local engine's."""
    return _cpus > 0


def given_cpus() -> int:
    """Return the CPUs that this process may use: what a simulation gives to one client, or those of the process."""
    if _cpus:
        return _cpus
    if _on_ray():
        import ray

        return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
    return own_cpus()


def own_cpus() -> int:
    """Return the CPUs of this machine that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def all_cpus() -> int:
    """Return the CPUs of a whole simulation on Ray, perhaps of many machines; 0 outside of one."""
    if not _on_ray():
        return 0
    import ray

    return int(ray.cluster_resources().get("CPU", 0))


def _on_ray() -> bool:
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized())


@dataclass(frozen=True)
class KeptState:
    """What a client keeps from round to round, as bytes: ``manifest`` is JSON, ``tensors`` safetensors.

    ``round`` is the round that it is from.
    """

    round: int
    manifest: bytes
    tensors: bytes


class LocalGrid(Grid):
    """The grid of the local engine: what it can do beyond Flower's."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Return when there is an answer that was not there before, at the latest after so many seconds."""

    @abstractmethod
    def forget(self, message_ids: Iterable[str]) -> None:
        """Wait no longer for the answers to these messages: those that no client has begun with are not delivered."""

    @abstractmethod
    def states(self) -> Mapping[str, KeptState]:
        """Return what each client keeps, by name, for a checkpoint; clients that keep nothing are not in it."""

    @abstractmethod
    def restore(self, states: Mapping[str, KeptState]) -> None:
        """Bring clients, by name, to what they kept when a checkpoint was written."""

    @abstractmethod
    def adopt(self, folder: Path, lineage: str, last: int, resumed: tuple[int, ...], starts: tuple[Start, ...]) -> None:
        """Bring the clients to what a simulation on Ray left in ``folder``.

        Args:
            folder: where its clients kept their states.
            lineage: of the run.
            last: the round of the checkpoint that the run goes on from.
            resumed: the rounds after which the run was resumed, in turn, the last one included.
            starts: of the run's server.
        """
