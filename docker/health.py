"""Exit with 0 if a process of Flower is healthy: ``health.py HEALTH [ADDRESS ...]``.

HEALTH is the address of its gRPC health server; each ADDRESS is one that it serves or needs, and must accept a
connection. Docker runs this every few seconds, so neither Floret nor protocol buffers are imported: the request is an
empty message, and the reply of a healthy server is two bytes.
"""

import socket
import sys

import grpc

SECONDS = 3.0
# HealthCheckResponse(status=SERVING)
SERVING = b"\x08\x01"


def main(health: str, *addresses: str) -> str:
    """Return what is wrong, or an empty text."""
    # Not by a proxy, which Docker may put into the environment of containers.
    with grpc.insecure_channel(health, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
            reply = check(b"", timeout=SECONDS)
        except grpc.RpcError as error:
            return f"{health}: {error.code().name}"
        if reply != SERVING:
            return f"{health}: does not serve"
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS).close()
        except OSError as error:
            return f"{address}: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) or 0)
