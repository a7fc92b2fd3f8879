"""``floret sweep``: a grid over any keys of the run config; the validation split decides."""

from pathlib import Path

import click

from cli.engines import check_with_code_of, engine_options, jobs_option, kernels_option
from cli.paths import NamedPath
from common.errors import FloretError


@click.command()
@click.argument("app", default=".", type=NamedPath(exists=True, file_okay=False))
@click.option("--grid", "grids", multiple=True, required=True, metavar="KEY=[...]", help="Values of a key; repeatable.")
@click.option(
    "--run-config",
    "-c",
    "run_configs",
    multiple=True,
    help="Keys that are the same in every run, as for `flwr run`; repeatable.",
)
@click.option("--federation-config", "federation_configs", multiple=True, help="As for `flwr run`; repeatable.")
@engine_options
@kernels_option
@jobs_option
@click.option("--keep-models", is_flag=True, help="Keep the personal models and checkpoints of each run.")
@click.option("--output", "-o", required=True, type=NamedPath(), help="Where runs and results go.")
def sweep(
    app: Path,
    grids: tuple[str, ...],
    run_configs: tuple[str, ...],
    federation_configs: tuple[str, ...],
    engine: str,
    superlink: str,
    kernels: str,
    jobs: int,
    keep_models: bool,
    output: Path,
) -> None:
    """Run every combination of the --grid values, one simulation after another or --jobs at a time, and compare.

    Combinations that differ in `seed` alone are one row: mean and standard deviation (population) over seeds. Rows are
    ordered by accuracy on the validation split. A run that is done is not run again and one that was killed goes on, so
    a sweep that was stopped is finished by the same command; a run that fails says so and the rest goes on. The results
    are printed and written to sweep.md, sweep.json and, with a plot, sweep.html: those of this grid alone.
    """
    check_with_code_of(app, engine)
    from cli.unused_keys import tell_unused
    from common.run_config import parse_run_configs
    from engine.checks import check_run
    from results.engines import engine_of
    from results.jobs import run_missing
    from results.runs import Runs
    from results.sweep import Sweep
    from server_app.settings import read_config

    runs = Runs(app, output, check_run, engine_of(engine, app, superlink, kernels, jobs))
    grid = Sweep.of(grids, run_configs, federation_configs)
    wanted = grid.jobs()
    for job in wanted:
        read_config(runs.config(job.spec))
    given = {"-c": parse_run_configs(run_configs), "--grid": grid.varied}
    tell_unused(given, [runs.config(job.spec) for job in wanted])
    if lost := grid.left_out(runs, output):
        what, are, them = ("combination", "is", "it") if lost == 1 else ("combinations", "are", "them")
        click.echo(
            f"floret: {output / 'sweep.json'} has {lost} {what} that {are} not in this grid and is written without "
            f"{them}; give the whole grid to have {them}, runs that are done are not made again",
            err=True,
        )
    failed = run_missing(runs, wanted, keep_models=keep_models)
    click.echo("\n" + grid.write(runs, output, failed))
    if failed:
        raise FloretError(f"{len(failed)} of {len(wanted)} runs failed; see above")
