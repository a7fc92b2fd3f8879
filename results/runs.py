"""Many runs, one after another or some at a time: what is done is not run again, what was killed goes on.

An engine (``LocalEngine``, ``RayEngine``) makes each run of a sweep or an experiment; what it measured is read here.
"""

import fcntl
import hashlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from select import select
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.config import own_keys
from common.durable import locked, write_whole
from common.errors import FloretError
from common.forks import at_end, ending
from common.home import importing_from
from common.kernels import NATIVE, kernels_in_use, variables
from common.local_superlink import check_local_superlink, simulated_clients, use_own_commands
from common.resources import Part, Resources
from common.run_config import default_config, merged
from common.stream import STARTED
from results.run import Run, read_run
from results.text import countdown

# Keys that change where a run finds and leaves its files, not what it computes.
PLACES = ("output-dir", "data-dir", "download", "resume", "tensorboard", "tracker")
# Data of the user's own: another place most likely has others.
_OWN_DATA = ("npz", "npz-clients", "image-folder")
_FEDERATION = "--federation-config"
# What of it only says how clients share a machine.
_SHARED = re.compile(r"(?:^|\s+)(?:client-resources-num-gpus|init-args-num-[cg]pus)=\S+")
# Keys that mean nothing in a simulation.
_REAL_NODES = ("return-timeout",)
# On disk a run is a cell of its table: folders of runs that are done keep their names.
_FOLDER, _ABOUT, _STARTS = "cells", "cell.json", "starts.json"
_LOG = "log.txt"
# What is added to the log of a run whose process was killed.
_ENDED = "ERROR : the run's process was ended by"
_POLL = 0.5


Check = Callable[[Mapping[str, Any], int | None], None]


@dataclass(frozen=True)
class RunSpec:
    """A run to make: the ``keys`` of its run config that differ from the defaults, and its ``--federation-config``."""

    keys: Mapping[str, Any]
    federation: str


def npz_name(config: Mapping[str, Any]) -> str | None:
    """Return the name of the npz file that a run with these keys reads; None if it reads none."""
    return Path(config["data-dir"]).name if config["dataset"] == "npz" else None


@dataclass(frozen=True)
class Outcome:
    """A finished run and the conditions it ran under.

    ``about`` has the ``run`` directory's name, ``config``, ``federation-config``, ``commit``, ``machine``, ``started``,
    ``resumed`` (how often), ``versions`` and ``file``: the name of the npz file that it read, None if it read none. Of
    a run that went on with another commit, on another machine or with other versions, each of them is told in turn.
    """

    run: Run
    about: Mapping[str, Any]


class Engine(Protocol):
    """What makes runs.

    Attributes:
        at_once: how many at a time.
        warm: whether its processes keep the code of the app that they once loaded.
        kernels: those of its processes, one of ``common.kernels.KERNELS``; empty if it does not start them.
    """

    at_once: int
    warm: bool
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
        self, keys: Mapping[str, Any], values: Mapping[str, Any], federation: str, log: Path, watch: Callable[[], None]
    ) -> None:
        """Make a run to its end, or to its failure; if this program is interrupted or ``watch`` raises, stop it.

        Up to ``at_once`` threads may call this at the same time.

        Args:
            keys: those of its run config that differ from the defaults.
            values: the whole run config.
            federation: its ``--federation-config``.
            log: where what the run prints goes.
            watch: called now and then while the run goes on.
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

    warm = True

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
        self._processes = [_EngineProcess(self._environment, (i, self.at_once)) for i in range(self.at_once)]
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
        self, keys: Mapping[str, Any], values: Mapping[str, Any], federation: str, log: Path, watch: Callable[[], None]
    ) -> None:
        """Make a run; see ``Engine``."""
        process = self._free.get()
        try:
            process.run({"values": values, "federation": [federation], "log": str(log)}, watch)
        finally:
            self._free.put(process)

    def close(self) -> None:
        """End the processes, and what they run in good order."""
        for process in self._processes:
            process.close()


class _EngineProcess:
    """A process of the local engine, which is started for the first run and again after it ended.

    Args:
        environment: its variables.
        part: of this machine, for its runs.
    """

    def __init__(self, environment: Mapping[str, str], part: Part) -> None:
        self._environment, self._part = environment, part
        self._process: subprocess.Popen[str] | None = None

    def run(self, job: Mapping[str, Any], watch: Callable[[], None]) -> None:
        """Make a run, with what ``engine.__main__`` reads of it besides its part; see ``Engine``."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        over = False
        try:
            process.stdin.write(json.dumps({**job, "part": self._part}) + "\n")
            process.stdin.flush()
            while not over:
                watch()
                over = bool(select([process.stdout], [], [], _POLL)[0])
            if not process.stdout.readline():
                raise BrokenPipeError
        except BrokenPipeError:
            # Killed with its run, which is told apart by what it left; the next run starts another one.
            self.close()
            if process.returncode < 0:
                with Path(job["log"]).open("a", encoding="utf-8") as log:
                    log.write(f"{_ENDED} {ending(process.returncode)}\n")
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
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None or self._process.poll() is not None:
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
    warm = False
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
        self, keys: Mapping[str, Any], values: Mapping[str, Any], federation: str, log: Path, watch: Callable[[], None]
    ) -> None:
        """Make a run; see ``Engine``."""
        command = ["flwr", "run", str(self._app), *([self._superlink] if self._superlink else []), "--stream"]
        if federation:
            command += ["--federation-config", federation]
        command += ["--run-config", " ".join(f"{key}={json.dumps(value)}" for key, value in keys.items())]
        with log.open("w", encoding="utf-8") as file:
            # In a session of its own: an interrupt is for this program, which stops the run in good order.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                while process.poll() is None:
                    watch()
                    time.sleep(_POLL)
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
            place = [self._superlink] if self._superlink else []
            subprocess.run(["flwr", "stop", found[1].decode(), *place], capture_output=True, check=False)


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


class Runs:
    """The runs of an app and their folders.

    Args:
        app: the app's folder.
        output: runs are in folders below its ``cells/``, named after what is computed: two tables that need the same
            run share it, wherever its data are and whatever made it.
        check: raises FloretError if a run with these keys cannot start; it gets the number of clients of a simulation
            on this machine, or None.
        engine: makes the runs.
        exact: a run that was made with other kernels, or read its data elsewhere, is not done; it is made again.

    Attributes:
        defaults: every key of a run config.
    """

    def __init__(self, app: Path, output: Path, check: Check, engine: Engine, *, exact: bool = False) -> None:
        self._app, self._check, self.engine, self._exact = app, check, engine, exact
        self.defaults = default_config(app)
        self._folder = output.resolve() / _FOLDER
        self._commit = commit(app)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other programs from starting runs in the same folder.

        Raises:
            FloretError: one is doing so.
        """
        with ExitStack() as held:
            try:
                held.enter_context(locked(self._folder, wait=False))
            except BlockingIOError as error:
                raise FloretError(f"{self._folder}: another floret is starting runs there") from error
            yield

    def config(self, spec: RunSpec) -> dict[str, Any]:
        """Return every key of the run's config.

        Raises:
            ConfigError: a key is not known.
        """
        return merged(self.defaults, spec.keys)

    def folder(self, spec: RunSpec) -> Path:
        """Return the folder of a run.

        Its name depends on all keys but those of other methods, of places and of real nodes, and on the clients.
        """
        return self._folder / self._name(self.config(spec), spec.federation)

    def recorded(self, about: Mapping[str, Any]) -> str:
        """Return the name of the folder of a run whose ``about`` was kept; keys that it lacks had their defaults."""
        return self._name({**self.defaults, **about["config"]}, about["federation-config"])

    def differences(self, about: Mapping[str, Any], spec: RunSpec) -> list[str]:
        """Return a text for each key, and the federation config, in which a run whose ``about`` was kept is another."""
        then = _computed({**self.defaults, **about["config"]}, about["federation-config"])
        now = _computed(self.config(spec), spec.federation)
        return [
            f"{key}={json.dumps(then.get(key))} (here {json.dumps(now.get(key))})"
            for key in sorted(then.keys() | now.keys())
            if then.get(key) != now.get(key)
        ]

    @staticmethod
    def _name(config: Mapping[str, Any], federation: str) -> str:
        computed = _computed(config, federation)
        clients = computed.pop(_FEDERATION)
        text = json.dumps([computed, clients], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def done(self, spec: RunSpec) -> bool:
        """Return whether the run came to its end."""
        folder = self.folder(spec)
        run = _finished(folder)
        return run is not None and _is_told(folder, run) and not (self._exact and self._otherwise(run, spec))

    def otherwise(self, spec: RunSpec) -> list[str]:
        """Return in what a run that is done was made otherwise than it would be now, a text each."""
        run = _finished(self.folder(spec))
        return self._otherwise(run, spec) if run and self.done(spec) else []

    def _otherwise(self, run: Path, spec: RunSpec) -> list[str]:
        try:
            config = json.loads((run / "config.json").read_text(encoding="utf-8"))
            kernels, read = _portable(config).get("kernels", NATIVE), _path(config["config"].get("data-dir", ""))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []  # said by who reads all of it
        found, values = other_kernels(kernels, self.engine.kernels), self.config(spec)
        given = _path(values["data-dir"])
        if read != given and (self._exact or values["dataset"] in _OWN_DATA):
            found.append(f"read {read or 'no data-dir'}, and {given or 'none'} is given")
        return found

    def outcome(self, spec: RunSpec) -> Outcome | None:
        """Read what the run measured; None if it has not come to its end.

        Raises:
            FloretError: a file of the run cannot be read.
        """
        folder = self.folder(spec)
        if not self.done(spec):
            return None
        try:
            about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
            run = read_run(folder / about["run"])
            if run.cut_short:
                raise FloretError(f"{about['run']}/history.jsonl: {run.fewer_rounds}")
            return Outcome(run, about | {"file": npz_name(run.config)})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, FloretError) as error:
            raise FloretError(f"{folder}: cannot be read ({error}); remove it to make the run again") from error

    def check(self, spec: RunSpec) -> str:
        """Return why a run cannot start, or an empty text."""
        try:
            self._check(self.config(spec), self.engine.clients(spec.federation))
        except FloretError as error:
            return str(error)
        return ""

    def run(self, spec: RunSpec, watch: Callable[[int], None], *, keep_models: bool = False) -> str:
        """Make a run, to its end; return why it failed, or an empty text.

        A run that was killed goes on after its last checkpoint; one that is still going, because only the program that
        started it was killed, is waited for. When this program is interrupted or ``watch`` raises, the run is stopped.

        Args:
            spec: what to run; a config that the app accepts.
            watch: called with the number of finished rounds, twice a second.
            keep_models: leave the personal models and checkpoints in the run directory.
        """
        wrong = self.check(spec)
        if wrong:
            return wrong
        # Of the code that runs, whatever is committed meanwhile.
        code = self._commit if self.engine.warm else commit(self._app)
        folder = self.folder(spec)
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / _LOG
        before = _last_run(folder)
        if before and not (before / "summary.json").is_file():
            _wait_for(before, watch)
            if not (before / "summary.json").is_file():
                otherwise = self._otherwise(before, spec)
                if _resumable(before) and otherwise and not self._exact:
                    # To go on would mix both, to begin anew would lose what there is.
                    return f"{before} is half done; its rounds {' and '.join(otherwise)}: give the same, or remove it"
                goes_on = _resumable(before) and not otherwise
                resumed = _resumed(before)
                self._start(spec, folder, code, {"resume": str(before)} if goes_on else {}, watch)
                if goes_on and _resumed(before) > resumed and not self._wanted(folder, spec):
                    return _reason(log)  # it did go on, and was ended again; the next command goes on from there
        elif before and _nothing_used(before):
            self._start(spec, folder, code, {}, watch)
        if not self._wanted(folder, spec):
            self._start(spec, folder, code, {}, watch)
        run = self._wanted(folder, spec)
        if not run:
            return _reason(log)
        if nothing := _nothing_used(run):
            return f"{nothing} (see {log})"
        if not keep_models:
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
        _write(folder / _ABOUT, self._about(spec, run, code))
        return ""

    def _wanted(self, folder: Path, spec: RunSpec) -> Path | None:
        """Return the newest finished run of a folder; None without one, or if it does not count (``exact``)."""
        run = _finished(folder)
        return None if run and self._exact and self._otherwise(run, spec) else run

    def _start(
        self, spec: RunSpec, folder: Path, code: str, more: Mapping[str, str], watch: Callable[[int], None]
    ) -> None:
        earlier = _starts(folder) if "resume" in more else []
        _write(folder / _STARTS, [*earlier, self._conditions(spec, code)])
        keys = {**spec.keys, "output-dir": str(folder), **more}
        values = merged(self.defaults, keys)
        self.engine.run(keys, values, spec.federation, folder / _LOG, lambda: watch(_rounds(folder)))

    def _about(self, spec: RunSpec, run: Path, code: str) -> dict[str, Any]:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        starts = _starts(run.parent) or [self._conditions(spec, code)]
        return {
            "run": run.name,
            "config": {k: v for k, v in self.config(spec).items() if k not in PLACES},
            "federation-config": spec.federation,
            "commit": _in_turn([start["commit"] for start in starts]),
            "machine": _each_in_turn([start["machine"] for start in starts]) | _portable(config),
            "started": config.get("started"),
            "resumed": len(config.get("resumed", [])),
            "versions": _each_in_turn([part["versions"] for part in _parts(config) if "versions" in part]),
        }

    def _conditions(self, spec: RunSpec, code: str) -> dict[str, Any]:
        """Return what the run's own ``config.json`` does not say of a start."""
        return {"commit": code, "machine": self._machine(spec.federation)}

    def _machine(self, federation: str) -> dict[str, Any]:
        """Return this machine, with the CPUs that a run has at least, and without GPUs if its clients got none."""
        found = machine()
        gpus = found["gpus"] if self.engine.gpus(federation) else []
        return found | {"cpus": max(1, found["cpus"] // self.engine.at_once), "gpus": gpus}


@dataclass(frozen=True)
class Job:
    """A run that is wanted.

    Attributes:
        spec: the run.
        label: its name in the progress display.
        describe: what to print of its results.
        weight: how long it takes compared with the other jobs.
    """

    spec: RunSpec
    label: str
    describe: Callable[[Run], str]
    weight: float = 1.0


def run_missing(
    runs: Runs, jobs: Sequence[Job], *, keep_models: bool, finished: Callable[[], object] = lambda: None
) -> dict[str, str]:
    """Make the runs that are not done, as many at a time as the engine makes, with a progress display.

    Args:
        runs: where they are.
        jobs: all that are wanted, also those that are done; a run that two jobs want is made once.
        keep_models: as in ``Runs.run``.
        finished: called after each run that came to its end.

    Returns:
        Why a run failed, by the name of its folder.

    Raises:
        FloretError: another program makes runs in the same folder, or another environment has the local SuperLink.
    """
    # Ended by a batch system or with its terminal, it stops its runs as at Ctrl-C.
    at_end(_interrupted)
    failed: dict[str, str] = {}
    console = Console(stderr=False, highlight=False, soft_wrap=True)
    columns = [TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn()]
    missing = [job for job in jobs if not runs.done(job.spec)]
    if missing:
        runs.engine.check()
    runs.engine.expect(len({runs.folder(job.spec) for job in missing}))
    # Those that cannot run come first: they say why at once, not after hours of the others.
    missing.sort(key=lambda job: not runs.check(job.spec))
    wanted: dict[str, list[Job]] = {}
    for job in missing:
        wanted.setdefault(runs.folder(job.spec).name, []).append(job)
    time_left = _TimeLeft({name: same[0].weight for name, same in wanted.items()})
    display = Progress(*columns, TextColumn("{task.fields[left]}"), console=console, transient=True)
    stopped = threading.Event()
    with runs.exclusive(), closing(runs.engine), display as progress:
        done = len(jobs) - len(missing)
        bar = progress.add_task("runs", total=len(jobs), completed=done, left="")
        if done:
            console.print(f"{done} of {len(jobs)} runs are done")
        for text in counted(text for job in jobs for text in runs.otherwise(job.spec)):
            console.print(text, markup=False)
        for job in jobs:
            if runs.done(job.spec) and (reason := _unreadable(runs, job)):
                failed[runs.folder(job.spec).name] = reason
                console.print(f"{job.label}: failed: {reason}", markup=False)

        def make(name: str) -> str:
            job = wanted[name][0]
            if runs.done(job.spec):  # another program has made it since
                return ""
            rounds = int(runs.config(job.spec)["rounds"])
            own = progress.add_task(job.label, total=rounds, left="")

            def watch(finished: int) -> None:
                if stopped.is_set():
                    raise _StoppedError
                progress.update(own, completed=finished)
                progress.update(bar, left=time_left.after(name, finished / rounds))

            try:
                return runs.run(job.spec, watch, keep_models=keep_models)
            except FloretError as error:
                return str(error)
            finally:
                progress.remove_task(own)

        with ThreadPoolExecutor(runs.engine.at_once) as pool:
            try:
                going: dict[Future[str], str] = {pool.submit(make, name): name for name in wanted}
                for future in as_completed(going):
                    name, reason = going[future], future.result()
                    left = time_left.after(name, 1.0)
                    for job in wanted[name]:
                        done += 1
                        progress.advance(bar)
                        if reason := reason or _unreadable(runs, job):
                            failed[name] = reason
                        result = f"failed: {reason}" if reason else _described(runs, job)
                        result += left and f" | {left}"
                        console.print(f"[{done}/{len(jobs)}] {job.label}: {result}", markup=False)
                    if not reason:
                        finished()
            except BaseException:
                stopped.set()
                pool.shutdown(cancel_futures=True)
                raise
    return failed


def _interrupted() -> None:
    raise KeyboardInterrupt


class _StoppedError(Exception):
    """The other runs, and so this one, are stopped."""


def _unreadable(runs: Runs, job: Job) -> str:
    """Return why a run that is done cannot be read; empty if it can."""
    try:
        runs.outcome(job.spec)
    except FloretError as error:
        return str(error)
    return ""


def _described(runs: Runs, job: Job) -> str:
    outcome = runs.outcome(job.spec)
    assert outcome is not None
    refused = outcome.run.figures.refused
    return job.describe(outcome.run) + (f"; {refused} replies refused" if refused else "")


class _TimeLeft:
    """How long the rest of some runs takes if it goes on at the same pace; ``weights`` are theirs, by name."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights, self._parts = weights, dict.fromkeys(weights, 0.0)
        self._started = time.monotonic()

    def after(self, name: str, part: float) -> str:
        """Return the time left when this part of a run, up to 1, is done, too; empty where it cannot be told."""
        self._parts[name] = part
        total = sum(self._weights.values())
        done = sum(weight * self._parts[run] for run, weight in self._weights.items())
        if not done or done >= total:
            return ""
        return f"{countdown((time.monotonic() - self._started) * (total - done) / done)} left"


def commit(app: Path) -> str:
    """Return the commit of the app's folder, 12 digits; empty if it is not a git checkout.

    It ends in ``-dirty`` if tracked files differ, but for those below ``docs``: no run reads them, and results are
    written there between one run and the next.
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
    different = [*git, "diff", "--quiet", "HEAD", "--", ".", ":(exclude)docs"]
    same = subprocess.run(different, check=False, start_new_session=True)
    return head.stdout.strip() + ("-dirty" if same.returncode else "")


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


def _portable(config: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run's ``config.json`` says of its kernels, if they were the same from its start to its end."""
    kinds = {part.get("kernels", NATIVE) for part in _parts(config)}
    return {"kernels": kinds.pop()} if len(kinds) == 1 and NATIVE not in kinds else {}


def counted(texts: Iterable[str]) -> list[str]:
    """Return each different text of what is said of runs, with of how many it is."""
    return [f"{many} of these runs {text}" for text, many in Counter(texts).items()]


def other_kernels(then: str, now: str) -> list[str]:
    """Return a text if a run was made with other kernels than those of now, which are empty if they are not known."""
    return [f"were made with {then} kernels, and {now} ones are asked for"] if now and then != now else []


def clients_alone(federation: str) -> str:
    """Return a federation config without what only says how its clients share a machine."""
    return _SHARED.sub("", federation).strip()


def _computed(config: Mapping[str, Any], federation: str) -> dict[str, Any]:
    """Return the keys of a config, and the part of a federation config, that change what a run computes.

    On how many processes and GPUs the same numbers come out, as on another machine, but for their last digits.
    """
    keys = {key: value for key, value in own_keys(config).items() if key not in PLACES + _REAL_NODES}
    return keys | {_FEDERATION: clients_alone(federation)}


def _path(place: str) -> str:
    """Return the path that a ``data-dir`` names, an empty text if it names none."""
    return str(Path(place).expanduser().resolve()) if place else ""


def _write(file: Path, content: Any) -> None:
    write_whole(file, (json.dumps(content, indent=1) + "\n").encode())


def _starts(folder: Path) -> list[dict[str, Any]]:
    """Return the conditions of each start of the run, in order; none if an earlier version began it.

    Raises:
        FloretError: the file cannot be read.
    """
    file = folder / _STARTS
    try:
        starts = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        return [{"commit": str(start["commit"]), "machine": dict(start["machine"])} for start in starts]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FloretError(f"{file}: cannot be read ({error}); remove {folder} to make the run again") from error


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a run's ``config.json`` says of its start and of each resume."""
    return [config, *config.get("resumed", [])]


def _in_turn(values: Sequence[Any]) -> Any:
    """Return what all parts of a run say; if they differ, texts and lists one after the other, of numbers the least."""
    if isinstance(values[-1], list):
        return list(dict.fromkeys(one for value in values for one in value))
    if isinstance(values[-1], int):
        return min(values)
    different = [value for value, _ in groupby(values)]
    return ", then ".join(value or "not known" for value in different) if len(different) > 1 else different[0]


def _each_in_turn(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: _in_turn([part[name] for part in parts if name in part]) for last in parts[-1:] for name in last}


def _last_run(folder: Path) -> Path | None:
    runs = sorted(path.parent for path in folder.glob("*/config.json"))
    return runs[-1] if runs else None


def _finished(folder: Path) -> Path | None:
    runs = sorted(path.parent for path in folder.glob("*/summary.json"))
    return runs[-1] if runs else None


def _is_told(folder: Path, run: Path) -> bool:
    """Return whether what stands beside the runs of a folder is about ``run``, or cannot be read."""
    try:
        return bool(json.loads((folder / _ABOUT).read_text(encoding="utf-8"))["run"] == run.name)
    except FileNotFoundError:
        return False  # its program was killed before it wrote it
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True  # said by who reads all of it


def _nothing_used(run: Path) -> str:
    """Return that no reply of a finished run was used, and why the first was not; an empty text if one was."""
    rounds = read_run(run).rounds
    if any(client.trained for line in rounds for client in line.clients.values()):
        return ""
    refused = [f"; the first is refused: client {one.client}: {one.reason}" for line in rounds for one in line.refused]
    return "no reply was used in any round" + (refused[0] if refused else "")


def _resumable(run: Path) -> bool:
    return any((run / "checkpoints").glob("round-*.json"))


def _resumed(run: Path) -> int:
    """Return how often a run was resumed."""
    try:
        return len(json.loads((run / "config.json").read_text(encoding="utf-8")).get("resumed", []))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return 0  # one that cannot be read cannot be resumed


def _rounds(folder: Path) -> int:
    """Return how many rounds the newest run in a folder has finished."""
    run = _last_run(folder)
    try:
        return (run / "history.jsonl").read_bytes().count(b"\n") if run else 0
    except FileNotFoundError:
        return 0


def _wait_for(run: Path, watch: Callable[[int], None]) -> None:
    """Return when no process is writing a run directory."""
    with (run / ".lock").open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                watch(_rounds(run.parent))
                time.sleep(_POLL)


def _reason(log: Path) -> str:
    """Return the line of a run's log that says why it failed."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in lines if line.strip()]
    if lines and lines[-1].startswith(_ENDED):
        lines = lines[-1:]  # whatever was wrong before, that is why
    errors = [re.sub(r"^(ERROR|INFO) :\s*", "", line) for line in lines if line.startswith("ERROR") or "Error" in line]
    first = next((line for line in errors if line), lines[-1] if lines else "it printed nothing")
    return f"{first} (see {log})"
