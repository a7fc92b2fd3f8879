"""The folder in which Floret keeps files between runs, on a server and on a node."""

import os
from pathlib import Path

from common.errors import FloretError


def floret_home() -> Path:
    """Return ``FLORET_HOME``, ``~/.floret`` by default.

    Raises:
        FloretError: it is relative: files of one node or server would be in several places.
    """
    said = os.environ.get("FLORET_HOME") or "~/.floret"
    home = Path(said).expanduser()
    if not home.is_absolute():
        raise FloretError(f"FLORET_HOME = {said!r}: must be an absolute path")
    return home


def states_folder(state_dir: Path | str | None) -> Path:
    """Return the folder of the states of a device's clients: ``state_dir``, by default one in ``FLORET_HOME``."""
    return Path(state_dir).expanduser() if state_dir else floret_home() / "state"


def importing_from(app: Path) -> dict[str, str]:
    """Return the environment of a process that imports Floret from the folder ``app`` and not the installed one."""
    path = os.pathsep.join(filter(None, [str(app.resolve()), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path}
