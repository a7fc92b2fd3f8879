"""What `pip install .` puts on a machine works there without a checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install this checkout's wheel into a folder, without its dependencies, and return the folder."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-compile"]
    subprocess.run([*pip, "--target", folder, ROOT], check=True, timeout=120)
    return folder


def said(folder: Path, *arguments: str, at: Path) -> str:
    """Return what ``floret`` of the packages in ``folder`` prints, started in ``at``."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "FLORET_HOME": str(at)}
    command = [sys.executable, "-P", "-m", "cli.main", *arguments]
    done = subprocess.run(command, cwd=at, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("arguments", [["policy"], ["policy", "-c", "rounds=3 num-classes=10"], ["list"]])
def test_a_machine_without_a_checkout_is_told_the_same(installed: Path, tmp_path: Path, arguments: list[str]) -> None:
    assert said(installed, *arguments, at=tmp_path) == said(ROOT, *arguments, at=tmp_path)
