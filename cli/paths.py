"""Paths that options and arguments take."""

import os
from pathlib import Path
from typing import Any

import click


class NamedPath(click.Path):
    """A path that, other than click's, is no empty text: Python would take that for the working directory.

    Args:
        path_type: what a command gets.
        **which: as of ``click.Path``.
    """

    def __init__(self, path_type: type[Any] = Path, **which: Any) -> None:
        super().__init__(path_type=path_type, **which)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail."""
        if not os.fspath(value):
            self.fail("is empty; name a path, such as . for the working directory", param, ctx)
        return super().convert(value, param, ctx)
