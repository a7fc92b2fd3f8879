"""An engine that trains nothing: it writes the run directories that runs of a table leave."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.config import own_keys
from results.history import ClientRound, Figures, Round, Scores, Spread, Traffic


class WritingEngine:
    """Writes runs of one round with two clients, as ``results.engines.Engine``.

    Args:
        kernels: which its runs say.
        after: accuracy of all clients after training.
        digest: of the data that its runs say they read.
        commit: of the code that makes them.

    Attributes:
        made: the values of the run config of each run that it made.
    """

    at_once = 1

    def __init__(
        self, kernels: str = "native", after: float = 0.5, digest: str | None = None, commit: str = ""
    ) -> None:
        self.kernels, self.made = kernels, list[Mapping[str, Any]]()
        self._after, self._digest, self._commit = after, digest, commit

    def expect(self, runs: int) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def clients(self, federation: str) -> int | None:
        """Return their number."""
        return 2

    def gpus(self, federation: str) -> bool:
        """Return that there are none."""
        return False

    def run(
        self,
        keys: Mapping[str, Any],
        values: Mapping[str, Any],
        federation: str,
        log: Path,
        watch: Callable[[], None],
        begins: Callable[[str], None],
    ) -> None:
        """Write a run directory."""
        begins(self._commit)
        self.made.append(values)
        before = len(list(Path(keys["output-dir"]).iterdir()))
        new = Path(keys["output-dir"]) / f"20260101-{before:06d}-{values['method']}-digits-seed0-000000"
        folder = Path(values["resume"]) if values["resume"] else new
        folder.mkdir(parents=True, exist_ok=True)
        client = ClientRound(True, Scores(0.25, 0.25), Scores(self._after, self._after), 1.0, Traffic(1, 1), 1.0)
        clients = dict.fromkeys("01", client)
        line = Round.of(1, clients, {name: {"test": 9, "validation": 9} for name in clients}, [], [], 1.0)
        samples = {name: {"samples": {"train": 9, "validation": 9, "test": 9}} for name in clients}
        kernels = {"kernels": self.kernels} if self.kernels != "native" else {}
        about: dict[str, Any] = {
            "config": own_keys(values),
            "parameters": {},
            "clients": samples,
            "versions": {},
            **kernels,
        }
        about["digest"] = self._digest
        spread = Spread(self._after, self._after, 0.0, self._after)
        figures = Figures(Spread(0.25, 0.25, 0.0, 0.25), spread, None, Traffic(2, 2), 1.0, 1.0, 0)
        for name, content in (("config", about), ("history", line.to_json()), ("summary", figures.to_json())):
            path = folder / f"{name}.{'jsonl' if name == 'history' else 'json'}"
            path.write_text(json.dumps(content) + "\n", encoding="utf-8")
