"""Round latency: two nodes, one local step, loopback; stock Flower against Floret."""

import json
import re
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Row, pair
from tests.deployment import BIN, Deployment, finish

ROUNDS = 5
STOCK = Path(__file__).parent / "stock_app"
# Every sample in one batch: one step.
ONE_STEP: dict[str, Any] = {
    "method": "fedavg",
    "local_epochs": 1,
    "batch_size": 2000,
    "min_clients": 2,
    "rounds": ROUNDS,
}


def run(repeats: int) -> list[Row]:
    """Return the rows of this benchmark."""
    samples = [(_floret_nodes(), _stock_app(), _stock_nodes()) for _ in range(repeats)]
    stock = [(ours, theirs) for ours, theirs, _ in samples]
    app = [(ours, theirs) for ours, _, theirs in samples]
    meaning = "times less than"
    return [
        pair("a round: floret node, stock Flower app and nodes", "s", stock, f"{meaning} stock", inverse=True),
        pair("a round: floret node, the same app on stock nodes", "s", app, f"{meaning} stock nodes", inverse=True),
    ]


def _floret_nodes() -> float:
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder) / "floret")
        try:
            deployment.nodes(2)
            finish(deployment.run(**ONE_STEP), 300)
            return _per_round(deployment)
        finally:
            deployment.end()


def _stock_nodes() -> float:
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder) / "stock")
        try:
            _start_stock(deployment)
            finish(deployment.run(**ONE_STEP), 600)
            return _per_round(deployment)
        finally:
            deployment.end()


def _stock_app() -> float:
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder) / "app")
        try:
            _start_stock(deployment)
            options = ["--stream", "--run-config", f"rounds={ROUNDS}"]
            process = deployment.start("stock-run", [BIN / "flwr", "run", STOCK, "dep", *options])
            process.wait_for(r"seconds a round: \S+", 600)
            found = re.search(r"seconds a round: (\S+)", process.text())
            assert found
            return float(found[1])
        finally:
            deployment.end()


def _start_stock(deployment: Deployment) -> None:
    for i in range(2):
        config = {"client-name": f"c{i}", "partition-id": i, "num-partitions": 2}
        config["state-dir"] = str(deployment.folder / f"state-c{i}")
        process = deployment.start(
            f"stock-{i}",
            [
                *(BIN / "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{deployment.fleet}"),
                *("--clientappio-api-address", "127.0.0.1:0"),
                *("--node-config", " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())),
            ],
        )
        process.wait_for("SuperNode ID", 60)


def _per_round(deployment: Deployment) -> float:
    seconds = [line["seconds"] for line in deployment.history()]
    print(f"  seconds of rounds: {' '.join(f'{s:.2f}' for s in seconds)}", file=sys.stderr, flush=True)
    return float(median(seconds))
