"""Memory allocation of this process."""

import ctypes
import os

_M_MMAP_THRESHOLD = -3


def return_freed_memory() -> None:
    """Make blocks above 1 MB return to the system when they are freed.

    glibc raises this threshold up to 32 MB as such blocks are freed. A server that receives and drops a model for each
    client then fragments its heap by several models' size. Does nothing with another C library.
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
