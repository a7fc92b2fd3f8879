"""``floret privacy``: what the clients of a device have spent."""

from pathlib import Path

import click

from cli.paths import NamedPath
from cli.ranges import NumberRange
from common.home import states_folder


@click.command()
@click.option("--client-name", help="Of this client only.")
@click.option("--state-dir", type=NamedPath(), help="As of floret node. [default: ~/.floret/state]")
@click.option("--delta", type=NumberRange(0, 1, min_open=True, max_open=True), default=1e-5, show_default=True)
@click.option("--lines", is_flag=True, help="Every line of the ledgers.")
def privacy(client_name: str | None, state_dir: Path | None, delta: float, lines: bool) -> None:
    """Show what the clients of this device have spent on differential privacy, over all their runs.

    Also while a node is running. The epsilon of an example counts all runs, those that protect the whole client with
    two to three times theirs, since one example may turn its update around; that of the client only the runs that
    protect it. Runs without privacy have none: of clients that took part in one this is said.
    """
    from client_app.inventory import check_state_dir
    from common.errors import FloretError, printable
    from common.privacy.ledger import FOLDER, UNPROTECTED, Ledger, spent_by_client, spent_by_example

    states = states_folder(state_dir)
    check_state_dir(states)
    folder = states / FOLDER
    # Of a ledger that lost its lines the other file tells.
    unprotected = {path.stem for path in (folder / UNPROTECTED).glob("*.json")}
    names = sorted(unprotected | {path.stem for kind in ("*.jsonl", "*.json") for path in folder.glob(kind)})
    if client_name is not None and client_name not in names:
        raise FloretError(
            f"--client-name {client_name!r}: no ledger in {folder}; there is {', '.join(names) or 'none'}"
        )
    if not names:
        raise FloretError(f"{folder}: no client has spent anything yet; see --state-dir")
    for name in names if client_name is None else [client_name]:
        found = Ledger(folder / f"{name}.jsonl").lines()
        if name in unprotected and not found:
            click.echo(f"client {name}: took part in runs without privacy alone; nothing is promised of its data")
            continue
        runs = len({line.run for line in found})
        spent = f"an example has spent epsilon {spent_by_example(found, delta):.4g}"
        if any(line.unit == "client" for line in found):
            spent += f", of runs that protect the client {spent_by_client(found, delta):.4g}"
        more = "; it took part in runs without privacy, too, which nothing bounds" if name in unprotected else ""
        click.echo(f"client {name}: {spent} at delta {delta:g}; {len(found)} lines, {runs} runs{more}")
        if lines:
            for line in found:
                by = "server" if line.by_server else "node"
                said = (
                    f"run {line.run} attempt {line.attempt} round {line.round}, federation {line.federation}, "
                    f"{line.method}: {line.unit}, noise {line.noise:.4g} by the {by}, rate {line.rate:.4g}, "
                    f"{line.steps} steps"
                )
                click.echo(f"  {printable(said)}")
    if client_name is None and len(names) > 1:
        click.echo("What clients with the same data have spent adds up.")
