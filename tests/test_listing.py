"""``floret list methods`` says of methods what their classes declare to share."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cli.sharing import groups
from client_app.policy import setup_of
from common.home import importing_from
from common.registry import load_class
from common.tensors import Free
from server_app.settings import read_config
from strategies import METHODS
from strategies.core import FloretStrategy
from tests.conftest import PATIENCE
from tests.harness import ROOT, copy_app, run_config


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_listed_by_what_its_class_declares(tmp_path: Path, method: str) -> None:
    (title,) = [title for title, methods in groups().items() if method in methods]
    config, _, own = read_config(run_config(tmp_path, method=method))
    kind = load_class("strategies", method, FloretStrategy)
    setup = setup_of(replace(config, model="cnn2"), kind, own, (1, 28, 28), 10)
    sent, received = kind.uplink(setup), kind.downlink(setup)
    specs = [*sent.values(), *received.values()]
    part = {"model-without-batch-norm": "the model without batch normalisation"}.get(kind.shares, f"the {kind.shares}")
    assert (part in title) == (kind.shares != "nothing")
    assert ("prototypes" in title) == any(name.startswith("prototype.") for name in {*sent, *received})
    assert ("networks beside the model" in title) == any(n.shared for n in kind.networks(setup).values())
    assert ("sparse" in title) == any(spec.sparse for spec in specs)
    assert ("factors" in title) == any(isinstance(side, Free) for spec in specs for side in spec.shape)
    assert ("passed on" in title) == kind.relays
    assert (title == "nothing") == (not specs)


def test_groups_have_every_method_once() -> None:
    listed = [method for methods in groups().values() for method in methods]
    assert sorted(listed) == sorted(METHODS)
    assert "fedper" in groups()["the extractor"]


def test_a_full_disk_that_the_output_goes_to_is_told() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-P", "-m", "cli.main", "list", "methods"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (2, "floret: the output cannot be written (No space left on device)\n")


def test_a_method_whose_file_cannot_be_read_is_listed_and_says_why(tmp_path: Path) -> None:
    app = copy_app(tmp_path / "floret")
    (app / "strategies" / "fedper.py").write_text('"""FedPer."""\n\ndef (\n')
    (app / "strategies" / "new.py").write_text('"""New: a server half is still to come."""\n')
    (app / "strategies" / "latin.py").write_bytes(b"# \xe9\n")

    def floret(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-P", "-m", "cli.main", *arguments]
        return subprocess.run(command, env=importing_from(app), capture_output=True, text=True, timeout=PATIENCE)

    done = floret("list", "methods")
    assert done.stderr == ""
    listed = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert listed[listed.index("share what cannot be read from their files:") + 1 :] == [
        "fedper cannot be read: invalid syntax (fedper.py, line 3)",
        "latin cannot be read: 'utf-8' codec can't decode byte 0xe9 in position 2: invalid continuation byte",
        "new New: a server half is still to come.",
    ]
    assert "fedavg FedAvg" in " | ".join(listed)
    done = floret("run", str(app), "--engine", "local", "-c", 'method="fedper"')
    assert done.returncode == 2
    line = "floret: strategies/fedper.py: cannot be imported (SyntaxError: invalid syntax (fedper.py, line 3))\n"
    assert done.stderr == line
