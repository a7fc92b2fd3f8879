"""Where the runs of a table are made: options that commands share."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cli.ranges import WholeRange
from common.kernels import KERNELS, NATIVE


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--engine`` and ``--superlink``, arguments of ``results.engines.engine_of``."""
    superlink = click.option("--superlink", default="", help="With --engine ray, the SuperLink connection to run on.")
    engine = click.option(
        "--engine",
        type=click.Choice(["local", "ray"]),
        default="local",
        show_default=True,
        help="local: processes of this machine. ray: `flwr run`, on a SuperLink.",
    )
    return engine(superlink(command))


def jobs_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--jobs``, the argument ``at_once`` of ``results.engines.engine_of``."""
    return click.option(
        "--jobs",
        "-j",
        type=WholeRange(1),
        default=1,
        show_default=True,
        help="With --engine local, how many runs at a time; they share CPUs and GPUs in equal parts.",
    )(command)


def kernels_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--kernels``."""
    return click.option(
        "--kernels",
        type=click.Choice(KERNELS),
        default=NATIVE,
        show_default=True,
        help="With --engine local. native: the fastest of this CPU. portable: the same digits on other x86-64 CPUs.",
    )(command)


def check_with_code_of(app: Path, engine: str) -> None:
    """Go on in a process that imports Floret from the folder ``app``, where that is another copy than this one.

    The local engine runs the code of that folder: what is checked and told before is of the same code. With Ray this
    process stays as it is: a SuperLink that it starts would have the folder on its path.
    """
    from cli.run import use_code_of

    if engine == "local" and (app / "engine" / "supervisor.py").is_file():
        use_code_of(app, sys.argv[1:])
