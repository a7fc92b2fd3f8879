"""Flower's SuperNode as ``floret node`` starts it: it ends with its parent, and it asks for messages more often.

Stock, it sleeps 3 s whenever no message waits. Here it asks again after 0.2 s, and less and less often the longer
nothing comes, down to the 3 s: rounds that follow each other closely do so without a pause, and a node that waits for
hours asks no more often than a stock one.
"""

import logging
import os
import signal
import sys
import threading
import time
import traceback
from types import SimpleNamespace

import grpc
from flwr.common.exit import ExitCode
from flwr.supernode import start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode

IDLE, FIRST, GROWTH = 3.0, 0.2, 1.1
# Exit codes: the SuperLink does not take this key; it has a node with this key as connected; it runs a version of
# Flower that does not go with this one. Flower's own SuperNode ends with 1 whatever its reason is.
TURNED_AWAY, STILL_THERE, WRONG_VERSION = 71, 72, 73


class Pace:
    """Sleeps in the place of ``time.sleep``.

    ``IDLE`` seconds are what the SuperNode asks for when no message waits; anything shorter is a wait for the
    ClientApp's answer to a message.
    """

    def __init__(self) -> None:
        self._idle = FIRST

    def sleep(self, seconds: float) -> None:
        """Sleep for as long as makes sense now."""
        if seconds < IDLE:
            self._idle = FIRST
            time.sleep(min(seconds, 0.05))
        else:
            time.sleep(self._idle)
            self._idle = min(self._idle * GROWTH, IDLE)


class Reason(logging.Handler):
    """Learns from what Flower logs why the SuperLink did not accept this node.

    Attributes:
        code: one of the exit codes above, or None.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.code: int | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Take down what is logged."""
        error = record.msg
        if isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.FAILED_PRECONDITION:
            # A node that was killed counts as connected until its heartbeat is missed.
            self.code = STILL_THERE if "could not be activated" in (error.details() or "") else TURNED_AWAY
        elif str(error).startswith(f"Exit Code: {ExitCode.RUNTIME_VERSION_INCOMPATIBLE}"):
            self.code = WRONG_VERSION


def end_with(parent: int) -> None:
    """Stop this process in good order when ``parent`` is no longer its parent, because it was killed."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run the SuperNode with the arguments of ``flower-supernode``."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    # The module uses nothing else of ``time``; the tests of real nodes would show it if another version did.
    start_client_internal.time = SimpleNamespace(sleep=Pace().sleep)  # type: ignore[attr-defined, assignment]
    sys.argv[0] = "flower-supernode"
    reason = Reason()
    logging.getLogger("flwr").addHandler(reason)
    code = 0
    try:
        flower_supernode()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        if reason.code is None:
            traceback.print_exc()
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: now and then an interpreter that ends in the usual way hangs in the threads of gRPC's server.
    os._exit((reason.code or code) if code else 0)


if __name__ == "__main__":
    main()
