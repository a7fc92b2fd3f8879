"""Check addresses before Flower starts, whose own errors do not name the cause: the SuperLink's, and its own."""

import errno
import socket
import ssl

from client_app.node.options import NodeOptions, trusted
from client_app.node.transport import ALPN, GREETING, is_answer
from common.errors import FloretError
from common.proxy import connected, proxy_to

_SECONDS = 10.0
_TLS_ALERT = 0x15
_WITH_TLS = "leave out --insecure and give --root-certificates"


class UnreachableError(FloretError):
    """No SuperLink answers at the address, or not yet; a later attempt may succeed."""


def check_health_address(address: str) -> None:
    """Check that the health service can listen at ``address``.

    Raises:
        FloretError: it cannot.
    """
    where = f"--health-address {address}"
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, *_, place = found[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except UnicodeError as error:
        raise FloretError(f"{where}: has no valid host name") from error
    except OSError as error:
        wrong = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened at ({error.strerror})"
        raise FloretError(f"{where}: {wrong}; name another address of this machine") from error


def check_connection(options: NodeOptions) -> None:
    """Connect to the SuperLink as the SuperNode will, through a proxy where the environment names one, and disconnect.

    Raises:
        UnreachableError: there is no connection, or it ends at once, as that of a proxy whose SuperLink is not up.
        FloretError: there is one, but the SuperLink's certificate is not acceptable, or one side uses TLS and the other
            does not; or the host is none.
    """
    proxy = proxy_to(options.host)
    where = f"--superlink {options.address}" + (f", through {proxy}" if proxy else "")
    try:
        with connected(options.host, options.port, _SECONDS) as connection:
            if options.insecure:
                _check_plain(connection, where)
            else:
                _check_tls(connection, where, options)
    except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError) as error:
        if options.insecure and _has_tls(options):
            raise FloretError(f"{where}: wants TLS; {_WITH_TLS}") from error
        other = f"wants TLS: then {_WITH_TLS}" if options.insecure else "has no TLS: then use --insecure"
        raise UnreachableError(f"{where}: hung up; the SuperLink is not up yet, or {other}") from error
    except ssl.SSLError as error:
        raise FloretError(
            f"{where}: TLS failed ({error.reason}); if the SuperLink has no TLS, use --insecure"
        ) from error
    except UnicodeError as error:
        raise FloretError(f"{where}: has no valid host name; name the SuperLink's host or its IP address") from error
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise UnreachableError(f"{where}: nobody answers ({reason})") from error


def _check_tls(connection: socket.socket, where: str, options: NodeOptions) -> None:
    cafile = options.root_certificates
    context = trusted(cafile)
    context.set_alpn_protocols([ALPN])
    try:
        with context.wrap_socket(connection, server_hostname=options.host):
            pass
    except ssl.SSLCertVerificationError as error:
        signer = f"--root-certificates {cafile}" if cafile else "the system's certificates (see --root-certificates)"
        raise FloretError(
            f"{where}: its certificate is refused: {error.verify_message}; it was checked with {signer}"
        ) from error


def _check_plain(connection: socket.socket, where: str) -> None:
    connection.sendall(GREETING)
    head = connection.recv(9)
    if not head:
        raise ConnectionResetError
    if head[:1] == bytes([_TLS_ALERT]):
        raise FloretError(f"{where}: wants TLS; {_WITH_TLS}")
    if not is_answer(head):
        raise FloretError(f"{where}: does not speak gRPC; is it the SuperLink's Fleet API, port 9092 by default?")


def _has_tls(options: NodeOptions) -> bool:
    """Return whether the server that hung up has TLS: a SuperLink says nothing to a greeting that it cannot read."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([ALPN])
    try:
        with (
            connected(options.host, options.port, _SECONDS) as connection,
            context.wrap_socket(connection, server_hostname=options.host),
        ):
            return True
    except OSError:
        return False
