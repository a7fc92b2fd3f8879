"""Many runs, one simulation after another: what is done is not run again, what was killed goes on from its checkpoint.

``floret sweep`` and ``floret reproduce`` say which runs; this module runs them and reads what they measured.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cli.run import default_config, merged, simulated_clients
from common.durable import write_whole
from common.errors import FloretError
from common.local_superlink import check_local_superlink, use_own_commands

# Keys that change where a run finds and leaves its files, not what it computes.
PLACES = ("output-dir", "data-dir", "download", "resume", "tensorboard", "tracker")
# Keys that mean nothing in a simulation.
_REAL_NODES = ("return-timeout",)
_POLL = 0.5
_RUN_ID = re.compile(r"Successfully started run (\d+)")


@dataclass(frozen=True)
class Cell:
    """One run: ``keys`` of the run config that differ from the app's defaults, and the simulation's ``federation``."""

    keys: Mapping[str, Any]
    federation: str


@dataclass(frozen=True)
class Outcome:
    """What a finished cell measured: ``history``, ``summary`` of its run; ``about`` has commit, versions, machine."""

    history: list[dict[str, Any]]
    summary: dict[str, Any]
    about: dict[str, Any]


class Cells:
    """The cells of an app and their folders.

    Args:
        app: the app's folder.
        output: folders of cells are below its ``cells/``, named after what is computed: whoever asks for the same run,
            with data in whichever place, finds it done.
        superlink: the SuperLink connection to run on; empty for Flower's default.
    """

    def __init__(self, app: Path, output: Path, superlink: str = "") -> None:
        self._app, self.superlink = app, superlink
        self._defaults = default_config(app)
        self._folder = output.resolve() / "cells"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other programs from running cells of the same folder.

        Raises:
            FloretError: one is doing so.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise FloretError(f"{self._folder}: another floret is running cells there") from error
            yield

    def config(self, cell: Cell) -> dict[str, Any]:
        """Return every key of the cell's run.

        Raises:
            ConfigError: a key is not known.
        """
        return merged(self._defaults, cell.keys)

    def folder(self, cell: Cell) -> Path:
        """Return the cell's folder: the name depends on all keys but those of other methods, of places and of
        real nodes.
        """
        config = self.config(cell)
        others = tuple(key for key in config if "." in key and not key.startswith(f"{config['method']}."))
        own = {key: value for key, value in config.items() if key not in PLACES + _REAL_NODES + others}
        text = json.dumps([own, cell.federation], sort_keys=True)
        return self._folder / hashlib.sha256(text.encode()).hexdigest()[:16]

    def outcome(self, cell: Cell) -> Outcome | None:
        """Return what the cell measured; None if it has not been run to its end.

        Raises:
            FloretError: a file of its run cannot be read.
        """
        folder = self.folder(cell)
        try:
            about = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
            run = folder / about["run"]
            lines = (run / "history.jsonl").read_text(encoding="utf-8").splitlines()
            summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
            return Outcome([json.loads(line) for line in lines], summary, about)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError) as error:
            raise FloretError(f"{folder}: cannot be read ({error}); remove it to run the cell again") from error

    def check(self, cell: Cell) -> str:
        """Return what is wrong with a cell before it is started, or an empty text."""
        from server_app.settings import read_config
        from server_app.setup import check_setup

        try:
            check_setup(*read_config(self.config(cell)), simulated_clients([cell.federation], self.superlink))
        except FloretError as error:
            return str(error)
        return ""

    def run(self, cell: Cell, watch: Callable[[int], None], *, keep_models: bool = False) -> str:
        """Run a cell to its end; return why it failed, or an empty text.

        A run of this cell that was killed goes on after its last checkpoint; one that is still going, because only this
        program was killed, is waited for. When this program is interrupted it stops the run.

        Args:
            cell: what to run.
            watch: called with the number of finished rounds, twice a second.
            keep_models: leave the personal models and checkpoints in the run directory.
        """
        wrong = self.check(cell)
        if wrong:
            return wrong
        folder = self.folder(cell)
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log.txt"
        before = _last_run(folder)
        if before and not (before / "summary.json").is_file():
            _follow(before, watch)
            if not (before / "summary.json").is_file():
                self._start(cell, folder, log, {"resume": str(before)} if _resumable(before) else {}, watch)
        if not _finished(folder):
            self._start(cell, folder, log, {}, watch)
        run = _finished(folder)
        if not run:
            return _reason(log)
        if not keep_models:
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
        write_whole(folder / "cell.json", (json.dumps(self._about(cell, run), indent=1) + "\n").encode())
        return ""

    def _start(
        self, cell: Cell, folder: Path, log: Path, more: Mapping[str, str], watch: Callable[[int], None]
    ) -> None:
        keys = {**cell.keys, "output-dir": str(folder), **more}
        command = ["flwr", "run", str(self._app), *([self.superlink] if self.superlink else []), "--stream"]
        if cell.federation:
            command += ["--federation-config", cell.federation]
        command += ["--run-config", " ".join(f"{key}={json.dumps(value)}" for key, value in keys.items())]
        with log.open("w", encoding="utf-8") as file:
            # In a session of its own: an interrupt is for this program, which stops the run in good order.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                while process.poll() is None:
                    watch(_rounds(folder))
                    time.sleep(_POLL)
            finally:
                if process.poll() is None:
                    self._stop(log)
                    process.terminate()
                    process.wait()

    def _stop(self, log: Path) -> None:
        """Stop a run: it goes on in the SuperLink when only its log stream is ended."""
        found = _RUN_ID.search(log.read_text(encoding="utf-8", errors="replace"))
        if found:
            place = [self.superlink] if self.superlink else []
            subprocess.run(["flwr", "stop", found[1], *place], capture_output=True, check=False)

    def _about(self, cell: Cell, run: Path) -> dict[str, Any]:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        return {
            "run": run.name,
            "config": {k: v for k, v in self.config(cell).items() if k not in PLACES},
            "federation-config": cell.federation,
            "commit": commit(self._app),
            "machine": machine(),
            "started": config.get("started"),
            "resumed": len(config.get("resumed", [])),
            "versions": config.get("versions"),
        }


@dataclass(frozen=True)
class Job:
    """A cell that somebody wants: how it is called, and how long it takes compared with the others."""

    cell: Cell
    label: str
    weight: float = 1.0


def run_missing(cells: Cells, jobs: Sequence[Job], told: Callable[[Cell], str], *, keep_models: bool) -> dict[str, str]:
    """Run the cells that are not done, one after another, with a progress display.

    Args:
        cells: where they are.
        jobs: all that are wanted, also those that are done; a cell that occurs twice is run once.
        told: what to print of a finished cell.
        keep_models: as in ``Cells.run``.

    Returns:
        Why a cell failed, by the name of its folder.

    Raises:
        FloretError: another program runs cells of the same folder, or another environment has the local SuperLink.
    """
    # Ended by a batch system, it stops its run as at Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed: dict[str, str] = {}
    console = Console(stderr=False, highlight=False, soft_wrap=True)
    columns = [TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn()]
    missing = [job for job in jobs if cells.outcome(job.cell) is None]
    if missing:
        check_local_superlink(cells.superlink)
        use_own_commands()
    # Those that cannot run come first: they say why at once, not after hours of the others.
    missing.sort(key=lambda job: not cells.check(job.cell))
    work = _Work([job.weight for job in missing])
    display = Progress(*columns, TextColumn("{task.fields[left]}"), console=console, transient=True)
    with cells.alone(), display as progress:
        bar = progress.add_task("cells", total=len(jobs), completed=len(jobs) - len(missing), left="")
        if len(missing) < len(jobs):
            console.print(f"{len(jobs) - len(missing)} of {len(jobs)} cells are done")
        for place, job in enumerate(missing):
            name = cells.folder(job.cell).name
            rounds = int(cells.config(job.cell)["rounds"])

            def watch(done: int, job: Job = job, rounds: int = rounds) -> None:
                work.now(done / rounds)
                progress.update(bar, description=f"{job.label}: round {done}/{rounds}", left=work.left())

            if cells.outcome(job.cell) is None and name not in failed:
                watch(0)
                reason = cells.run(job.cell, watch, keep_models=keep_models)
                if reason:
                    failed[name] = reason
            work.done(job.weight)
            progress.advance(bar)
            said = f"failed: {failed[name]}" if name in failed else told(job.cell)
            done = len(jobs) - len(missing) + place + 1
            console.print(f"[{done}/{len(jobs)}] {job.label}: {said}{work.left(' | ')}", markup=False)
    return failed


class _Work:
    """How much of the work is done, and how long the rest takes at the same pace."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._all, self._done, self._part = sum(weights), 0.0, 0.0
        self._weights = list(weights)
        self._started = time.monotonic()

    def now(self, share: float) -> None:
        """Say how much of the current cell is done."""
        self._part = share * (self._weights[0] if self._weights else 0.0)

    def done(self, weight: float) -> None:
        """Say that a cell is over."""
        self._done += weight
        self._weights = self._weights[1:]
        self._part = 0.0

    def left(self, before: str = "") -> str:
        """Return the time left, or nothing while there is no telling."""
        over = self._done + self._part
        if not over or over >= self._all:
            return ""
        seconds = round((time.monotonic() - self._started) * (self._all - over) / over)
        return f"{before}{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"


def commit(app: Path) -> str:
    """Return the commit of the app's folder, with ``-dirty`` if it differs; empty if it is not a git checkout."""
    command = ["git", "-C", str(app), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Return what the figures were computed on: CPUs, their model, GPUs."""
    import torch

    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpus": len(os.sched_getaffinity(0)), "cpu": model[1] if model else "", "gpus": gpus}


def percent(values: Sequence[float | None], digits: int = 1) -> str:
    """Return accuracies in [0, 1] in percent: one, or mean and standard deviation of several; ``-`` of none."""
    from statistics import pstdev

    measured = [100 * value for value in values if value is not None]
    if not measured:
        return "-"
    return f"{mean(measured):.{digits}f}" + (f" ± {pstdev(measured):.{digits}f}" if len(measured) > 1 else "")


def _last_run(folder: Path) -> Path | None:
    runs = sorted(path.parent for path in folder.glob("*/config.json"))
    return runs[-1] if runs else None


def _finished(folder: Path) -> Path | None:
    runs = sorted(path.parent for path in folder.glob("*/summary.json"))
    return runs[-1] if runs else None


def _resumable(run: Path) -> bool:
    return any((run / "checkpoints").glob("round-*.json"))


def _rounds(folder: Path) -> int:
    """Return how many rounds the newest run of a cell has finished."""
    run = _last_run(folder)
    try:
        return (run / "history.jsonl").read_bytes().count(b"\n") if run else 0
    except FileNotFoundError:
        return 0


def _follow(run: Path, watch: Callable[[int], None]) -> None:
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
    errors = [re.sub(r"^(ERROR|INFO) :\s*", "", line) for line in lines if line.startswith("ERROR") or "Error" in line]
    first = next((line for line in errors if line), lines[-1] if lines else "it printed nothing")
    return f"{first} (see {log})"
