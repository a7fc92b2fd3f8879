"""Where runs are made, and by which code: what commands share."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cli.ranges import WholeRange
from common.errors import FloretError
from common.home import importing_from
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


def use_code_of(app: Path) -> None:
    """Run this command anew in a process that imports Floret from the folder ``app``, unless this one does.

    `flwr run` runs the code of that folder, too, and not the installed one.

    Raises:
        FloretError: the folder does not have the local engine.
    """
    if app.resolve() == Path(__file__).resolve().parents[1]:
        return
    if not _has_engine(app):
        raise FloretError(f"{app}: has no folder engine/, Floret's local engine; start in Floret's folder")
    os.execve(sys.executable, [sys.executable, "-P", "-m", "cli.main", *sys.argv[1:]], importing_from(app))


def check_with_code_of(app: Path, engine: str) -> None:
    """Check with the code that makes the runs: ``use_code_of`` where the local engine makes them.

    With Ray this process stays as it is: a SuperLink that it starts would have the folder on its path. A folder without
    Floret is told by what comes next.
    """
    if engine == "local" and _has_engine(app):
        use_code_of(app)


def _has_engine(app: Path) -> bool:
    return (app / "engine" / "supervisor.py").is_file()
