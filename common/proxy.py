"""The HTTP proxy through which gRPC reaches other machines, where the environment names one."""

import base64
import http.client
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from urllib.parse import SplitResult, unquote, urlsplit

from common.errors import FloretError

# As gRPC reads them, in this order, and in lower case only.
VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
# A channel of gRPC that connects directly, whatever the environment says.
DIRECT = ("grpc.enable_http_proxy", 0)


@dataclass(frozen=True)
class Proxy:
    """A proxy that passes connections on (HTTP CONNECT), and the environment variable that names it."""

    variable: str
    url: SplitResult

    def __str__(self) -> str:
        """Return the variable and the proxy's address, without the password that it may have."""
        return f"{self.variable}={self.url.hostname}:{self.url.port}"

    def connect(self, host: str, port: int, seconds: float) -> socket.socket:
        """Return a connection to ``host`` through the proxy.

        Raises:
            OSError: the proxy does not answer, or does not connect.
        """
        assert self.url.hostname
        tunnel = http.client.HTTPConnection(self.url.hostname, self.url.port, timeout=seconds)
        tunnel.set_tunnel(f"[{host}]" if ":" in host else host, port, dict(self._authorization()))
        try:
            tunnel.connect()
        except http.client.HTTPException as error:
            raise OSError(f"the proxy does not speak HTTP: {type(error).__name__}") from error
        return tunnel.sock

    def _authorization(self) -> Iterator[tuple[str, str]]:
        if self.url.username:
            user = f"{unquote(self.url.username)}:{unquote(self.url.password or '')}"
            yield "Proxy-Authorization", f"Basic {base64.b64encode(user.encode()).decode()}"


def proxy_to(host: str) -> Proxy | None:
    """Return the proxy through which gRPC reaches ``host``, or None if it connects directly.

    Raises:
        FloretError: an environment variable names none that gRPC can use.
    """
    variable = next((name for name in VARIABLES if os.environ.get(name)), None)
    if variable is None or _is_excepted(host):
        return None
    try:
        url = urlsplit(os.environ[variable])
        usable = url.scheme == "http" and url.hostname and url.port
    except ValueError:
        usable = False
    if not usable:
        raise FloretError(
            f"{variable}: names no proxy that gRPC can use; it must be like http://HOST:PORT, "
            f"or {host} be in no_proxy, or {variable} not be set"
        )
    return Proxy(variable, url)


def connected(host: str, port: int, seconds: float) -> socket.socket:
    """Return a connection to ``host`` that goes the way that ``proxy_to`` says.

    Raises:
        OSError: nobody answers there, or no proxy connects.
        FloretError: see ``proxy_to``.
    """
    proxy = proxy_to(host)
    return proxy.connect(host, port, seconds) if proxy else socket.create_connection((host, port), timeout=seconds)


def channel_options(host: str) -> list[tuple[str, int | str]]:
    """Return the options of a gRPC channel to ``host`` that goes the way that ``proxy_to`` says."""
    proxy = proxy_to(host)
    return [("grpc.http_proxy", proxy.url.geturl())] if proxy else [DIRECT]


def _is_excepted(host: str) -> bool:
    named = next((os.environ[name] for name in EXCEPTIONS if name in os.environ), "")
    return any(_names(entry.strip(), host) for entry in named.split(",") if entry.strip())


def _names(entry: str, host: str) -> bool:
    if entry == "*":
        return True
    try:
        return ip_address(host) in ip_network(entry, strict=False)
    except ValueError:
        return host.lower().endswith(entry.lower())
