"""``floret policy``: what a node's policy permits, before it joins anything."""

from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.paths import NamedPath

if TYPE_CHECKING:
    from client_app.policy import Policy


@click.command()
@click.argument("file", required=False, type=NamedPath())
@click.option("--partition", is_flag=True, help="Of a node with a partition of the run's dataset.")
@click.option("--run-config", "-c", multiple=True, help="Say instead whether this run would be permitted.")
def policy(file: Path | None, partition: bool, run_config: tuple[str, ...]) -> None:
    """Print what the policy in FILE permits, or without FILE what a node permits by itself.

    First every key with its value, then what each method would send from a node.
    """
    from client_app.policy import Policy
    from common.run_config import merged, own_config, parse_run_configs

    base = Policy.public() if partition else Policy()
    permitted = Policy.read(file, base) if file else base
    defaults = own_config()
    if run_config:
        _check(permitted, merged(defaults, parse_run_configs(run_config)))
    else:
        _show(permitted, defaults)


def _show(permitted: "Policy", defaults: dict[str, Any]) -> None:
    from client_app.policy import kinds_sent
    from server_app.settings import read_config
    from strategies import METHODS

    values = permitted.values()
    wide = max(map(len, values))
    for key, value in values.items():
        said = ", ".join(value) if isinstance(value, tuple) else str(value).lower()
        click.echo(f"{key.ljust(wide)}  {said}")
    click.echo()
    wide = max(map(len, METHODS))
    for name in METHODS:
        config, _, parameters = read_config(defaults | {"method": name})
        kinds = kinds_sent(config, parameters)
        wrong = permitted.objection(name, kinds)
        click.echo(f"{name.ljust(wide)}  {f'not permitted: {wrong}' if wrong else f'sends {_listed(kinds)}'}")


def _check(permitted: "Policy", values: dict[str, Any]) -> None:
    from client_app.policy import PolicyError, kinds_sent
    from server_app.settings import read_config

    config, kind, parameters = read_config(values)
    kind.check_protects(config)
    config.check_classes_are_given()
    permitted.check_run(config, parameters)
    permitted.check_calibrated(config)
    kinds = kinds_sent(config, parameters)
    wrong = permitted.objection(config.method, kinds)
    if wrong:
        raise PolicyError(f"method = {config.method!r}: not permitted: {wrong}")
    click.echo(f"This run is permitted, as far as the data and the server's messages are: it sends {_listed(kinds)}.")


def _listed(kinds: Set[str]) -> str:
    return ", ".join(sorted(kinds)) or "no tensors"
