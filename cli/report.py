"""``floret report``: the page of one run, or of several side by side."""

from pathlib import Path

import click

from cli.paths import NamedPath


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=NamedPath())
@click.option("--output", "-o", type=NamedPath(dir_okay=False), metavar="FILE", help="Where to write the page.")
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    """Write the report of a run, or compare several.

    RUN is a run directory, finished or not, or the name of one in ~/.floret/runs. One: its report.html is written
    again, and its table of clients is printed. Several: compare.html in the current directory, and a table with a row
    for each.
    """
    from common.extras import require
    from results.report import client_table, table, write_report
    from results.run import read_run
    from results.rundir import folder_of_runs, named_run

    require("matplotlib", "server", "floret report")
    runs = tuple(named_run(run, folder_of_runs("")) for run in runs)
    read = [read_run(directory) for directory in runs]
    if len(read) == 1:
        path, text = output or runs[0] / "report.html", table(read) + "\n\n" + client_table(read[0])
    else:
        path, text = output or Path("compare.html"), table(read)
    write_report(read, path)
    click.echo(f"{text}\n\nreport: {path.resolve()}")
