"""How this process handles its memory."""

import ctypes
import os

_M_MMAP_THRESHOLD = -3


def return_freed_memory() -> None:
    """Let every block above 1 MB go back to the system when it is freed.

    The C library of Linux raises that limit to 32 MB by itself as such blocks are freed, and what a server then
    receives and drops, a model a client, leaves holes that add up to several models. Does nothing where the library is
    another one.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def available_memory() -> int:
    """Return how many bytes new data can have; where the system does not tell, all of its memory."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 2**62
