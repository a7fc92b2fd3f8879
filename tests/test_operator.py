"""An operator stops runs, unregisters nodes, and starts them in any folder."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from cli.main import floret
from tests.conftest import BIN, PATIENCE
from tests.deployment import Deployment, finish


def flwr(deployment: Deployment, *arguments: str) -> str:
    command: list[str | Path] = [BIN / "flwr", *arguments]
    done = subprocess.run(command, env=deployment.env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    said: str = done.stdout
    return said


@pytest.mark.slow
def test_a_run_that_is_stopped_leaves_its_nodes_for_the_next(deployment: Deployment) -> None:
    (node,) = deployment.nodes(1)
    for _ in range(2):  # Flower drops the answer before it is handed over, or after: both happen
        since = len(node.text())
        run = deployment.run(method="fedper", rounds=100, local_epochs=1000)
        node.wait_for(r"Receiving: train message[\s\S]*Received successfully", since=since)
        found = re.search(r"Successfully started run (\d+)", run.text())
        assert found, run.text()
        flwr(deployment, "stop", found[1], "dep")
        node.wait_for("is not in `RUNNING` status. Ignoring reply", since=since)
    finish(deployment.run(method="fedper", rounds=1, local_epochs=1))
    assert node.popen.poll() is None
    assert "Traceback" not in node.text()


@pytest.mark.slow
def test_a_node_that_is_unregistered_says_so_and_ends(tmp_path: Path) -> None:
    made = tmp_path / "made"
    floret.main(["certificates", str(made), "--host", "127.0.0.1", "--node", "north"], standalone_mode=False)
    tls: list[str | Path] = [
        *("--ssl-ca-certfile", made / "ca.crt", "--ssl-certfile", made / "superlink.crt"),
        *("--ssl-keyfile", made / "superlink.key", "--enable-supernode-auth"),
    ]
    deployment = Deployment(tmp_path / "deployment", tls)
    try:
        flwr(deployment, "supernode", "register", str(made / "nodes" / "north.pub"), "dep")
        keys = ("--root-certificates", made / "ca.crt", "--key", made / "nodes" / "north")
        node = deployment.node("north", "--partition", "0/1", *keys)
        (listed,) = json.loads(flwr(deployment, "supernode", "list", "dep", "--format", "json"))["nodes"]
        flwr(deployment, "supernode", "unregister", listed["node-id"], "dep")
        assert node.popen.wait(PATIENCE) == 2
        where = f"--superlink 127.0.0.1:{deployment.fleet}"
        assert node.text().splitlines()[-1].startswith(f"floret: {where}: does not know --key")
    finally:
        deployment.end()


@pytest.mark.slow
def test_the_folder_that_a_node_is_started_in_does_not_matter(deployment: Deployment) -> None:
    for name in ("data", "models", "common", "client_app", "cli", "strategies"):
        (deployment.folder / name).mkdir()
    (deployment.folder / "torch.py").write_text("raise SystemExit('not this one')")
    node = deployment.node("north", "--partition", "0/1")
    finish(deployment.run(method="fedper", rounds=1, local_epochs=1))
    assert node.popen.poll() is None
