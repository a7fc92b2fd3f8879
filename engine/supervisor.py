"""The process that has imported everything: it forks the server's process and the workers, and replaces those that end.

It has one thread, so that a fork is whole, and never uses CUDA, which does not survive a fork.
"""

import gc
import logging
import os
import signal
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from types import FrameType

import torch
from flwr.app import Context, RecordDict

import data
from common.errors import ConfigError, FloretError
from common.forks import at_end, ending, fork
from common.resources import count_gpus
from engine.checks import check_both_halves
from engine.display import display
from engine.grid import EngineGrid
from engine.plan import Plan
from engine.worker import work
from server_app.app import run as run_server
from server_app.settings import read_config

log = logging.getLogger("flwr")

# Exit codes: the user can correct it; as a shell has it of a process that was interrupted.
WRONG, INTERRUPTED = 2, 130


class StoppedError(BaseException):
    """The run was told to stop."""


def prepare(plan: Plan) -> None:
    """Check a run, and read its data so that all processes share them.

    Raises:
        FloretError: it cannot be run.
    """
    torch.set_num_threads(1)
    config, kind, parameters = read_config(plan.values)
    if config.threads > plan.resources.cpus:
        raise ConfigError(
            f"threads = {config.threads}: each client has {plan.resources.cpus} CPU(s); lower threads or raise "
            "client-resources-num-cpus in --federation-config"
        )
    check_both_halves(config, kind, parameters, plan.resources.clients)
    if not any(plan.resources.gpus):
        share = "client-resources-num-gpus=0.25 in --federation-config lets four share one"
        if config.device.startswith("cuda"):
            raise ConfigError(f"device = {config.device!r}: clients get no GPU; {share}")
        if config.device == "auto" and count_gpus():
            log.info("Clients compute on CPUs and get no GPU of this machine; %s", share)
    data.load_client(config, 0, plan.resources.clients)
    # What the server's process writes of the files is known before it is forked: it need not read them again.
    data.digest(config)
    # What is there now stays: the forks' collector need not go through it, which would also copy its pages.
    gc.collect()
    gc.freeze()


def run(plan: Plan) -> int:
    """Run a federation that ``prepare`` has accepted, to its end; return an exit code.

    At SIGINT, SIGTERM or SIGHUP the server's process stops in good order; at the second one everything ends at once. If
    this process is killed, its forks end with it (on Linux).
    """
    own, control = Pipe()
    server = fork(lambda: _serve(plan, control), close=[own])
    control.close()
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        os.kill(server, signal.SIGTERM if asked == 1 else signal.SIGKILL)

    before = at_end(stop) | {signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: stop())}
    workers: dict[int, int] = {}
    try:
        return _watch(plan, own, server, workers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        own.close()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        for pid in workers:
            os.waitpid(pid, 0)


def _watch(plan: Plan, own: Connection, server: int, workers: dict[int, int]) -> int:
    """Keep ``workers`` complete, by process id the slot of each, until the server's process ends; return its code."""
    for slot in range(plan.resources.workers):
        _start_worker(plan, own, server, workers, slot, "")
    while True:
        pid, status = os.waitpid(-1, 0)
        code = os.waitstatus_to_exitcode(status)
        if pid == server:
            if code < 0:
                log.error("The server's process was ended by %s", ending(code))
            return code if code >= 0 else 128 - code
        if pid not in workers:
            continue
        # However many end: each message is given up after some of them, and the server's process ends by what is lost.
        _start_worker(plan, own, server, workers, workers.pop(pid), ending(code))


def _start_worker(plan: Plan, own: Connection, server: int, workers: dict[int, int], slot: int, why: str) -> None:
    """Start a worker, and tell the server's process how to reach it and why the one before it ended."""
    near, far = Pipe()
    pid = fork(lambda: work(far, plan, slot), close=[own, near])
    workers[pid] = slot
    with suppress(OSError):  # the server's process has just ended, which is seen next
        own.send((slot, pid, why))
        send_handle(own, near.fileno(), server)
    near.close()
    far.close()


def _serve(plan: Plan, control: Connection) -> int:
    """Run the ServerApp; return an exit code."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise StoppedError

    context = Context(run_id=plan.run_id, node_id=0, node_config={}, state=RecordDict(), run_config=dict(plan.values))
    grid: EngineGrid | None = None
    try:
        signal.signal(signal.SIGTERM, stop)
        with display(int(plan.values["rounds"]), plan.resources.clients) as progress:
            grid = EngineGrid(plan, control, progress)
            try:
                run_server(grid, context)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is done, and all is written
            except FloretError as error:
                log.error("%s", error)
                return WRONG
    except StoppedError:
        resumable = grid and grid.began and plan.values["checkpoint-every"]
        again = '; resume="latest" goes on from its last checkpoint' if resumable else ""
        log.error("The run was stopped%s", again)
        return INTERRUPTED
    return 0
