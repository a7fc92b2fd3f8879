"""The ServerApp: from the run config to a run directory with its report."""

import logging
import sys
import time
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import data
from common.errors import FloretError
from common.seeds import torch_generator
from models import build_model, head_layers
from server_app.report import client_table, read_run, write_report
from server_app.rounds import Federation, query, run_rounds, summarise
from server_app.rundir import RunDirectory, versions
from server_app.settings import read_config
from strategies.core import FloretStrategy, StrategySetting, in_simulation

app = ServerApp()
log = logging.getLogger("flwr")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a federation to its end.

    Raises:
        FloretError: the config or the data cannot be used; the log ends with its line.
    """
    try:
        run(grid, context)
    except FloretError as error:
        log.error("%s", error)
        # The line says it all; Flower would log the stack of this process three times over.
        sys.tracebacklimit = 0
        raise


def run(grid: Grid, context: Context) -> None:
    """Read the config, find the clients, run the rounds, write what a run leaves behind."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    config, kind, parameters = read_config(context.run_config)
    data.check(config, files=in_simulation(grid))
    federation = Federation(grid, config)
    federation.gather()
    strategy = kind(_setting(federation, kind, parameters))
    directory = RunDirectory(config, context.run_id)
    directory.write_config(context.run_config, _about(grid, federation, context))
    history = run_rounds(grid, federation, strategy, directory)
    directory.write_summary(summarise(config, len(federation.roster), history, time.perf_counter() - started))
    if in_simulation(grid):
        nodes = [client.node_id for client in federation.roster]
        query(grid, nodes, "export", {"directory": str(directory.personal)}, config.round_timeout)
    finished = read_run(directory.path)
    write_report([finished], directory.path / "report.html")
    log.info("Accuracy per client, last round:\n%s", client_table(finished))
    log.info("Report: %s", directory.path / "report.html")


def _setting(federation: Federation, kind: type[FloretStrategy], parameters: Any) -> StrategySetting:
    config, shape = federation.config, federation.input_shape
    generator = torch_generator(config.seed, "model")
    cut = config.head_layers or head_layers(config.model, shape, kind.head)
    model = build_model(config.model, shape, federation.num_classes, cut, generator)
    return StrategySetting(config, parameters, model, cut, shape, federation.roster)


def _about(grid: Grid, federation: Federation, context: Context) -> dict[str, Any]:
    """Return what ``config.json`` says beside the config; labels are counted in simulation only, from files here."""
    labels = None
    if in_simulation(grid):
        labels = data.describe(federation.config, len(federation.roster)).label_counts.tolist()
    return {
        "run_id": str(context.run_id),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "num_classes": federation.num_classes,
        "clients": {
            client.name: {
                "samples": {"train": client.train, "validation": client.validation, "test": client.test},
                "labels": labels[place] if labels else None,
            }
            for place, client in enumerate(federation.roster)
        },
    }
