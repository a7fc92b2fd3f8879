"""``flwr run --stream`` with an exit code that tells whether the run finished; its own is 0 also when the run failed.

A process of its own, with the standard library alone: it stays as long as the run does.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

# What `flwr run` prints before the log, with the number of the run.
STARTED = re.compile(rb"Successfully started run (\d+)")

_INTERRUPTED = 128 + signal.SIGINT
# Seconds that `flwr list` may take: a SuperLink that the network has cut off answers nothing.
_PATIENCE = 60.0


def main(arguments: Sequence[str]) -> int:
    """Start a run, print its log, and return the exit code.

    Args:
        arguments: the SuperLink connection, empty for Flower's default, and the command.

    Returns:
        0 if the run finished, 2 if it failed or nobody can tell, 130 if it was stopped, 128 and the signal's number if
        only its log was left, and the command's code if there is no run.
    """
    superlink, *command = arguments
    ended: list[int] = []
    # In a session of its own: a signal comes once, from here, whether a terminal sent it or `kill`.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"}, start_new_session=True
    ) as process:

        def forward(number: int, _: FrameType | None) -> None:
            ended.append(number)
            process.send_signal(number)

        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            # What was started to ignore a signal, by nohup or in a shell's background, goes on ignoring it.
            if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
                signal.signal(getattr(signal, name), forward)
        run_id = _pass_on(process)
    if not run_id:
        if process.returncode < 0:  # by a signal of that number
            return 128 - process.returncode
        return process.returncode or _say("flwr run did not say which run it started; flwr list has it", 2)
    place = [superlink] if superlink else []
    if ended:
        where = " ".join([run_id, *place])
        hints = f"flwr log {where} shows it; flwr stop {where} stops the run"
        return _say(f"run {run_id} goes on without its log here; {hints}", 128 + ended[0])
    status = _status(run_id, place)
    if status == "finished:completed":
        return 0
    if status == "finished:stopped":
        return _say(f"run {run_id} was stopped", _INTERRUPTED)
    if status == "finished:failed":
        return _say(f"run {run_id} failed; its log says why", 2)
    return _say(f"whether run {run_id} finished cannot be told: {status}", 2)


def _pass_on(process: "subprocess.Popen[bytes]") -> str:
    """Print what a process prints until it ends; return the number of the run that it started, empty if none."""
    run_id = ""
    assert process.stdout is not None
    for line in process.stdout:
        if not run_id and (found := STARTED.search(line)):
            run_id = found[1].decode()
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except OSError:  # nobody reads it any more: `head`, or a terminal that is closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            signal.raise_signal(signal.SIGTERM)
    return run_id


def _status(run_id: str, place: list[str]) -> str:
    """Return a run's status in Flower, or else why it cannot be told, and what to do."""
    command = ["flwr", "list", "--run-id", run_id, "--format", "json", *place]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        again = " ".join(["flwr list", *place])
        return f"the SuperLink does not answer within {_PATIENCE:g} s; {again} asks it again"
    said, more = done.stderr or done.stdout, ""
    with suppress(ValueError, LookupError, TypeError):  # else it is said as it is
        answer = json.loads(done.stdout)
        if "error-message" not in answer:
            return str(answer["runs"][0]["status"])
        said = str(answer["error-message"])
        more = '; start the SuperLink again and run with resume="latest" if the run did not finish'
    lines = said.strip().splitlines()
    return (lines[-1] if lines else f"flwr list ended with {done.returncode}").rstrip(".") + more


def _say(line: str, code: int) -> int:
    print(f"floret: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
