"""What a run of the local engine shows while it goes on: a bar on a terminal, the log's lines everywhere."""

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, cast

log = logging.getLogger("flwr")


# Is told a round, and how many of its messages were sent and answered.
Show = Callable[[str, int, int], None]


def _ignored(group: str, sent: int, answered: int) -> None:
    """Show nothing: the log has a line for each round."""


@contextmanager
def display(rounds: int, clients: int) -> Iterator[Show]:
    """Show the run's progress below its log on a terminal; elsewhere the log's lines are all there is.

    Args:
        rounds: of the run.
        clients: of the federation.
    """
    if not sys.stderr.isatty():
        yield _ignored
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(file=cast(IO[str], _Terminal()), highlight=False, soft_wrap=True)
    columns = [TextColumn("{task.description}"), BarColumn(bar_width=32), TimeElapsedColumn(), TimeRemainingColumn()]
    before = log.handlers
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{clients} clients join", total=rounds)

        def show(group: str, sent: int, answered: int) -> None:
            done = int(group) - 1 + answered / max(sent, 1)
            bar.update(task, completed=done, description=f"round {group}/{rounds}, {answered} clients")

        log.handlers = [_Above(console)]
        try:
            yield show
        finally:
            log.handlers = before


class _Terminal(io.TextIOBase):
    """Standard error on a terminal, which may be closed before the run ends."""

    def __init__(self) -> None:
        # Not looked up again: while a bar is there, what is written to ``sys.stderr`` goes to it.
        self._stream = sys.stderr

    def write(self, text: str) -> int:
        """Write what can be written."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is still to be written."""
        with suppress(OSError):
            self._stream.flush()

    def fileno(self) -> int:
        """Return the terminal's number, by which its width is known."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Return True."""
        return True


class _Above(logging.Handler):
    """Prints lines above the bar."""

    def __init__(self, console: object) -> None:
        super().__init__()
        self._print = console.print  # type: ignore[attr-defined]

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        level = "" if record.levelno <= logging.INFO else f"{record.levelname}: "
        self._print(f"{level}{self.format(record)}", markup=False)
