"""What makes runs: Floret's own engine in processes that stay warm, or ``flwr run`` on a SuperLink with Ray."""

import json
import queue
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from select import select
from typing import Any, Protocol

from common.durable import open_file
from common.errors import FloretError
from common.forks import ending
from common.home import importing_from
from common.kernels import NATIVE, kernels_in_use, variables
from common.local_superlink import check_local_superlink, simulated_clients, use_own_commands
from common.resources import Part, Resources
from common.run_config import as_pairs
from common.stream import STARTED
from results.conditions import commit

# Seconds between two looks at a run.
POLL = 0.5
# What is added to the log of a run whose process was killed.
_ENDED = "ERROR : the run's process was ended by"


class Engine(Protocol):
    """What makes runs.

    Attributes:
        at_once: how many at a time.
        kernels: those of its processes, one of ``common.kernels.KERNELS``; empty if it does not start them.
    """

    at_once: int
    kernels: str

    def expect(self, runs: int) -> None:
        """Make no more than so many runs at a time, to be called while none is made: there are no more.

        Those that share a machine then get larger parts of it.
        """

    def check(self) -> None:
        """Check that runs can be made here.

        Raises:
            FloretError: they cannot.
        """

    def clients(self, federation: str) -> int | None:
        """Return how many clients a simulation on this machine has; None if a run is not one.

        Raises:
            ConfigError: the federation config cannot be read.
        """

    def gpus(self, federation: str) -> bool:
        """Return whether clients of a run may have computed on GPUs."""

    def run(
        self,
        keys: Mapping[str, Any],
        values: Mapping[str, Any],
        federation: str,
        log: Path,
        watch: Callable[[], None],
        begins: Callable[[str], None],
    ) -> None:
        """Make a run to its end, or to its failure; if this program is interrupted or ``watch`` raises, stop it.

        Up to ``at_once`` threads may call this at the same time.

        Args:
            keys: those of its run config that differ from the defaults.
            values: the whole run config.
            federation: its ``--federation-config``.
            log: where what the run prints goes.
            watch: called now and then while the run goes on.
            begins: called just before it begins, with the commit of the code that makes it.
        """

    def close(self) -> None:
        """End what is kept for the next run."""


class LocalEngine:
    """Floret's own engine, in processes that stay warm from run to run, one for each run at a time.

    Args:
        app: the app's folder, whose code runs.
        kernels: one of ``common.kernels.KERNELS``.
        at_once: how many runs share the CPUs and GPUs of this machine in equal parts.

    Raises:
        FloretError: this CPU does not have the kernels.
    """

    def __init__(self, app: Path, kernels: str = NATIVE, at_once: int = 1) -> None:
        self._app, self._most = app.resolve(), at_once
        self.kernels = kernels_in_use() if kernels == NATIVE else kernels
        self._environment = importing_from(self._app) | variables(kernels)
        self._processes: list[_EngineProcess] = []
        # The one that ran last is warm.
        self._free = queue.LifoQueue[_EngineProcess]()
        self.expect(at_once)

    def expect(self, runs: int) -> None:
        """Divide the machine among so many runs at most; see ``Engine``."""
        self.at_once = max(1, min(self._most, runs))
        self.close()
        self._free = queue.LifoQueue()
        self._processes = [_EngineProcess(self._app, self._environment, (i, self.at_once)) for i in range(self.at_once)]
        for process in reversed(self._processes):
            self._free.put(process)

    def check(self) -> None:
        """Check that the app's folder has the engine; see ``Engine``."""
        if not (self._app / "engine" / "__main__.py").is_file():
            raise FloretError(f"{self._app}: has no folder engine/, Floret's local engine; see --app and --engine")

    def clients(self, federation: str) -> int | None:
        """Return how many clients a run has; see ``Engine``."""
        # The last of the parts is the smallest.
        return Resources.of([federation], (self.at_once - 1, self.at_once)).clients

    def gpus(self, federation: str) -> bool:
        """Return whether clients got GPUs; see ``Engine``."""
        return any(Resources.of([federation], (0, self.at_once)).gpus)

    def run(
        self,
        keys: Mapping[str, Any],
        values: Mapping[str, Any],
        federation: str,
        log: Path,
        watch: Callable[[], None],
        begins: Callable[[str], None],
    ) -> None:
        """Make a run; see ``Engine``."""
        process = self._free.get()
        try:
            process.run({"values": values, "federation": [federation], "log": str(log)}, watch, begins)
        finally:
            self._free.put(process)

    def close(self) -> None:
        """End the processes, and what they run in good order."""
        with ExitStack() as every:  # also the others if an interrupt ends one's close
            for process in self._processes:
                every.callback(process.close)


class _EngineProcess:
    """A process of the local engine, which is started for the first run and again after it ended.

    Args:
        app: whose code runs, as it is when the process starts.
        environment: its variables.
        part: of this machine, for its runs.
    """

    def __init__(self, app: Path, environment: Mapping[str, str], part: Part) -> None:
        self._app, self._environment, self._part = app, environment, part
        self._process: subprocess.Popen[str] | None = None
        self._commit = ""

    def run(self, job: Mapping[str, Any], watch: Callable[[], None], begins: Callable[[str], None]) -> None:
        """Make a run, with what ``engine.__main__`` reads of it besides its part; see ``Engine``."""
        process = self._started()
        begins(self._commit)
        assert process.stdin is not None
        assert process.stdout is not None
        over = False
        try:
            process.stdin.write(json.dumps({**job, "part": self._part}) + "\n")
            process.stdin.flush()
            while not over:
                watch()
                over = bool(select([process.stdout], [], [], POLL)[0])
            if not process.stdout.readline():
                raise BrokenPipeError
        except BrokenPipeError:
            # Killed with its run, which is told apart by what it left; the next run starts another one.
            self.close()
            if process.returncode < 0:
                with open_file(Path(job["log"]), "ab", private=False) as log:
                    log.write(f"{_ENDED} {ending(process.returncode)}\n".encode())
        finally:
            if not over:
                # At once: this program may be interrupted once more, and end before it has told the run to stop.
                self.close(patience=0.0)

    def close(self, patience: float = 0.5) -> None:
        """End the process, and what it runs in good order; one that runs nothing has so many seconds to end itself."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):  # it may have ended
            process.stdin.close()  # type: ignore[union-attr]
        try:
            # Without input it ends by itself once it runs nothing.
            process.wait(patience)
        except BaseException as error:
            process.terminate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise  # a further interrupt: what runs is stopped all the same
            process.wait()

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None or self._process.poll() is not None:
            self._commit = commit(self._app)
            # In a session of its own: an interrupt is for this program, which stops the run in good order.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment,
                start_new_session=True,
            )
        return self._process


class RayEngine:
    """Flower's simulation: ``flwr run`` for each run, one at a time.

    Args:
        app: the app's folder.
        superlink: the SuperLink connection to run on; empty for Flower's default.
    """

    at_once = 1
    kernels = ""

    def expect(self, runs: int) -> None:
        """Do nothing; see ``Engine``."""

    def __init__(self, app: Path, superlink: str = "") -> None:
        self._app, self._superlink = app, superlink

    def check(self) -> None:
        """Check that the SuperLink is none of another environment; see ``Engine``."""
        check_local_superlink(self._superlink)
        use_own_commands()

    def clients(self, federation: str) -> int | None:
        """Return how many clients a run has; see ``Engine``."""
        return simulated_clients([federation], self._superlink)

    def gpus(self, federation: str) -> bool:
        """Return True, as the SuperLink may give some by a config of its own; see ``Engine``."""
        return True

    def run(
        self,
        keys: Mapping[str, Any],
        values: Mapping[str, Any],
        federation: str,
        log: Path,
        watch: Callable[[], None],
        begins: Callable[[str], None],
    ) -> None:
        """Make a run; see ``Engine``."""
        command = ["flwr", "run", str(self._app), *([self._superlink] if self._superlink else []), "--stream"]
        if federation:
            command += ["--federation-config", federation]
        command += ["--run-config", as_pairs(keys)]
        begins(commit(self._app))
        with open_file(log, "wb", private=False) as file:
            # In a session of its own: an interrupt is for this program, which stops the run in good order.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                while process.poll() is None:
                    watch()
                    time.sleep(POLL)
            finally:
                if process.poll() is None:
                    self._stop(log)
                    process.terminate()
                    process.wait()

    def close(self) -> None:
        """Do nothing: the SuperLink goes on; see ``Engine``."""

    def _stop(self, log: Path) -> None:
        """Stop a run: it goes on in the SuperLink when only its log stream is ended."""
        found = STARTED.search(log.read_bytes())
        if found:
            command = ["flwr", "stop", found[1].decode(), *([self._superlink] if self._superlink else [])]
            # In a session of its own, as above: whoever interrupts again must not end it before it has begun.
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, check=False, start_new_session=True
            )
            if done.returncode:
                sys.stderr.write(f"floret: the run may go on in the SuperLink; stop it with {' '.join(command)}\n")


def engine_of(name: str, app: Path, superlink: str, kernels: str, at_once: int = 1) -> Engine:
    """Return the engine that an option ``--engine`` names.

    Args:
        name: of the engine.
        app: the app's folder.
        superlink: a SuperLink connection, for Ray.
        kernels: one of ``common.kernels.KERNELS``.
        at_once: how many runs it makes at a time.

    Raises:
        FloretError: a SuperLink is named for the engine that needs none; kernels or several runs at a time are named
            for the other; this CPU does not have the kernels.
    """
    if name == "local" and superlink:
        raise FloretError(f"--superlink {superlink}: the local engine has none; use it with --engine ray")
    if name == "local":
        return LocalEngine(app, kernels, at_once)
    if at_once > 1:
        raise FloretError(f"--jobs {at_once}: the SuperLink's CPUs are not divided among runs; use --engine local")
    if kernels != NATIVE:
        raise FloretError(f"--kernels {kernels}: the SuperLink's processes are running already; use --engine local")
    return RayEngine(app, superlink)


def reason_of(log: Path) -> str:
    """Return the line of a run's log that says why it failed."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in lines if line.strip()]
    if lines and lines[-1].startswith(_ENDED):
        lines = lines[-1:]  # whatever was wrong before, that is why
    errors = [re.sub(r"^(ERROR|INFO) :\s*", "", line) for line in lines if line.startswith("ERROR") or "Error" in line]
    first = next((line for line in errors if line), lines[-1] if lines else "it printed nothing")
    return f"{first} (see {log})"
