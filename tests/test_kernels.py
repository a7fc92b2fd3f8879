"""Portable kernels: what the libraries of a process use, and where it is said."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.errors import FloretError
from common.kernels import kernels_in_use, variables
from results.runs import LocalEngine, RayEngine, _portable, engine_of, machine
from results.tables import environment_notes
from tests.conftest import PATIENCE
from tests.harness import ROOT

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
    assert _portable(portable) == portable
    assert _portable({**portable, "resumed": [portable, portable]}) == portable
    # A part of the run was made with others.
    assert _portable({**portable, "resumed": [portable, native]}) == {}
    assert _portable({"resumed": [portable]}) == {}
    machine = {"cpus": 2, "cpu": "A CPU", "gpus": []}
    about = {"commit": "c", "versions": {"python": "3"}, "file": None}
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
