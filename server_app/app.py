"""The ServerApp: from the run config to a run directory with its report."""

import json
import logging
import secrets
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from safetensors.numpy import save

import data
from common.accuracies import EXACT
from common.config import RunConfig, own_keys
from common.durable import digest, write_manifest, write_whole
from common.errors import ConfigError, FloretError
from common.extras import require
from common.flower import find_by_node, is_simulated, notice_stop
from common.kernels import NATIVE, kernels_in_use
from common.memory import return_freed_memory
from common.names import natural_key
from common.privacy.calibration import drawn_in_secret
from common.privacy.ledger import Ledger
from common.simulation import LocalGrid
from common.starts import Start
from common.versions import versions
from results.history import History, Round
from results.report import client_table, write_report
from results.run import Run, Summary
from results.rundir import RunDirectory, read_about
from results.status import StatusWriter
from results.trackers import Trackers, trackers_of
from server_app.checkpoint import Checkpoint, Checkpoints
from server_app.delivery import Delivery, bound_of
from server_app.federation import Federation, question
from server_app.rounds import checkpoint_of, restore, run_rounds
from server_app.settings import check_resumable, check_rounds_left, read_config
from server_app.setup import build_strategy, check_setup
from strategies.core import Client, ExportReply, RefusedError, Session, send_and_receive

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
        raise error from None


def run(grid: Grid, context: Context) -> None:
    """Read the config, find the clients, run the rounds, write what a run leaves behind."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    return_freed_memory()
    require("matplotlib", "server", "the report of a run")
    config, kind, parameters = read_config(context.run_config)
    simulated = is_simulated(grid)
    if simulated and not isinstance(grid, LocalGrid):
        find_by_node(grid)
        notice_stop()
    for doubt in check_setup(config, kind, parameters, len(list(grid.get_node_ids())) if simulated else None):
        log.warning("%s", doubt)
    trackers = Trackers(trackers_of(config))
    federation = Federation(grid, config)
    directory, origin = _start(config, context, simulated)
    checkpoints = Checkpoints(directory.checkpoints)
    checkpoint = _resume(directory, checkpoints, federation) if config.resume else None
    if checkpoint:
        origin["resumed"][-1]["round"] = checkpoint.round
    session = Session(f"{context.run_id:016x}", starts=_starts(origin), run_directory=directory.path)
    if checkpoint:
        session.lineage, session.checkpointed = checkpoint.lineage, checkpoint.round
        session.resumed = (*checkpoint.resumed, checkpoint.round)
    if drawn_in_secret(config.privacy):
        federation.run = session.scalars()  # who joins pays for rounds in which it is not drawn, too
    with directory, trackers, StatusWriter(directory.path, config.method, config.dataset, config.rounds) as status:
        trackers.begin(own_keys(context.run_config), directory.path, checkpoint.round if checkpoint else 0)
        status.phase("waiting for clients")
        federation.gather(status.gathering)
        if simulated and checkpoint:
            _check_same_clients(checkpoint.clients, list(federation.roster))
        federation.settled = True
        # A resumed run's clients are in files, also if it writes no checkpoints from here on.
        if simulated and (config.checkpoint_every or checkpoint) and not isinstance(grid, LocalGrid):
            session.directory = str(directory.clients)
        if simulated and checkpoint:
            _bring_back(grid, directory, checkpoint, config, session)
        shape, classes = federation.input_shape, federation.num_classes
        strategy = build_strategy(config, kind, parameters, shape, classes, roster=federation.roster, session=session)
        if strategy.protection and config.privacy.by_server:
            done = checkpoint.round if checkpoint else 0
            strategy.protection.keep(Ledger(directory.path / "privacy.jsonl"), session, done)
        if checkpoint:
            restore(strategy, checkpoint)
        else:
            checkpoint = checkpoint_of(0, strategy.initial_arrays(), strategy, federation, 0.0, {})
            if config.checkpoint_every:
                checkpoints.write(checkpoint)

        def write_config() -> None:
            directory.write_config(context.run_config, {**origin, **_about(federation, simulated)})

        directory.reopen()
        write_config()
        deliver = grid if simulated else Delivery(grid, federation, bound=bound_of(strategy.uplink(strategy.setup)))
        rounds = tuple(
            run_rounds(
                deliver, federation, strategy, directory, checkpoints, trackers, status, checkpoint, write_config
            )
        )
        seconds = checkpoint.seconds + time.perf_counter() - started
        last = rounds[-1].round if rounds else 0
        ended = last if last < config.rounds else None
        figures = History(rounds, last, config.evaluate_every).figures(seconds)
        own = sum(client.own for client in federation.roster)
        telling = Counter(client.accuracies for client in federation.roster)
        summary = Summary(config, len(federation.roster), figures, own, ended, telling)
        if simulated and (missing := export(grid, federation, directory.personal, session)):
            _tell_missing(missing, rounds, session)
        finished = Run.of(directory.path, directory.about, rounds, figures, ended)
        write_report([finished], directory.path / "report.html")
        # Last: a run that has one is finished, and is not resumed any more.
        directory.write_summary(summary)
        log.info("Accuracy per client, last round:\n%s", client_table(finished))
        log.info("Report: %s", directory.path / "report.html")
        _check_used(rounds)
        trackers.finish(summary)


def _check_used(rounds: Sequence[Round]) -> None:
    """Check that something was learned.

    Raises:
        FloretError: every reply of every round was refused; tells why the last one was.
    """
    refused = [refusal for line in rounds for refusal in line.refused]
    if refused and not any(client.trained for line in rounds for client in line.clients.values()):
        last = refused[-1]
        raise FloretError(
            f"no reply of any round was used, so nothing was learned; see the report. Client {last.client} was refused "
            f"last: {last.reason}"
        )


def _start(config: RunConfig, context: Context, simulated: bool) -> tuple[RunDirectory, dict[str, Any]]:
    """Return a new run directory, or that of the run to resume; and how the run began."""
    now: dict[str, Any] = {"run_id": str(context.run_id), "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    # Flower's run id may come again where the SuperLink's own files were copied or lost.
    now["start"] = secrets.token_hex(8)
    now["versions"] = versions()
    if kernels_in_use() != NATIVE:
        now["kernels"] = kernels_in_use()
    digest = data.digest(config) if simulated else None
    if digest:
        now["digest"] = digest
    if not config.resume:
        return RunDirectory.new(config, context.run_id, simulated), now
    directory = RunDirectory.find(config)
    check_resumable(directory.path, context.run_config)
    before = read_about(directory.path)
    had = before.get("digest", digest)
    if had != digest:
        raise ConfigError(
            f"resume: the run to resume read other data (SHA-256 {had}...) than data-dir = {config.data_dir} has "
            f"({digest}...); give the same"
        )
    kept = ("run_id", "started", "start", "versions", "kernels", "digest")
    origin = {key: before[key] for key in kept if key in before}
    return directory, origin | {"resumed": [*before.get("resumed", []), now]}


def _starts(origin: Mapping[str, Any]) -> tuple[Start, ...]:
    """Return the starts of the server that ``config.json`` has, of whatever version it is."""
    found = [Start(str(origin.get("start", "")))]
    for resumed in origin.get("resumed", []):
        found.append(Start(str(resumed.get("start", "")), int(resumed.get("round", 0))))
    return tuple(found)


def _resume(directory: RunDirectory, checkpoints: Checkpoints, federation: Federation) -> Checkpoint:
    """Return the last checkpoint of the run to resume, and bring the federation to where it was then.

    Raises:
        FloretError: there is none, or nothing is left to run.
    """
    config = federation.config
    checkpoint, damaged = checkpoints.read()
    for reason in damaged:
        log.warning("%s; going back to round %d", reason, checkpoint.round)
    check_rounds_left(directory.path, config.rounds, checkpoint.round)
    federation.restore(checkpoint.about, checkpoint.clients)
    log.info("Resuming %s after round %d", directory.path, checkpoint.round)
    return checkpoint


def _check_same_clients(before: Sequence[Client], now: Sequence[Client]) -> None:
    """Check that a simulation is resumed with the clients that it had, by their names and numbers of samples.

    Raises:
        ConfigError: it is not.
    """
    parts = [{client.name: (client.train, client.validation, client.test) for client in one} for one in (before, now)]
    if parts[0] != parts[1]:
        had, has = (f"{len(part)} clients with {sum(map(sum, part.values()))} samples" for part in parts)
        raise ConfigError(
            f"resume: the run to resume had {had}, now there are {has}; give the same --federation-config and data"
        )


def _bring_back(
    grid: Grid, directory: RunDirectory, checkpoint: Checkpoint, config: RunConfig, session: Session
) -> None:
    """Give the clients of a simulation what they kept when ``checkpoint`` was written, by whichever engine."""
    if isinstance(grid, LocalGrid):
        grid.adopt(directory.clients, session.lineage, session.checkpointed, session.resumed, session.starts)
        grid.restore(checkpoint.states)
        return
    # On Ray clients keep versions in files: the state becomes the newest one.
    for name, state in checkpoint.states.items():
        folder = directory.clients / config.federation / config.method / name
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.stem) for path in folder.glob("[0-9]*.json")), default=0)
        about = json.loads(state.manifest) | {"bytes": len(state.tensors), "sha256": digest(state.tensors)}
        write_whole(folder / f"{number:08d}.safetensors", state.tensors, sync=False)
        write_manifest(folder / f"{number:08d}.json", about, sync=False)


def _about(federation: Federation, simulated: bool) -> dict[str, Any]:
    """Return what ``config.json`` says of the clients; labels are counted in simulation only, from files here.

    Numbers of samples that were not told are None.
    """
    labels = None
    if simulated:
        labels = data.describe(federation.config, len(federation.roster)).label_counts.tolist()
    return {
        "num_classes": federation.num_classes,
        "clients": {
            client.name: {
                "samples": {
                    split: getattr(client, split) if federation.told else None
                    for split in ("train", "validation", "test")
                },
                "labels": labels[place] if labels else None,
                **({"own": True} if client.own else {}),
                **({} if client.accuracies == EXACT else {"accuracies": client.accuracies}),
            }
            for place, client in enumerate(federation.roster)
        },
    }


def _tell_missing(missing: Mapping[str, str], rounds: Sequence[Round], session: Session) -> None:
    """Tell which personal models were not exported, by client why.

    Raises:
        FloretError: the run can be resumed after its last round, and then exports them.
    """
    if rounds and session.checkpointed == rounds[-1].round:
        name = min(missing, key=natural_key)
        raise FloretError(
            f"{len(missing)} personal models were not exported, that of client {name}: {missing[name]}; resume the "
            "run, and it exports them again"
        )
    for name in sorted(missing, key=natural_key):
        log.error("The personal model of client %s was not exported: %s", name, missing[name])


def export(grid: Grid, federation: Federation, folder: Path, session: Session) -> dict[str, str]:
    """Let the clients of a simulation write their personal models into ``folder``, or write what they send.

    One that says it has none, since its state is damaged, is logged.

    Returns:
        Why a model that there is was not written, by client; when it is asked for again, it may be.
    """
    timeout = federation.config.round_timeout
    config = ConfigRecord({**session.scalars(), "round": federation.config.rounds, "directory": str(folder)})
    messages = [question(client.node_id, "export", config, timeout) for client in federation.roster]
    missing = {client.name: f"no answer within {timeout:g} s" for client in federation.roster}
    for reply in send_and_receive(grid, messages, timeout):
        name = federation.roster.at(reply.metadata.src_node_id).name
        del missing[name]
        try:
            answer = ExportReply.read(reply)
            if answer.unwritten:
                missing[name] = answer.unwritten
            elif answer.model is not None:
                write_whole(folder / f"{name}.safetensors", save(answer.model), sync=False)
        except RefusedError as reason:
            log.error("The personal model of client %s was not exported: %s", name, reason)
        except OSError as error:
            missing[name] = f"{error.filename} cannot be written ({error.strerror})"
    return missing
