"""The conditions that a run was made under: commit, machine, kernels; also of a run that went on under others."""

import hashlib
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from common.kernels import NATIVE

# The folders whose modules a run loads.
_LOADED = ("client_app", "common", "data", "engine", "models", "server_app", "strategies")


def commit(app: Path) -> str:
    """Return the commit of the app's folder, 12 digits; empty if it is not a git checkout.

    If tracked files differ, but for those below ``docs``, or git does not know a Python file of those that runs load,
    ``-dirty-`` and 8 digits stand behind it, which tell one state of such a checkout from another: they are of what
    differs and of Python files that git does not know yet. No run reads ``docs``, and results are written there between
    one run and the next.
    """
    git = ["git", "-C", str(app)]
    try:
        # In sessions of their own: what interrupts this program must not end them, which would read as no commit.
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )
    except FileNotFoundError:
        return ""
    if head.returncode:
        return ""
    different = [*git, "diff", "--binary", "HEAD", "--", ".", ":(exclude)docs"]
    changes = subprocess.run(different, capture_output=True, check=False, start_new_session=True).stdout
    unknown = [*git, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py", ":(exclude)docs"]
    listed = subprocess.run(unknown, capture_output=True, check=False, start_new_session=True).stdout
    names = sorted(filter(None, os.fsdecode(listed).split("\0")))
    if not changes and not any(name.partition("/")[0] in _LOADED for name in names):
        return head.stdout.strip()
    found = hashlib.sha256(changes)
    for name in names:
        with suppress(OSError):  # it is gone meanwhile
            found.update(os.fsencode(name) + b"\0" + (app / name).read_bytes())
    return f"{head.stdout.strip()}-dirty-{found.hexdigest()[:8]}"


def machine() -> dict[str, Any]:
    """Return this machine: number and model of its CPUs, its GPUs.

    Generations of a CPU that compute other digits have the same name on rented machines, so its family and model number
    stand behind it.
    """
    import torch

    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = ""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in info.splitlines())}
    kind = (
        f" (family {fields['cpu family']}, model {fields['model']})" if {"cpu family", "model"} <= fields.keys() else ""
    )
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpus": len(os.sched_getaffinity(0)), "cpu": fields.get("model name", "") + kind, "gpus": gpus}


def kernels_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run's ``config.json`` says of its kernels, if they were the same from its start to its end."""
    kinds = {part.get("kernels", NATIVE) for part in parts_of(config)}
    return {"kernels": kinds.pop()} if len(kinds) == 1 and NATIVE not in kinds else {}


def counted(texts: Iterable[str]) -> list[str]:
    """Return each different text of what is said of runs, with of how many it is."""
    return [f"{many} of these runs {text}" for text, many in Counter(texts).items()]


def other_data(read: str, had: str | None, given: str, has: str | None) -> list[str]:
    """Return a text if a run read other data than are given: by their digests where both are known, else by place."""
    if had and has:
        return [] if had == has else [f"read {read} (SHA-256 {had}...), and {given} ({has}...) is given"]
    return [f"read {read}, and {given} is given"] if read != given else []


def other_kernels(then: str, now: str) -> list[str]:
    """Return a text if a run was made with other kernels than those of now, which are empty if they are not known."""
    return [f"were made with {then} kernels, and {now} ones are asked for"] if now and then != now else []


def other_code(then: str, now: str) -> list[str]:
    """Return a text if a run was made with another commit, or another state of a checkout, than that of now."""
    return [f"were made with commit {then}, and that of now is {now}"] if then and now and then != now else []


def parts_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a run's ``config.json`` says of its start and of each resume."""
    return [config, *config.get("resumed", [])]


def in_turn(values: Sequence[Any]) -> Any:
    """Return what all parts of a run say; if they differ, texts and lists one after the other, of numbers the least."""
    if isinstance(values[-1], list):
        return list(dict.fromkeys(one for value in values for one in value))
    if isinstance(values[-1], int):
        return min(values)
    different = [value for value, _ in groupby(values)]
    return ", then ".join(value or "not known" for value in different) if len(different) > 1 else different[0]


def each_in_turn(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return ``in_turn`` of each entry that the last part has."""
    return {name: in_turn([part[name] for part in parts if name in part]) for last in parts[-1:] for name in last}
