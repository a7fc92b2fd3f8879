"""``floret run``: check the whole run config at once, then hand over to ``flwr run`` or to the local engine."""

import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import click

from cli.engines import kernels_option, use_code_of
from common.kernels import NATIVE, kernels_in_use, variables
from common.run_config import default_config, merged, parse_run_configs, run_config_text

# Other options of `flwr run` that have a value, with an example of it.
_VALUED = {"--federation-config": "'num-supernodes=10'", "--federation": "@none/default", "--format": "json"}


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option(
    "--engine",
    type=click.Choice(["ray", "local"]),
    default="ray",
    show_default=True,
    help="ray: `flwr run`, on a SuperLink. local: processes of this machine, without SuperLink and Ray.",
)
@kernels_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(engine: str, kernels: str, arguments: tuple[str, ...]) -> None:
    """Check the run config and the data, then start `flwr run` with the same arguments.

    A key that is misspelt, a value that cannot be used, a dataset that is not there, a method that does not work with
    the model, or a SuperLink that another environment started is told in one line at once.

    With `--engine local` the same apps run in processes of this machine and begin after seconds; it takes
    `--run-config` and `--federation-config` as `flwr run` does, and gives the same results.
    """
    if engine == "local":
        _run_here(arguments, kernels)
    if kernels != NATIVE:
        raise click.UsageError(
            f"--kernels {kernels}: the SuperLink's processes are running already; use --engine local"
        )
    from cli.unused_keys import tell_unused
    from common import stream
    from common.extras import require
    from common.flower import check_connection
    from common.local_superlink import check_local_superlink, simulated_clients, use_own_commands
    from engine.checks import check_both_halves
    from results.trackers import trackers_of
    from server_app.settings import read_config
    from server_app.setup import check_directory

    places, texts, rest = split_arguments(arguments)
    app = Path(places[0] if places else ".")
    given = parse_run_configs(texts)
    values = merged(default_config(app), given)
    config, kind, parameters = read_config(values)
    superlink = places[1] if len(places) > 1 else ""
    check_connection(superlink)
    check_local_superlink(superlink)
    clients = simulated_clients(values_of("--federation-config", rest), superlink)
    check_both_halves(config, kind, parameters, clients)
    tell_unused({"run config:": given}, [values])
    if clients is not None:
        require("ray", "simulation", "a simulation on this machine")
        trackers_of(config)  # refuses one whose package is not installed
        check_directory(config, values)
    use_own_commands()
    # In one option: of several, Flower keeps only the last table of a method. Each key once, or Flower refuses it.
    command = ["flwr", "run", *rest, *(("--run-config", run_config_text(texts)) if texts else ())]
    if "--stream" in rest and values_of("--format", rest)[-1:] != ["json"]:
        # By its file: what is on PYTHONPATH would be there for the SuperLink that `flwr run` starts, too.
        os.execv(sys.executable, [sys.executable, "-P", stream.__file__, superlink, *command])
    os.execvp("flwr", command)


def _run_here(arguments: tuple[str, ...], kernels: str) -> NoReturn:
    """Run on the local engine, and end this process with the run's exit code."""
    if kernels not in (NATIVE, kernels_in_use()):
        os.execve(
            sys.executable, [sys.executable, "-P", "-m", "cli.main", *sys.argv[1:]], os.environ | variables(kernels)
        )
    places, texts, rest = split_arguments(arguments)
    app = Path(places[0] if places else ".")
    federation = values_of("--federation-config", rest)
    others = [part for part in rest if part not in (*places[:1], "--federation-config", "--stream", *federation)]
    others = [part for part in others if not part.startswith("--federation-config=")]
    if others:
        raise click.UsageError(
            f"--engine local takes the app's folder, --run-config and --federation-config, not {others[0]!r}"
        )
    given = parse_run_configs(texts)
    values = merged(default_config(app), given)
    use_code_of(app)
    from common.extras import require
    from common.imports import quick_imports
    from common.partitioners import DrawingProcess

    require("jinja2", "server", "the report of a run")
    with DrawingProcess():
        with quick_imports():
            from cli.unused_keys import tell_unused
            from common.flower import format_log
            from common.forks import end
            from engine.plan import Plan
            from engine.supervisor import prepare
            from engine.supervisor import run as run_plan

        format_log()
        plan = Plan.of(values, federation)
        prepare(plan)
    tell_unused({"run config:": given}, [values])
    end(run_plan(plan))


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the app and SuperLink among the arguments of `flwr run`, its run configs, and all but the run configs.

    Raises:
        click.UsageError: one is empty, or the last one is an option without its value.
    """
    places: list[str] = []
    texts: list[str] = []
    rest: list[str] = []
    remaining = iter(arguments)

    def value_of(option: str, example: str) -> str:
        found = next(remaining, None)
        if found is None:
            raise click.UsageError(f"{option}: its value is missing, such as {example}")
        return found

    for argument in remaining:
        if not argument:
            raise click.UsageError("an argument is empty; name the app's folder, such as . for the working directory")
        option, _, value = argument.partition("=")
        if argument in ("--run-config", "-c"):
            texts.append(value_of(argument, "'rounds=10'"))
        elif option == "--run-config":
            texts.append(value)
        elif argument in _VALUED:
            rest += [argument, value_of(argument, _VALUED[argument])]
        else:
            rest.append(argument)
            if not argument.startswith("-"):
                places.append(argument)
    return places, texts, rest


def values_of(option: str, arguments: Sequence[str]) -> list[str]:
    """Return the values of an option, such as ``--federation-config``, among the arguments of `flwr run`, in turn."""
    found = []
    for before, argument in pairwise(["", *arguments]):
        if before == option:
            found.append(argument)
        elif argument.startswith(f"{option}="):
            found.append(argument.partition("=")[2])
    return found
