"""Options that the commands share which run published tables."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.engines import engine_options, jobs_option, kernels_option
from cli.paths import NamedPath
from cli.ranges import NumberRange, WholeRange
from common.errors import ConfigError, FloretError, printable

if TYPE_CHECKING:
    from results.experiment import Data, Experiment, PlannedRun
    from results.measured import Records
    from results.runs import Runs

# Keys that the command sets in each run, and what says them.
_SET_BY = {
    "method": "each row has its own, and --only says which rows are run",
    "seed": "--seeds says which seeds are run",
    "num-supernodes": "its file says the clients of each row and column",
    "download": "--download says it",
}

_OPTIONS = (
    click.option(
        "--scale", type=NumberRange(0, 1, min_open=True), default=1.0, help="Part of rounds and samples to run."
    ),
    click.option("--seeds", type=WholeRange(1), default=1, show_default=True, help="Run seeds 0 to this number - 1."),
    click.option(
        "--only", multiple=True, metavar="NAME", help="Run only this row or column; * for any text; repeatable."
    ),
    click.option(
        "--data",
        "places",
        multiple=True,
        metavar="[DATASET=]PATH",
        help="Folder of the datasets, or the folder or npz file of one of them; repeatable.",
    ),
    click.option("--download", is_flag=True, help="Download datasets that are not there."),
    click.option("--no-run", is_flag=True, help="Run nothing: show what is done."),
    click.option("--keep-models", is_flag=True, help="Keep the personal models and checkpoints of each run."),
    click.option(
        "--set",
        "-c",
        "extra",
        multiple=True,
        metavar="KEYS",
        help="Keys for every run, as --run-config of `flwr run`; repeatable.",
    ),
    click.option("--app", default=".", type=NamedPath(exists=True, file_okay=False), help="Floret's folder."),
    click.option(
        "--federation-config",
        "federation_configs",
        multiple=True,
        help="As for `flwr run`, but for the number of clients; repeatable. A client has one CPU unless "
        "client-resources-num-cpus is among them.",
    ),
    engine_options,
    kernels_option,
    jobs_option,
    click.option(
        "--output",
        "-o",
        default="reproduced",
        show_default=True,
        type=NamedPath(),
        help="Where runs and results go.",
    ),
    click.option(
        "--results",
        "kept",
        type=NamedPath(),
        help="Where results go, and are: a run that is in them is not made again. By default the folder of --output.",
    ),
)


@dataclass(frozen=True)
class TableOptions:
    """What the options say; see their help."""

    scale: float
    seeds: int
    only: tuple[str, ...]
    places: tuple[str, ...]
    download: bool
    no_run: bool
    keep_models: bool
    extra: tuple[str, ...]
    app: Path
    federation_configs: tuple[str, ...]
    engine: str
    superlink: str
    kernels: str
    jobs: int
    output: Path
    kept: Path | None

    @property
    def results(self) -> Path:
        """The folder of the results."""
        return self.kept or self.output

    def same(self) -> dict[str, Any]:
        """Return the keys of every run: of one that is given twice the last value.

        Raises:
            ConfigError: they cannot be read.
        """
        from common.run_config import parse_run_configs

        return parse_run_configs(self.extra)

    def data(self) -> "Data":
        """Return where the datasets are.

        Raises:
            ConfigError: a name is not that of a dataset, or a place is not there.
        """
        from results.experiment import Data

        data = Data.of(self.places, self.download)
        data.check_there()
        return data

    def runs(self) -> "Runs":
        """Return where runs are made.

        Raises:
            FloretError: the engine cannot be used.
        """
        from engine.checks import check_run
        from results.engines import engine_of
        from results.runs import Runs

        engine = engine_of(self.engine, self.app, self.superlink, self.kernels, self.jobs)
        return Runs(self.app, self.output, check_run, engine)

    def planned(
        self, experiment: "Experiment", runs: "Runs", setting: dict[str, Any], seeds: Iterable[int]
    ) -> "list[PlannedRun]":
        """Return the runs of a table with the keys of ``setting``, in order of the seeds.

        Raises:
            FloretError: a key is not for --set, --grid or --federation-config; or a run's config is wrong, and the
                message names the table, the row and the column.
        """
        from common.run_config import federation_text, parse_federation_configs
        from results.runs import SET_BY_COMMAND
        from server_app.settings import read_config

        same = {**self.same(), **setting}
        federation = {"client-resources-num-cpus": "1", **parse_federation_configs(self.federation_configs)}
        given = {**federation, **same}
        by_data = {"data-dir": "--data says where datasets are"} if self.places else {}
        for key, instead in {**_SET_BY, **SET_BY_COMMAND, **by_data}.items():
            if key in given:
                raise ConfigError(f"{key} = {given[key]!r}: cannot be set for a table: {instead}")
        planned = experiment.planned_runs(sorted(seeds), self.scale, self.data(), federation_text(federation), same)
        for place in planned:
            try:
                read_config(runs.config(place.spec))
            except FloretError as error:
                raise type(error)(f"{experiment.stem}, {place.row}, {place.column}: {error}") from error
        return planned


def table_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; the command gets them as ``TableOptions``, its last argument ``options``."""

    def collected(*args: Any, **kwargs: Any) -> Any:
        names = TableOptions.__dataclass_fields__
        options = TableOptions(**{name: kwargs.pop(name) for name in names})
        return command(*args, **kwargs, options=options)

    collected.__name__, collected.__doc__ = command.__name__, command.__doc__
    collected.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    wrapped: Callable[..., Any] = collected
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def tell_unused_data(data: "Data", places: "Iterable[PlannedRun]") -> None:
    """Say of which datasets a place is given that none of these runs reads."""
    for line in data.unused(place.spec for place in places):
        click.echo(f"floret: {printable(line)}", err=True)


def tell_kept(records: "Iterable[tuple[Records, PlannedRun]]", folder: Path, runs: "Runs") -> None:
    """Say how many of the runs are in the results already, and which of them were made otherwise than is asked for.

    That is from files with another content, or with other kernels than those of the engine.
    """
    from results.measured import made_with_others, other_files

    every = [(known.kept(place.spec), place.spec) for known, place in records]
    kept = [(run, spec) for run, spec in every if run]
    if kept:
        click.echo(f"{len(kept)} of {len(every)} runs are in the results of {folder}")
    otherwise = made_with_others((run for run, _ in kept), runs.engine.kernels)
    for text in (*other_files(kept, runs.defaults), *otherwise):
        click.echo(f"floret: {folder}: {printable(text)}", err=True)
