"""``floret run``: check the whole run config at once, then hand over to ``flwr run``."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
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

    A key that is misspelt, a value that cannot be used or a dataset that is not there is told in one line at once.
    """
    import data
    from server_app.settings import read_config
    from server_app.trackers import wanted

    places, texts, rest = split_arguments(arguments)
    overrides: dict[str, Any] = {}
    for text in texts:
        overrides |= parse_run_config(text)
    app = Path(places[0] if places else ".")
    values = merged(default_config(app), overrides)
    config, _, _ = read_config(values)
    here = len(places) < 2  # a second place is a SuperLink: its clients have the data, its machine the packages
    data.check(config, files=here)
    if here:
        wanted(config)
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
