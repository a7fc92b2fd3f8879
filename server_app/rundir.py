"""The run directory: what a run leaves behind, written as it goes, so that a killed run can still be read."""

import json
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common.config import RunConfig
from common.errors import FloretError


def floret_home() -> Path:
    """Return ``FLORET_HOME``, ``~/.floret`` by default."""
    return Path(os.environ.get("FLORET_HOME", "~/.floret")).expanduser()


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
    """One directory a run: ``config.json``, ``history.jsonl``, ``summary.json``, ``report.html``, ``checkpoints/``."""

    def __init__(self, config: RunConfig, run_id: int) -> None:
        """Make a new directory under ``output-dir``.

        Raises:
            FloretError: it cannot be written.
        """
        parent = Path(config.output_dir).expanduser() if config.output_dir else floret_home() / "runs"
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"{stamp}-{config.method}-{config.dataset}-seed{config.seed}-{run_id % 16**6:06x}"
        self.path = parent / name
        self.personal = self.path / "checkpoints" / "personal"
        try:
            self.personal.mkdir(parents=True)
        except OSError as error:
            raise FloretError(f"output-dir = {str(parent)!r}: cannot be written ({error.strerror})") from error

    def write_config(self, values: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Write ``config.json``: every key of the run, the method's parameters apart, and ``about`` the run."""
        method = f"{values['method']}."
        content = {
            "config": {key: value for key, value in values.items() if "." not in key},
            "parameters": {key.removeprefix(method): v for key, v in values.items() if key.startswith(method)},
            **about,
        }
        self._write("config.json", json.dumps(content, indent=2))

    def append_history(self, line: Mapping[str, Any]) -> None:
        """Add a round to ``history.jsonl``, whole and on disk before this returns."""
        with (self.path / "history.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        self._write("summary.json", json.dumps(summary, indent=2, allow_nan=False))

    def _write(self, name: str, text: str) -> None:
        new = self.path / f".{name}.new"
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(self.path / name)
