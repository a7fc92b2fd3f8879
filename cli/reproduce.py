"""``floret reproduce``: a published table run again, beside what the paper reports."""

from pathlib import Path

import click

from cli.engines import engine_options
from common.errors import FloretError


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--scale", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Part of rounds and samples to run."
)
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Run seeds 0 to this number - 1.")
@click.option("--only", multiple=True, metavar="NAME", help="Run only this row or column; * for any text; repeatable.")
@click.option(
    "--data",
    "places",
    multiple=True,
    metavar="[DATASET=]PATH",
    help="Folder of the datasets, or the folder or npz file of one of them; repeatable.",
)
@click.option("--download", is_flag=True, help="Download datasets that are not there.")
@click.option("--report", is_flag=True, help="Write a page with tables and curves, too.")
@click.option("--no-run", is_flag=True, help="Run nothing: show what is done.")
@click.option("--keep-models", is_flag=True, help="Keep the personal models and checkpoints of each run.")
@click.option(
    "--set", "-c", "extra", default="", metavar="KEYS", help="Keys for every run, as --run-config of `flwr run`."
)
@click.option(
    "--app", default=".", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Floret's folder."
)
@click.option(
    "--federation-config",
    default="client-resources-num-cpus=1",
    show_default=True,
    help="As for `flwr run`, after the number of clients.",
)
@engine_options
@click.option(
    "--output", "-o", default="reproduced", show_default=True, type=click.Path(path_type=Path), help="Where results go."
)
def reproduce(
    files: tuple[Path, ...],
    scale: float,
    seeds: int,
    only: tuple[str, ...],
    places: tuple[str, ...],
    download: bool,
    report: bool,
    no_run: bool,
    keep_models: bool,
    extra: str,
    app: Path,
    federation_config: str,
    engine: str,
    superlink: str,
    output: Path,
) -> None:
    """Run published tables again (FILE is one of experiments/) and print reported and measured numbers.

    Runs what is missing, one simulation after another. A run that is done is not run again, and one that was killed
    goes on: repeat the command. A run that fails says why, and the rest goes on. Tables that share runs share their
    results. Writes OUTPUT/<name>.md and .json, with --report also .html; with --scale the name says so.
    """
    from common.run_config import parse_run_config
    from results.experiment import Data, Experiment, selected
    from results.runs import Runs, engine_of, run_missing
    from results.tables import ExperimentResults
    from server_app.settings import read_config
    from server_app.setup import check_run

    data = Data.of(places, download)
    runs = Runs(app, output, check_run, engine_of(engine, app, superlink))
    experiments = [Experiment.read(file) for file in files]
    same = parse_run_config(extra)
    tables = [experiment.planned_runs(range(seeds), scale, data, federation_config, same) for experiment in experiments]
    for experiment, table in zip(experiments, tables, strict=True):
        for place in table:
            try:
                read_config(runs.config(place.spec))
            except FloretError as error:
                raise type(error)(f"{experiment.stem}, {place.row}, {place.column}: {error}") from error
    wanted = selected(tables, only)
    jobs = [
        experiment.job(place, scale, runs.config(place.spec))
        for experiment, table in zip(experiments, wanted, strict=True)
        for place in table
    ]
    failed = {} if no_run else run_missing(runs, jobs, keep_models=keep_models)
    for experiment, table in zip(experiments, tables, strict=True):
        results = ExperimentResults.gather(experiment, scale, runs, table, failed, data.instead(table))
        click.echo("\n" + results.write(output))
        if report:
            from results.page import write_results_page

            page = output / f"{results.stem}.html"
            write_results_page(results, page)
            click.echo(f"report: {page.resolve()}")
    if failed:
        raise FloretError(f"{len(failed)} of {len(jobs)} runs failed; see above")
