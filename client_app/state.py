"""What a client keeps between rounds: its personal model and whatever else its method remembers.

Kept are versions, one for each round that the client took part in, so that a message which arrives twice, or a server
that goes back to an older checkpoint, finds the client as it was. On a node versions are files (``FileStore``); in a
simulation that writes no checkpoints the last one is in Flower's ``context.state`` (``ContextStore``).
"""

import fcntl
import json
import logging
import math
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from safetensors.numpy import save as save_arrays
from safetensors.torch import load, save
from torch import Tensor

from client_app.keeping import SHARE, Quota, Version, kept
from common.config import IDENTITY, SEED, RunConfig, federation_name, folder_name
from common.durable import (
    DamagedError,
    UnreadableError,
    digest,
    locked,
    make_folder,
    open_file,
    read_checked,
    read_manifest,
    write_manifest,
    write_whole,
)
from common.errors import FloretError
from common.seeds import derive_seed
from common.simulation import KeptState
from common.starts import Start, starts_of

log = logging.getLogger("flwr")

# In a client's folder: who has it locked has the client's state.
LOCK = "lock"
# Under what name a client's state is in ``context.state``.
STATE = "floret.state"

# What a message may say: rounds below this, and so often resumed.
_ROUNDS, _RESUMES = 2**31, 10_000
_LINEAGE = re.compile(r"[!-~]{1,100}")
# The types of tensors that a method can have in its state; whatever else a file has was not written by one.
_DTYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
_OURS = re.compile(r"[0-9]{8,}\.(json|safetensors)|\.[0-9]{8,}\.(json|safetensors)\.new")
_MANIFEST_BYTES = 4_000_000
_OWN_TEXT = re.compile(r"[!-~]{1,100}")


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
        starts: all starts of the run's server, the present one last; none in a message that does not name them.
    """

    lineage: str = ""
    round: int = 0
    over: bool = False
    fresh: bool = False
    checkpointed: int = 0
    resumed: tuple[int, ...] = ()
    starts: tuple[Start, ...] = ()

    @classmethod
    def of(cls, message: Mapping[str, Any], config: RunConfig, *, over: bool) -> Self:
        """Return that of a message with these scalars.

        Raises:
            FloretError: one of them is missing, or is not what a server of Floret sends.
        """
        lineage, resumed = message.get("session.lineage"), message.get("session.resumed")
        if not isinstance(lineage, str) or not _LINEAGE.fullmatch(lineage):
            raise _wrong("session.lineage", lineage, "a name of 1 to 100 letters")
        if not isinstance(resumed, list | tuple) or len(resumed) > _RESUMES:
            raise _wrong("session.resumed", resumed, f"a list of at most {_RESUMES} rounds")
        return cls(
            lineage=lineage,
            round=checked_round("round", message.get("round"), 0 if over else 1),
            over=over,
            # What another run made of the examples counts in that run's epsilon, not in this one's.
            fresh=config.client_state == "fresh" or config.privacy.unit == "example",
            checkpointed=checked_round("session.checkpointed", message.get("session.checkpointed")),
            resumed=tuple(checked_round("session.resumed", back) for back in resumed),
            starts=starts_of(message) if "session.starts" in message else (),
        )

    def knows(self, version: "Version") -> bool:
        """Return whether a version is of this run, and not of a future that a resume has undone."""
        return self.made(version) and version.round <= self.undone_after(version)

    def made(self, version: "Version") -> bool:
        """Return whether a version is of this run: of its lineage, and of a start of its server."""
        named = {start.name for start in self.starts}
        return version.lineage == self.lineage and (not version.start or not named or version.start in named)

    def undone_after(self, version: "Version") -> float:
        """Return the round after which nothing counts of what the start did that made a version of this run.

        A start that was given up leaves no trace in ``resumed`` if the next one goes back to the same checkpoint.
        """
        if version.start and self.starts:
            later = [start.name for start in self.starts].index(version.start) + 1
            return min((start.after for start in self.starts[later:]), default=math.inf)
        return min(self.resumed[version.attempt :], default=math.inf)

    def has_seen(self, version: "Version") -> bool:
        """Return whether a version that it knows is from before the message."""
        return version.round < self.round or (self.over and version.round == self.round)


class Store(Protocol):
    """Where versions are."""

    @property
    def unreadable(self) -> Mapping[int, str]:
        """The numbers of versions of which ``versions`` could not tell anything now, and why."""

    def versions(self, notes: list[str]) -> list[Version]:
        """Return the versions, newest first; what is damaged adds a line to ``notes``.

        Raises:
            UnreadableError: nobody can tell now which there are.
        """

    def read(self, version: Version) -> dict[str, Tensor]:
        """Return a version's tensors.

        Raises:
            DamagedError: they are not what was written.
            UnreadableError: they cannot be read now.
        """

    def write(self, version: Version, tensors: Mapping[str, Tensor]) -> Version:
        """Add a version, and return it with its size.

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
        quota: how much of the past is kept; by default no milestones, as a simulation needs none.

    Attributes:
        notes: what was found damaged, a line each.

    Raises:
        FloretError: no version fits the message, none is intact, or one cannot be read now; nothing was changed.
    """

    def __init__(self, store: Store, at: RoundContext | None = None, quota: Quota | None = None) -> None:
        self._store = store
        self._at = at or RoundContext(round=2**31)
        self._quota = quota or Quota(milestones=())
        self.notes: list[str] = []
        self._versions = store.versions(self.notes)
        self._version: Version | None = None
        self._tensors: dict[str, Tensor] = {}
        candidates = self._versions if at is None else self._candidates()
        newest = max((version.number for version in candidates), default=0)
        for number, reason in store.unreadable.items():
            if number > newest:
                raise UnreadableError(reason)  # it may be the one that counts
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
                    "see floret state list, bring the files back from a copy, or move them away to start anew"
                )
        if self._version and self.notes:
            self.notes.append(f"went on from the client's state after round {self._version.round}")

    @property
    def version(self) -> Version | None:
        """The version at hand, if there is one."""
        return self._version

    @property
    def round(self) -> int:
        """The round that the version at hand is from, 0 if there is none."""
        return self._version.round if self._version else 0

    @property
    def number(self) -> int:
        """The number of the version at hand, 0 if there is none."""
        return self._version.number if self._version else 0

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
        of other lines, as of this line's past, what ``client_app.keeping`` says.

        Raises:
            FloretError: they cannot be written, or are larger than the quota allows; the state is as it was.
        """
        self._check_size(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
        at, base = self._at, self._version
        own = self._own()
        number = max((version.number for version in self._versions), default=0) + 1
        line = number if not own or self._breaks(own[0], server_round) else own[0].line
        safe = [v for v in own if v.round <= min(at.checkpointed, server_round - 1)]
        needed = [version for version in (base, *safe[:1]) if version]
        new = Version(
            number=number,
            lineage=at.lineage,
            attempt=len(at.resumed),
            round=server_round,
            first=min([server_round, *(version.first for version in own)]),
            about=about or {},
            checkpointed=min(at.checkpointed, server_round),
            line=line,
            trained=1 + (base.trained if base and base.line == line else 0),
            beside=tuple(version.number for version in needed),
            start=at.starts[-1].name if at.starts else "",
        )
        new = self._store.write(new, tensors)
        self._versions = [new, *self._versions]
        stay = kept(self._versions, new, needed, self._quota, self._is_intact)
        for line in {version.line for version in self._versions if version.number not in stay and version.line != line}:
            if not any(version.line == line for version in self._versions if version.number in stay):
                log.info("Of a run before this one the personal model is not kept any more; see keep-runs, keep-gb")
        self._versions = [version for version in self._versions if version.number in stay]
        self._store.keep(self._versions)
        self._version, self._tensors = new, dict(tensors)

    def _own(self) -> list[Version]:
        """Return the versions of the message's run that its messages may go on from, newest first.

        What is kept only to be brought back by hand is not among them: between it and what a message asks for, rounds
        are missing.
        """
        own = [version for version in self._versions if self._at.made(version)]
        if own and own[0].beside is not None:
            numbers = {own[0].number, *own[0].beside}
            own = [version for version in own if version.number in numbers]
        return [version for version in own if self._at.knows(version)]

    def _breaks(self, last: Version, server_round: int) -> bool:
        """Return whether the message goes back further than its own server said it could, from its line's ``last``."""
        at = self._at
        line = [version for version in self._versions if version.line == last.line and at.made(version)]
        if any(version.round > server_round for version in line if at.knows(version)):
            return True
        undone = [version for version in line if not at.knows(version)]
        return any(version.checkpointed > at.undone_after(version) for version in undone)

    def _candidates(self) -> list[Version]:
        at = self._at
        own, there = self._own(), [version for version in self._versions if at.made(version)]
        others = [] if at.fresh else [version for version in self._versions if version not in there]
        past = [version for version in own if at.has_seen(version)]
        # It took part before the round that is asked for, and nothing of that is left.
        before = any(version.first <= min(at.round - 1, at.undone_after(version)) for version in there)
        if not past and before and not self._store.unreadable:
            rounds = " and ".join(str(version.round) for version in reversed(own or there))
            raise FloretError(
                f"the server asks for round {at.round}, but this client's state is of round {rounds} and nothing "
                "earlier is left; resume the server from a later checkpoint"
            )
        return past + others

    def _check_size(self, size: int) -> None:
        most = self._quota.bytes // SHARE
        if size > most:
            raise FloretError(
                f"the personal state of this run has {size} bytes; with keep-gb = {self._quota.bytes / 1e9:g} this "
                f"node keeps at most {most} for a version, so that several have room"
            )

    def _is_intact(self, version: Version) -> bool:
        try:
            self._store.read(version)
        except DamagedError:
            return False
        except UnreadableError:
            return True  # it may be, so it is not forgotten
        return True


class ContextStore:
    """The last version only, in ``context.state``, which a simulation hands back with the next message of the run.

    It is kept as the bytes of the two files that ``FileStore`` would write, without what is only needed for serving.
    """

    def __init__(self, record: RecordDict) -> None:
        self._record = record

    @property
    def unreadable(self) -> Mapping[int, str]:
        """Nothing: what is there is in memory."""
        return {}

    @property
    def kept(self) -> KeptState | None:
        """The last version as bytes, if there is one."""
        found: Any = self._record.get(STATE)
        return KeptState(found["round"], found["manifest"], found["tensors"]) if found else None

    @kept.setter
    def kept(self, state: KeptState) -> None:
        self._record[STATE] = ConfigRecord({"round": state.round, "manifest": state.manifest, "tensors": state.tensors})

    def versions(self, notes: list[str]) -> list[Version]:
        """Return the last version, if there is one."""
        kept = self.kept
        return [] if kept is None else [_version_of(1, json.loads(kept.manifest))]

    def read(self, version: Version) -> dict[str, Tensor]:
        """Return its tensors."""
        kept = self.kept
        assert kept is not None
        return load(kept.tensors)

    def write(self, version: Version, tensors: Mapping[str, Tensor]) -> Version:
        """Replace the last version."""
        content = _to_bytes(tensors)
        said = _manifest_of(replace(version, about={}))
        self.kept = KeptState(version.round, json.dumps(said).encode(), content)
        return replace(version, size=len(content))

    def keep(self, versions: Iterable[Version]) -> None:
        """Do nothing: writing has replaced the others."""


class FileStore:
    """Two files a version in one directory a client: tensors as safetensors, and a manifest with their checksum.

    The manifest is written last, so a version is there whole or not at all; a file of tensors without a manifest is
    what a crash left and is removed with the next commit. Nothing is ever unpickled.

    Args:
        directory: the client's.
        sync: as on a node: return only when the disk has what was written; and whatever is made here is its owner's
            alone (files 0600, directories 0700).
    """

    def __init__(self, directory: Path, *, sync: bool) -> None:
        self.directory = directory
        self.unreadable: dict[int, str] = {}
        self._sync = sync

    @classmethod
    def at(cls, state_dir: Path, federation: str, method: str, client: str, *, sync: bool) -> Self:
        """Return the store of a client in a federation and method: directories below ``state_dir``.

        Raises:
            FloretError: a name cannot be that of a directory.
        """
        for what, name, check in (
            ("federation", federation, federation_name),
            ("method", method, folder_name),
            ("client-name", client, folder_name),
        ):
            wrong = check(name)
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
            make_folder(self.directory, private=self._sync)
            file = open_file(self.directory / LOCK, "ab", private=self._sync)
        except OSError as error:
            raise FloretError(f"state-dir: {self.directory} cannot be written ({error.strerror})") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise FloretError(f"state-dir: {self.directory} is in use by another process") from error
            if not os.fstat(file.fileno()).st_nlink:  # another process has just removed the folder
                raise FloretError(f"state-dir: {self.directory} is in use by another process")
            if self._sync:
                _close_to_others(self.directory)
            yield

    def versions(self, notes: list[str]) -> list[Version]:
        """Return the versions, newest first; see ``Store``."""
        found, self.unreadable = [], {}
        for number in self.numbers():
            try:
                found.append(self._manifest(number)[0])
            except DamagedError as error:
                notes.append(str(error))
            except UnreadableError as error:
                self.unreadable[number] = str(error)
        # Manifests from before lines were written: the versions of one lineage are one.
        lines: dict[str, int] = {}
        for version in found:
            line = version.line or version.number
            lines[version.lineage] = min(line, lines.get(version.lineage, line))
        return [version if version.line else replace(version, line=lines[version.lineage]) for version in found]

    def numbers(self) -> list[int]:
        """Return the numbers of all versions, damaged or not, newest first.

        Raises:
            UnreadableError: the directory cannot be read.
        """
        try:
            names = os.listdir(self.directory)  # a glob finds nothing in a folder that it may not read
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UnreadableError(f"{self.directory} cannot be read ({error.strerror})") from error
        found = (name.removesuffix(".json") for name in names if name.endswith(".json") and _OURS.fullmatch(name))
        return sorted(map(int, found), reverse=True)

    def read(self, version: Version) -> dict[str, Tensor]:
        """Return a version's tensors; see ``Store``."""
        _, size, checksum = self._manifest(version.number)
        path = self._paths(version.number)[1]
        content = read_checked(path, size, checksum)
        try:
            tensors = load(content)
        except Exception as error:  # the checksum is right, and what was written with it is no file of tensors
            raise DamagedError(f"{path} is damaged: it is not a file of tensors") from error
        for name, tensor in tensors.items():
            if not name.isprintable() or tensor.dtype not in _DTYPES:
                raise DamagedError(f"{path} is damaged: {name!r:.60} is not a tensor of a personal model")
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise DamagedError(f"{path} is damaged: {name} is not finite")
        return tensors

    def write(self, version: Version, tensors: Mapping[str, Tensor]) -> Version:
        """Add a version; see ``Store``."""
        content = _to_bytes(tensors)
        manifest, path = self._paths(version.number)
        said = _manifest_of(version) | {"bytes": len(content), "sha256": digest(content)}
        _check_manifest(said)
        try:
            make_folder(self.directory, private=self._sync)
            write_whole(path, content, sync=self._sync, private=self._sync)
            write_manifest(manifest, said, sync=self._sync, private=self._sync)
        except OSError as error:
            for part in (manifest, path):
                with suppress(OSError):  # on a disk that has just turned read-only
                    part.unlink(missing_ok=True)
            raise FloretError(
                f"state-dir: {path} cannot be written ({error.strerror}); the client's state is as it was"
            ) from error
        return replace(version, size=len(content))

    def keep(self, versions: Iterable[Version]) -> None:
        """Remove all other versions, manifest first, whatever is damaged, and whatever a crash left.

        What could not be read stays: it may be whole.
        """
        numbers = [*(version.number for version in versions), *self.unreadable]
        kept = {path.name for number in numbers for path in self._paths(number)}
        # In order, so that a manifest goes before its tensors.
        for path in sorted(self.directory.glob("*")):
            if path.name not in kept and _OURS.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def written(self, number: int) -> float:
        """Return when a version was written, in seconds since 1970.

        Raises:
            OSError: it is not there.
        """
        return self._paths(number)[0].stat().st_mtime

    def _manifest(self, number: int) -> tuple[Version, int, str]:
        """Return what a manifest says: the version, and size and checksum of its tensors.

        Raises:
            DamagedError: it is not one of a version, or not there.
            UnreadableError: it cannot be read.
        """
        path = self._paths(number)[0]
        content = read_manifest(path)
        try:
            size, checksum = content["bytes"], content["sha256"]
            fine = type(size) is int and 0 <= size < 2**63 and isinstance(checksum, str)
            version = replace(_version_of(number, content), size=size)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"{path} is damaged: it is not a manifest of a version") from error
        if not fine:
            raise DamagedError(f"{path} is damaged: it is not a manifest of a version")
        return version, size, checksum

    def _paths(self, number: int) -> tuple[Path, Path]:
        stem = self.directory / f"{number:08d}"
        return stem.with_suffix(".json"), stem.with_suffix(".safetensors")


def _to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as safetensors."""
    if any(tensor.dtype == torch.bfloat16 for tensor in tensors.values()):
        return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    # Several times faster, but NumPy has no bfloat16.
    return save_arrays({name: np.asarray(t.detach().cpu().numpy(), order="C") for name, t in tensors.items()})


def _manifest_of(version: Version) -> dict[str, Any]:
    """Return what a version says of itself, but for its number and size."""
    said = {item.name: getattr(version, item.name) for item in fields(version)}
    del said["number"], said["size"]
    return said


def _version_of(number: int, said: Mapping[str, Any]) -> Version:
    """Return the version that ``_manifest_of`` described.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is something else.
    """
    counts = {key: said.get(key, 0) for key in ("attempt", "round", "first", "checkpointed", "line")}
    counts |= {"trained": said.get("trained", 1)}
    beside = said.get("beside")
    if not (
        {"attempt", "round", "first"} <= said.keys()
        and all(type(count) is int and 0 <= count < 2**63 for count in counts.values())
        and isinstance(said["lineage"], str)
        and isinstance(said["about"], dict)
        and isinstance(said.get("start", ""), str)
        and (beside is None or all(type(other) is int for other in beside))
    ):
        raise ValueError("not what a version says of itself")
    if "trained" not in said:  # from before it was written: as many as there can have been
        counts["trained"] = max(min(counts["round"] - counts["first"] + 1, number), 1)
    beside = None if beside is None else tuple(beside)
    start = said.get("start", "")
    return Version(number=number, lineage=said["lineage"], about=said["about"], beside=beside, start=start, **counts)


def identity(state_dir: Path) -> str:
    """Return the random text that names this state directory, made at the first call, or anew if it is damaged.

    Raises:
        FloretError: the directory cannot be written.
    """
    return _own_text(state_dir, IDENTITY)


def own_seed(state_dir: Path) -> int:
    """Return the seed with which a node divides and orders its own data; it never leaves the node.

    It is made and kept as ``identity`` is; errors likewise.
    """
    return derive_seed(0, "own", _own_text(state_dir, SEED))


def checked_round(key: str, value: object, low: int = 0) -> int:
    """Return a round that a message says under ``key``.

    Raises:
        FloretError: it is none, or below ``low``.
    """
    if type(value) is not int or not low <= value < _ROUNDS:
        raise _wrong(key, value, f"a whole number from {low} to {_ROUNDS - 1}")
    return value


def _own_text(state_dir: Path, name: str) -> str:
    path = state_dir / name
    try:
        make_folder(state_dir, private=True)
        if path.is_dir():
            raise FloretError(
                f"{path}: is a folder, in the place of a file of the node's own; move it away, or delete the "
                f"states of the federation of this name with floret state remove --federation {name}"
            )
        if found := _kept_text(path):
            return found
        with locked(state_dir, wait=True, private=True):  # by one of those that share it; the others read that one
            if found := _kept_text(path):
                return found
            if path.exists():
                log.warning("%s: is damaged; this state directory gets another %s", path, name)
            new = secrets.token_hex(16)
            write_whole(path, new.encode(), private=True)
        return new
    except OSError as error:
        raise FloretError(f"state-dir: {state_dir} cannot be written ({error.strerror})") from error


def _kept_text(path: Path) -> str:
    """Return the node's own text in a file; empty if there is none, or another one."""
    found = path.read_bytes().decode("ascii", "replace").strip() if path.exists() else ""
    return found if _OWN_TEXT.fullmatch(found) else ""


def _wrong(key: str, value: object, right: str) -> FloretError:
    return FloretError(f"{key} = {value!r:.60}: must be {right}; the server's message is not one of Floret's")


def _check_manifest(said: Mapping[str, Any]) -> None:
    """Refuse what cannot be written: the scalars of the message are in it, and they are the server's."""
    try:
        size = len(json.dumps(said))
    except (TypeError, ValueError, RecursionError) as error:
        raise FloretError("the server's message has scalars that cannot be kept with the personal model") from error
    if size > _MANIFEST_BYTES:
        raise FloretError(f"the server's message has {size} bytes of scalars, more than can be kept; at most 4 MB")


def _close_to_others(directory: Path) -> None:
    """Take from others what an earlier version of Floret let them have: the directory of a client and its files."""
    opened = []
    for path in (directory, *directory.iterdir()):
        with suppress(OSError):  # of another user, who sees to it
            mode = path.stat(follow_symlinks=False).st_mode
            if mode & 0o077 and not path.is_symlink():
                path.chmod(mode & 0o700)
                opened.append(path)
    if opened:
        log.warning("%s: others could read it; from now on only its owner can", directory)
