"""Portable kernels: what the libraries of a process use, and where it is said."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from cli.main import floret
from common.errors import FloretError
from common.kernels import kernels_in_use, variables
from results.conditions import kernels_of, machine
from results.engines import LocalEngine, RayEngine, engine_of
from results.jobs import Job, run_missing
from results.measured import MeasuredRun, dumped
from results.runs import Runs, RunSpec
from results.tables import environment_notes
from tests.conftest import PATIENCE
from tests.harness import ROOT
from tests.writing import WritingEngine

# What each library computes with, as it says itself; the last lines have MKL and oneDNN name theirs.
ASK = """
import json, numpy, torch
from common.kernels import kernels_in_use
from client_app.runtime import training_type
torch.cpu._is_amx_tile_supported = lambda: True
found = numpy.show_config(mode="dicts")["SIMD Extensions"]["found"]
auto = str(training_type("auto", torch.device("cpu")))
print(json.dumps([kernels_in_use(), torch.backends.cpu.get_cpu_capability(), auto, found]))
a = torch.ones(64, 64)
a @ a
torch.nn.functional.conv2d(torch.ones(8, 8, 32, 32), torch.ones(8, 8, 3, 3))
"""


def ask(kernels: str) -> tuple[list[object], str]:
    """Return what a process with these kernels says of itself, and what oneDNN and MKL print of their calls."""
    env = os.environ | variables(kernels) | {"ONEDNN_VERBOSE": "1", "MKL_VERBOSE": "1"}
    command = [sys.executable, "-c", ASK]
    text = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True)
    (said,) = [line for line in text.stdout.splitlines() if line.startswith("[")]
    answer: list[object] = json.loads(said)
    return answer, text.stdout


def test_every_library_is_held_to_avx2() -> None:
    (kernels, capability, auto, found), log = ask("portable")
    assert (kernels, capability, auto) == ("portable", "AVX2", "torch.float32")
    assert isinstance(found, list)
    assert {"X86_V3", "AVX2"}.intersection(found)
    assert not [name for name in found if "512" in name or name == "X86_V4"]
    assert "isa:Intel AVX2\n" in log
    assert "avx512" not in log
    assert "CNR:COMPATIBLE" in log


def test_native_kernels_are_left_alone() -> None:
    assert variables("native") == {}
    (kernels, _, auto, found), log = ask("native")
    assert (kernels, auto) == ("native", "torch.bfloat16")
    assert found == np.show_config(mode="dicts")["SIMD Extensions"]["found"]
    assert "CNR:OFF" in log


def test_the_kernels_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_in_use() == "native"
    for name, value in variables("portable").items():
        monkeypatch.setenv(name, value)
    assert kernels_in_use() == "portable"
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert kernels_in_use() == "native"


def test_where_they_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(engine_of("ray", ROOT, "", "native"), RayEngine)
    with pytest.raises(FloretError, match="--kernels portable: the SuperLink's processes are running already; use"):
        engine_of("ray", ROOT, "", "portable")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(FloretError, match="--kernels portable: needs an x86-64 CPU with AVX2; this is aarch64"):
        LocalEngine(ROOT, "portable")


def test_what_a_table_says_of_them() -> None:
    portable, native = {"kernels": "portable"}, dict[str, str]()
    assert kernels_of(portable) == portable
    assert kernels_of({**portable, "resumed": [portable, portable]}) == portable
    # A part of the run was made with others.
    assert kernels_of({**portable, "resumed": [portable, native]}) == {}
    assert kernels_of({"resumed": [portable]}) == {}
    machine = {"cpus": 2, "cpu": "A CPU", "gpus": []}
    about = {"commit": "c", "versions": {"python": "3"}, "file": None, "digest": None}
    notes = environment_notes([about | {"machine": machine}, about | {"machine": machine | portable}])
    assert notes[1] == "Machine: 2 CPUs, A CPU; 2 CPUs, A CPU, portable kernels."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\n", "AMD EPYC (family 25, model 17)"),
        ("processor\t: 0\nCPU part\t: 0xd40\n", ""),
        ("", ""),
    ],
)
def test_generations_of_a_cpu_are_told_apart(monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert machine()["cpu"] == said


def test_a_run_says_with_which_it_was_made(tmp_path: Path) -> None:
    command = [*(sys.executable, "-m", "cli.main", "run", str(ROOT), "--kernels", "portable")]
    config = f'output-dir="{tmp_path}" method="fedper" rounds=1 local-epochs=1'
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("floret: --kernels portable: the SuperLink's processes are")
    made = subprocess.run(
        [*command, "--engine", "local", "--run-config", config],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    (file,) = tmp_path.glob("*/config.json")
    assert json.loads(file.read_text())["kernels"] == "portable"


SPEC = RunSpec({"method": "fedper", "rounds": 1}, "num-supernodes=2")


def made(output: Path, engine: WritingEngine, *, exact: bool = False) -> Runs:
    """Make the run, if it is missing."""
    runs = Runs(ROOT, output, lambda *_: None, engine, exact=exact)
    assert not run_missing(runs, [Job(SPEC, "One", lambda _: "")], keep_models=False)
    return runs


def test_a_run_that_is_done_with_other_kernels_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    made(tmp_path, WritingEngine())
    assert "of these runs" not in capsys.readouterr().out
    for kernels, line in (
        ("native", ""),
        ("portable", "1 of these runs were made with native kernels, and portable ones are asked for"),
        ("", ""),  # those of a SuperLink are not known
    ):
        engine = WritingEngine(kernels)
        made(tmp_path, engine)
        assert not engine.made
        assert [text for text in capsys.readouterr().out.splitlines() if "of these runs" in text] == [line] * bool(line)


def test_a_run_that_is_verified_has_the_same_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    made(tmp_path, WritingEngine())
    engine = WritingEngine("portable", after=0.75)
    runs = made(tmp_path, engine, exact=True)
    made(tmp_path, engine, exact=True)
    assert len(engine.made) == 1
    outcome = runs.outcome(SPEC)
    assert outcome is not None
    assert (outcome.about["machine"]["kernels"], outcome.run.figures.after.mean) == ("portable", 0.75)


def test_a_run_is_told_of_though_its_program_was_killed_when_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it stands what an earlier run measured, made with other kernels; that is another run."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    made(tmp_path, WritingEngine())
    (about,) = tmp_path.rglob("cell.json")
    earlier = about.read_bytes()
    engine = WritingEngine("portable", after=0.75)
    made(tmp_path, engine, exact=True)
    about.write_bytes(earlier)
    runs = made(tmp_path, engine, exact=True)
    assert len(engine.made) == 1
    outcome = runs.outcome(SPEC)
    assert outcome is not None
    assert (outcome.about["machine"]["kernels"], outcome.run.figures.after.mean) == ("portable", 0.75)


@pytest.mark.parametrize(("kernels", "goes_on"), [("native", True), ("portable", False)])
def test_a_run_that_was_stopped_goes_on_with_the_same_kernels_where_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, goes_on: bool
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    made(tmp_path, WritingEngine())
    (summary,) = tmp_path.rglob("summary.json")
    summary.unlink()
    (summary.parent / "checkpoints").mkdir()
    (summary.parent / "checkpoints" / "round-1.json").write_text("{}")
    engine = WritingEngine(kernels)
    made(tmp_path, engine, exact=True)
    assert [values["resume"] for values in engine.made] == [str(summary.parent) if goes_on else ""]


def test_verify_makes_runs_with_the_kernels_of_the_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is there with others is made again."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    made(tmp_path / "there", WritingEngine())
    runs = made(tmp_path / "file", WritingEngine("portable", after=0.75))
    outcome = runs.outcome(SPEC)
    assert outcome is not None
    about = {"row": "One", "column": "A", "seed": 0}
    file = tmp_path / "results.json"
    file.write_text(json.dumps(dumped([(about, MeasuredRun.of(outcome, "after", 1))], 1)))
    engine = WritingEngine("portable", after=0.75)
    monkeypatch.setattr("results.engines.engine_of", lambda *_: engine)
    done = CliRunner().invoke(floret, ["verify", str(file), "-o", str(tmp_path / "there")], catch_exceptions=False)
    assert len(engine.made) == 1
    assert "One | A | seed 0: agrees" in done.output
