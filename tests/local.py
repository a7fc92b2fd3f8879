"""A federation on the local engine, in one process that stays warm from test to test."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results.engines import LocalEngine
from tests.harness import FEW, ROOT, folders, run_config


@dataclass(frozen=True)
class Result:
    """What a run left behind."""

    directory: Path
    history: list[dict[str, Any]]
    summary: dict[str, Any]
    log: str


class Local:
    """Makes runs on the local engine with two workers."""

    def __init__(self) -> None:
        self._engine = LocalEngine(ROOT)

    def run(self, output: Path, clients: int = 4, **keys: Any) -> Result:
        """Make a run with the default config but for ``keys``, and ``FEW`` unless said otherwise."""
        output.mkdir(exist_ok=True)
        values = run_config(output, **(FEW | keys))
        before = folders(output)
        log = Path(tempfile.mkdtemp(prefix="log-", dir=output.parent)) / "log.txt"
        federation = f"num-supernodes={clients} init-args-num-cpus=2"
        self._engine.run({}, values, federation, log, lambda: None, lambda commit: None)
        new = folders(output) - before
        text = log.read_text()
        directory = new.pop() if new else max(before, default=None)
        assert directory is not None, text
        assert (directory / "summary.json").is_file(), text
        return Result(directory, read_history(directory), json.loads((directory / "summary.json").read_text()), text)

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


def read_history(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's history."""
    return [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]


def histories(output: Path) -> list[Path]:
    """Return the histories of all runs in a folder."""
    return sorted(output.glob("*/history.jsonl"))
