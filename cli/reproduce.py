"""``floret reproduce``: a published table run again, beside what the paper reports."""

import json
from pathlib import Path

import click

from cli.cells import Cell, Cells, Job, percent, run_missing
from cli.experiment import Data, Experiment, Placed, selected
from cli.results import Results
from common.durable import write_whole
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
    help="Passed on to `flwr run`, after the number of clients.",
)
@click.option("--superlink", default="", help="The SuperLink connection to run on, as for `flwr run`.")
@click.option(
    "--output", "-o", default="results", show_default=True, type=click.Path(path_type=Path), help="Where results go."
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
    superlink: str,
    output: Path,
) -> None:
    """Run published tables again (FILE is one of experiments/) and print reported and measured numbers.

    Runs what is missing, one simulation after another. A run that is done is not run again, and one that was killed
    goes on: repeat the command. A run that fails says why, and the rest goes on. Tables that share runs share their
    results. Writes OUTPUT/<name>.md and .json, with --report also .html; with --scale the name says so.
    """
    from cli.run import parse_run_config
    from server_app.settings import read_config

    data = Data.of(places, download)
    cells = Cells(app, output, superlink)
    experiments = [Experiment.read(file) for file in files]
    same = parse_run_config(extra)
    plans = [experiment.placed(range(seeds), scale, data, federation_config, same) for experiment in experiments]
    for experiment, plan in zip(experiments, plans, strict=True):
        for place in plan:
            try:
                read_config(cells.config(place.cell))
            except FloretError as error:
                raise type(error)(f"{experiment.stem}, {place.row}, {place.column}: {error}") from error
    wanted = selected([place for plan in plans for place in plan], only)
    measures = {id(place): experiment for experiment, plan in zip(experiments, plans, strict=True) for place in plan}
    failed: dict[str, str] = {}
    if not no_run:
        jobs = [Job(place.cell, _label(place), _weight(cells, place)) for place in wanted]
        owners = {cells.folder(place.cell).name: (measures[id(place)], place.row) for place in wanted}

        def told(cell: Cell) -> str:
            outcome, (experiment, row) = cells.outcome(cell), owners[cells.folder(cell).name]
            value = experiment.value(row, outcome.history, scale) if outcome else None
            return f"{percent([value], 2)} % {experiment.when(row)} local training"

        failed = run_missing(cells, jobs, told, keep_models=keep_models)
    output.mkdir(parents=True, exist_ok=True)
    instead = {name: Path(place).name for name, place in data.single.items() if place.endswith(".npz")}
    for experiment, plan in zip(experiments, plans, strict=True):
        used = {place.column for place in plan if place.cell.keys["dataset"] == "npz"}
        results = Results.gather(experiment, scale, cells, plan, failed, instead if used else {})
        text = results.markdown()
        click.echo("\n" + text)
        stem = experiment.stem + (f"-scale{scale:g}" if scale < 1 else "")
        write_whole(output / f"{stem}.md", text.encode())
        write_whole(output / f"{stem}.json", (json.dumps(results.data(), indent=1) + "\n").encode())
        if report:
            from cli.results_page import write_results_page

            write_results_page(results, output / f"{stem}.html")
            click.echo(f"report: {(output / f'{stem}.html').resolve()}")
    if failed:
        raise FloretError(f"{len(failed)} of {len(wanted)} runs failed; see above")


def _label(place: Placed) -> str:
    return f"{place.row} | {place.column} | seed {place.seed}"


def _weight(cells: Cells, place: Placed) -> float:
    """Return a run's cost compared with others of the same table: epochs times samples."""
    config = cells.config(place.cell)
    samples = config["max-samples"] or 60_000
    return float(config["rounds"] * config["local-epochs"] * config["participation"] * samples)
