"""A run's records in TensorBoard and MLflow, read back with their own readers."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flwr.app import Message, MetricRecord

from common.errors import FloretError
from results.history import Round
from results.trackers import Mlflow
from tests.harness import ROOT, federate, folders
from tests.test_resume import ServerKilledError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

BOTH: dict[str, Any] = {"tensorboard": True, "tracker": "mlflow"}
KEYS: dict[str, Any] = {"method": "fedprox", "local_epochs": 1, **BOTH}


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def events(directory: Path) -> "EventAccumulator":
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def drawn(directory: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(directory).Scalars(name)]


def mlflow_runs(output: Path) -> "tuple[MlflowClient, list[Run]]":
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{output / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("floret")
    return client, client.search_runs([experiment.experiment_id])


def logged(output: Path, name: str) -> list[tuple[int, float]]:
    client, (run,) = mlflow_runs(output)
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


def expected(history: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Some figures as both should have them."""
    return {
        "accuracy/after/test/mean": [(n["round"], n["accuracy"]["after"]["test"]["mean"]) for n in history],
        "accuracy/before/validation/std": [(n["round"], n["accuracy"]["before"]["validation"]["std"]) for n in history],
        "accuracy/after/test/worst_decile": [
            (n["round"], n["accuracy"]["after"]["test"]["worst_decile"]) for n in history
        ],
        "loss": [(n["round"], n["loss"]) for n in history],
        "bytes/up": [(n["round"], n["bytes"]["up"]) for n in history],
        "bytes/down": [(n["round"], n["bytes"]["down"]) for n in history],
        "seconds": [(n["round"], n["seconds"]) for n in history],
        "refused": [(n["round"], len(n["refused"])) for n in history],
    }


def assert_all_there(output: Path, directory: Path, history: list[dict[str, Any]]) -> None:
    for name, values in expected(history).items():
        assert logged(output, name) == values, name
        points = drawn(directory, name)
        assert [step for step, _ in points] == [step for step, _ in values], name
        assert [value for _, value in points] == pytest.approx([value for _, value in values]), name


@pytest.mark.thorough
def test_both_have_config_rounds_and_summary(tmp_path: Path) -> None:
    output = tmp_path / "runs"

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            reply.content["metrics"] = MetricRecord({"num-examples": -1})
        return reply

    outcome = federate(output, 3, **KEYS, tamper=tamper)
    assert outcome.summary["refused"] > 0
    assert_all_there(output, outcome.directory, outcome.history)
    _, (run,) = mlflow_runs(output)
    assert (run.info.status, run.info.run_name) == ("FINISHED", outcome.directory.name)
    assert run.data.params["lr"] == "0.01"
    assert run.data.params["fedprox.mu"] == "0.01"
    assert not [key for key in run.data.params if key.startswith("pfakd.")]
    assert run.data.tags["version.flwr"] == outcome.summary["versions"]["flwr"]
    assert run.data.metrics["summary/accuracy/after/mean"] == outcome.summary["accuracy"]["after"]["mean"]
    read = events(outcome.directory)
    assert b"| fedprox.mu | `0.01` |" in read.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert read.Tensors("status/text_summary")[0].tensor_proto.string_val[0] == b"FINISHED"
    (total,) = read.Scalars("summary/bytes/up")
    assert (total.step, total.value) == (2, outcome.summary["bytes"]["up"])
    assert set(read.PluginTagToContent("hparams")) == {
        f"_hparams_/{part}" for part in ("experiment", "session_start_info", "session_end_info")
    }
    assert not list((tmp_path / "cwd").iterdir())
    assert sorted(path.name for path in output.iterdir()) == [outcome.directory.name, "mlflow.db"]


@pytest.mark.thorough
def test_a_resumed_run_goes_on_where_it_was_and_doubles_no_round(tmp_path: Path) -> None:
    output, states = tmp_path / "runs", tmp_path / "states"
    keys = KEYS | {"rounds": 5, "checkpoint_every": 3}
    # Killed in round 5: round 4 was told, and is run again.
    script = (
        "import os, sys; from pathlib import Path; from tests.harness import federate\n"
        "def tamper(message, reply):\n"
        "    if message.metadata.group_id == '5': os._exit(9)\n"
        "    return reply\n"
        f"federate(Path({str(output)!r}), 5, states=Path({str(states)!r}), tamper=tamper, **{keys!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 9, done.stderr
    (directory,) = folders(output)
    assert [step for step, _ in logged(output, "loss")] == [1, 2, 3, 4]
    assert [step for step, _ in drawn(directory, "loss")] == [1, 2, 3, 4]
    _, (before,) = mlflow_runs(output)
    assert before.info.status == "RUNNING"  # nothing could say that it was killed

    resumed = federate(output, 5, states=states, **keys | {"rounds": 6}, resume=str(directory))
    _, (after,) = mlflow_runs(output)
    assert (after.info.run_id, after.info.status) == (before.info.run_id, "FINISHED")
    assert (after.data.params["rounds"], after.data.tags["resumed.rounds"]) == ("5", "6")
    for read in (logged(output, "loss"), drawn(directory, "loss")):
        assert [step for step, _ in read] == [1, 2, 3, 4, 5, 6]
        assert [value for _, value in read] == pytest.approx([line["loss"] for line in resumed.history])
    # TensorBoard shows round 4 as it was run the second time.
    assert drawn(directory, "seconds")[3][1] == pytest.approx(resumed.history[3]["seconds"])


@pytest.mark.thorough
def test_a_tracker_that_was_away_or_comes_late_gets_the_rounds_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow import MlflowClient

    output, states = tmp_path / "runs", tmp_path / "states"
    send = Mlflow.round

    def gone(self: Mlflow, line: Round) -> None:
        if line.round == 2:
            self._client = MlflowClient(tracking_uri="http://127.0.0.1:9")
        send(self, line)

    monkeypatch.setattr(Mlflow, "round", gone)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    first = federate(output, 3, states=states, **KEYS | {"tensorboard": False, "rounds": 3})
    assert len(first.history) == 3
    assert len([r for r in caplog.records if "MLflow failed; the run goes on without it: " in r.getMessage()]) == 1
    assert logged(output, "loss") == [(1, first.history[0]["loss"])]

    monkeypatch.setattr(Mlflow, "round", send)
    longer = federate(output, 3, states=states, **KEYS | {"rounds": 4}, resume=str(first.directory))
    assert_all_there(output, first.directory, longer.history)


@pytest.mark.thorough
@pytest.mark.parametrize(("error", "status"), [(FloretError, "FAILED"), (ServerKilledError, "KILLED")])
def test_a_run_that_does_not_come_to_its_end_says_so(
    tmp_path: Path, error: type[BaseException], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "runs"

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.group_id == "2":
            raise error("stop")
        return reply

    with pytest.raises(error):
        federate(output, 2, tamper=tamper, **KEYS)
    (directory,) = folders(output)
    _, (run,) = mlflow_runs(output)
    assert run.info.status == status
    assert events(directory).Tensors("status/text_summary")[0].tensor_proto.string_val[0] == status.encode()


@pytest.mark.parametrize(
    ("keys", "package", "line"),
    [
        (
            {"tensorboard": True},
            "tensorboard",
            "tensorboard = true: the package tensorboard is not installed here; in Floret's folder: "
            "pip install '.[tensorboard]'",
        ),
        (
            {"tracker": "mlflow"},
            "mlflow",
            "tracker = 'mlflow': the package mlflow is not installed here; in Floret's folder: pip install '.[mlflow]'",
        ),
    ],
)
def test_a_missing_package_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], package: str, line: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("common.extras.find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(FloretError) as told:
        federate(tmp_path / "runs", 2, **keys)
    assert str(told.value).startswith(line)
    assert not (tmp_path / "runs").exists()


def test_a_store_that_cannot_be_reached_is_told_before_any_client_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(FloretError, match=r"^tracker = 'mlflow': MLflow cannot begin: .*127\.0\.0\.1:9[^\n]*$"):
        federate(tmp_path / "runs", 2, **KEYS)
    assert not list((tmp_path / "runs").rglob("history.jsonl"))


@pytest.mark.thorough
def test_a_server_without_the_packages_starts() -> None:
    script = "import sys, server_app.app; print([name for name in ('mlflow', 'tensorboard') if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
