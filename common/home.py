"""The folder in which Floret keeps files between runs, on a server and on a node."""

import os
from pathlib import Path


def floret_home() -> Path:
    """Return ``FLORET_HOME``, ``~/.floret`` by default."""
    return Path(os.environ.get("FLORET_HOME", "~/.floret")).expanduser()
