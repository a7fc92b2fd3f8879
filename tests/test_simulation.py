"""Simulation as a user runs it: ``flwr run`` through a real SuperLink, Ray and its actors."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from client_app.batches import normalise
from data import load_client
from models import build_model
from server_app.settings import read_config
from tests.conftest import PATIENCE, Simulator
from tests.deployment import children, commands, until
from tests.harness import ROOT, copy_app, federate, run_config, timeless

SHORT = "rounds=3 local-epochs=2"


def finished(simulator: Simulator, run: str, federation: str, **keys: Any) -> tuple[str, Path]:
    """Run to the end; return the log and the run directory."""
    output = simulator.output / f"{len(list(simulator.output.iterdir()))}"
    log = simulator.run(f'{run} output-dir="{output}"', federation, **keys)
    directories = list(output.glob("*")) if output.exists() else []
    assert len(directories) == 1, log
    return log, directories[0]


def read(directory: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return summary and history."""
    lines = (directory / "history.jsonl").read_text().splitlines()
    return json.loads((directory / "summary.json").read_text()), [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def one_actor(simulator: Simulator) -> tuple[str, Path]:
    """Ten clients on one actor, half of them a round."""
    return finished(
        simulator, f"{SHORT} participation=0.5", "num-supernodes=10 client-resources-num-cpus=2 init-args-num-cpus=2"
    )


@pytest.mark.quick
def test_the_main_job_ends_with_a_table_and_a_report(one_actor: tuple[str, Path]) -> None:
    log, directory = one_actor
    summary, history = read(directory)
    assert [line["round"] for line in history] == [1, 2, 3]
    assert all(f"round {i}/3 | accuracy before " in log for i in (1, 2, 3))
    assert "Accuracy per client, last round:" in log
    assert f"Report: {directory / 'report.html'}" in log
    assert list(summary) == [
        *("method", "dataset", "model", "partition", "clients", "rounds", "seed", "accuracy", "best_validation"),
        *("bytes", "seconds", "refused", "measured", "versions"),
    ]
    assert (summary["method"], summary["clients"], summary["refused"]) == ("pfakd", 10, 0)
    assert summary["accuracy"]["after"] == history[-1]["accuracy"]["after"]["test"]
    config = json.loads((directory / "config.json").read_text())
    assert config["parameters"]["beta"] == 1.0
    counts = [client["labels"] for client in config["clients"].values()]
    assert all(sum(1 for n in labels if n) == 2 for labels in counts)
    assert [sum(labels) for labels in counts] == [c["samples"]["train"] for c in config["clients"].values()]


@pytest.mark.quick
def test_the_harness_of_the_other_tests_gives_the_same_history(tmp_path: Path, one_actor: tuple[str, Path]) -> None:
    here = federate(tmp_path, 10, rounds=3, local_epochs=2, participation=0.5)
    assert timeless(here.history) == timeless(read(one_actor[1])[1])


@pytest.mark.quick
def test_personal_models_are_those_that_were_measured(tmp_path: Path, one_actor: tuple[str, Path]) -> None:
    _, directory = one_actor
    _, history = read(directory)
    config, _, _ = read_config(run_config(tmp_path))
    files = sorted((directory / "checkpoints" / "personal").glob("*.safetensors"))
    assert {file.stem for file in files} == set(history[-1]["clients"])
    for file in files:
        model = build_model(config.model, (1, 8, 8), 10, 1, torch.Generator()).eval()
        model.load_state_dict(load_file(file))
        test = load_client(config, int(file.stem), 10).test
        accuracy = (model(normalise(test.x)).argmax(1) == test.y).float().mean().item()
        assert accuracy == pytest.approx(history[-1]["clients"][file.stem]["after"]["test"])


@pytest.mark.slow
def test_a_killed_simulation_is_resumed_with_the_same_numbers(simulator: Simulator, tmp_path: Path) -> None:
    keys = f'local-epochs=2 participation=0.5 output-dir="{tmp_path / "runs"}"'
    federation = "num-supernodes=10 client-resources-num-cpus=1 init-args-num-cpus=2"
    with ThreadPoolExecutor() as pool:
        killed = pool.submit(simulator.run, f"rounds=300 {keys}", federation)
        until(lambda: any(tmp_path.glob("runs/*/checkpoints/round-*[1-9].json")), "no round was finished")
        for pid, command in commands([*children(simulator.pid), *children(os.getpid())]).items():
            if "flwr-simulation" in command or str(tmp_path) in command:  # and the command that would wait for it
                os.kill(pid, signal.SIGKILL)
        killed.result()
    (directory,) = (tmp_path / "runs").iterdir()
    done = max(int(path.stem.removeprefix("round-")) for path in directory.glob("checkpoints/round-*.json"))
    log = simulator.run(f'rounds={done + 1} {keys} resume="latest"', federation)
    assert f"Resuming {directory} after round {done}" in log, log
    undisturbed = federate(tmp_path / "here", 10, rounds=done + 1, local_epochs=2, participation=0.5)
    assert timeless(read(directory)[1]) == timeless(undisturbed.history)
    # What clients keep is in the run directory, one version each when the run is over.
    kept = list((directory / "checkpoints" / "clients" / "default" / "pfakd").glob("*/*.json"))
    assert len(kept) == len({path.parent for path in kept}) >= 5


@pytest.mark.parametrize(
    ("run", "line"),
    [
        pytest.param('method="fedprr"', "method = 'fedprr': must be one of ", marks=pytest.mark.slow),
        ("classes-per-client=12", "classes-per-client = 12: must be at most 10, the number of classes of digits"),
    ],
)
def test_a_config_that_cannot_be_used_ends_the_run_with_a_line(simulator: Simulator, run: str, line: str) -> None:
    log = simulator.run(run, "num-supernodes=3 client-resources-num-cpus=1")
    assert line in log
    assert 'File "' not in log  # no stack of ours for the user to read


def streamed(simulator: Simulator, run: str) -> "subprocess.Popen[str]":
    """Start ``floret run --stream`` with three clients."""
    command = [*(sys.executable, "-m", "cli.main", "run", str(simulator.app), "test", "--stream"), "--run-config", run]
    command += ["--federation-config", "num-supernodes=3 client-resources-num-cpus=1"]
    return subprocess.Popen(
        command, env=simulator.env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_floret_run_with_its_log_tells_that_the_run_failed(simulator: Simulator, tmp_path: Path) -> None:
    x, y = np.zeros((60, 4, 4, 1), np.float32), np.arange(60) % 3
    x[7] = np.nan  # which only a look at the inputs can find
    np.savez(tmp_path / "all.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    keys = f'dataset="npz" data-dir="{tmp_path / "all.npz"}" model="mlp" partition="iid"'
    process = streamed(simulator, f"{keys} alpha=0.3")
    out, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, out + error
    assert "not finite" in out
    assert error.startswith("floret: run config: alpha changes nothing: it needs partition = 'dirichlet' or ")
    assert re.fullmatch(r"floret: run \d+ failed; its log says why", error.splitlines()[-1])


@pytest.mark.slow
def test_floret_run_with_its_log_tells_whether_the_run_finished_goes_on_or_was_stopped(
    simulator: Simulator, tmp_path: Path
) -> None:
    def reached(lines: Iterable[str], wanted: str) -> re.Match[str]:
        return next(found for line in lines if (found := re.search(wanted, line)))

    out, error = (process := streamed(simulator, f'rounds=1 output-dir="{tmp_path}"')).communicate(timeout=PATIENCE)
    assert (process.returncode, "floret: " in error) == (0, False), out + error
    assert "round 1/1 | accuracy before " in out
    # An interrupt is the log's, not the run's.
    process = streamed(simulator, f'rounds=300 local-epochs=2 output-dir="{tmp_path / "runs"}"')
    assert process.stdout is not None
    reached(process.stdout, r"round 1/300 \| ")
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE)
    line = (
        r"floret: run (\d+) goes on without its log here; flwr log \1 test shows it; (flwr stop \1 test) stops the run"
    )
    found = re.fullmatch(line, error.splitlines()[-1])
    assert found, error
    assert process.returncode == 130
    history = next((tmp_path / "runs").glob("*/history.jsonl"))
    rounds = len(history.read_text().splitlines())
    until(lambda: len(history.read_text().splitlines()) > rounds, "the run did not go on")
    subprocess.run(found[2].split(), env=simulator.env, check=True, capture_output=True, timeout=PATIENCE)
    # One that somebody else stops.
    process = streamed(simulator, f'rounds=300 local-epochs=20 model="mlp" output-dir="{tmp_path / "others"}"')
    assert process.stdout is not None
    run = reached(process.stdout, r"Successfully started run (\d+)")[1]
    reached(process.stdout, r"round 1/300 \| ")
    subprocess.run(["flwr", "stop", run, "test"], env=simulator.env, check=True, capture_output=True, timeout=PATIENCE)
    _, error = process.communicate(timeout=PATIENCE)
    assert (process.returncode, error.splitlines()[-1]) == (130, f"floret: run {run} was stopped")
    # The round that was being made is not finished without the clients whose actors ended before they had answered.
    (stopped,) = (tmp_path / "others").iterdir()
    lines = [json.loads(line) for line in (stopped / "history.jsonl").read_text().splitlines()]
    assert [(len(line["clients"]), line["refused"]) for line in lines] == [(3, [])] * len(lines)
    last = max(int(re.sub(r"\D", "", path.name)) for path in (stopped / "checkpoints").glob("round-*.json"))
    assert last == len(lines)


@pytest.mark.slow
def test_actors_run_the_code_of_the_app_that_was_submitted(simulator: Simulator, tmp_path: Path) -> None:
    # Another checkout than the one that is installed, through a SuperLink that was started elsewhere.
    app = copy_app(tmp_path / "floret")
    changed = app / "client_app" / "methods" / "local.py"
    changed.write_text(
        changed.read_text() + "\n    def train(self) -> float:\n        return float(len(__file__))\n", encoding="utf-8"
    )
    _, directory = finished(
        simulator, 'method="local" rounds=1', "num-supernodes=2 client-resources-num-cpus=1", app=app
    )
    loss = read(directory)[1][0]["loss"]
    assert loss == int(loss)
    assert loss > 20


@pytest.mark.slow
def test_a_sweep_runs_what_is_missing_and_lets_the_validation_split_decide(
    simulator: Simulator, tmp_path: Path
) -> None:
    command = [
        *(sys.executable, "-m", "cli.main", "sweep", str(simulator.app), "--engine", "ray", "--superlink", "test"),
        *("-o", str(tmp_path / "out")),
        *("--grid", "seed=[0, 1]", "-c", 'method="local" rounds=1', "--federation-config", "num-supernodes=2"),
    ]

    def sweep() -> str:
        done = subprocess.run(command, env=simulator.env, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = sweep()
    results = json.loads((tmp_path / "out" / "sweep.json").read_text())
    found = [cell["summary"] for cell in results["runs"]]
    assert [cell["keys"]["seed"] for cell in results["runs"]] == [0, 1]
    mean = 100 * (found[0]["test"] + found[1]["test"]) / 2
    row = (tmp_path / "out" / "sweep.md").read_text().splitlines()[2]
    assert f"| 2 | {100 * (found[0]['validation'] + found[1]['validation']) / 2:.1f} ± " in row
    assert f"| {mean:.1f} ± " in row
    assert row in printed
    page = (tmp_path / "out" / "sweep.html").read_text()
    assert f"<td>{row.split(' | ')[2]}</td>" in page
    assert page.count("<svg") == 1
    before = set((tmp_path / "out").rglob("summary.json"))
    sweep()
    assert set((tmp_path / "out").rglob("summary.json")) == before
