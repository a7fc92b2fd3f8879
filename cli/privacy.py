"""``floret privacy``: what the clients of a device have spent."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.paths import NamedPath
from cli.ranges import NumberRange
from common.home import states_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.privacy.ledger import Line

DELTA = 1e-5


@click.command()
@click.option("--client-name", help="Of this client only.")
@click.option("--state-dir", type=NamedPath(), help="As of floret node. [default: state in FLORET_HOME]")
@click.option(
    "--policy",
    "policy_file",
    type=NamedPath(),
    metavar="FILE",
    help="That of floret node: its delta is taken, and what is left of its max-epsilon is told.",
)
@click.option(
    "--delta",
    type=NumberRange(0, 1, min_open=True, max_open=True),
    help=f"[default: that of --policy, {DELTA:g} without]",
)
@click.option("--lines", is_flag=True, help="Every line of the ledgers.")
def privacy(
    client_name: str | None, state_dir: Path | None, policy_file: Path | None, delta: float | None, lines: bool
) -> None:
    """Show what the clients of this device have spent on differential privacy, over all their runs.

    Also while a node is running. The epsilon of an example counts all runs, those that protect the whole client with
    two to three times theirs, since one example may turn its update around; that of the client only the runs that
    protect it. Runs without privacy have none: of clients that took part in one this is said. A line for each run says
    what it has spent alone; these numbers do not add up to that of all runs.
    """
    from client_app.inventory import check_state_dir
    from common.errors import FloretError, printable
    from common.privacy.ledger import FOLDER, UNPROTECTED, Ledger

    most = None
    if policy_file is not None:
        from client_app.policy import Policy

        permitted = Policy.read(policy_file.expanduser())
        if delta not in (None, permitted.delta):
            raise FloretError(
                f"--delta {delta}: policy {policy_file} has delta = {permitted.delta}; leave out --delta or --policy"
            )
        most, delta = permitted.max_epsilon, permitted.delta
    delta = DELTA if delta is None else delta
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
            click.echo(f"client {name}: answered runs without privacy alone; nothing is promised of its data")
            continue
        runs: dict[str, list[Line]] = {}
        for line in found:
            runs.setdefault(line.run, []).append(line)
        spent = f"an example has spent {_spent(found, delta, most)}"
        more = "; it answered runs without privacy, too, which nothing bounds" if name in unprotected else ""
        counts = f"{_counted(len(found), 'line')}, {_counted(len(runs), 'run')}"
        click.echo(f"client {name}: {spent} at delta {delta:g}; {counts}{more}")
        for run, own in runs.items():
            asked = ", ".join(dict.fromkeys(f"federation {line.federation}, {line.method}" for line in own))
            click.echo(
                f"  {printable(f'run {run}, {asked}')}: {_counted(len(own), 'line')}, {_spent(own, delta)} alone"
            )
        if lines:
            for line in found:
                by = "server" if line.by_server else "node"
                said = (
                    f"run {line.run} attempt {line.attempt} round {line.round}, federation {line.federation}, "
                    f"{line.method}: {line.unit}, noise {line.noise:.4g} by the {by}, rate {line.rate:.4g}, "
                    f"{line.steps} steps{'' if line.count is None else ', the count of examples'}"
                )
                click.echo(f"  {printable(said)}")
    if client_name is None and len(names) > 1:
        click.echo("What clients with the same data have spent adds up.")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _spent(lines: "Sequence[Line]", delta: float, most: float | None = None) -> str:
    """Return the epsilon of an example after these lines, and that of the client if one protects it.

    Args:
        lines: of a ledger, one or more runs.
        delta: above 0 and below 1.
        most: the policy's ``max-epsilon``, of which is said what is left; 0 for no limit, None without a policy.
    """
    from common.privacy.ledger import spent_by_client, spent_by_example

    example = spent_by_example(lines, delta)
    text = f"epsilon {example:.4g}{_left(example, most)}"
    units = {line.unit for line in lines}
    if "client" in units:
        client = spent_by_client(lines, delta)
        left = _left(client, most)
        if most and "example" in units:
            left = f" (of max-epsilon = {most:g}, nothing left: runs that protect examples do not protect the client)"
        text += f", of runs that protect the client {client:.4g}{left}"
    return text


def _left(spent: float, most: float | None) -> str:
    if most is None:
        return ""
    if not most:
        return " (max-epsilon = 0, no limit)"
    left = most - spent
    return f" (of max-epsilon = {most:g}, {f'{left:.4g}' if left > 0 else 'nothing'} left)"
