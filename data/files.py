"""What is at a path: questions whose failure is one line for the user, where pathlib's own end in a traceback."""

import os
import stat
from pathlib import Path

from common.errors import DataError


def status(path: str | Path) -> os.stat_result | None:
    """Return what ``stat`` says of the path, links followed, or None if nothing is there.

    Raises:
        DataError: that cannot be told: no permission, a name too long, a loop of links.
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


def entries(directory: Path) -> list[Path]:
    """Return what is in the directory, sorted by name, without what is hidden (a name that begins with a dot).

    Raises:
        DataError: it cannot be listed.
    """
    try:
        return [directory / name for name in sorted(os.listdir(directory)) if not name.startswith(".")]
    except OSError as error:
        raise DataError(f"{directory}: cannot be listed ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
