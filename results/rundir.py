"""The run directory, written round by round, so that a killed run can still be read (``results.run.read_run``)."""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from common.config import RunConfig, own_keys
from common.durable import open_file, write_whole
from common.errors import FloretError
from common.home import floret_home
from common.names import without_prefix
from results.history import Json, Round
from results.run import Summary

# How long a run tries to take its directory while others only look at it.
_LOOKERS_SECONDS = 5.0


class RunDirectory:
    """One directory a run: ``config.json``, ``history.jsonl``, ``summary.json``, ``report.html``, ``checkpoints/``.

    Attributes:
        path: the directory.
        checkpoints: where the server's checkpoints are; below it ``personal``, the clients' exported models, and
            ``clients``, what the clients of a simulation keep from round to round.
        about: the content of ``config.json``, as ``write_config`` wrote it last.

    Raises:
        FloretError: it cannot be written, or another run is writing it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.personal = self.checkpoints / "personal"
        self.clients = self.checkpoints / "clients"
        self.about: Json = {}
        try:
            self.personal.mkdir(parents=True, exist_ok=True)
            self._lock = open_file(path / ".lock", "ab", private=False)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            self._claim()
        except OSError as error:
            raise FloretError(f"resume: {path} is in use; its run is still going") from error

    def _claim(self) -> None:
        """Take the lock; processes that look whether the run is going (``in_use``) have it for a moment each.

        Raises:
            OSError: another run has it.
        """
        deadline = time.monotonic() + _LOOKERS_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if in_use(self.path) or time.monotonic() > deadline:
                    raise
            time.sleep(0.005)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Give the lock back, and take the directory away if nothing was written, as when nobody joined."""
        if not (self.path / "config.json").exists():
            with suppress(OSError):  # one is not empty
                self.personal.rmdir()
                self.checkpoints.rmdir()
                (self.path / ".lock").unlink()
                self.path.rmdir()
        self._lock.close()

    @classmethod
    def new(cls, config: RunConfig, run_id: int, simulated: bool) -> Self:
        """Make a directory under ``output-dir``, named after the time in UTC, which no zone puts back.

        A simulation is named after its dataset, another run after its federation: nodes may have data of their own.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        where = config.dataset if simulated else config.federation
        name = f"{stamp}-{config.method}-{where}-seed{config.seed}-{run_id % 16**6:06x}"
        return cls(runs_folder(config) / name)

    @classmethod
    def find(cls, config: RunConfig) -> Self:
        """Return the directory that ``resume`` names; errors as of ``place_to_resume``."""
        return cls(place_to_resume(config))

    def write_config(self, values: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Write ``config.json``: every key of the run, the method's parameters apart, and ``about`` the run."""
        method = f"{values['method']}."
        self.about = {
            "config": {key: value for key, value in own_keys(values).items() if not key.startswith(method)},
            "parameters": without_prefix(values, method),
            **about,
        }
        self._write("config.json", json.dumps(self.about, indent=2) + "\n")

    def read_history(self, rounds: int) -> list[Round]:
        """Return the first ``rounds`` rounds, and cut the file down to them: those after them are run again.

        Raises:
            FloretError: a line of these rounds is missing or cannot be read.
        """
        path = self.path / "history.jsonl"
        try:
            # What comes after these rounds may be half of a line, or no text.
            content = path.read_bytes().split(b"\n")[:rounds] if path.is_file() else []
            lines = [line.decode() for line in content]
            history = [Round.from_json(json.loads(line)) for line in lines]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FloretError(f"{path}: a line before round {rounds} cannot be read") from error
        if [line.round for line in history] != list(range(1, rounds + 1)):
            raise FloretError(f"{path}: does not have the rounds 1 to {rounds} that the checkpoint is from")
        self._write("history.jsonl", "".join(f"{line}\n" for line in lines))
        return history

    def append_history(self, line: Round) -> None:
        """Add a round to ``history.jsonl``, whole and on disk before this returns.

        Raises:
            FloretError: it cannot be written.
        """
        path, text = self.path / "history.jsonl", json.dumps(line.to_json(), allow_nan=False)
        try:
            with open_file(path, "ab", private=False) as file:
                file.write(f"{text}\n".encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FloretError(f"{path}: cannot be written ({error.strerror})") from error

    def reopen(self) -> None:
        """Remove ``summary.json``, if there is one: the run goes on, and what it says is of fewer rounds."""
        path = self.path / "summary.json"
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise FloretError(f"{path}: cannot be removed ({error.strerror})") from error

    def write_summary(self, summary: Summary) -> None:
        """Write ``summary.json``, by which the run is finished."""
        self._write("summary.json", json.dumps(summary.to_json(), indent=2, allow_nan=False) + "\n")

    def _write(self, name: str, text: str) -> None:
        try:
            write_whole(self.path / name, text.encode())
        except OSError as error:
            raise FloretError(f"{self.path / name}: cannot be written ({error.strerror})") from error


def read_about(run: Path) -> dict[str, Any]:
    """Return ``config.json`` of a run directory.

    Raises:
        FloretError: it cannot be read.
    """
    try:
        content = json.loads((run / "config.json").read_text(encoding="utf-8"))
        return {**content, "config": dict(content["config"]), "parameters": dict(content["parameters"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FloretError(f"{run / 'config.json'}: cannot be read as a run's config") from error


def check_writable(config: RunConfig) -> None:
    """Check that a run directory can be made, which the run itself makes.

    Raises:
        FloretError: it cannot.
    """
    folder = runs_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".", dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(path: Path, error: OSError) -> FloretError:
    return FloretError(f"output-dir: {path} cannot be written ({error.strerror})")


def place_to_resume(config: RunConfig) -> Path:
    """Return the directory that ``resume`` names: a path, or ``latest`` for the last one under ``output-dir``.

    Raises:
        FloretError: there is no run directory there.
    """
    if config.resume == "latest":
        folder = runs_folder(config)
        runs = sorted(path.parent for path in folder.glob("*/config.json"))
        if not runs:
            raise FloretError(f"resume = 'latest': there is no run in {folder}; see output-dir")
        return runs[-1]
    path = Path(config.resume).expanduser()
    if not (path / "config.json").is_file():
        raise FloretError(f"resume = {config.resume!r}: is not a run directory; it has no config.json")
    return path


def runs_folder(config: RunConfig) -> Path:
    """Return where run directories are: ``output-dir``, by default below ``floret_home``."""
    return folder_of_runs(config.output_dir)


def folder_of_runs(output_dir: str) -> Path:
    """Return the folder that a value of ``output-dir`` names."""
    return Path(output_dir).expanduser() if output_dir else floret_home() / "runs"


def named_run(run: Path, folder: Path) -> Path:
    """Return ``run``, or the run directory of this name in ``folder`` if only that is there."""
    return folder / run if not run.exists() and (folder / run).is_dir() else run


def in_use(directory: Path) -> bool:
    """Return whether a process is writing a run directory; nothing is waited for and nothing is changed.

    Who asks holds the lock together with others who ask, for a moment; a run that starts in it tries again.
    """
    try:
        with (directory / ".lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no run of this version was here, or the file system has no locks
        return False
    return False
