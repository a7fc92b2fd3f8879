"""Checkpoints of the server: what a run needs to go on from a round as if nothing had happened.

A checkpoint is a manifest, ``round-<n>.json``, and files of tensors that it names with their checksums: the global ones
and the strategy's own in ``round-<n>.safetensors``; what clients sent last in ``mail-<n>.safetensors``; in a run of the
local engine, what its clients keep in ``states-<n>.safetensors``. Of the last two, each checkpoint writes what came
since the one before; a file stays as long as a manifest names it.

Random numbers need no state: every generator is derived from the seed, its purpose and the round.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from common.accuracies import TELLING
from common.durable import (
    DamagedError,
    UnreadableError,
    digest,
    read_checked,
    read_manifest,
    write_manifest,
    write_whole,
)
from common.errors import FloretError
from common.names import natural_key, without_prefix
from common.simulation import KeptState
from common.tensors import NamedArrays
from strategies.core import Client

GLOBAL, STRATEGY = "global/", "strategy/"
KEPT = 2
# What there is of each client beside the manifest.
_KINDS = ("mail", "states")
# The files of mail, or of states, may take so many times what is alive in them; beyond that all of it is written anew.
_LOOSE = 2.0
# Bytes of tensors that a file of mail or of states begins another one after.
_FULL = 1 << 26


@dataclass(frozen=True)
class Mail:
    """What a client sent in ``round``; ``tensors`` returns it when it is needed."""

    round: int
    tensors: Callable[[], NamedArrays]


@dataclass(frozen=True)
class Checkpoint:
    """The server after ``round`` (0: before the first); ``lineage`` and ``resumed`` are those of its session.

    ``arrays`` are the global tensors, ``strategy`` what the strategy remembers besides, ``mail`` what each client sent
    last if the method keeps it, ``about`` what the federation's data have in common, ``seconds`` how long the run has
    taken, ``states`` what clients keep if the server keeps it for them.
    """

    round: int
    lineage: str
    resumed: tuple[int, ...]
    arrays: NamedArrays
    strategy: NamedArrays
    mail: Mapping[str, Mail]
    clients: list[Client]
    about: dict[str, Any]
    seconds: float
    states: Mapping[str, KeptState] = field(default_factory=dict)


@dataclass(frozen=True)
class _File:
    """A file of tensors that a manifest names."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class _Place:
    """Where mail or state of a client is: in which file, from which round, how many bytes of tensors."""

    file: _File
    round: int
    size: int


class Checkpoints:
    """The checkpoints of a run, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Where mail and states are of the checkpoint that was written or read last.
        self._places: dict[str, dict[str, _Place]] = {kind: {} for kind in _KINDS}

    def write(self, checkpoint: Checkpoint) -> None:
        """Write what changed since the last checkpoint and a manifest, and remove all but the last two checkpoints.

        Raises:
            FloretError: it cannot be written; the earlier ones are still there.
        """
        tensors = {GLOBAL + name: array for name, array in checkpoint.arrays.items()}
        tensors |= {STRATEGY + name: array for name, array in checkpoint.strategy.items()}
        stem = f"round-{checkpoint.round:06d}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._write_tensors(f"{stem}.safetensors", tensors)
            for kind, boxes in (("mail", checkpoint.mail), ("states", _boxes_of(checkpoint.states))):
                self._places[kind] = self._write_boxes(kind, checkpoint.round, boxes)
            places = [place for found in self._places.values() for place in found.values()]
            files = {place.file.name: asdict(place.file) for place in places}
            manifest = {
                "round": checkpoint.round,
                "lineage": checkpoint.lineage,
                "resumed": checkpoint.resumed,
                "clients": [asdict(client) for client in checkpoint.clients],
                "about": checkpoint.about,
                "seconds": checkpoint.seconds,
                "bytes": file.bytes,
                "sha256": file.sha256,
                "files": list(files.values()),
                "order": list(checkpoint.arrays),
                **{
                    kind: {client: [p.file.name, p.round, p.size] for client, p in found.items()}
                    for kind, found in self._places.items()
                },
            }
            write_manifest(self._folder / f"{stem}.json", manifest)
            self._remove_old()
        except OSError as error:
            raise FloretError(f"checkpoint {self._folder / stem}: cannot be written ({error.strerror})") from error

    def read(self) -> tuple[Checkpoint, list[str]]:
        """Return the last checkpoint that is intact, and a line for each later one that is not.

        Raises:
            FloretError: there is none, or a later one cannot be read now.
        """
        notes: list[str] = []
        for manifest in self._manifests():
            try:
                return self._read(manifest), notes
            except DamagedError as error:
                notes.append(str(error))
        found = "; ".join(notes) or "the run wrote none (checkpoint-every = 0), or this is not a run directory"
        raise FloretError(f"resume: {self._folder} has no checkpoint to go on from: {found}")

    def _read(self, manifest: Path) -> Checkpoint:
        """Return one checkpoint.

        Raises:
            DamagedError: one of its files is not what was written, or what was written is no checkpoint.
        """
        content = read_manifest(manifest)
        try:
            own = _File(f"{manifest.stem}.safetensors", content["bytes"], content["sha256"])
            tensors = self._read_tensors(own)
            mail, places = self._read_boxes("mail", content)
            kept, places_of_states = self._read_boxes("states", content)
            strategy = without_prefix(tensors, STRATEGY)
            # Noise is drawn for one tensor after the other, and a file has them in an order of its own.
            arrays = without_prefix(tensors, GLOBAL)
            arrays = {name: arrays[name] for name in content.get("order", arrays)}
            if "mail" not in content:  # written before mail had files of its own: it was the strategy's
                mail, strategy = _mail_of(strategy, content["round"]), {}
            checkpoint = Checkpoint(
                round=content["round"],
                lineage=content["lineage"],
                resumed=tuple(content["resumed"]),
                arrays=arrays,
                strategy=strategy,
                mail=mail,
                clients=[Client(**client) for client in content["clients"]],
                about=content["about"],
                seconds=content["seconds"],
                states={client: _state_of(box) for client, box in kept.items()},
            )
            wrong = _wrong_with(checkpoint)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{manifest} is damaged: it is not a manifest of a checkpoint") from error
        if wrong:
            raise DamagedError(f"{manifest} is damaged: {wrong}")
        self._places = {"mail": places, "states": places_of_states}
        return checkpoint

    def _write_tensors(self, name: str, tensors: NamedArrays, *, sync: bool = True) -> _File:
        # What is saved are the bytes as they lie; not ``ascontiguousarray``, which makes vectors of numbers.
        content = save({name: np.asarray(array, order="C") for name, array in tensors.items()})
        write_whole(self._folder / name, content, sync=sync)
        return _File(name, len(content), digest(content))

    def _read_tensors(self, file: _File) -> NamedArrays:
        if Path(file.name).name != file.name:
            raise ValueError("a file somewhere else")
        path = self._folder / file.name
        content = read_checked(path, file.bytes, file.sha256)
        try:
            return load(content)
        except Exception as error:  # the checksum is right, and what was written with it is no file of tensors
            raise DamagedError(f"{path} is damaged: it is not a file of tensors") from error

    def _write_boxes(self, kind: str, server_round: int, boxes: Mapping[str, Mail]) -> dict[str, _Place]:
        """Write the mail, or the states, that no file has yet; return where all of it is."""
        old = self._places[kind]
        places = {c: old[c] for c, box in boxes.items() if c in old and old[c].round == box.round}
        taken = sum(file.bytes for file in {place.file for place in places.values()})
        if taken > _LOOSE * sum(place.size for place in places.values()):
            places = {}
        missing = [client for client in boxes if client not in places]
        while missing:
            flat: NamedArrays = {}
            sizes: dict[str, int] = {}
            while missing and sum(sizes.values()) < _FULL:
                client = missing.pop()
                arrays = boxes[client].tensors()
                flat |= {f"{client}/{name}": array for name, array in arrays.items()}
                sizes[client] = sum(array.nbytes for array in arrays.values())
            part = f"-{len(missing)}" if missing else ""
            # What a simulation's clients keep was never worth the wait for the disk; see ``client_app.state``.
            file = self._write_tensors(f"{kind}-{server_round:06d}{part}.safetensors", flat, sync=kind == "mail")
            places |= {client: _Place(file, boxes[client].round, size) for client, size in sizes.items()}
        return places

    def _read_boxes(self, kind: str, manifest: Mapping[str, Any]) -> tuple[dict[str, Mail], dict[str, _Place]]:
        files = {item["name"]: _File(**item) for item in manifest.get("files", [])}
        places = {c: _Place(files[name], sent, size) for c, (name, sent, size) in manifest.get(kind, {}).items()}
        needed = {place.file.name: place.file for place in places.values()}
        boxes = {name: _mail_of(self._read_tensors(file), 0) for name, file in needed.items()}
        return {c: Mail(place.round, boxes[place.file.name][c].tensors) for c, place in places.items()}, places

    def newest(self) -> int:
        """Return the round of the last checkpoint, which may be damaged; 0 if there is none."""
        rounds = (path.stem.removeprefix("round-") for path in self._manifests())
        return next((int(number) for number in rounds if number.isdecimal()), 0)

    def _manifests(self) -> Iterator[Path]:
        yield from sorted(self._folder.glob("round-*.json"), key=lambda path: natural_key(path.name), reverse=True)

    def _remove_old(self) -> None:
        """Remove all but the last manifests, then the files that none names any more."""
        needed = {place.file.name for places in self._places.values() for place in places.values()}
        for age, manifest in enumerate(self._manifests()):
            if age >= KEPT:
                manifest.unlink()
                continue
            needed.add(f"{manifest.stem}.safetensors")
            try:
                needed |= {item["name"] for item in read_manifest(manifest).get("files", [])}
            except (DamagedError, KeyError, TypeError):
                continue  # it will be passed over, so nothing is kept for it
            except UnreadableError:
                return  # which files it needs is not known: this time none goes
        for kind in ("round", *_KINDS):
            for file in self._folder.glob(f"{kind}-*.safetensors"):
                if file.name not in needed:
                    file.unlink()


def _wrong_with(checkpoint: Checkpoint) -> str:
    """Return why no run can go on from a checkpoint whose checksums are right; an empty text if it can."""
    boxes: list[Mail | KeptState] = [*checkpoint.mail.values(), *checkpoint.states.values()]
    counts = (checkpoint.round, *checkpoint.resumed, *(box.round for box in boxes))
    if not all(type(count) is int and 0 <= count < 2**31 for count in counts):
        return "it has a round that is none"
    if not (isinstance(checkpoint.lineage, str) and isinstance(checkpoint.about, dict)):
        return "it is not a manifest of a checkpoint"
    if not (isinstance(checkpoint.seconds, int | float) and 0 <= checkpoint.seconds < float("inf")):
        return "it has a time that is none"
    for client in checkpoint.clients:
        counts = (client.node_id, client.train, client.validation, client.test)
        texts = (client.name, client.identity, client.key)
        of_a_client = {*map(type, texts)} == {str} and {*map(type, counts)} == {int} and type(client.own) is bool
        if not of_a_client or client.accuracies not in TELLING:
            return "it has a client that is none"
    for name, array in checkpoint.arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return f"its tensor {name} is not finite"
    return ""


def _mail_of(tensors: NamedArrays, server_round: int) -> dict[str, Mail]:
    """Return tensors called ``<client>/<name>`` by client."""
    boxes: dict[str, NamedArrays] = {}
    for key, array in tensors.items():
        client, _, name = key.rpartition("/")
        boxes.setdefault(client, {})[name] = array
    return {client: Mail(server_round, lambda box=box: box) for client, box in boxes.items()}  # type: ignore[misc]


def _boxes_of(states: Mapping[str, KeptState]) -> dict[str, Mail]:
    """Return states as boxes of two tensors of bytes."""

    def tensors(state: KeptState) -> NamedArrays:
        parts = {"manifest": state.manifest, "tensors": state.tensors}
        return {name: np.frombuffer(content, np.uint8) for name, content in parts.items()}

    return {client: Mail(state.round, partial(tensors, state)) for client, state in states.items()}


def _state_of(box: Mail) -> KeptState:
    """Return the state that ``_boxes_of`` made a box of.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    arrays = box.tensors()
    manifest, tensors = (arrays[name].tobytes() for name in ("manifest", "tensors"))
    if not isinstance(json.loads(manifest), dict):
        raise TypeError("a manifest that is no table")
    return KeptState(box.round, manifest, tensors)
