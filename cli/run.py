"""``floret run``: check the whole run config at once, then hand over to ``flwr run``."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from common.run_config import default_config, merged, parse_run_config


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Check the run config and the data, then start `flwr run` with the same arguments.

    A key that is misspelt, a value that cannot be used or a dataset that is not there is named in one line at once.
    """
    import data
    from results.trackers import trackers_of
    from server_app.settings import read_config

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
        trackers_of(config)  # refuses one whose package is not installed
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
