"""``floret run``: check the whole run config at once, then hand over to ``flwr run``."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from common.config import check_known
from common.errors import ConfigError

# As `flwr run` reads it: pairs of key and value, the value perhaps quoted, separated by white space.
_PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Check the run config and the data, then start `flwr run` with the same arguments.

    A key that is misspelt, a value that cannot be used, a dataset that is not there, a method that does not work with
    the model, or a SuperLink that another environment started is told in one line at once.
    """
    from common.local_superlink import check_local_superlink, use_own_commands
    from server_app.settings import read_config
    from server_app.setup import check_setup
    from server_app.trackers import wanted

    places, texts, rest = split_arguments(arguments)
    overrides: dict[str, Any] = {}
    for text in texts:
        overrides |= parse_run_config(text)
    app = Path(places[0] if places else ".")
    values = merged(default_config(app), overrides)
    config, kind, parameters = read_config(values)
    superlink = places[1] if len(places) > 1 else ""
    check_local_superlink(superlink)
    clients = simulated_clients(federation_configs(rest), superlink)
    check_setup(config, kind, parameters, clients)
    if clients is not None:
        wanted(config)
    use_own_commands()
    # In one option: of several, Flower keeps only the last table of a method.
    together = [text for text in texts if text.endswith(".toml")] or [" ".join(texts)] if texts else []
    os.execvp("flwr", ["flwr", "run", *rest, *(part for text in together for part in ("--run-config", text))])


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the places (app, SuperLink) among the arguments of `flwr run`, its run configs, and all but the latter."""
    places: list[str] = []
    texts: list[str] = []
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        option, _, value = argument.partition("=")
        if argument in ("--run-config", "-c"):
            texts.append(next(remaining, ""))
        elif option == "--run-config":
            texts.append(value)
        elif argument in ("--federation-config", "--federation", "--format"):
            rest += [argument, next(remaining, "")]
        else:
            rest.append(argument)
            if not argument.startswith("-"):
                places.append(argument)
    return places, texts, rest


def federation_configs(arguments: Sequence[str]) -> list[str]:
    """Return the values of ``--federation-config`` among the arguments of `flwr run`."""
    option = "--federation-config"
    after = [value for key, value in pairwise(arguments) if key == option]
    return after + [key.partition("=")[2] for key in arguments if key.startswith(f"{option}=")]


def simulated_clients(texts: Sequence[str], superlink: str = "") -> int | None:
    """Return how many clients a simulation on this machine has, or None if it is not one.

    Other clients have the data, other machines the packages.

    Args:
        texts: values of ``--federation-config``; the number is ``num-supernodes``, or else what Flower takes.
        superlink: the SuperLink connection, empty for Flower's default.

    Raises:
        ConfigError: it is not a number, or too small.
    """
    from common.flower import default_supernodes, find_connection
    from common.local_superlink import simulates_here

    connection = find_connection(superlink)
    if connection is None or not simulates_here(connection):
        return None
    for key, value in reversed(_PAIR.findall(" ".join(texts))):
        if key.replace("_", "-") == "num-supernodes":
            if not value.isdecimal() or int(value) < 1:
                raise ConfigError(f"--federation-config {key}={value}: must be a whole number, at least 1")
            return int(value)
    return default_supernodes(connection)


def parse_run_config(text: str) -> dict[str, Any]:
    """Return the keys of a ``--run-config``: ``'alpha=0.5 method="fedper"'``, or the path of a TOML file.

    Raises:
        ConfigError: the text or the file cannot be read as such.
    """
    try:
        if text.endswith(".toml"):
            return flat(tomllib.loads(Path(text).expanduser().read_text(encoding="utf-8")))
        left = _PAIR.sub("", text).split()
        if left:
            raise ConfigError(f"run config {text!r}: {left[0]!r} is not key=value, without blanks around the '='")
        return flat(tomllib.loads("\n".join(f"{key} = {value}" for key, value in _PAIR.findall(text))))
    except OSError as error:
        raise ConfigError(f"run config {text}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        example = """'method="fedper" alpha=0.5 download=true'"""
        raise ConfigError(f"run config {text!r} cannot be read ({error}); it must be like {example}") from error


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a table of tables as one, with dotted keys."""
    keys: dict[str, Any] = {}
    for key, value in table.items():
        keys |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return keys


def default_config(app: Path) -> dict[str, Any]:
    """Return the run config of the app in folder ``app``, every key with its default.

    Raises:
        ConfigError: there is no app.
    """
    file = app / "pyproject.toml"
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))
        return flat(project["tool"]["flwr"]["app"]["config"])
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} is not that of a Flower app with a run config; start in Floret's folder") from error


def merged(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults with the overrides in place.

    Raises:
        ConfigError: names a key that there is no default for, and the nearest one.
    """
    check_known(overrides, defaults)
    return {**defaults, **overrides}
