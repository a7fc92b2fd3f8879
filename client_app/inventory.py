"""What a state directory has, and how an older version is used again: by hand, on the device, without a server."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from client_app.keeping import Version
from client_app.state import LOCK, FileStore
from common.config import one_of
from common.durable import DamagedError, UnreadableError, claim_client, why_unwritable
from common.errors import FloretError


@dataclass(frozen=True)
class Shelf:
    """The versions of a client in a federation and method."""

    federation: str
    method: str
    client: str
    store: FileStore

    def __str__(self) -> str:
        """Return what it is called in a message."""
        return f"client {self.client} in federation {self.federation}, {self.method}"


@dataclass(frozen=True)
class Entry:
    """A version on a shelf.

    Attributes:
        shelf: where it is.
        number: its own.
        version: what its manifest says; None if that is damaged.
        written: seconds since 1970; None if that cannot be told.
        wrong: what is damaged, in a line; empty if it is intact.
        used: it is the one that the next message, or ``floret predict``, goes on from.
    """

    shelf: Shelf
    number: int
    version: Version | None
    written: float | None
    wrong: str
    used: bool


def check_state_dir(state_dir: Path) -> None:
    """Check that a node has kept something in ``state_dir``, for commands that only read it.

    Raises:
        FloretError: it is no directory.
    """
    if not state_dir.is_dir():
        found = "is no directory" if state_dir.exists() else "is not there, so no node has kept anything in it"
        raise FloretError(f"--state-dir {state_dir}: {found}; name that of floret node")


def shelves(state_dir: Path, federation: str | None, method: str | None, client: str | None) -> list[Shelf]:
    """Return what is there of the federation, method and client that are named; None stands for all.

    Raises:
        FloretError: nothing is; names the choices.
    """
    check_state_dir(state_dir)
    found = []
    for path in sorted(_folders(state_dir, 3)):
        federation_name, method_name, client_name = path.relative_to(state_dir).parts
        found.append(Shelf(federation_name, method_name, client_name, FileStore(path, sync=True)))
    for option, field, wanted in (
        ("--federation", "federation", federation),
        ("--method", "method", method),
        ("--client-name", "client", client),
    ):
        there = sorted({str(getattr(shelf, field)) for shelf in found})
        if not there:
            raise FloretError(f"{state_dir}: no client has a state here yet; see --state-dir")
        wrong = one_of(wanted, there) if wanted is not None else None
        if wrong:
            raise FloretError(f"{option} {wanted!r}: {wrong}")
        found = [shelf for shelf in found if wanted in (None, getattr(shelf, field))]
    return found


def states_of(state_dir: Path) -> set[str]:
    """Return the names of the federations that have a folder here, with versions or without.

    Raises:
        FloretError: the directory cannot be read.
    """
    return {path.relative_to(state_dir).parts[0] for path in _folders(state_dir, 3, used=False)}


def size_of_states(state_dir: Path) -> int:
    """Return how many bytes all versions of all clients take here; errors as of ``states_of``."""
    size = 0
    for folder in _folders(state_dir, 3, used=False):
        for path in folder.glob("*"):
            # A version may be removed meanwhile: another client's node may be at work.
            with suppress(FileNotFoundError):
                size += path.stat().st_size
    return size


def remove_unused(state_dir: Path) -> bool:
    """Remove the folders of clients that have no version and that no process works on; return whether there were any.

    They are of messages that kept nothing, as one that was refused; errors as of ``states_of``.
    """
    removed = False
    for folder in list(_folders(state_dir, 3, used=False)):
        if any(folder.glob("*.json")):
            continue
        store = FileStore(folder, sync=True)
        with suppress(FloretError, OSError), store.claim():
            if not any(folder.glob("*.json")):
                _remove_folder(store)
                removed = True
    return removed


def remove(among: list[Shelf], state_dir: Path) -> None:
    """Delete all versions on shelves, for good; what is not Floret's stays in their folders.

    Raises:
        FloretError: a node is running, or a file cannot be removed.
    """
    for shelf in among:
        with _claimed(state_dir, shelf):
            try:
                _remove_folder(shelf.store)
            except OSError as error:
                raise FloretError(f"{error.filename}: cannot be removed ({error.strerror})") from error


def entries(shelf: Shelf) -> Iterator[Entry]:
    """Yield the versions on a shelf, newest first, each looked at whole."""
    found = {version.number: version for version in shelf.store.versions([])}
    used = False
    for number in shelf.store.numbers():
        version = found.get(number)
        wrong, written = "", None
        try:
            # Read even if the manifest is damaged: the reason is in the error.
            shelf.store.read(version or Version(number, "", 0, 0, 0))
            written = shelf.store.written(number)
        except UnreadableError as error:
            wrong, used = str(error), True  # nothing older is gone on from while it may be whole
        except (DamagedError, OSError) as error:
            wrong = str(error)
        if version or not _gone(shelf, number):
            yield Entry(shelf, number, version, written, wrong, used=not wrong and not used)
            used = used or not wrong


def restore(among: list[Shelf], state_dir: Path, number: int) -> tuple[Entry, int]:
    """Write a copy of an older version as the newest one; nothing is deleted.

    ``floret predict`` and the next run with ``client-state="continue"`` go on from it; so does its own run, if it is
    still going.

    Args:
        among: where to look; one of them must have the version.
        state_dir: what they are in.
        number: of the version.

    Returns:
        The version that was restored, and the number of the copy.

    Raises:
        FloretError: no shelf has it, or several; it is damaged, or in use already; or a node is running.
    """
    having = [shelf for shelf in among if number in shelf.store.numbers()]
    if not having:
        raise FloretError(f"version {number}: there is none; see floret state list")
    if len(having) > 1:
        raise FloretError(
            f"version {number}: several have one ({'; '.join(map(str, having))}); say which with --federation, "
            "--method and --client-name"
        )
    (shelf,) = having
    with _claimed(state_dir, shelf):
        there = list(entries(shelf))
        entry = next((entry for entry in there if entry.number == number), None)
        if entry is None or entry.version is None or entry.wrong:
            raise FloretError(f"version {number} cannot be restored: {entry.wrong if entry else 'it is gone'}")
        if entry.used:
            raise FloretError(f"version {number} of {shelf} is in use already")
        new = max(entry.number for entry in there) + 1
        shelf.store.write(replace(entry.version, number=new), shelf.store.read(entry.version))
    return entry, new


@contextmanager
def _claimed(state_dir: Path, shelf: Shelf) -> Iterator[None]:
    """Keep nodes from a shelf.

    Raises:
        FloretError: one is running, or the directory cannot be written.
    """
    try:
        lock = claim_client(state_dir, shelf.client)
    except BlockingIOError as error:
        raise FloretError(f"a node of client {shelf.client} is running on {state_dir}; stop it first") from error
    except OSError as error:
        raise FloretError(f"--state-dir {state_dir}: {why_unwritable(error)}") from error
    with lock, shelf.store.claim():
        yield


def _folders(folder: Path, depth: int, *, used: bool = True) -> Iterator[Path]:
    """Yield the folders of clients ``depth`` below: those with versions, or all of them with ``used=False``."""
    if not depth:
        if any(folder.glob("*.json")) or (not used and (folder / LOCK).exists()):
            yield folder
        return
    try:
        below = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return  # nothing is there yet, or any more: another client's node may be at work
    except OSError as error:
        raise FloretError(f"--state-dir: {folder} cannot be read ({error.strerror})") from error
    for path in below:
        yield from _folders(path, depth - 1, used=used)


def _remove_folder(store: FileStore) -> None:
    """Remove all versions of a store that is claimed, and its folder: whoever claims it next makes it again."""
    store.keep([])
    (store.directory / LOCK).unlink()
    _remove_empty([store.directory, *list(store.directory.parents)[:2]])


def _remove_empty(folders: list[Path]) -> None:
    """Remove of these folders those that are empty, in this order."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _gone(shelf: Shelf, number: int) -> bool:
    """Return whether a version was removed while it was looked at: a node may be at work."""
    return number not in shelf.store.numbers()
