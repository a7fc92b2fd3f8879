"""Flower's SuperNode as ``floret node`` starts it: it ends with its parent, and it asks for messages more often.

Stock, it sleeps 3 s whenever no message waits. Here it asks again after 0.2 s, and less and less often the longer
nothing comes, down to the 3 s: rounds that follow each other closely do so without a pause, and a node that waits for
hours asks no more often than a stock one.
"""

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

from flwr.supernode import start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode

IDLE, FIRST, GROWTH = 3.0, 0.2, 1.1


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
    flower_supernode()


if __name__ == "__main__":
    main()
