"""Exit with 0 if a process of Flower is healthy: ``health.py HEALTH [ADDRESS ...]``.

HEALTH is the address of its gRPC health server; each ADDRESS is one that it serves or needs, and must accept a
connection, through a proxy where a node would use one. Docker runs this every few seconds, so little of Floret is
imported, and no protocol buffers: the request is an empty message, and the reply of a healthy server is two bytes.
"""

import socket
import sys

import grpc

from client_app.node.proxy import DIRECT, proxy_to
from common.errors import FloretError

SECONDS = 3.0
# HealthCheckResponse(status=SERVING)
SERVING = b"\x08\x01"


def main(health: str, *addresses: str) -> str:
    """Return what is wrong, or an empty text."""
    with grpc.insecure_channel(health, [DIRECT]) as channel:
        try:
            check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
            reply = check(b"", timeout=SECONDS)
        except grpc.RpcError as error:
            return f"{health}: {error.code().name}"
        if reply != SERVING:
            return f"{health}: does not serve"
    for address in addresses:
        name, _, port = address.rpartition(":")
        host = name.strip("[]")
        try:
            proxy = proxy_to(host)
            if proxy:
                proxy.connect(host, int(port), SECONDS).close()
            else:
                socket.create_connection((host, int(port)), timeout=SECONDS).close()
        except (OSError, FloretError) as error:
            return f"{address}: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) or 0)
