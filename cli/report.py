"""``floret report``: the page of one run, or of several side by side."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.paths import NamedPath
from common.errors import FloretError

if TYPE_CHECKING:
    from results.run import Run


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=NamedPath())
@click.option("--output", "-o", type=NamedPath(dir_okay=False), metavar="FILE", help="Where to write the page.")
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    """Write the report of a run, or compare several.

    RUN is a run directory, finished or not, or the name of one in the folder of runs. One: its report.html is written
    again, and its table of clients is printed. Several: compare.html in the current directory, and a table with a row
    for each. The folder of a sweep or a table stands for its runs, those side by side.
    """
    from common.extras import require
    from results.report import client_table, table, write_report
    from results.run import read_run
    from results.rundir import folder_of_runs, named_run

    require("matplotlib", "server", "floret report")
    found: list[Path] = []
    read: list[Run] = []
    for run in runs:
        place = named_run(run, folder_of_runs(""))
        directories = _runs_at(place)
        for directory in directories:
            try:
                read.append(read_run(directory))
                found.append(directory)
            except FloretError as error:
                # Of a folder of runs the others are shown.
                if directories == [place]:
                    raise
                click.echo(f"floret: {error}; it is left out", err=True)
    if not read:
        raise FloretError("no run is left to report")
    if len(read) == 1:
        path, text = output or found[0] / "report.html", table(read) + "\n\n" + client_table(read[0])
    else:
        path, text = output or Path("compare.html"), table(read)
    write_report(read, path)
    click.echo(f"{text}\n\nreport: {path.resolve()}")


def _runs_at(place: Path) -> list[Path]:
    """Return the run directories that an argument stands for; what is not there is told by who reads it.

    Raises:
        FloretError: it is a folder, and no run is in it.
    """
    from results.watch import runs_at

    if (place / "config.json").is_file() or not place.is_dir():
        return [place]
    # One that begins just now has nothing to report.
    found = [directory for directory in runs_at(place) if (directory / "config.json").is_file()]
    if not found and (place / "cells").is_dir():
        raise FloretError(f"{place} has no run yet; the runs of a sweep are in {place / 'cells/*/2*'}/")
    if not found:
        raise FloretError(
            f"{place} is neither a run directory, which has a config.json, nor a sweep's folder, whose runs are in "
            "cells/*/2*/"
        )
    return found
