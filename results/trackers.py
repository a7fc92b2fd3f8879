"""Tools that show a run while it goes on: TensorBoard, MLflow. Each is sent every round when it ends.

Their packages are optional, and imported only where the run config asks for them.
"""

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from common.config import RunConfig, Scalar
from common.durable import write_whole
from common.errors import ConfigError, one_line
from common.extras import require
from common.flower import at_stop
from common.versions import versions
from results.history import Round
from results.run import Summary

log = logging.getLogger("flwr")
Status = Literal["FINISHED", "FAILED", "KILLED"]


class Tracker(ABC):
    """One tool. An error in ``begin`` ends the run, an error later ends the tracker; it may be any exception.

    Attributes:
        name: what it is called in the log.
        setting: what in the run config asks for it.
        package: what must be there to import; Floret's extra that brings it has the same name.
    """

    name: str
    setting: str
    package: str

    @abstractmethod
    def begin(self, values: Mapping[str, Scalar], directory: Path, done: int) -> None:
        """Start, or go on with the run of this directory.

        Args:
            values: the run config as far as this run reads it.
            directory: the run directory.
            done: rounds that are not run again; 0 for a new run.
        """

    @abstractmethod
    def round(self, line: Round) -> None:
        """Take a round; a resumed run begins with the rounds that are done."""

    @abstractmethod
    def end(self, status: Status, summary: Summary | None) -> None:
        """Take the end of the run; it has a summary if it finished."""


class TensorBoard(Tracker):
    """Event files in the run directory's ``tensorboard/``."""

    name = "TensorBoard"
    setting = "tensorboard = true"
    package = "tensorboard"

    def begin(self, values: Mapping[str, Scalar], directory: Path, done: int) -> None:
        """Hide what the event files have from the first round on that they lack: it is written again."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = directory / "tensorboard"
        there = _steps_in(folder) if folder.is_dir() else set()
        self._first = next(step for step in count(1) if step not in there or step > done)
        # Step 0 is the config, which stays as the run began.
        self._writer = SummaryWriter(str(folder), purge_step=self._first if there else 0)
        self._end: Any = None
        if not there:
            table = "\n".join(["| key | value |", "|---|---|", *(f"| {k} | `{v!r}` |" for k, v in values.items())])
            self._writer.add_text("config", table, 0)
            self._writer.add_text("versions", ", ".join(f"{k} {v}" for k, v in versions().items()), 0)
        shown = {"accuracy/after/test/mean": 0.0, "accuracy/before/test/mean": 0.0}
        experiment, session, self._end = hparams(dict(values), shown)
        if not there:
            for summary in (experiment, session):
                self._writer.file_writer.add_summary(summary, 0)
        self._writer.flush()

    def round(self, line: Round) -> None:
        """Write a point for each figure."""
        if line.round >= self._first:
            for name, value in figures(line):
                self._writer.add_scalar(name, value, line.round)
            self._writer.flush()

    def end(self, status: Status, summary: Summary | None) -> None:
        """Write the summary, and close the files."""
        last = _last(summary) if summary else 0
        for name, value in totals(summary) if summary else ():
            self._writer.add_scalar(name, value, last)
        self._writer.add_text("status", status, last)
        if status == "FINISHED":
            self._writer.file_writer.add_summary(self._end, last)
        self._writer.close()


def _steps_in(folder: Path) -> set[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {event.step for event in events.Scalars("seconds")} if "seconds" in events.Tags()["scalars"] else set()


class Mlflow(Tracker):
    """A run of MLflow, where ``MLFLOW_TRACKING_URI`` says, or else in ``mlflow.db`` beside the run directories."""

    name = "MLflow"
    setting = "tracker = 'mlflow'"
    package = "mlflow"

    def begin(self, values: Mapping[str, Scalar], directory: Path, done: int) -> None:
        """Make a run, or take the one whose id the run directory keeps, if MLflow still knows it."""
        # MLflow's own default is to try for eight minutes, in which the federation would wait.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        # MLflow sends usage statistics unless this is set.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        runs = directory.parent
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{runs / 'mlflow.db'}")
        # A local store would put artifacts into the working directory.
        self._artifacts = None if uri else (runs / "mlflow-artifacts").as_uri()
        id_file = directory / "mlflow-run"
        run = self._known(id_file.read_text(encoding="utf-8").strip()) if id_file.is_file() else None
        if run is None:
            run = self._client.create_run(self._experiment(), run_name=directory.name)
            write_whole(id_file, run.info.run_id.encode())
        self._run = run.info.run_id
        self._client.update_run(self._run, status="RUNNING")
        self._there = {metric.step for metric in self._client.get_metric_history(self._run, "seconds")}
        # A parameter of MLflow never changes; a key that may be another when a run is resumed then becomes a tag.
        before = run.data.params
        params = {key: str(value) for key, value in values.items()}
        tags = {f"version.{name}": version for name, version in versions().items()}
        tags |= {f"resumed.{key}": text for key, text in params.items() if before.get(key, text) != text}
        self._client.log_batch(
            self._run,
            params=[Param(key, text) for key, text in params.items() if key not in before],
            tags=[RunTag(key, text) for key, text in (tags | {"run-directory": str(directory)}).items()],
        )

    def _known(self, run_id: str) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        if "MLFLOW_EXPERIMENT_ID" in os.environ:
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "floret")
        try:
            return str(self._client.create_experiment(name, artifact_location=self._artifacts))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = self._client.get_experiment_by_name(name)
        if found is None or found.lifecycle_stage != "active":
            raise ConfigError(f"the experiment {name!r} was deleted; restore it, or set MLFLOW_EXPERIMENT_NAME")
        return str(found.experiment_id)

    def round(self, line: Round) -> None:
        """Log a round, unless MLflow has it: it deletes no point, so a round sent twice would be drawn twice."""
        if line.round not in self._there:
            self._log(figures(line), line.round)

    def end(self, status: Status, summary: Summary | None) -> None:
        """Log the summary, and end the run."""
        if summary:
            self._log(totals(summary), _last(summary))
        self._client.set_terminated(self._run, status)

    def _log(self, values: Iterator[tuple[str, float]], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in values])


# The values of the key `tracker`.
TRACKERS: dict[str, type[Tracker]] = {"mlflow": Mlflow}


def trackers_of(config: RunConfig) -> list[Tracker]:
    """Return the trackers that the config asks for.

    Raises:
        FloretError: the package of one is not installed; the line names the key and what to install.
    """
    kinds: list[type[Tracker]] = [TensorBoard] if config.tensorboard else []
    kinds += [TRACKERS[config.tracker]] if config.tracker else []
    for kind in kinds:
        require(kind.package, kind.package, kind.setting)
    return [kind() for kind in kinds]


class Trackers:
    """The trackers of a run; used as a context, so that each is sent how the run ended, whatever ended it."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers
        self._going: list[Tracker] = []
        self._summary: Summary | None = None

    def begin(self, values: Mapping[str, Scalar], directory: Path, done: int) -> None:
        """Begin all of them; see ``Tracker.begin``.

        Raises:
            ConfigError: one cannot begin; no client has trained yet, so the user loses nothing by mending that.
        """
        for tracker in self._trackers:
            try:
                tracker.begin(values, directory, done)
            except Exception as error:
                raise ConfigError(f"{tracker.setting}: {tracker.name} cannot begin: {one_line(error)}") from error
            self._going.append(tracker)
        if self._going:
            # A stopped simulation ends without a word to the thread of its ServerApp.
            at_stop(lambda: self._end("KILLED"))

    def round(self, line: Round) -> None:
        """Send each tracker a round."""
        self._send(lambda tracker: tracker.round(line))

    def finish(self, summary: Summary) -> None:
        """Tell that the run finished."""
        self._summary = summary
        self._end("FINISHED")

    def _end(self, status: Status) -> None:
        self._send(lambda tracker: tracker.end(status, self._summary))
        self._going = []

    def _send(self, what: Callable[[Tracker], None]) -> None:
        for tracker in list(self._going):
            try:
                what(tracker)
            except Exception as error:
                log.warning("%s failed; the run goes on without it: %s", tracker.name, one_line(error))
                self._going.remove(tracker)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end("FAILED" if kind and issubclass(kind, Exception) else "KILLED")


def figures(line: Round) -> Iterator[tuple[str, float]]:
    """Yield name and value of each figure of a round as a whole, under their names in ``history.jsonl``."""
    record = line.to_json()
    shown = {key: record[key] for key in ("accuracy", "loss", "bytes", "seconds")} | {"refused": len(line.refused)}
    shown |= {"epsilon": line.epsilon}
    yield from _flat("", shown)


def totals(summary: Summary) -> Iterator[tuple[str, float]]:
    """Yield name and value of each figure of ``summary.json``."""
    yield from _flat("summary/", {**summary.figures.to_json(), "clients": summary.clients})


def _last(summary: Summary) -> int:
    return summary.config.rounds if summary.ended_after is None else summary.ended_after


def _flat(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}/", value)
        elif value is not None:
            yield prefix + key, float(value)
