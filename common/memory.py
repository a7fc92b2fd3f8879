"""Memory allocation of this process."""

import ctypes

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
