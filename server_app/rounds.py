"""The rounds of a run: train, evaluate, write history and checkpoint, log a line."""

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from common.errors import FloretError
from common.names import without_prefix
from common.simulation import KeptState, LocalGrid
from common.wire import to_record, views
from results.history import SPLITS, ClientRound, Note, Refusal, Round, Scores, Traffic, evaluates_all
from results.rundir import RunDirectory
from results.status import StatusWriter
from results.text import countdown
from results.trackers import Trackers
from server_app.checkpoint import Checkpoint, Checkpoints, Mail
from server_app.federation import RENEWAL, Federation
from strategies.core import ClientResult, FloretStrategy, SpoolError, send_and_receive

log = logging.getLogger("flwr")

# Under what names a checkpoint has the usual sizes of updates, beside what the strategy remembers.
NORMS = "norms/"
# ... and what clients have said that they spent on privacy.
PRIVACY = "privacy/"


def run_rounds(
    grid: Grid,
    federation: Federation,
    strategy: FloretStrategy,
    directory: RunDirectory,
    checkpoints: Checkpoints,
    trackers: Trackers,
    status: StatusWriter,
    checkpoint: Checkpoint,
    joined: Callable[[], None],
) -> list[Round]:
    """Run the rounds after ``checkpoint``.

    Args:
        grid: what messages go through.
        federation: the clients.
        strategy: the method's server half, as of the checkpoint.
        directory: where the history goes.
        checkpoints: where checkpoints go.
        trackers: are sent each round.
        status: is told what the run is doing.
        checkpoint: from where to go on; of round 0 for a new run.
        joined: called when there are new clients, or some have other data.

    Returns:
        The whole history, the rounds before the checkpoint included.
    """
    config = strategy.config
    arrays = to_record(checkpoint.arrays)
    history = directory.read_history(checkpoint.round)
    for line in history:
        trackers.round(line)
    begun = time.perf_counter() - checkpoint.seconds
    known = described(federation)
    strategy.watcher = status
    strategy.summary()

    def keep(server_round: int) -> None:
        seconds = time.perf_counter() - begun
        kept = grid.states() if isinstance(grid, LocalGrid) else {}
        checkpoints.write(checkpoint_of(server_round, views(arrays), strategy, federation, seconds, kept))
        strategy.session.checkpointed = server_round

    started = time.perf_counter()
    for server_round in range(checkpoint.round + 1, config.rounds + 1):
        status.round(server_round)
        status.phase("waiting for clients")
        _await_clients(federation)
        if described(federation) != known:
            known = described(federation)
            joined()
        if _spent(strategy):
            _tell_spent(strategy, server_round - 1)
            break
        arrays = _train(grid, strategy, arrays, server_round, status)
        spent = server_round < config.rounds and _spent(strategy)
        last = spent or server_round == config.rounds
        if last or evaluates_all(server_round, config.rounds, config.evaluate_every):
            messages = strategy.configure_evaluate(server_round, arrays, ConfigRecord(), grid)
            status.phase("evaluating", strategy.awaited)
            strategy.aggregate_evaluate(server_round, send_and_receive(grid, messages, config.round_timeout))
        status.phase("writing")
        strategy.notes += federation.departures()
        # With the checkpoint of the round before, which is written after its line.
        ended = time.perf_counter()
        line = round_of(server_round, strategy, ended - started)
        started = ended
        directory.append_history(line)
        history.append(line)
        if config.checkpoint_every and (server_round % config.checkpoint_every == 0 or last):
            keep(server_round)
        # After the checkpoint: a round that is run again cannot be deleted from every tracker.
        trackers.round(line)
        left = median(line.seconds for line in history) * (config.rounds - server_round)
        log.info("%s", log_line(line, config.rounds, left))
        if spent:
            _tell_spent(strategy, server_round)
            break
    # Whoever had something left may have gone away since the last round.
    if history and config.checkpoint_every and strategy.session.checkpointed < history[-1].round:
        keep(history[-1].round)
    return history


def checkpoint_of(
    server_round: int,
    arrays: dict[str, Any],
    strategy: FloretStrategy,
    federation: Federation,
    seconds: float,
    states: Mapping[str, KeptState],
) -> Checkpoint:
    """Return the server as it is after ``server_round``, ``seconds`` into the run.

    ``states`` are what clients keep if the grid keeps it for them.
    """
    return Checkpoint(
        round=server_round,
        lineage=strategy.session.lineage,
        resumed=strategy.session.resumed,
        arrays=arrays,
        strategy=strategy.state_dict()
        | {NORMS + group: a for group, a in strategy.norms.state_dict().items()}
        | ({PRIVACY + n: a for n, a in strategy.protection.state_dict().items()} if strategy.protection else {}),
        mail={
            client: Mail(sent, partial(strategy.post.__getitem__, client))
            for client, sent in strategy.post.rounds().items()
        },
        clients=list(federation.roster),
        about=federation.about(),
        seconds=seconds,
        states=states,
    )


def restore(strategy: FloretStrategy, checkpoint: Checkpoint) -> None:
    """Bring a strategy to where it was when ``checkpoint`` was written."""
    strategy.norms.load_state_dict(without_prefix(checkpoint.strategy, NORMS))
    if strategy.protection:
        strategy.protection.load_state_dict(without_prefix(checkpoint.strategy, PRIVACY))
    own = {n: a for n, a in checkpoint.strategy.items() if not n.startswith((NORMS, PRIVACY))}
    strategy.load_state_dict(own)
    for client, mail in checkpoint.mail.items():
        strategy.post.load(client, mail.round, mail.tensors())


def described(federation: Federation) -> dict[str, tuple[int | bool | str, ...]]:
    """Return what ``config.json`` has of the clients by name, as they say it: their data, how they tell accuracies."""
    said = ("train", *SPLITS, "own", "accuracies")
    return {client.name: tuple(getattr(client, one) for one in said) for client in federation.roster}


def _await_clients(federation: Federation) -> None:
    """Refresh the roster; while no client is connected, wait for one, at most ``round-timeout`` seconds.

    Clients that are asked again what they have are waited for, too, a few seconds: they would be refused once more.
    """
    started = time.monotonic()
    deadline = started + federation.config.round_timeout
    federation.refresh()
    # Nodes that come and go in turn are asked again without an end.
    while federation.renewing and time.monotonic() < min(started + RENEWAL, deadline):
        time.sleep(0.05)
        federation.refresh()
    if not federation.roster.present():
        log.warning("No client is connected; waiting for one")
    while not federation.roster.present() and time.monotonic() < deadline:
        time.sleep(0.2)
        federation.refresh()


def _spent(strategy: FloretStrategy) -> bool:
    """Return whether nobody who is there, or ever was if nobody is, has enough left of the budget for another round."""
    clients = strategy.roster.present() or list(strategy.roster)
    return strategy.protection is not None and strategy.protection.over(clients)


def _tell_spent(strategy: FloretStrategy, done: int) -> None:
    epsilon, rounds = strategy.config.privacy.epsilon, strategy.config.rounds
    log.warning("privacy.epsilon = %g is spent after round %d of %d; the run ends here", epsilon, done, rounds)


def _train(
    grid: Grid, strategy: FloretStrategy, arrays: ArrayRecord, server_round: int, status: StatusWriter
) -> ArrayRecord:
    status.phase("preparing")
    messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
    status.phase("training", strategy.awaited)
    replies = send_and_receive(grid, messages, strategy.config.round_timeout)
    try:
        new, _ = strategy.aggregate_train(server_round, replies)
    except SpoolError as error:
        checkpointed = strategy.session.checkpointed
        again = f"; resumed, the run goes on after round {checkpointed}" if strategy.config.checkpoint_every else ""
        raise FloretError(f"round {server_round}: {error}{again}") from error
    return arrays if new is None else new


def round_of(server_round: int, strategy: FloretStrategy, seconds: float) -> Round:
    """Return the round that the strategy has just finished; it took ``seconds``."""
    results = strategy.results
    sent = {name: Traffic(strategy.received[name], strategy.sent[name]) for name in strategy.sent}
    return Round.of(
        server_round,
        {name: _client_round(result, sent.pop(name, Traffic())) for name, result in results.items()},
        {name: {split: getattr(result.client, split) for split in SPLITS} for name, result in results.items()},
        [Refusal(name, reason) for name, reason in strategy.refused],
        [Note(name, note) for name, note in strategy.notes],
        seconds,
        strategy.protection.epsilon if strategy.protection else None,
        list(sent.values()),
        bounded=not strategy.roster.trusted,
    )


def _client_round(result: ClientResult, traffic: Traffic) -> ClientRound:
    def measured(when: str) -> Scores:
        return Scores(**{split: result.metrics.get(f"{when}.{split}") for split in SPLITS})

    return ClientRound(
        trained=result.trained,
        before=measured("before"),
        after=measured("after"),
        loss=result.metrics.get("loss") if result.trained else None,
        bytes=traffic,
        seconds=result.metrics.get("seconds"),
        peers=result.peers,
        epsilon=result.metrics.get("epsilon"),
    )


def log_line(line: Round, rounds: int, left: float) -> str:
    """Return the log's line on a round, of ``rounds`` in all; ``left`` is how many seconds the rest will take."""

    def accuracy(when: str) -> str:
        test = line.accuracy(when)
        return f"{when} -" if test.mean is None else f"{when} {test.mean:.3f} ±{test.std:.3f}"

    loss = "-" if line.loss is None else f"{line.loss:.4f}"
    size = f"up {line.bytes.up / 1e6:.3f} MB down {line.bytes.down / 1e6:.3f} MB"
    refused = f" | {len(line.refused)} refused" if line.refused else ""
    epsilon = "" if line.epsilon is None else f" | epsilon {line.epsilon:.3g}"
    return (
        f"round {line.round}/{rounds} | accuracy {accuracy('before')}, {accuracy('after')} | loss {loss} | {size}"
        f" | {line.seconds:.1f} s, {countdown(left)} left{epsilon}{refused}"
    )
