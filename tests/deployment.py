"""Real processes on loopback: a SuperLink, nodes, runs; started, watched, killed and ended here."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from client_app.node.options import NodeOptions
from tests.conftest import PATIENCE, free_port, wait_for_port
from tests.harness import ROOT, copy_app

BIN = Path(sys.executable).parent
# Training that takes some seconds, so that there is a middle to be killed in.
LONG: dict[str, Any] = {"method": "fedper", "local_epochs": 250, "min_clients": 2}
SHORT: dict[str, Any] = {"method": "fedper", "local_epochs": 2, "min_clients": 2}


class Process:
    """A child process with its log; ends with the test that started it."""

    def __init__(self, command: list[str | Path], log: Path, env: dict[str, str], **options: Any) -> None:
        self.log = log
        with log.open("ab") as file:
            self.popen = subprocess.Popen(
                [str(part) for part in command],
                env=env,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=log.parent,
                **options,
            )

    def text(self) -> str:
        """Return what it has printed, without colours."""
        return re.sub(r"\x1b\[\d+m", "", self.log.read_text(errors="replace"))

    def wait_for(self, pattern: str, seconds: float = PATIENCE, *, times: int = 1, since: int = 0) -> None:
        """Return when the log, from character ``since`` on, has ``pattern``; fail when time is up or it has ended."""
        deadline = time.monotonic() + seconds
        while len(re.findall(pattern, self.text()[since:])) < times:
            over = self.popen.poll() is not None
            if over and len(re.findall(pattern, self.text()[since:])) >= times:
                return
            if over or time.monotonic() > deadline:
                raise AssertionError(f"no {pattern!r} in:\n{self.text()[-6000:]}")
            time.sleep(0.1)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, and wait for the end."""
        self.popen.send_signal(number)
        self.popen.wait(PATIENCE)

    def end(self) -> None:
        """Stop it in good order, or else by force."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.terminate()
            try:
                self.popen.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


@dataclass
class Deployment:
    """A SuperLink on free ports with its database, and what joins it.

    Args:
        folder: everything is below it.
        tls: the SuperLink's options for TLS and node authentication; none for plain connections.
    """

    folder: Path
    tls: list[str | Path] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fleet, self.control, self.appio = free_port(), free_port(), free_port()
        self.output = self.folder / "runs"
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("FLWR_", "FLORET_"))},
            "FLWR_HOME": str(self.folder / "flwr"),
            "FLORET_HOME": str(self.folder / "floret"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            # The code of this checkout, whichever one is installed.
            "PYTHONPATH": str(ROOT),
            "NO_COLOR": "1",
        }
        (self.folder / "flwr").mkdir(parents=True)
        self.app = copy_app(self.folder / "app")
        ca = [part for flag, part in zip(self.tls, self.tls[1:], strict=False) if flag == "--ssl-ca-certfile"]
        secure = f'root-certificates = "{ca[0]}"' if ca else "insecure = true"
        (self.folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "dep"\n\n[superlink.dep]\naddress = "127.0.0.1:{self.control}"\n{secure}\n'
        )
        self.superlink = self.start_superlink()

    def start(self, name: str, command: list[str | Path], **options: Any) -> Process:
        """Start a process; its log is ``<name>.log``."""
        process = Process(command, self.folder / f"{name}.log", self.env, **options)
        self.processes.append(process)
        return process

    def start_superlink(self) -> Process:
        """Start the SuperLink, again on the same ports and database if it was there before."""
        ports = ["--fleet-api-address", f"127.0.0.1:{self.fleet}", "--control-api-address", f"127.0.0.1:{self.control}"]
        self.superlink = self.start(
            "superlink",
            [
                *(BIN / "flower-superlink", *(self.tls or ["--insecure"]), *ports),
                *("--serverappio-api-address", f"127.0.0.1:{self.appio}", "--database", self.folder / "superlink.db"),
            ],
        )
        wait_for_port(self.fleet, self.superlink.popen, self.superlink.log)
        wait_for_port(self.control, self.superlink.popen, self.superlink.log)
        return self.superlink

    def node(self, name: str, *arguments: str | Path, wait: bool = True, **options: Any) -> Process:
        """Start ``floret node``; without ``--superlink`` among the arguments, for this SuperLink."""
        join = [] if "--superlink" in arguments else ["--superlink", f"127.0.0.1:{self.fleet}"]
        safe = [] if self.tls or "--insecure" in arguments else ["--insecure"]
        kept: list[str | Path] = [] if "--state-dir" in arguments else ["--state-dir", self.folder / f"state-{name}"]
        known = [] if "--client-name" in arguments else ["--client-name", name]
        process = self.start(name, [BIN / "floret", "node", *join, *safe, *known, *kept, *arguments], **options)
        if wait:
            since = 0 if process.text().count("SuperNode ID") == 0 else len(process.text())
            process.wait_for("SuperNode ID", since=since)
        return process

    def nodes(self, count: int) -> list[Process]:
        """Start nodes ``a``, ``b``, ... with a partition of digits each."""
        started = [self.node("abcdefgh"[i], "--partition", f"{i}/{count}", wait=False) for i in range(count)]
        for process in started:
            process.wait_for("SuperNode ID")
        return started

    def run(self, app: Path | None = None, **keys: Any) -> Process:
        """Start ``flwr run`` with run-config keys: ``min_clients=2`` for ``min-clients=2``, ``pfakd__beta``."""
        values = {"output_dir": str(self.output), "round_timeout": PATIENCE, "return_timeout": PATIENCE} | keys
        said = [f"{key.replace('__', '.').replace('_', '-')}={json.dumps(value)}" for key, value in values.items()]
        name = f"run{sum(process.log.name.startswith('run') for process in self.processes)}"
        return self.start(
            name, [BIN / "flwr", "run", app or self.app, "dep", "--stream", "--run-config", " ".join(said)]
        )

    def end(self) -> None:
        """End everything, what was started last first."""
        for process in reversed(self.processes):
            process.end()

    def directory(self) -> Path:
        """Return the run directory, the only one there is."""
        (found,) = self.output.iterdir()
        return found

    def history(self) -> list[dict[str, Any]]:
        """Return the history of the only run."""
        return [json.loads(line) for line in (self.directory() / "history.jsonl").read_text().splitlines()]

    def rounds_kept(self, name: str, method: str = "fedper") -> list[int]:
        """Return the rounds of the two newest versions in a client's state, oldest first; older ones are milestones."""
        folder = self.folder / f"state-{name}" / "default" / method / name
        return [json.loads(path.read_text())["round"] for path in sorted(folder.glob("*.json"))[-2:]]


def finish(run: Process, seconds: float = PATIENCE) -> str:
    """Wait until the run has ended well; return its log."""
    run.wait_for("Report: ", seconds)
    run.popen.wait(PATIENCE)
    return run.text()


def until(condition: Callable[[], bool], what: str) -> None:
    """Return when the condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    """Return the pids of all processes below ``pid``, parents first, and the oldest first of those of one parent."""
    lines = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True).stdout.splitlines()
    own = [child for child, parent in (map(int, line.split()) for line in lines) if parent == pid]
    largest = Path("/proc/sys/kernel/pid_max")
    most = int(largest.read_text()) if largest.exists() else 100_000
    own.sort(key=lambda child: (child - pid) % most)  # pids are given in turn, and begin again after the largest one
    return [found for child in own for found in (child, *children(child))]


def commands(pids: list[int]) -> dict[int, str]:
    """Return the command lines of those processes that are there."""
    lines = subprocess.run(["ps", "-e", "-ww", "-o", "pid=,args="], capture_output=True, text=True).stdout.splitlines()
    table = {int(line.split()[0]): line.split(maxsplit=1)[1] for line in lines if "<defunct>" not in line}
    return {pid: table[pid] for pid in pids if pid in table}


def below(above: int, part: str) -> list[int]:
    """Return the pids of the processes below ``above`` whose command has ``part``, parents first."""
    return [pid for pid, command in commands(children(above)).items() if part in command]


def in_round(node: Process, server_round: int) -> None:
    """Return while the node is training in this round."""
    node.wait_for(rf"ROUND {server_round}\]\s+INFO [\d:, -]+:\s+Receiving: train.*\n.*Received successfully")
    # The warm process and the fork that has this message.
    until(lambda: len(below(node.popen.pid, "forkserver")) == 2, "no fork of the warm process")


def refused(deployment: Deployment) -> list[tuple[int, str, str]]:
    return [(line["round"], r["client"], r["reason"]) for line in deployment.history() for r in line["refused"]]


def trained(deployment: Deployment) -> list[list[str]]:
    return [sorted(n for n, c in line["clients"].items() if c["trained"]) for line in deployment.history()]


def node_options(tmp_path: Path, port: int, **keys: Any) -> NodeOptions:
    """Return options of a node of the SuperLink at ``port`` of this machine, with one of two partitions."""
    usual: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "insecure": False,
        "root_certificates": None,
        "key": None,
        "client_name": "a",
        "data_dir": None,
        "partition": (0, 2),
        "state_dir": tmp_path,
        "device": None,
        "max_wait": 0.0,
        "health_address": None,
    }
    return NodeOptions(**usual | keys)


def container_health() -> ModuleType:
    """Return ``docker/health.py``, which is in no package."""
    spec = spec_from_file_location("health", ROOT / "docker" / "health.py")
    assert spec
    assert spec.loader
    health = module_from_spec(spec)
    spec.loader.exec_module(health)
    return health
