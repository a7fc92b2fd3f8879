"""The rounds of a run: train and evaluate, write history and checkpoints, tell the user how it goes."""

import logging
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from common.config import RunConfig
from common.wire import from_record, to_record
from server_app.checkpoint import Checkpoint, Mail
from server_app.federation import Federation
from server_app.metrics import accuracies
from server_app.rundir import RunDirectory, versions
from server_app.trackers import Trackers
from strategies.core import ClientResult, FloretStrategy, send_and_receive

log = logging.getLogger("flwr")


def run_rounds(
    grid: Grid,
    federation: Federation,
    strategy: FloretStrategy,
    directory: RunDirectory,
    trackers: Trackers,
    checkpoint: Checkpoint,
    joined: Callable[[], None],
) -> list[dict[str, Any]]:
    """Run the rounds after ``checkpoint``.

    Args:
        grid: what messages go through.
        federation: the clients.
        strategy: the method's server half, as of the checkpoint.
        directory: where history and checkpoints go.
        trackers: who is told of each round.
        checkpoint: from where to go on; of round 0 for a new run.
        joined: called when there are new clients.

    Returns:
        The whole history, a dictionary a round, as in ``history.jsonl``.
    """
    config = strategy.config
    arrays = to_record(checkpoint.arrays)
    history = directory.read_history(checkpoint.round)
    for line in history:
        trackers.round(line)
    begun = time.perf_counter() - checkpoint.seconds
    known = len(federation.roster)
    strategy.summary()
    for server_round in range(checkpoint.round + 1, config.rounds + 1):
        started = time.perf_counter()
        _await_clients(federation)
        if len(federation.roster) > known:
            known = len(federation.roster)
            joined()
        arrays = _train(grid, strategy, arrays, server_round)
        last = server_round == config.rounds
        if server_round % config.evaluate_every == 0 or last:
            messages = strategy.configure_evaluate(server_round, arrays, ConfigRecord(), grid)
            strategy.aggregate_evaluate(server_round, send_and_receive(grid, messages, config.round_timeout))
        line = history_line(server_round, strategy, time.perf_counter() - started)
        directory.append_history(line)
        history.append(line)
        if config.checkpoint_every and (server_round % config.checkpoint_every == 0 or last):
            seconds = time.perf_counter() - begun
            directory.write_checkpoint(checkpoint_of(server_round, from_record(arrays), strategy, federation, seconds))
            strategy.session.checkpointed = server_round
        # After the checkpoint: what a tracker was told cannot always be taken back.
        trackers.round(line)
        left = median(line["seconds"] for line in history) * (config.rounds - server_round)
        log.info("%s", log_line(line, config.rounds, left))
    return history


def checkpoint_of(
    server_round: int, arrays: dict[str, Any], strategy: FloretStrategy, federation: Federation, seconds: float
) -> Checkpoint:
    """Return the server as it is after ``server_round``, ``seconds`` into the run."""
    return Checkpoint(
        round=server_round,
        lineage=strategy.session.lineage,
        resumed=strategy.session.resumed,
        arrays=arrays,
        strategy=strategy.state_dict(),
        mail={
            client: Mail(sent, partial(strategy.post.__getitem__, client))
            for client, sent in strategy.post.rounds().items()
        },
        clients=list(federation.roster),
        about=federation.about(),
        seconds=seconds,
    )


def restore(strategy: FloretStrategy, checkpoint: Checkpoint) -> None:
    """Bring a strategy to where it was when ``checkpoint`` was written."""
    strategy.load_state_dict(checkpoint.strategy)
    for client, mail in checkpoint.mail.items():
        strategy.post.load(client, mail.round, mail.tensors())
    strategy.session.checkpointed = checkpoint.round
    strategy.session.resumed = (*checkpoint.resumed, checkpoint.round)


def _await_clients(federation: Federation) -> None:
    """Take in who came and who left; where nobody is there, wait as long as for the answers of a round."""
    deadline = time.monotonic() + federation.config.round_timeout
    federation.refresh()
    if not federation.roster.present():
        log.warning("No client is connected; waiting for one")
    while not federation.roster.present() and time.monotonic() < deadline:
        time.sleep(0.2)
        federation.refresh()


def _train(grid: Grid, strategy: FloretStrategy, arrays: ArrayRecord, server_round: int) -> ArrayRecord:
    messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
    replies = send_and_receive(grid, messages, strategy.config.round_timeout)
    new, _ = strategy.aggregate_train(server_round, replies)
    return arrays if new is None else new


def history_line(server_round: int, strategy: FloretStrategy, seconds: float) -> dict[str, Any]:
    """Return what ``history.jsonl`` says of a round."""
    results = strategy.results
    losses = [result.metrics["loss"] for result in results.values() if result.trained]
    return {
        "round": server_round,
        "clients": {name: _client_entry(result) for name, result in results.items()},
        "accuracy": accuracies(results.values()),
        "loss": sum(losses) / len(losses) if losses else None,
        "bytes": {
            "up": sum(result.up for result in results.values()),
            "down": sum(result.down for result in results.values()),
        },
        "refused": [{"client": name, "reason": reason} for name, reason in strategy.refused],
        "notes": [{"client": name, "note": line} for name, line in strategy.notes],
        "seconds": seconds,
    }


def _client_entry(result: ClientResult) -> dict[str, Any]:
    def measured(when: str) -> dict[str, float | None] | None:
        values = {split: result.metrics.get(f"{when}.{split}") for split in ("test", "validation")}
        return values if any(value is not None for value in values.values()) else None

    return {
        "trained": result.trained,
        "before": measured("before"),
        "after": measured("after"),
        "loss": result.metrics["loss"] if result.trained else None,
        "bytes": {"up": result.up, "down": result.down},
        "seconds": result.metrics.get("seconds"),
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
