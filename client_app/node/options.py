"""The options of a node."""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from common.config import folder_name
from common.durable import claim_client, why_unwritable
from common.errors import ConfigError, FloretError
from common.extras import require
from common.proof import load_key
from common.yamlfile import read_yaml

log = logging.getLogger("flwr")


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The options of ``floret node``, checked as far as they can be without the network.

    Attributes:
        host, port: of the SuperLink's Fleet API.
        insecure: no TLS.
        root_certificates: the CA that signed the SuperLink's certificate; None for those of the system.
        key: the node's private key, None without node authentication.
        client_name: the client's name at the server, which stays when it moves to another node.
        data_dir: the client's own data, or where the run's dataset is.
        partition: (i, n), if the client has partition i of n of the run's dataset.
        state_dir: where personal models are kept.
        device: ``auto``, ``cpu``, ``cuda``, ...; None for what the run says.
        max_wait: seconds without a SuperLink after which the node gives up; None for never.
        health_address: where the SuperNode's gRPC health service listens, None for nowhere.
        keep_warm: minutes without a message after which the process that has imported PyTorch ends.
        policy: the file of the node's policy; None for the default.
        keep_runs, keep_gb: how much of its past a client keeps (``client_app.keeping.Quota``); None for the usual.
    """

    host: str
    port: int
    insecure: bool
    root_certificates: Path | None
    key: Path | None
    client_name: str
    data_dir: Path | None
    partition: tuple[int, int] | None
    state_dir: Path
    device: str | None
    max_wait: float | None
    health_address: str | None
    keep_runs: int | None = None
    keep_gb: int | None = None
    policy: Path | None = None
    keep_warm: float = 10.0

    def __post_init__(self) -> None:
        """Check values, files and names.

        Raises:
            FloretError: one line that names the option.
        """
        wrong = folder_name(self.client_name)
        if wrong:
            raise FloretError(f"--client-name {self.client_name!r}: {wrong}")
        for option, path in (("--data-dir", self.data_dir), ("--state-dir", self.state_dir), ("--policy", self.policy)):
            # Flower's SuperNode is told of it in a text that cannot have them.
            if path and ('"' in str(path) or not str(path).isprintable()):
                raise FloretError(
                    f"{option} {str(path)!r}: has a double quote or a sign that cannot be printed; give it another "
                    "name, or make a link to it"
                )
        if self.insecure and (self.root_certificates or self.key):
            raise FloretError("--insecure: goes without --root-certificates and --key; leave it out to use TLS")
        if self.root_certificates:
            trusted(self.root_certificates)
        if self.key:
            _check_key(self.key)
        if self.data_dir is None and self.partition is None:
            raise FloretError("a node needs --data-dir, its own data, or --partition I/N of the run's dataset")
        if self.data_dir and not self.data_dir.is_dir():
            raise FloretError(f"--data-dir {self.data_dir}: is not a directory")
        if self.partition:
            require("flwr_datasets", "datasets", "--partition")
        if self.partition and not 0 <= self.partition[0] < self.partition[1]:
            raise FloretError(f"--partition {self.partition[0]}/{self.partition[1]}: must be from 0 to n - 1")

    @property
    def address(self) -> str:
        """The SuperLink's address as it was given."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def node_config(self) -> dict[str, str | int]:
        """Return what Flower calls the node config: it stays on this machine, the ClientApp reads it."""
        config: dict[str, str | int] = {"client-name": self.client_name, "state-dir": str(self.state_dir)}
        if self.data_dir:
            config["data-dir"] = str(self.data_dir)
        if self.partition:
            config["partition-id"], config["num-partitions"] = self.partition
        if self.device:
            config["device"] = self.device
        if self.policy:
            config["policy"] = str(self.policy)
        for key, value in (("keep-runs", self.keep_runs), ("keep-gb", self.keep_gb)):
            if value is not None:
                config[key] = value
        return config

    def demands_privacy(self) -> bool:
        """Return whether the policy has a key of differential privacy; whether it can be used is checked elsewhere."""
        try:
            content = read_yaml(self.policy, f"policy {self.policy}") if self.policy else {}
        except ConfigError:
            return False
        return isinstance(content, dict) and bool({"privacy", "max-epsilon"} & content.keys())

    def claim(self) -> IO[bytes]:
        """Lock this client's states against other nodes until the returned file is closed.

        Raises:
            FloretError: another node holds the lock, or ``state_dir`` cannot be written.
        """
        try:
            return claim_client(self.state_dir, self.client_name)
        except BlockingIOError as error:
            raise FloretError(
                f"--client-name {self.client_name}: another node with this name is running on {self.state_dir}"
            ) from error
        except OSError as error:
            raise FloretError(f"--state-dir {self.state_dir}: {why_unwritable(error)}") from error


def trusted(root_certificates: Path | None) -> ssl.SSLContext:
    """Return a TLS context that trusts this CA, or without one those of the system.

    Raises:
        FloretError: the file cannot be read, or has no certificate.
    """
    try:
        return ssl.create_default_context(cafile=root_certificates)
    except ssl.SSLError as error:
        raise FloretError(f"--root-certificates {root_certificates}: has no PEM certificate") from error
    except OSError as error:
        raise FloretError(f"--root-certificates {root_certificates}: cannot be read ({error.strerror})") from error


def _check_key(path: Path) -> None:
    load_key(path)
    if path.stat().st_mode & 0o077:
        log.warning("--key %s: others on this machine may read or write it; chmod 600 %s", path, path)
