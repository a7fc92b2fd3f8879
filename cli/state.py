"""``floret state``: what a device keeps of its personal models, and how an older one is used again."""

import sys
from collections.abc import Callable
from pathlib import Path

import click

from cli.paths import NamedPath
from cli.ranges import WholeRange
from common.errors import FloretError, printable
from common.home import states_folder


def _of_states(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say which states are meant."""
    for option in (
        click.option("--client-name", help="Of this client only."),
        click.option("--method", help="Of this method only."),
        click.option("--federation", help="Of this federation only."),
        click.option("--state-dir", type=NamedPath(), help="As of floret node. [default: state in FLORET_HOME]"),
    ):
        command = option(command)
    return command


@click.group()
def state() -> None:
    """List the versions of this device's personal models, use an older one again, or delete them."""


@state.command("list")
@_of_states
def list_versions(state_dir: Path | None, federation: str | None, method: str | None, client_name: str | None) -> None:
    """List the versions, newest first; also while a node is running.

    The one "in use" is what floret predict takes and what the next run with client-state="continue" goes on from.
    """
    from datetime import datetime

    from client_app.inventory import entries, shelves

    rows = [("federation", "method", "client", "version", "run", "round", "when", "bytes", "")]
    for shelf in shelves(states_folder(state_dir), federation, method, client_name):
        for entry in entries(shelf):
            version = entry.version
            when = f"{datetime.fromtimestamp(entry.written):%Y-%m-%d %H:%M:%S}" if entry.written else "?"
            said = (printable(version.lineage, 40), str(version.round)) if version else ("?", "?")
            size = str(version.size) if version else "?"
            condition = entry.wrong or ("intact, in use" if entry.used else "intact")
            where = (shelf.federation, shelf.method, shelf.client)
            rows.append((*where, str(entry.number), *said, when, size, condition))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@state.command()
@click.argument("version", type=WholeRange(min=1))
@_of_states
def restore(
    version: int, state_dir: Path | None, federation: str | None, method: str | None, client_name: str | None
) -> None:
    """Use VERSION of floret state list again: a copy of it becomes the newest version of its run.

    Nothing is deleted. The node must be stopped. The options are needed only where several clients have this version.
    """
    from client_app.inventory import restore as restored
    from client_app.inventory import shelves

    folder = states_folder(state_dir)
    entry, new = restored(shelves(folder, federation, method, client_name), folder, version)
    assert entry.version
    click.echo(f"{entry.shelf}: version {version}, of round {entry.version.round}, is in use again, as version {new}")


@state.command()
@_of_states
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(
    state_dir: Path | None, federation: str | None, method: str | None, client_name: str | None, yes: bool
) -> None:
    """Delete the personal models of a federation, of a method in it or of a client, with all versions, for good.

    The node must be stopped. --federation must be given.
    """
    from client_app.inventory import remove as removed
    from client_app.inventory import shelves

    if federation is None:
        raise FloretError("--federation: name the one whose personal models are to be deleted")
    folder = states_folder(state_dir)
    found = shelves(folder, federation, method, client_name)
    said = "; ".join(map(str, found))
    if not yes and not _confirmed(f"Delete the personal models of {said}?"):
        click.echo("nothing was deleted")
        return
    removed(found, folder)
    click.echo(f"deleted: {said}")


def _confirmed(question: str) -> bool:
    """Return the answer to a question.

    Raises:
        FloretError: nobody is there to answer.
        click.Abort: interrupted.
    """
    try:
        return click.confirm(question)
    except click.Abort as end:
        if sys.stdin.isatty():
            raise
        raise FloretError("nothing was deleted: nobody answers here; --yes does not ask") from end
