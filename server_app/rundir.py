"""The run directory: what a run leaves behind, written as it goes, so that a killed run can still be read."""

import fcntl
import json
import logging
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from common.config import RunConfig
from common.durable import write_whole
from common.errors import FloretError
from common.home import floret_home
from server_app.checkpoint import Checkpoint, Checkpoints

log = logging.getLogger("flwr")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for package in ("floret", "flwr", "torch", "torchvision", "numpy", "ray"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


class RunDirectory:
    """One directory a run: ``config.json``, ``history.jsonl``, ``summary.json``, ``report.html``, ``checkpoints/``.

    Raises:
        FloretError: it cannot be written, or another run is writing it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.personal = self.checkpoints / "personal"
        self.clients = self.checkpoints / "clients"
        self._checkpoints = Checkpoints(self.checkpoints)
        try:
            self.personal.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("a")
        except OSError as error:
            raise FloretError(f"output-dir: {path} cannot be written ({error.strerror})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FloretError(f"resume: {path} is in use; its run is still going") from error

    @classmethod
    def new(cls, config: RunConfig, run_id: int) -> Self:
        """Make a directory under ``output-dir``."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"{stamp}-{config.method}-{config.dataset}-seed{config.seed}-{run_id % 16**6:06x}"
        return cls(runs_folder(config) / name)

    @classmethod
    def find(cls, config: RunConfig) -> Self:
        """Return the directory that ``resume`` names: a path, or ``latest`` for the last one under ``output-dir``.

        Raises:
            FloretError: there is no run directory there.
        """
        if config.resume == "latest":
            folder = runs_folder(config)
            runs = sorted(path.parent for path in folder.glob("*/config.json"))
            if not runs:
                raise FloretError(f"resume = 'latest': there is no run in {folder}; see output-dir")
            return cls(runs[-1])
        path = Path(config.resume).expanduser()
        if not (path / "config.json").is_file():
            raise FloretError(f"resume = {config.resume!r}: is not a run directory; it has no config.json")
        return cls(path)

    def read_config(self) -> dict[str, Any]:
        """Return ``config.json``.

        Raises:
            FloretError: it cannot be read.
        """
        try:
            content = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
            return {**content, "config": dict(content["config"]), "parameters": dict(content["parameters"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FloretError(f"{self.path / 'config.json'}: cannot be read as a run's config") from error

    def write_config(self, values: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Write ``config.json``: every key of the run, the method's parameters apart, and ``about`` the run."""
        method = f"{values['method']}."
        content = {
            "config": {key: value for key, value in values.items() if "." not in key},
            "parameters": {key.removeprefix(method): v for key, v in values.items() if key.startswith(method)},
            **about,
        }
        self._write("config.json", json.dumps(content, indent=2) + "\n")

    def read_history(self, rounds: int) -> list[dict[str, Any]]:
        """Return the first ``rounds`` rounds, and cut the file down to them: what came later is run again.

        Raises:
            FloretError: a line of these rounds is missing or cannot be read.
        """
        path = self.path / "history.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines()[:rounds] if path.is_file() else []
        try:
            history = [json.loads(line) for line in lines]
        except ValueError as error:
            raise FloretError(f"{path}: a line before round {rounds} cannot be read") from error
        if [line["round"] for line in history] != list(range(1, rounds + 1)):
            raise FloretError(f"{path}: does not have the rounds 1 to {rounds} that the checkpoint is from")
        self._write("history.jsonl", "".join(f"{line}\n" for line in lines))
        return history

    def append_history(self, line: Mapping[str, Any]) -> None:
        """Add a round to ``history.jsonl``, whole and on disk before this returns."""
        with (self.path / "history.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint; see ``server_app.checkpoint``."""
        self._checkpoints.write(checkpoint)

    def read_checkpoint(self) -> Checkpoint:
        """Return the last intact checkpoint; damaged ones are logged.

        Raises:
            FloretError: there is none.
        """
        checkpoint, notes = self._checkpoints.read()
        for note in notes:
            log.warning("%s; going back to round %d", note, checkpoint.round)
        return checkpoint

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        self._write("summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")

    def _write(self, name: str, text: str) -> None:
        try:
            write_whole(self.path / name, text.encode())
        except OSError as error:
            raise FloretError(f"{self.path / name}: cannot be written ({error.strerror})") from error


def runs_folder(config: RunConfig) -> Path:
    """Return where run directories are: ``output-dir``, by default below ``floret_home``."""
    return Path(config.output_dir).expanduser() if config.output_dir else floret_home() / "runs"
