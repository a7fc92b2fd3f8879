"""Files that are there whole or not at all: written under another name, flushed to the disk, then renamed."""

import errno
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from common.errors import FloretError

CHECKSUM = "checksum"


class DamagedError(FloretError):
    """A file is truncated, altered or gone; the message names it."""


class UnreadableError(FloretError):
    """A file is there and cannot be read now, so what it has may be whole; the message names it."""


def make_folder(path: Path, *, private: bool) -> None:
    """Make a directory and those above it that are missing; with ``private`` only their owner can look into them.

    Raises:
        OSError: it cannot be made. One that is there is left as it is.
    """
    if private:
        for folder in (*reversed(path.parents), path):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(parents=True, exist_ok=True)


def open_file(path: Path, mode: str, *, private: bool) -> IO[bytes]:
    """Open a file to be written; with ``private`` one that only its owner can read, from its first moment on.

    Raises:
        OSError: as ``open``.
    """
    file: IO[bytes] = open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600 if private else 0o666))  # noqa: SIM115
    return file


def claim_client(state_dir: Path, client: str) -> IO[bytes]:
    """Keep other nodes from this client's states, in all federations, for as long as the returned file is open.

    Raises:
        OSError: ``state_dir`` cannot be written; BlockingIOError: another node has them.
    """
    make_folder(state_dir, private=True)
    lock = open_file(state_dir / f".{client}.lock", "ab", private=True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock


@contextmanager
def locked(folder: Path, *, wait: bool, private: bool = False) -> Iterator[None]:
    """Have ``folder``, which is made if it is missing, alone among the programs that lock it so.

    Args:
        folder: the folder; a file ``.lock`` stays in it.
        wait: for a program that has it.
        private: nobody but its owner can read what is made.

    Raises:
        OSError: it cannot be made or written; BlockingIOError: another program has it, and ``wait`` is false.
    """
    make_folder(folder, private=private)
    with open_file(folder / ".lock", "ab", private=private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def write_whole(path: Path, content: bytes | memoryview, *, sync: bool = True, private: bool = False) -> None:
    """Write ``path`` so that a crash at any moment leaves the old content or the new, never a part.

    Of several that write it at the same time, the last one's content is there, whole.

    Args:
        path: the file; its directory exists.
        content: what it will have.
        sync: return only when the disk has it; without, a crash of the machine (not of the process) may lose it.
        private: nobody but its owner can read it.

    Raises:
        OSError: it cannot be written, and names ``path``; the old content is still there.
    """
    try:
        new, opened = _new_file(path, private=private)
        with opened as file:
            try:
                file.write(content)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
                new.replace(path)  # while it is locked: until then another could take it for one that was left
            except OSError:
                with suppress(OSError):
                    new.unlink(missing_ok=True)
                raise
    except OSError as error:
        error.filename = str(path)  # not that of the new file, which the user did not name
        raise
    if sync:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _new_file(path: Path, *, private: bool) -> tuple[Path, IO[bytes]]:
    """Return an empty file beside ``path`` that no other writer has, and open it, locked.

    It has always the same name, so that what a killed writer left is used again; only where another writer has that
    file, or it cannot be known, one of its own.
    """
    new = path.with_name(f".{path.name}.new")
    file = open_file(new, "ab", private=private)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = os.fstat(file.fileno())
        # Another writer may have renamed it before its lock was gone.
        free = os.path.samestat(there, new.stat())
        if free and private and there.st_mode & 0o077:  # what a crash left is open to others
            new.unlink()
            free = False
        if free:
            file.truncate(0)
            return new, file
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # there are no locks
            file.close()
            raise
    file.close()
    own = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.new")
    own.unlink(missing_ok=True)
    return own, open_file(own, "wb", private=private)


def write_manifest(path: Path, content: Mapping[str, Any], *, sync: bool = True, private: bool = False) -> None:
    """Write ``content`` as JSON with a checksum of its own; see ``write_whole``."""
    text = json.dumps({**content, CHECKSUM: _checksum(content)})
    write_whole(path, text.encode(), sync=sync, private=private)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return what ``write_manifest`` wrote.

    Raises:
        DamagedError: it is something else, or not there.
        UnreadableError: it cannot be read.
    """
    found = _read(path)
    try:
        content = json.loads(found)
        if not isinstance(content, dict):
            raise TypeError("not a table")
        checksum = content.pop(CHECKSUM)
        right = checksum == _checksum(content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: it is not a complete manifest") from error
    if not right:
        raise DamagedError(f"{path} is damaged: its checksum is wrong")
    return content


def digest(content: bytes | memoryview) -> str:
    """Return the SHA-256 sum of ``content``."""
    return hashlib.sha256(content).hexdigest()


def read_checked(path: Path, size: int, checksum: str) -> bytes:
    """Return the content of a file of which size and SHA-256 sum are known.

    Raises:
        DamagedError: it is not that content, or not there.
        UnreadableError: it cannot be read.
    """
    content = _read(path)
    if len(content) != size:
        raise DamagedError(f"{path} is damaged: {len(content)} bytes instead of {size}")
    if digest(content) != checksum:
        raise DamagedError(f"{path} is damaged: its checksum is wrong")
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        gone = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        raise (DamagedError if gone else UnreadableError)(f"{path} cannot be read ({error.strerror})") from error


def _checksum(content: Mapping[str, Any]) -> str:
    return digest(json.dumps(content, sort_keys=True).encode())
