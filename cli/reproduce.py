"""``floret reproduce``: a published table run again, beside what the paper reports."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.engines import check_with_code_of
from cli.paths import NamedPath
from cli.table_options import TableOptions, table_options, tell_kept, tell_unused_data
from common.durable import locked
from common.errors import FloretError

if TYPE_CHECKING:
    from results.experiment import PlannedRun
    from results.runs import Runs


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=NamedPath())
@click.option("--report", is_flag=True, help="Write a page with tables and curves, too.")
@table_options
def reproduce(files: tuple[Path, ...], report: bool, options: TableOptions) -> None:
    """Run published tables again (FILE is one of experiments/) and print reported and measured numbers.

    Runs what is missing, one simulation after another or --jobs at a time. A run that is done is not run again, and
    one that was killed goes on: repeat the command. A run that fails says why, and the rest goes on. Tables that share
    runs share their results. Writes <name>.md and .json after each run, at the end with --report also .html; with
    --scale the name says so. With --results FOLDER they are written there, and the runs that they have already are not
    made again.
    """
    check_with_code_of(options.app, options.engine)
    from cli.unused_keys import tell_unused
    from results.experiment import Experiment, PlannedRun, selected
    from results.jobs import run_missing
    from results.measured import Records
    from results.tables import ExperimentResults, stem

    stems = [file.stem for file in files]
    if twice := next((file for i, file in enumerate(files) if file.stem in stems[:i]), None):
        raise FloretError(f"{twice}: another FILE is named {twice.stem}, too, and results go by it; give one of them")
    scale, runs = options.scale, options.runs()
    experiments = [Experiment.read(file) for file in files]
    records = [
        Records(runs, options.results / f"{stem(experiment, scale)}.json", experiment.window(scale))
        for experiment in experiments
    ]

    def planned(experiment: Experiment, known: Records) -> list[PlannedRun]:
        # More seeds than are asked for, where they are there already: what is written has them all.
        table = options.planned(experiment, runs, {}, known.seeds.union(range(options.seeds)))
        known.need(place.spec for place in table)
        return [place for place in table if place.seed < options.seeds or known.kept(place.spec)]

    tables = [planned(experiment, known) for experiment, known in zip(experiments, records, strict=True)]
    wanted = selected(tables, options.only)
    every = [
        (experiment, known, place)
        for experiment, table, known in zip(experiments, wanted, records, strict=True)
        for place in table
    ]
    tell_unused_data(options.data(), (place for table in tables for place in table))
    tell_kept(((known, place) for _, known, place in every), options.results, runs)
    tell_unused({"-c": options.same()}, [runs.config(place.spec) for *_, place in every])
    if options.extra:
        for experiment, table in zip(experiments, wanted, strict=True):
            if alike := _alike(table, runs):
                said = "; ".join(alike)
                click.echo(f"floret: {experiment.stem}: with -c these columns are the same runs: {said}", err=True)
    jobs = [
        experiment.job(place, scale, runs.config(place.spec))
        for experiment, known, place in every
        if not known.kept(place.spec)
    ]
    failed = dict[str, str]()

    def write() -> list[tuple[ExperimentResults, str]]:
        written = []
        with locked(options.results, wait=True):
            for experiment, known in zip(experiments, records, strict=True):
                known.read_again()
                table = planned(experiment, known)
                found = ExperimentResults.gather(experiment, scale, runs, known, table, failed)
                written.append((found, found.write(options.results)))
        return written

    if not options.no_run:
        failed |= run_missing(runs, jobs, keep_models=options.keep_models, finished=write)
    for result, text in write():
        click.echo("\n" + text)
        if report:
            from results.page import write_results_page

            page = options.results / f"{result.stem}.html"
            write_results_page(result, page)
            click.echo(f"report: {page.resolve()}")
    if failed:
        raise FloretError(f"{len(failed)} of {len(jobs)} runs failed; see above")


def _alike(table: "Sequence[PlannedRun]", runs: "Runs") -> list[str]:
    """Return the columns, in order, of which a run is that of another column."""
    columns: dict[tuple[str, Path], list[str]] = {}
    for place in table:
        columns.setdefault((place.row, runs.folder(place.spec)), []).append(place.column)
    return list(dict.fromkeys(column for same in columns.values() if len(same) > 1 for column in same))
