"""Files that are there whole or not at all: written under another name, flushed to the disk, then renamed."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import FloretError

CHECKSUM = "checksum"


class DamagedError(FloretError):
    """A file is truncated or altered; the message names it."""


def write_whole(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write ``path`` so that a crash at any moment leaves the old content or the new, never a part.

    Args:
        path: the file; its directory exists.
        content: what it will have.
        sync: return only when the disk has it; without, a crash of the machine (not of the process) may lose it.

    Raises:
        OSError: it cannot be written; the old content is still there.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    if sync:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_manifest(path: Path, content: Mapping[str, Any], *, sync: bool = True) -> None:
    """Write ``content`` as JSON with a checksum of its own; see ``write_whole``."""
    text = json.dumps({**content, CHECKSUM: _checksum(content)})
    write_whole(path, text.encode(), sync=sync)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return what ``write_manifest`` wrote.

    Raises:
        DamagedError: it is something else.
    """
    try:
        content = json.loads(path.read_bytes())
        checksum = content.pop(CHECKSUM)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(f"{path} is damaged: it is not a complete manifest") from error
    if checksum != _checksum(content):
        raise DamagedError(f"{path} is damaged: its checksum is wrong")
    return content  # type: ignore[no-any-return]


def digest(content: bytes) -> str:
    """Return the SHA-256 sum of ``content``."""
    return hashlib.sha256(content).hexdigest()


def read_checked(path: Path, size: int, checksum: str) -> bytes:
    """Return the content of a file of which size and SHA-256 sum are known.

    Raises:
        DamagedError: it cannot be read, or is not that content.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
    if len(content) != size:
        raise DamagedError(f"{path} is damaged: {len(content)} bytes instead of {size}")
    if digest(content) != checksum:
        raise DamagedError(f"{path} is damaged: its checksum is wrong")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    return digest(json.dumps(content, sort_keys=True).encode())
