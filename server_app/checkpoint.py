"""Checkpoints of the server: what a run needs to go on from a round as if nothing had happened.

Random numbers need no state: every generator is derived from the seed, its purpose and the round.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load, save

from common.durable import DamagedError, digest, read_checked, read_manifest, write_manifest, write_whole
from common.errors import FloretError
from common.names import without_prefix
from common.wire import NamedArrays
from strategies.core import Client

GLOBAL, STRATEGY = "global/", "strategy/"
KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """The server after ``round`` (0: before the first); ``lineage`` and ``resumed`` are those of its session.

    ``arrays`` are the global tensors, ``strategy`` what the strategy remembers besides, ``about`` what the federation's
    data have in common, ``seconds`` how long the run has taken.
    """

    round: int
    lineage: str
    resumed: tuple[int, ...]
    arrays: NamedArrays
    strategy: NamedArrays
    clients: list[Client]
    about: dict[str, Any]
    seconds: float


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write ``round-<n>.safetensors`` and its manifest, and remove all but the last two checkpoints.

    Raises:
        FloretError: they cannot be written; the earlier ones are still there.
    """
    tensors = {GLOBAL + name: array for name, array in checkpoint.arrays.items()}
    tensors |= {STRATEGY + name: array for name, array in checkpoint.strategy.items()}
    content = save(tensors)
    stem = folder / f"round-{checkpoint.round:06d}"
    said = {
        "round": checkpoint.round,
        "lineage": checkpoint.lineage,
        "resumed": checkpoint.resumed,
        "clients": [asdict(client) for client in checkpoint.clients],
        "about": checkpoint.about,
        "seconds": checkpoint.seconds,
        "bytes": len(content),
        "sha256": digest(content),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(stem.with_suffix(".safetensors"), content)
        write_manifest(stem.with_suffix(".json"), said)
        for old in sorted(folder.glob("round-*.json"), reverse=True)[KEPT:]:
            old.unlink()
            old.with_suffix(".safetensors").unlink(missing_ok=True)
    except OSError as error:
        raise FloretError(f"checkpoint {stem}: cannot be written ({error.strerror})") from error


def read_checkpoint(folder: Path) -> tuple[Checkpoint, list[str]]:
    """Return the last checkpoint that is intact, and a line for each later one that is not.

    Raises:
        FloretError: there is none.
    """
    notes: list[str] = []
    for manifest in _manifests(folder):
        try:
            said = read_manifest(manifest)
            tensors = load(read_checked(manifest.with_suffix(".safetensors"), said["bytes"], said["sha256"]))
        except DamagedError as error:
            notes.append(str(error))
            continue
        checkpoint = Checkpoint(
            round=said["round"],
            lineage=said["lineage"],
            resumed=tuple(said["resumed"]),
            arrays=without_prefix(tensors, GLOBAL),
            strategy=without_prefix(tensors, STRATEGY),
            clients=[Client(**client) for client in said["clients"]],
            about=said["about"],
            seconds=said["seconds"],
        )
        return checkpoint, notes
    found = "; ".join(notes) or "the run wrote none (checkpoint-every = 0), or this is not a run directory"
    raise FloretError(f"resume: {folder} has no checkpoint to go on from: {found}")


def _manifests(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("round-*.json"), reverse=True)
