"""A node where the environment names an HTTP proxy: to the SuperLink through it, on its own machine never."""

import http.server
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from flwr.supercore.grpc_health import run_health_server_grpc_no_tls

from client_app.node import transport
from client_app.node.preflight import UnreachableError, check_connection
from common.errors import FloretError
from common.proxy import EXCEPTIONS, VARIABLES, proxy_to
from tests.conftest import PATIENCE, free_port
from tests.deployment import Deployment, container_health, finish, node_options

# Nobody listens there.
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *EXCEPTIONS):
        monkeypatch.delenv(name, raising=False)


class Passing(http.server.BaseHTTPRequestHandler):
    """Passes connections on to this machine, whatever the host, and notes what was asked for."""

    asked: list[tuple[str, str | None]]
    refuses = False

    def do_CONNECT(self) -> None:
        self.asked.append((self.path, self.headers["Proxy-Authorization"]))
        if self.refuses:
            self.send_error(403)
            return
        with socket.create_connection(("127.0.0.1", int(self.path.rpartition(":")[2]))) as there:
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: there, there: self.connection}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    data = end.recv(65536)
                    if not data:
                        return
                    ends[end].sendall(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def proxy(refuses: bool = False) -> Iterator[tuple[int, list[tuple[str, str | None]]]]:
    """Serve a proxy and yield its port and what it was asked for: where to, and with which authorization."""
    asked: list[tuple[str, str | None]] = []
    handler = type("Handler", (Passing,), {"asked": asked, "refuses": refuses})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1], asked
        finally:
            server.shutdown()


@pytest.fixture
def healthy() -> Iterator[int]:
    """Serve gRPC without TLS and yield its port."""
    port = free_port()
    server = run_health_server_grpc_no_tls(f"127.0.0.1:{port}")
    yield port
    server.stop(None).wait()


def serves(channel: grpc.Channel) -> bool:
    """Return whether the health service behind ``channel``, which is closed then, says so: status 1."""
    with channel:
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
        return check(b"", timeout=PATIENCE) == b"\x08\x01"


# The host is one that only the proxy finds.
HOST = "superlink.invalid"


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_superlink_is_reached_through_the_proxy(
    tmp_path: Path, healthy: int, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy() as (port, asked):
        monkeypatch.setenv(variable, f"http://a:b%20c@127.0.0.1:{port}")
        check_connection(node_options(tmp_path, healthy, host=HOST, insecure=True))
        assert serves(transport.open_channel(f"{HOST}:{healthy}", insecure=True))
    # RFC 7617: base64 of "a:b c"
    assert asked == [(f"{HOST}:{healthy}", "Basic YTpiIGM=")] * 2


def test_a_node_reaches_its_own_machine_without_a_proxy(healthy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", NOWHERE)
    assert serves(transport._channel(f"127.0.0.1:{healthy}", None))


def test_a_container_behind_a_proxy_is_healthy(healthy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    served, needed = f"127.0.0.1:{healthy}", f"{HOST}:{healthy}"
    with proxy() as (port, asked):
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        assert container_health().main(served, needed) == ""
    assert asked == [(needed, None)]
    assert container_health().main(served, needed).startswith(f"{needed}: ")
    monkeypatch.setenv("http_proxy", "mail")
    assert container_health().main(served, needed).startswith(f"{needed}: http_proxy: names no proxy")


@pytest.mark.parametrize("exceptions", ["127.0.0.1", "a.org, 127.0.0.0/8", "*"])
@pytest.mark.parametrize("variable", EXCEPTIONS)
def test_a_superlink_that_no_proxy_is_for(
    tmp_path: Path, healthy: int, variable: str, exceptions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", NOWHERE)
    monkeypatch.setenv(variable, exceptions)
    check_connection(node_options(tmp_path, healthy, insecure=True))
    assert serves(transport.open_channel(f"127.0.0.1:{healthy}", insecure=True))


@pytest.mark.parametrize(
    ("exceptions", "host", "direct"),
    [
        ("b.org", "a.b.org", True),
        (".b.org", "a.B.org", True),
        ("b.org", "b.com", False),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("10.0.0.0/8", "a.org", False),
        ("", "a.org", False),
    ],
)
def test_what_no_proxy_says(exceptions: str, host: str, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", NOWHERE)
    monkeypatch.setenv("no_proxy", exceptions)
    assert (proxy_to(host) is None) is direct


def test_grpcs_own_exceptions_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", NOWHERE)
    monkeypatch.setenv("no_proxy", "a.org")
    monkeypatch.setenv("no_grpc_proxy", "b.org")
    assert [proxy_to(host) is None for host in ("a.org", "b.org")] == [False, True]


@pytest.mark.parametrize("value", ["https://h:1", "h:1", "http://h", "http://h:x", "socks5://h:1"])
def test_a_proxy_that_grpc_cannot_use_is_one_line(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", value)
    with pytest.raises(FloretError) as caught:
        proxy_to("a.org")
    assert str(caught.value) == (
        "https_proxy: names no proxy that gRPC can use; it must be like http://HOST:PORT, or a.org be in no_proxy, "
        "or https_proxy not be set"
    )


def test_a_proxy_that_does_not_connect_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with proxy(refuses=True) as (port, _):
        monkeypatch.setenv("https_proxy", f"http://user:secret@127.0.0.1:{port}")
        with pytest.raises(UnreachableError) as caught:
            check_connection(node_options(tmp_path, 9092, host=HOST))
    assert str(caught.value) == (
        f"--superlink {HOST}:9092, through https_proxy=127.0.0.1:{port}: "
        "nobody answers (Tunnel connection failed: 403 Forbidden)"
    )


def test_a_proxy_that_speaks_no_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 mail\r\n")

        threading.Thread(target=answer, daemon=True).start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(UnreachableError, match=r"nobody answers \(the proxy does not speak HTTP: BadStatusLine\)"):
            check_connection(node_options(tmp_path, 9092, host=HOST))


@pytest.mark.slow
def test_a_run_with_a_node_behind_a_proxy(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path / "deployment")
    with proxy() as (port, asked):
        try:
            # Of the node and of its SuperNode, not of `flwr run`, nor of the SuperLink and its ServerApp.
            deployment.env["http_proxy"] = f"http://127.0.0.1:{port}"
            deployment.node("a", "--partition", "0/1")
            del deployment.env["http_proxy"]
            finish(deployment.run(rounds=2, min_clients=1))
        finally:
            deployment.end()
    assert [line["clients"]["a"]["trained"] for line in deployment.history()] == [True, True]
    # The node looks at the address, and its SuperNode stays connected.
    assert {where for where, _ in asked} == {f"127.0.0.1:{deployment.fleet}"}
    assert len(asked) >= 2
