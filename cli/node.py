"""``floret node``: join a federation with a device."""

import re
from pathlib import Path

import click

from cli.paths import NamedPath
from cli.ranges import NumberRange, WholeRange
from common.errors import FloretError
from common.home import states_folder


@click.command()
@click.option("--superlink", required=True, metavar="HOST:PORT", help="The SuperLink's Fleet API; its port is 9092.")
@click.option("--client-name", required=True, help="The name that this client goes by, on whatever machine.")
@click.option(
    "--data-dir",
    type=NamedPath(),
    help="Own data: train.npz and test.npz, or image folders; with --partition the run's dataset.",
)
@click.option("--partition", metavar="I/N", help="Not own data: partition I of N of the run's dataset, from 0.")
@click.option("--state-dir", type=NamedPath(), help="Where personal models stay. [default: state in FLORET_HOME]")
@click.option("--root-certificates", type=NamedPath(), help="The CA of the SuperLink's certificate.")
@click.option("--key", type=NamedPath(), help="This node's private key, where the SuperLink wants one.")
@click.option("--insecure", is_flag=True, help="No TLS: anyone on the network can read and alter what travels.")
@click.option("--device", help="auto, cpu, cuda, cuda:1, ... instead of the run's.")
@click.option("--max-wait", type=NumberRange(min=0), help="Give up after so many seconds without a SuperLink.")
@click.option("--keep-runs", type=WholeRange(min=1), help="Keep the models of so many runs that came first. [8]")
@click.option("--keep-gb", type=WholeRange(min=1), help="For all versions of a client in a federation. [20]")
@click.option("--policy", type=NamedPath(), help="What may run here and leave; see floret policy.")
@click.option(
    "--keep-warm",
    type=NumberRange(min=0),
    default=10.0,
    help="Minutes without a message after which PyTorch leaves memory. [10]",
)
@click.option("--health-address", metavar="HOST:PORT", help="Serve gRPC's health protocol here.")
def node(
    superlink: str,
    client_name: str,
    data_dir: Path | None,
    partition: str | None,
    state_dir: Path | None,
    root_certificates: Path | None,
    key: Path | None,
    insecure: bool,
    device: str | None,
    max_wait: float | None,
    keep_runs: int | None,
    keep_gb: int | None,
    policy: Path | None,
    keep_warm: float,
    health_address: str | None,
) -> None:
    """Join a federation with this machine, and stay in it until stopped.

    Starts a SuperNode and a process that has imported PyTorch once and forks for every message. Runs the Floret that is
    installed here, never code from the network. Personal models stay in --state-dir.
    """
    from client_app.node.options import NodeOptions
    from client_app.node.supervisor import Node

    host, port = _address("--superlink", superlink, "superlink.example.org:9092")
    if health_address is not None:
        _address("--health-address", health_address, "127.0.0.1:9095")
    options = NodeOptions(
        host=host,
        port=port,
        insecure=insecure,
        root_certificates=_absolute(root_certificates),
        key=_absolute(key),
        client_name=client_name,
        data_dir=_absolute(data_dir),
        partition=_partition(partition),
        state_dir=states_folder(state_dir).absolute(),
        device=device,
        max_wait=max_wait,
        keep_runs=keep_runs,
        keep_gb=keep_gb,
        policy=_absolute(policy),
        keep_warm=keep_warm,
        health_address=health_address,
    )
    Node(options).run()


def _address(option: str, text: str, example: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:/\s]+)):(\d{1,5})", text)
    if not match or not 0 < int(match[3]) < 65536:
        raise FloretError(f"{option} {text!r}: must be HOST:PORT, such as {example}")
    return match[1] or match[2], int(match[3])


def _partition(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if not match:
        raise FloretError(f"--partition {text!r}: must be I/N, such as 0/3 for the first of three")
    return int(match[1]), int(match[2])


def _absolute(path: Path | None) -> Path | None:
    return path.expanduser().absolute() if path else None
