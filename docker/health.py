"""Exit with 0 if a process of Flower is healthy: ``health.py HEALTH [ADDRESS ...]``.

HEALTH is the address of its gRPC health server; each ADDRESS is one that it serves or needs, and must accept a
connection, through a proxy where a node would use one. Docker runs this every few seconds, so little of Floret is
imported, and no protocol buffers: the request is an empty message, and the reply of a healthy server is two bytes.
"""

import sys

import grpc

from common.errors import FloretError
from common.proxy import DIRECT, connected

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
            connected(host, int(port), SECONDS).close()
        except (OSError, FloretError) as error:
            return f"{address}: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) or 0)
