"""``floret fit``: settings that a paper does not print, judged by its baselines' reported numbers."""

from pathlib import Path

import click

from cli.engines import check_with_code_of
from cli.paths import NamedPath
from cli.table_options import TableOptions, table_options, tell_kept, tell_unused_data
from common.durable import locked
from common.errors import FloretError


@click.command()
@click.argument("file", metavar="FILE", type=NamedPath())
@click.option("--grid", "grids", multiple=True, required=True, metavar="KEY=[...]", help="Values of a key; repeatable.")
@table_options
def fit(file: Path, grids: tuple[str, ...], options: TableOptions) -> None:
    """Search settings that a paper does not print: which brings its baselines near their reported numbers?

    Runs the baselines of FILE, one of experiments/, with every combination of the --grid values. The paper's own
    method is never run. Writes <name>-fit.md and .json after each run; another grid is added to what is there. A run
    that is done is not made again. Keys given with --set are part of each setting, like those of a grid.
    """
    check_with_code_of(options.app, options.engine)
    from cli.unused_keys import tell_unused
    from results.experiment import Experiment, selected
    from results.fit import Fit, baselines, failure, fit_stem
    from results.jobs import run_missing
    from results.measured import Records
    from results.sweep import combinations

    scale, runs = options.scale, options.runs()
    experiment = Experiment.read(file)
    path = options.results / f"{fit_stem(experiment, scale)}.json"
    records = Records(runs, path, experiment.window(scale))
    same = options.same()
    settings = [{**same, **setting} for setting in combinations(grids, same)]
    tables = [options.planned(experiment, runs, setting, range(options.seeds)) for setting in settings]
    planned = [
        (setting, place)
        for setting, table in zip(settings, selected(tables, options.only), strict=True)
        for place in baselines(experiment, table)
    ]
    missing = [(setting, place) for setting, place in planned if not records.kept(place.spec)]
    tell_unused_data(options.data(), (place for table in tables for place in table))
    tell_kept(((records, place) for _, place in planned), options.results, runs)
    varied = dict.fromkeys(key for setting in combinations(grids, same) for key in setting)
    tell_unused({"-c": same, "--grid": varied}, [runs.config(place.spec) for _, place in planned])
    jobs = [experiment.job(place, scale, runs.config(place.spec), setting) for setting, place in missing]
    failed = dict[str, str]()

    def write() -> str:
        wrong = [
            failure(place, setting, failed[name])
            for setting, place in planned
            if (name := runs.folder(place.spec).name) in failed
        ]
        with locked(options.results, wait=True):
            return Fit.gather(experiment, scale, path, records, planned, wrong, runs.defaults).write(options.results)

    if not options.no_run:
        failed |= run_missing(runs, jobs, keep_models=options.keep_models, finished=write)
    click.echo("\n" + write())
    if failed:
        raise FloretError(f"{len(failed)} of {len(jobs)} runs failed; see above")
