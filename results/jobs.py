"""Make many runs, one after another or some at a time, with a display of how far they are."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.errors import FloretError, printable
from common.forks import at_end
from results.conditions import counted
from results.run import Run
from results.runs import Runs, RunSpec
from results.text import countdown


@dataclass(frozen=True)
class Job:
    """A run that is wanted.

    Attributes:
        spec: the run.
        label: its name in the progress display.
        describe: what to print of its results.
        weight: how long it takes compared with the other jobs.
    """

    spec: RunSpec
    label: str
    describe: Callable[[Run], str]
    weight: float = 1.0


def run_missing(
    runs: Runs, jobs: Sequence[Job], *, keep_models: bool, finished: Callable[[], object] = lambda: None
) -> dict[str, str]:
    """Make the runs that are not done, as many at a time as the engine makes, with a progress display.

    Args:
        runs: where they are.
        jobs: all that are wanted, also those that are done; a run that two jobs want is made once.
        keep_models: as in ``Runs.run``.
        finished: called after each run that came to its end.

    Returns:
        Why a run failed, by the name of its folder.

    Raises:
        FloretError: another program makes runs in the same folder, or another environment has the local SuperLink; or
            none is done, and all cannot be made for the same reason.
    """
    # Ended by a batch system or with its terminal, it stops its runs as at Ctrl-C.
    at_end(_interrupted)
    failed: dict[str, str] = {}
    console = Console(stderr=False, highlight=False, soft_wrap=True)
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    ]
    missing = [job for job in jobs if not runs.done(job.spec)]
    if missing:
        runs.engine.check()
    runs.engine.expect(len({runs.folder(job.spec) for job in missing}))
    checked = [(runs.check(job.spec), job) for job in missing]
    reasons = {reason for reason, _ in checked}
    if len(missing) == len(jobs) and len(reasons) == 1 and (reason := reasons.pop()):
        raise FloretError(reason)
    # Those that cannot run come first: they say why at once, not after hours of the others.
    missing = [job for _, job in sorted(checked, key=lambda one: not one[0])]
    wanted: dict[str, list[Job]] = {}
    for job in missing:
        wanted.setdefault(runs.folder(job.spec).name, []).append(job)
    time_left = _TimeLeft({name: same[0].weight for name, same in wanted.items()})
    display = Progress(*columns, TextColumn("{task.fields[left]}"), console=console, transient=True)
    stopped = threading.Event()
    with runs.exclusive(), closing(runs.engine), display as progress:
        done = len(jobs) - len(missing)
        bar = progress.add_task("runs", total=len(jobs), completed=done, left="")
        if done:
            console.print(f"{done} of {len(jobs)} runs are done")
        for text in counted(text for job in jobs for text in runs.otherwise(job.spec)):
            console.print(printable(text), markup=False)
        for job in jobs:
            if runs.done(job.spec) and (reason := _unreadable(runs, job)):
                failed[runs.folder(job.spec).name] = reason
                console.print(printable(f"{job.label}: failed: {reason}"), markup=False)

        def make(name: str) -> str:
            job = wanted[name][0]
            if runs.done(job.spec):  # another program has made it since
                return ""
            rounds = int(runs.config(job.spec)["rounds"])
            own = progress.add_task(printable(job.label), total=rounds, left="")

            def watch(finished: int) -> None:
                if stopped.is_set():
                    raise _StoppedError
                progress.update(own, completed=finished)
                progress.update(bar, left=time_left.after(name, finished / rounds))

            try:
                return runs.run(job.spec, watch, keep_models=keep_models)
            except FloretError as error:
                return str(error)
            finally:
                progress.remove_task(own)

        with ThreadPoolExecutor(runs.engine.at_once) as pool:
            try:
                going: dict[Future[str], str] = {pool.submit(make, name): name for name in wanted}
                for future in as_completed(going):
                    name, reason = going[future], future.result()
                    left = time_left.after(name, 1.0)
                    for job in wanted[name]:
                        done += 1
                        progress.advance(bar)
                        if reason := reason or _unreadable(runs, job):
                            failed[name] = reason
                        result = f"failed: {reason}" if reason else _described(runs, job)
                        result += left and f" | {left}"
                        console.print(printable(f"[{done}/{len(jobs)}] {job.label}: {result}"), markup=False)
                    if not reason:
                        finished()
            except BaseException:
                stopped.set()
                pool.shutdown(cancel_futures=True)
                raise
    return failed


def _interrupted() -> None:
    raise KeyboardInterrupt


class _StoppedError(Exception):
    """The other runs, and so this one, are stopped."""


def _unreadable(runs: Runs, job: Job) -> str:
    """Return why a run that is done cannot be read; empty if it can."""
    try:
        runs.outcome(job.spec)
    except FloretError as error:
        return str(error)
    return ""


def _described(runs: Runs, job: Job) -> str:
    outcome = runs.outcome(job.spec)
    assert outcome is not None
    refused = outcome.run.figures.refused
    return job.describe(outcome.run) + (f"; {refused} replies refused" if refused else "")


class _TimeLeft:
    """How long the rest of some runs takes if it goes on at the same pace; ``weights`` are theirs, by name."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights, self._parts = weights, dict.fromkeys(weights, 0.0)
        self._started = time.monotonic()

    def after(self, name: str, part: float) -> str:
        """Return the time left when this part of a run, up to 1, is done, too; empty where it cannot be told."""
        self._parts[name] = part
        total = sum(self._weights.values())
        done = sum(weight * self._parts[run] for run, weight in self._weights.items())
        if not done or done >= total:
            return ""
        return f"{countdown((time.monotonic() - self._started) * (total - done) / done)} left"
