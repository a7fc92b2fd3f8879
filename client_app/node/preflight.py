"""What is wrong with the way to the SuperLink, found out before Flower is started, whose errors do not say it."""

import socket
import ssl

from client_app.node.options import NodeOptions
from common.errors import FloretError

_SECONDS = 10.0
# The client's opening of HTTP/2 and an empty SETTINGS frame: any plain gRPC server answers with its own SETTINGS.
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SETTINGS, _TLS_ALERT = 0x04, 0x15


class UnreachableError(FloretError):
    """Nobody answers at the address; that may change without anybody changing this node."""


def check_connection(options: NodeOptions) -> None:
    """Connect to the SuperLink as the SuperNode will, and hang up.

    Raises:
        UnreachableError: there is no connection.
        FloretError: there is one, but the SuperLink's certificate is not acceptable, or one side uses TLS and the other
            does not.
    """
    where = f"--superlink {options.address}"
    try:
        with socket.create_connection((options.host, options.port), timeout=_SECONDS) as connection:
            if options.insecure:
                _check_plain(connection, where)
            else:
                _check_tls(connection, where, options)
    except ssl.SSLError as error:
        raise FloretError(
            f"{where}: TLS failed ({error.reason}); if the SuperLink has no TLS, use --insecure"
        ) from error
    except ConnectionResetError as error:
        raise FloretError(f"{where}: hung up; is it the SuperLink's Fleet API, with TLS?") from error
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise UnreachableError(f"{where}: nobody answers ({reason})") from error


def _check_tls(connection: socket.socket, where: str, options: NodeOptions) -> None:
    cafile = str(options.root_certificates) if options.root_certificates else None
    try:
        context = ssl.create_default_context(cafile=cafile)
    except ssl.SSLError as error:
        raise FloretError(f"--root-certificates {cafile}: is not a PEM certificate ({error.reason})") from error
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection, server_hostname=options.host):
            pass
    except ssl.SSLCertVerificationError as error:
        signer = f"--root-certificates {cafile}" if cafile else "the system's certificates (see --root-certificates)"
        raise FloretError(
            f"{where}: its certificate is refused: {error.verify_message}; it was checked with {signer}"
        ) from error


def _check_plain(connection: socket.socket, where: str) -> None:
    connection.sendall(_HTTP2)
    head = connection.recv(9)
    if head[:1] == bytes([_TLS_ALERT]) or not head:
        raise FloretError(f"{where}: wants TLS; leave out --insecure and give --root-certificates")
    if len(head) < 9 or head[3] != _SETTINGS:
        raise FloretError(f"{where}: does not speak gRPC; is it the SuperLink's Fleet API, port 9092 by default?")
