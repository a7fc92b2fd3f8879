"""Forks of this process that run one function and end."""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

# The exit code of a fork in which something failed.
FAILED = 1
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


def fork(function: Callable[[], int | None], close: Sequence[Connection]) -> int:
    """Run ``function`` in a fork of this process, which must have one thread; return the fork's process id.

    Args:
        function: returns the exit code; None is 0.
        close: connections of this process that the fork closes first.

    The fork leaves SIGINT and SIGHUP to this process, and is killed when this process ends (on Linux).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        _live(function, parent, close)
    return pid


def _live(function: Callable[[], int | None], parent: int, close: Sequence[Connection]) -> NoReturn:
    code = FAILED
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _end_with(parent)
        for connection in close:
            connection.close()
        code = function() or 0
    except BaseException:  # nothing of the parent's may run in its fork
        traceback.print_exc()
    end(code)


def ending(code: int) -> str:
    """Return in words how a process ended, by its exit code; below 0 it is the number of a signal."""
    if code < 0:
        return f"signal {-code}{', out of memory?' if code == -signal.SIGKILL else ''}"
    return f"exit code {code}"


def at_end(stop: Callable[[], None]) -> dict[signal.Signals, Any]:
    """Have ``stop`` called at SIGTERM and when the terminal closes; return the handlers that were there.

    A terminal that closes sends SIGHUP, its shell perhaps once more: that counts once. Under nohup it is left ignored.
    """

    def told(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
        stop()

    numbers = [signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    return {number: signal.signal(number, told) for number in numbers}


def end(code: int) -> NoReturn:
    """End this process without what Python does at its end: a fork has no part in it, and it takes a second."""
    with suppress(OSError):  # a terminal that was closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _end_with(parent: int) -> None:
    """Have this process killed when its parent ends, where the system can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        end(FAILED)
