"""Find the local SuperLink that ``flwr run`` would use, and refuse one of another environment or user.

``flwr run`` starts a local SuperLink where none listens and otherwise uses the one that does, which runs the app with
the packages of its own environment. It is found in Linux's ``/proc``; on other systems it is not.
"""

import os
import pwd
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import FloretError
from common.resources import check_cpus, clients_of_simulation

if TYPE_CHECKING:  # it imports Flower, which takes seconds
    from common.flower import Connection

PROC = Path("/proc")
# The state of a socket that listens, in the tables of /proc/net.
_LISTENS = "0A"


def check_local_superlink(name: str = "") -> None:
    """Refuse to run a simulation on a SuperLink of another environment.

    Args:
        name: the SuperLink connection of Flower's ``config.toml``; empty for the default one. A SuperLink on another
            machine or with real nodes is accepted: the user chose it.

    Raises:
        FloretError: names the environment, and how to stop the SuperLink.
    """
    from common.flower import find_connection

    connection = find_connection(name)
    if connection is None or not connection.loopback:
        return
    where = f"the SuperLink at {connection.address}"
    away = "set FLWR_LOCAL_CONTROL_API_PORT to another port"
    own = environment_of(Path(sys.executable))
    inodes = _listening(connection.port)
    pids = _owners(set(inodes))
    for pid in pids:
        theirs = _simulating(pid)
        if theirs and theirs != own:
            elsewhere = f", or {away}" if connection.managed else ""
            raise FloretError(
                f"{where} was started from another environment, {theirs}, and would run this with its packages, not "
                f"those of {own}: stop it with kill {pid} (its runs end with it){elsewhere}"
            )
    others = {uid for uid in inodes.values() if uid != os.getuid()}
    if connection.managed and others and not pids:
        raise FloretError(f"{where} is that of user {_user(others.pop())}, who would run this: {away}")


def simulates_here(connection: "Connection") -> bool:
    """Return whether runs over this connection are simulations by a SuperLink on this machine.

    One that ``flwr run`` starts itself is; another loopback address may be a tunnel to another machine.
    """
    if connection.managed or not connection.loopback:
        return connection.managed
    return any(_simulating(pid) for pid in _owners(set(_listening(connection.port))))


def simulated_clients(texts: Sequence[str], superlink: str = "") -> int | None:
    """Return how many clients a simulation on this machine has, or None if it is not one.

    In the other cases data or packages are on other machines.

    Args:
        texts: values of ``--federation-config``; the number is ``num-supernodes``, or else what Flower takes.
        superlink: the SuperLink connection, empty for Flower's default.

    Raises:
        ConfigError: as of ``clients_of_simulation``, whatever the SuperLink; a client is to have more CPUs than this
            machine.
    """
    from common.flower import default_supernodes, find_connection

    clients = clients_of_simulation(texts)
    connection = find_connection(superlink)
    if connection is None or not simulates_here(connection):
        return None
    check_cpus(texts)
    return default_supernodes(connection) if clients is None else clients


def use_own_commands() -> None:
    """Put the commands of this process's environment first on ``PATH``, whether it is activated or not.

    ``flwr run`` finds ``flower-superlink`` there, which finds the command for a simulation there.
    """
    folder = Path(sys.executable).parent
    if (folder / "flwr").is_file():
        os.environ["PATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PATH")]))


def environment_of(python: Path) -> Path:
    """Return the folder of the environment whose interpreter ``python`` is, its ``sys.prefix``.

    A virtual environment has a ``pyvenv.cfg``; its interpreter is only a link to that of the base installation.
    """
    for folder in python.parents[:2]:
        if (folder / "pyvenv.cfg").is_file():
            return folder.resolve()
    return python.resolve().parent.parent


def _listening(port: int) -> dict[str, int]:
    """Return the sockets that listen on ``port`` of this machine, their inodes with their owner's uid."""
    found = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            # sl, local address, remote address, state, queues, timer, retransmits, uid, timeout, inode
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                found[fields[9]] = int(fields[7])
    return found


def _owners(inodes: set[str]) -> list[int]:
    """Return the processes that have one of these sockets open, as far as this user may see it."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return [pid for pid in _pids() if wanted & set(_open_files(pid))] if wanted else []


def _pids() -> list[int]:
    return sorted(int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal())


def _open_files(pid: int) -> Iterator[str]:
    entries: list[Path] = []
    with suppress(OSError):  # the process has ended, or is another user's
        entries += (PROC / str(pid) / "fd").iterdir()
    for entry in entries:
        with suppress(OSError):  # the file was closed meanwhile
            yield str(entry.readlink())


def _simulating(pid: int) -> Path | None:
    """Return the environment that runs the apps of a process, if it is a SuperLink that runs simulations.

    That is the environment of the simulation command on its ``PATH``, not always the one that it was started from.
    """
    try:
        arguments = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        variables = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
        folder = (PROC / str(pid) / "cwd").readlink()
    except OSError:
        return None
    if "--simulation" not in arguments or not any(Path(part).name == "flower-superlink" for part in arguments[:3]):
        return None
    from common.flower import SIMULATION

    path = dict(pair.split("=", 1) for pair in variables if "=" in pair).get("PATH", os.defpath)
    script = shutil.which(SIMULATION, path=path)
    python = script and _interpreter(Path(script))
    if not python:
        python = arguments[0] if os.sep in arguments[0] else shutil.which(arguments[0], path=path) or arguments[0]
    return environment_of(folder / python)


def _interpreter(script: Path) -> str:
    """Return the interpreter that a script names in its first line; empty if that is not Python itself."""
    try:
        with script.open("rb") as file:
            line = file.readline(1000).decode(errors="replace")
    except OSError:
        return ""
    python = line.removeprefix("#!").strip()
    return python if line.startswith("#!") and Path(python).name.startswith("python") else ""


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
