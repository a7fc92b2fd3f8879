"""What is checked of a run before it starts: all that needs no clients, and that the method has a client half."""

from collections.abc import Mapping
from typing import Any

import data
from client_app.client import FloretClient
from common.config import RunConfig
from common.registry import load_class
from server_app.settings import read_config
from server_app.setup import check_setup


def check_both_halves(config: RunConfig, kind: type[Any], parameters: Any, clients: int | None) -> None:
    """Check a config as ``server_app.setup.check_setup`` does, and the client half, without which no client answers.

    A run is about to begin: files that were altered since another one of this process began are read anew.

    Raises:
        FloretError: one line that names the key or the file, and what would be right.
    """
    if clients is not None:
        data.forget_altered(config)
    check_setup(config, kind, parameters, clients)
    load_class("client_app.methods", config.method, FloretClient)


def check_run(values: Mapping[str, Any], clients: int | None) -> None:
    """Check a whole run config; arguments and errors as of ``read_config`` and ``check_both_halves``."""
    check_both_halves(*read_config(values), clients)
