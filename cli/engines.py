"""Where the runs of a table are made: options that commands share."""

from collections.abc import Callable
from typing import Any

import click


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--engine`` and ``--superlink``, the arguments of ``results.runs.engine_of``."""
    superlink = click.option("--superlink", default="", help="With --engine ray, the SuperLink connection to run on.")
    engine = click.option(
        "--engine",
        type=click.Choice(["local", "ray"]),
        default="local",
        show_default=True,
        help="local: processes of this machine. ray: `flwr run`, on a SuperLink.",
    )
    return engine(superlink(command))
