"""Memory allocation of this process."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

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


def available_memory(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many bytes new data can have; where the system does not tell, all of its memory.

    Limits of a container, or of another control group of this process, count: whoever passes them is killed.

    Args:
        groups, own: where Linux has control groups, and which of them are this process's.
    """
    return min([_available_on_machine(), *_left_in_groups(groups, own)])


def _available_on_machine() -> int:
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


def _left_in_groups(groups: Path, own: Path) -> Iterator[int]:
    """Yield the bytes that each control group above this process has left, of version 1 or 2, if it has a limit.

    Memory that only keeps what was read of files is left, too: the system gives it up.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, (limit, used), kept = groups, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            base, (limit, used) = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            kept = "total_inactive_file"
        else:
            continue
        # In a container the path may be that of the host, and the group is at the top.
        place = base / path.lstrip("/")
        for group in (place, *place.parents):
            try:
                most, taken = (int((group / name).read_text(encoding="ascii")) for name in (limit, used))
                stat = dict(entry.split() for entry in (group / "memory.stat").read_text(encoding="ascii").splitlines())
                yield max(most - taken + int(stat[kept]), 0)
            except (OSError, ValueError, KeyError):  # no such group, or "max"
                pass
            if group == base:
                break
