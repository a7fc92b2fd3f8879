"""The rounds of a run: find the clients, train and evaluate, write history, tell the user how it goes."""

import logging
import time
from statistics import median
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from common.config import RunConfig
from common.errors import FloretError, one_line
from common.wire import to_record
from server_app.metrics import accuracies
from server_app.rundir import RunDirectory, versions
from strategies.core import Client, FloretStrategy, Report, Roster, exchange

log = logging.getLogger("flwr")


def query(grid: Grid, nodes: list[int], action: str, config: dict[str, str], timeout: float) -> list[Message]:
    """Ask ``nodes`` one thing and return their replies, in the order of ``nodes``."""
    content = RecordDict({"config": ConfigRecord(dict(config))})
    messages = [Message(content, node, f"{MessageType.QUERY}.{action}", ttl=timeout) for node in nodes]
    return list(exchange(grid, messages, timeout))


class Federation:
    """The clients as they describe themselves, and what their data have in common."""

    def __init__(self, grid: Grid, config: RunConfig) -> None:
        self.grid = grid
        self.config = config
        self.roster = Roster()
        self.input_shape: tuple[int, ...] = ()
        self.num_classes = config.num_classes
        self._partitions = 0

    def gather(self) -> None:
        """Wait until ``min-clients`` have joined, in simulation all of them.

        Raises:
            FloretError: they did not within ``round-timeout``, or a client cannot take part.
        """
        deadline = time.monotonic() + self.config.round_timeout
        while True:
            refused = self.refresh()
            if refused:
                raise FloretError(refused[0])
            wanted = max(self.config.min_clients, self._partitions)
            if len(self.roster) >= wanted:
                return
            if time.monotonic() > deadline:
                raise FloretError(
                    f"{len(self.roster)} of {wanted} clients joined within round-timeout = "
                    f"{self.config.round_timeout:g} s; see min-clients"
                )
            time.sleep(0.1)

    def refresh(self) -> list[str]:
        """Ask nodes that are new who they are; return why a client cannot take part, a line each.

        The very first is asked alone: what is wrong for it, such as a dataset that is not there, is wrong for all.
        """
        new = sorted(node for node in self.grid.get_node_ids() if not self.roster.known(node))
        new = new if self.roster else new[:1]
        refused = []
        for reply in query(self.grid, new, "describe", {}, self.config.round_timeout) if new else []:
            try:
                self._add(reply)
            except FloretError as error:
                refused.append(str(error))
        return refused

    def _add(self, reply: Message) -> None:
        if reply.has_error():
            raise FloretError(f"a client failed: {one_line(reply.error.reason)}")
        records = reply.content.config_records
        if "error" in records:
            raise FloretError(str(records["error"]["reason"]))
        said: dict[str, Any] = dict(records["client"])
        name, shape = str(said["name"]), tuple(said["input-shape"])
        if self.input_shape and shape != self.input_shape:
            raise FloretError(f"client {name}: input shape {shape}, the federation's is {self.input_shape}")
        self.input_shape = shape
        if not self.config.num_classes:
            self.num_classes = max(self.num_classes, int(said["num-classes"]))
        self._partitions = max(self._partitions, int(said["partitions"]))
        samples = {split: int(said[split]) for split in ("train", "validation", "test")}
        self.roster.add(Client(name, reply.metadata.src_node_id, **samples))


def run_rounds(
    grid: Grid, federation: Federation, strategy: FloretStrategy, directory: RunDirectory
) -> list[dict[str, Any]]:
    """Run all rounds; return the history, a dictionary a round, as in ``history.jsonl``."""
    config = strategy.config
    arrays = to_record(strategy.initial_arrays())
    history: list[dict[str, Any]] = []
    strategy.summary()
    for server_round in range(1, config.rounds + 1):
        started = time.perf_counter()
        for reason in federation.refresh():
            log.warning("A new client cannot take part: %s", reason)
        arrays = _train(grid, strategy, arrays, server_round)
        if server_round % config.evaluate_every == 0 or server_round == config.rounds:
            messages = strategy.configure_evaluate(server_round, arrays, ConfigRecord(), grid)
            strategy.aggregate_evaluate(server_round, exchange(grid, messages, config.round_timeout))
        line = history_line(server_round, strategy, time.perf_counter() - started)
        directory.append_history(line)
        history.append(line)
        left = median(line["seconds"] for line in history) * (config.rounds - server_round)
        log.info("%s", log_line(line, config.rounds, left))
    return history


def _train(grid: Grid, strategy: FloretStrategy, arrays: ArrayRecord, server_round: int) -> ArrayRecord:
    messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
    replies = exchange(grid, messages, strategy.config.round_timeout)
    new, _ = strategy.aggregate_train(server_round, replies)
    return arrays if new is None else new


def history_line(server_round: int, strategy: FloretStrategy, seconds: float) -> dict[str, Any]:
    """Return what ``history.jsonl`` says of a round."""
    reports = strategy.reports
    losses = [report.metrics["loss"] for report in reports.values() if report.trained]
    return {
        "round": server_round,
        "clients": {name: _client_entry(report) for name, report in reports.items()},
        "accuracy": accuracies(reports.values()),
        "loss": sum(losses) / len(losses) if losses else None,
        "bytes": {
            "up": sum(report.up for report in reports.values()),
            "down": sum(report.down for report in reports.values()),
        },
        "refused": [{"client": name, "reason": reason} for name, reason in strategy.refused],
        "seconds": seconds,
    }


def _client_entry(report: Report) -> dict[str, Any]:
    def measured(when: str) -> dict[str, float | None] | None:
        values = {split: report.metrics.get(f"{when}.{split}") for split in ("test", "validation")}
        return values if any(value is not None for value in values.values()) else None

    return {
        "trained": report.trained,
        "before": measured("before"),
        "after": measured("after"),
        "loss": report.metrics["loss"] if report.trained else None,
        "bytes": {"up": report.up, "down": report.down},
        "seconds": report.metrics.get("seconds"),
    }


def log_line(line: dict[str, Any], rounds: int, left: float) -> str:
    """Return the one line that the log says of a round."""

    def accuracy(when: str) -> str:
        test = line["accuracy"][when]["test"]
        return f"{when} {test['mean']:.3f} ±{test['std']:.3f}" if test else f"{when} -"

    loss = "-" if line["loss"] is None else f"{line['loss']:.4f}"
    size = " ".join(f"{way} {line['bytes'][way] / 1e6:.3f} MB" for way in ("up", "down"))
    refused = f" | {len(line['refused'])} refused" if line["refused"] else ""
    return (
        f"round {line['round']}/{rounds} | accuracy {accuracy('before')}, {accuracy('after')} | loss {loss} | {size}"
        f" | {line['seconds']:.1f} s, {_duration(left)} left{refused}"
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def summarise(config: RunConfig, clients: int, history: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return ``summary.json``: accuracies on the test split in the last round."""
    last = history[-1]["accuracy"]
    judged = [
        line
        for line in history
        if line["accuracy"]["after"]["validation"] and len(line["clients"]) == len(history[-1]["clients"])
    ]
    best = max(judged, key=lambda line: line["accuracy"]["after"]["validation"]["mean"], default=None)
    return {
        "method": config.method,
        "dataset": config.dataset,
        "model": config.model,
        "partition": config.partition,
        "clients": clients,
        "rounds": config.rounds,
        "seed": config.seed,
        "accuracy": {when: last[when]["test"] for when in ("after", "before")},
        "best_validation": best and {"round": best["round"], "test_mean": best["accuracy"]["after"]["test"]["mean"]},
        "bytes": {way: sum(line["bytes"][way] for line in history) for way in ("up", "down")},
        "seconds": {"total": seconds, "per_round_median": median(line["seconds"] for line in history)},
        "refused": sum(len(line["refused"]) for line in history),
        "versions": versions(),
    }
