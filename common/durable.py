"""Files that are there whole or not at all: written under another name, flushed to the disk, then renamed."""

import errno
import fcntl
import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from common.errors import FloretError

CHECKSUM = "checksum"
_LARGEST_MANIFEST = 2**30


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

    A link is not followed, and a named pipe not waited for: the folder may have come from somebody else.

    Raises:
        OSError: as ``open``; it is a link, or a pipe that nobody reads.
    """
    return open(path, mode, opener=lambda name, flags: open_descriptor(name, flags, private=private))


def open_descriptor(path: str | Path, flags: int, *, private: bool = False) -> int:
    """Return a descriptor of a file to be written, as ``open_file`` opens it."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600 if private else 0o666)


def open_plain(path: Path) -> IO[bytes]:
    """Open a file to be read, if it is a plain one: a pipe would be waited for, a device never ends.

    Raises:
        OSError: as ``open``, or it is none.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return file


def read_plain(path: Path, most: int) -> bytes:
    """Return the content of a plain file of at most so many bytes.

    Raises:
        OSError: it cannot be read, or is something else or larger.
    """
    with open_plain(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes", str(path))
    return content


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


def why_unwritable(error: OSError) -> str:
    """Return why a folder cannot be written, for who runs this process; where rights are missing, whose it must be."""
    right = f"; it and all in it must belong to user {os.geteuid()}, who runs this"
    return f"cannot be written ({error.strerror}){right if isinstance(error, PermissionError) else ''}"


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
            except BaseException:  # also if the process is told to stop
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
    file, or it cannot be known, or it is no plain file of this user alone, one of its own.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        file = open_file(new, "ab", private=private)
    except OSError as error:
        # A link, a pipe, a folder, or another user's.
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR) and not _of_another_user(new):
            raise
    else:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = os.fstat(file.fileno())
            # Another writer may have renamed it before its lock was gone.
            free = os.path.samestat(there, new.lstat()) and stat.S_ISREG(there.st_mode)
            free = free and there.st_uid == os.geteuid() and there.st_nlink == 1
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
    return own, open_file(own, "xb", private=private)


def _of_another_user(path: Path) -> bool:
    try:
        return path.lstat().st_uid != os.geteuid()
    except OSError:
        return False


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
    content = _read(path, size)
    if digest(content) != checksum:
        raise DamagedError(f"{path} is damaged: its checksum is wrong")
    return content


def _read(path: Path, size: int | None = None) -> bytes:
    """Return the content of a plain file of ``size`` bytes; if that is None, of at most ``_LARGEST_MANIFEST``."""
    try:
        with open_plain(path) as file:
            found = os.fstat(file.fileno()).st_size
            if size is not None and found != size:
                raise DamagedError(f"{path} is damaged: {found} bytes instead of {size}")
            if found > _LARGEST_MANIFEST and size is None:
                raise DamagedError(f"{path} is damaged: {found} bytes are no manifest")
            return file.read(found)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        raise (DamagedError if gone else UnreadableError)(f"{path} cannot be read ({error.strerror})") from error


def _checksum(content: Mapping[str, Any]) -> str:
    return digest(json.dumps(content, sort_keys=True).encode())
