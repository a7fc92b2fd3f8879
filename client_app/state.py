"""What a client keeps between rounds: its personal model and whatever else its method remembers.

Kept are versions, one for each round that the client took part in, so that a message which arrives twice, or a server
that goes back to an older checkpoint, finds the client as it was. On a node versions are files (``FileStore``); in a
simulation that writes no checkpoints the last one is in Flower's ``context.state`` (``ContextStore``).
"""

import fcntl
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from flwr.app import ConfigRecord, RecordDict
from safetensors.torch import load, save
from torch import Tensor

from common.config import RunConfig, folder_name
from common.durable import DamagedError, digest, read_checked, read_manifest, write_manifest, write_whole
from common.errors import FloretError
from common.wire import from_record, to_record

TENSORS = "floret.tensors"
MANIFEST = "floret.manifest"


@dataclass(frozen=True)
class RoundContext:
    """The run and round that a message belongs to: what decides which version it goes on from.

    Attributes:
        lineage: names a run and all runs that resumed it.
        round: the message's round.
        over: the round's training is over, so what came of it counts; else only what came of earlier rounds does.
        fresh: what other lineages left behind does not count.
        checkpointed: the last round that the server can go back to.
        resumed: the rounds after which the run was resumed, in turn; what came later before that did not happen.
    """

    lineage: str = ""
    round: int = 0
    over: bool = False
    fresh: bool = False
    checkpointed: int = 0
    resumed: tuple[int, ...] = ()

    @classmethod
    def of(cls, message: Mapping[str, Any], config: RunConfig, *, over: bool) -> Self:
        """Return that of a message with these scalars."""
        return cls(
            lineage=str(message["session.lineage"]),
            round=int(message["round"]),
            over=over,
            fresh=config.client_state == "fresh",
            checkpointed=int(message["session.checkpointed"]),
            resumed=tuple(message["session.resumed"]),
        )

    def knows(self, version: "Version") -> bool:
        """Return whether a version is of this lineage, and not of a future that a resume has undone."""
        undone = any(version.round > back for back in self.resumed[version.attempt :])
        return version.lineage == self.lineage and not undone

    def has_seen(self, version: "Version") -> bool:
        """Return whether a version that it knows is from before the message."""
        return version.round < self.round or (self.over and version.round == self.round)


@dataclass(frozen=True)
class Version:
    """The outcome of one round.

    Attributes:
        number: its place among a client's versions.
        lineage, attempt, round: of the server; ``attempt`` counts how often the run had been resumed.
        first: the first round of this lineage that the client took part in.
        about: how to build the model again.
    """

    number: int
    lineage: str
    attempt: int
    round: int
    first: int
    about: dict[str, Any] = field(default_factory=dict)


class Store(Protocol):
    """Where versions are."""

    def versions(self, notes: list[str]) -> list[Version]:
        """Return the versions, newest first; what cannot be read adds a line to ``notes``."""

    def read(self, version: Version) -> dict[str, Tensor]:
        """Return a version's tensors.

        Raises:
            DamagedError: they are not what was written.
        """

    def write(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Add a version.

        Raises:
            FloretError: it cannot be written; those that were there still are.
        """

    def keep(self, versions: Iterable[Version]) -> None:
        """Forget all other versions."""


class ClientState:
    """A client's versions as one message sees them: the one to go on from, and the one that comes of the message.

    Args:
        store: where versions are.
        at: the message's; by default the newest version counts, whatever it is from.

    Attributes:
        notes: what was found damaged, a line each.

    Raises:
        FloretError: no version fits the message, or none is intact; nothing was changed.
    """

    def __init__(self, store: Store, at: RoundContext | None = None) -> None:
        self._store = store
        self._at = at or RoundContext(round=2**31)
        self.notes: list[str] = []
        self._versions = store.versions(self.notes)
        self._version: Version | None = None
        self._tensors: dict[str, Tensor] = {}
        candidates = self._versions if at is None else self._candidates()
        for version in candidates:
            try:
                self._tensors = store.read(version)
            except DamagedError as error:
                self.notes.append(str(error))
                continue
            self._version = version
            break
        else:
            if self.notes:
                raise FloretError(
                    f"no intact version of the client's state is left ({'; '.join(self.notes)}); "
                    "bring the files back from a copy, or move them away to start anew"
                )
        if self._version and self.notes:
            self.notes.append(f"went on from the client's state after round {self._version.round}")

    @property
    def round(self) -> int:
        """The round that the version at hand is from, 0 if there is none."""
        return self._version.round if self._version else 0

    @property
    def about(self) -> dict[str, Any]:
        """What was said of the version at hand when it was committed."""
        return self._version.about if self._version else {}

    def load(self) -> dict[str, Tensor]:
        """Return the tensors of the version at hand by name; empty if there is none."""
        return dict(self._tensors)

    def commit(self, server_round: int, tensors: Mapping[str, Tensor], about: dict[str, Any] | None = None) -> None:
        """Keep ``tensors`` as the outcome of ``server_round``; what they supersede goes after they are safe.

        Left are: the new version; the one it was made from; the last one that the server's checkpoint can ask for; and
        the last one of another lineage.

        Raises:
            FloretError: they cannot be written; the state is as it was.
        """
        at = self._at
        own = [version for version in self._versions if at.knows(version)]
        first = min([server_round, *(version.first for version in own)])
        number = max((version.number for version in self._versions), default=0) + 1
        new = Version(number, at.lineage, len(at.resumed), server_round, first, about or {})
        self._store.write(new, tensors)
        safe = [v for v in own if v.round <= min(at.checkpointed, server_round - 1)]
        others = [version for version in self._versions if version.lineage != at.lineage]
        keep = {version.number for version in (self._version, *safe[:1], *others[:1]) if version}
        self._versions = [new, *(version for version in self._versions if version.number in keep)]
        self._store.keep(self._versions)
        self._version, self._tensors = new, dict(tensors)

    def _candidates(self) -> list[Version]:
        at = self._at
        own = [version for version in self._versions if at.knows(version)]
        others = [] if at.fresh else [version for version in self._versions if version.lineage != at.lineage]
        past = [version for version in own if at.has_seen(version)]
        if not past and own and at.round > own[-1].first:
            rounds = " and ".join(str(version.round) for version in reversed(own))
            raise FloretError(
                f"the server asks for round {at.round}, but this client's state is of round {rounds} and nothing "
                "earlier is left; resume the server from a later checkpoint"
            )
        return past + others


class ContextStore:
    """The last version only, in ``context.state``, which Flower hands back with the next message of the run."""

    def __init__(self, record: RecordDict) -> None:
        self._record = record

    def versions(self, notes: list[str]) -> list[Version]:
        """Return the last version, if there is one."""
        kept: Any = self._record.config_records.get(MANIFEST)
        return [Version(1, kept["lineage"], kept["attempt"], kept["round"], kept["first"])] if kept else []

    def read(self, version: Version) -> dict[str, Tensor]:
        """Return its tensors."""
        arrays = from_record(self._record.array_records[TENSORS])
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def write(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Replace the last version."""
        self._record[TENSORS] = to_record({name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()})
        self._record[MANIFEST] = ConfigRecord(
            {
                "lineage": version.lineage,
                "attempt": version.attempt,
                "round": version.round,
                "first": version.first,
            }
        )

    def keep(self, versions: Iterable[Version]) -> None:
        """Do nothing: writing has replaced the others."""


class FileStore:
    """Two files a version in one directory a client: tensors as safetensors, and a manifest with their checksum.

    The manifest is written last, so a version is there whole or not at all; a file of tensors without a manifest is
    what a crash left and is removed with the next commit. Nothing is ever unpickled.
    """

    def __init__(self, directory: Path, *, sync: bool) -> None:
        self.directory = directory
        self._sync = sync

    @classmethod
    def at(cls, state_dir: Path, federation: str, method: str, client: str, *, sync: bool) -> Self:
        """Return the store of a client in a federation and method: directories below ``state_dir``.

        Raises:
            FloretError: a name cannot be that of a directory.
        """
        for what, name in (("federation", federation), ("client-name", client)):
            wrong = folder_name(name)
            if wrong:
                raise FloretError(f"{what} = {name!r}: {wrong}")
        return cls(state_dir / federation / method / client, sync=sync)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Keep every other process from this client's state.

        Raises:
            FloretError: another one has it now, or the directory cannot be written.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = (self.directory / "lock").open("a")
        except OSError as error:
            raise FloretError(f"state-dir: {self.directory} cannot be written ({error.strerror})") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise FloretError(f"state-dir: {self.directory} is in use by another process") from error
            yield

    def versions(self, notes: list[str]) -> list[Version]:
        """Return the versions, newest first; a manifest that is damaged adds a line to ``notes``."""
        found = []
        for path in sorted(self.directory.glob("*.json"), reverse=True):
            try:
                content = read_manifest(path)
            except DamagedError as error:
                notes.append(str(error))
                continue
            found.append(
                Version(
                    int(path.stem), **{key: content[key] for key in ("lineage", "attempt", "round", "first", "about")}
                )
            )
        return found

    def read(self, version: Version) -> dict[str, Tensor]:
        """Return a version's tensors; see ``Store``."""
        manifest, path = self._paths(version)
        content = read_manifest(manifest)
        return load(read_checked(path, content["bytes"], content["sha256"]))

    def write(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Add a version; see ``Store``."""
        content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        manifest, path = self._paths(version)
        said = {item.name: getattr(version, item.name) for item in fields(version) if item.name != "number"}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_whole(path, content, sync=self._sync)
            write_manifest(manifest, said | {"bytes": len(content), "sha256": digest(content)}, sync=self._sync)
        except OSError as error:
            manifest.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise FloretError(
                f"state-dir: {path} cannot be written ({error.strerror}); the client's state is as it was"
            ) from error

    def keep(self, versions: Iterable[Version]) -> None:
        """Remove all other versions, manifest first, whatever is damaged, and whatever a crash left."""
        kept = {path.name for version in versions for path in self._paths(version)}
        # In order, so that a manifest goes before its tensors.
        for path in sorted(self.directory.glob("*")):
            if path.name not in kept and path.suffix in (".json", ".safetensors", ".new"):
                path.unlink(missing_ok=True)

    def _paths(self, version: Version) -> tuple[Path, Path]:
        stem = self.directory / f"{version.number:08d}"
        return stem.with_suffix(".json"), stem.with_suffix(".safetensors")


def identity(state_dir: Path) -> str:
    """Return the random text that names this state directory, made at the first call.

    Raises:
        FloretError: the directory cannot be written.
    """
    path = state_dir / "identity"
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_whole(path, secrets.token_hex(16).encode())
        return path.read_text()
    except OSError as error:
        raise FloretError(f"state-dir: {state_dir} cannot be written ({error.strerror})") from error
