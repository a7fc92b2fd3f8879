"""Queries of the file system that raise a one-line ``DataError`` where pathlib's raise an ``OSError``."""

import hashlib
import os
import stat
from pathlib import Path

from common.errors import DataError


def status(path: str | Path) -> os.stat_result | None:
    """Return the ``stat`` result of the path, links followed, or None if nothing is there.

    Raises:
        DataError: ``stat`` fails: no permission, a name too long, a loop of links.
    """
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise DataError(f"{path}: cannot be looked at ({_reason(error)})") from error


def is_file(path: str | Path) -> bool:
    """Return whether the path is a regular file; raises as ``status``."""
    found = status(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_dir(path: str | Path) -> bool:
    """Return whether the path is a directory; raises as ``status``."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def check_distinct(train: Path, test: Path) -> None:
    """Check that two files or two folders are not one: accuracy would be that on the training samples.

    Raises:
        DataError: one is a link to the other; or as ``status``.
    """
    first, second = status(train), status(test)
    if first and second and (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino):
        raise DataError(f"{test} is {train} under another name; test samples must be others than those for training")


def entries(directory: Path) -> list[Path]:
    """Return the entries of the directory, sorted by name, without hidden ones (a name that begins with a dot).

    Raises:
        DataError: it cannot be listed.
    """
    try:
        return [directory / name for name in sorted(os.listdir(directory)) if not name.startswith(".")]
    except OSError as error:
        raise DataError(f"{directory}: cannot be listed ({_reason(error)})") from error


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content, 64 digits.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
