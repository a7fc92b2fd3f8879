"""``floret verify``: runs of a file of results, made again and compared."""

from pathlib import Path

import click

from cli.engines import check_with_code_of, engine_options
from cli.paths import NamedPath
from cli.ranges import WholeRange
from common.errors import FloretError, printable


@click.command()
@click.argument("file", metavar="FILE", type=NamedPath())
@click.option("--runs", "count", type=WholeRange(1), default=1, show_default=True, help="Number of runs to make.")
@click.option("--pick", type=WholeRange(0), default=0, show_default=True, help="Seed of the choice of the runs.")
@click.option("--only", multiple=True, metavar="NAME", help="Only from this row or column; * for any text; repeatable.")
@click.option(
    "--data",
    "places",
    multiple=True,
    metavar="[DATASET=]PATH",
    help="Folder of the datasets, or the folder or npz file of one of them; repeatable.",
)
@click.option("--download", is_flag=True, help="Download datasets that are not there.")
@click.option(
    "--app",
    default=".",
    type=NamedPath(exists=True, file_okay=False),
    help="Floret's folder.",
)
@engine_options
@click.option(
    "--output",
    "-o",
    default="verified",
    show_default=True,
    type=NamedPath(),
    help="Where runs go.",
)
def verify(
    file: Path,
    count: int,
    pick: int,
    only: tuple[str, ...],
    places: tuple[str, ...],
    download: bool,
    app: Path,
    engine: str,
    superlink: str,
    output: Path,
) -> None:
    """Make runs of FILE again, chosen at random, and say whether every number is the same.

    FILE is a JSON file of `floret reproduce` or `floret fit`. A run that agrees does so bit for bit. For one that
    differs the first round that does is told, and what else does: data, commit, machine, versions. It is an error
    if one differs. A run that was made with portable kernels is made with them again. Runs that the folder --output has
    are compared, not made again, if their kernels and their data are the same.
    """
    check_with_code_of(app, engine)
    from common.run_config import default_config
    from engine.checks import check_run
    from results.engines import engine_of
    from results.experiment import Data, selected
    from results.jobs import Job, run_missing
    from results.measured import other_files
    from results.runs import Runs
    from results.verify import Comparison, Recorded, picked

    data = Data.of(places, download)
    recorded = Recorded.read(file)
    ((*wanted,),) = selected([[one.place for one in recorded]], only)
    chosen = [one.at(data) for one in picked([one for one in recorded if one.place in wanted], count, pick)]
    for text in other_files(((one.run, one.place.spec) for one in chosen), default_config(app)):
        click.echo(f"floret: {file}: {printable(text)}", err=True)
    failed = differ = 0
    for kernels in sorted({one.kernels for one in chosen}):
        same = [one for one in chosen if one.kernels == kernels]
        runs = Runs(app, output, check_run, engine_of(engine, app, superlink, kernels), exact=True)
        jobs = [Job(one.place.spec, one.place.label, lambda run: f"{len(run.history.rounds)} rounds") for one in same]
        failed += len(run_missing(runs, jobs, keep_models=False))
        for one in same:
            outcome = runs.outcome(one.place.spec)
            if outcome:
                comparison = Comparison.of(one, outcome)
                differ += not comparison.same
                label = printable(one.place.label)
                click.echo(f"{label}: " + "\n  ".join(map(printable, str(comparison).splitlines())))
    if failed:
        raise FloretError(f"{failed} of {len(chosen)} runs failed; see above")
    if differ:
        raise FloretError(f"{file}: {differ} of {len(chosen)} runs differ; see above")
