"""A page on this machine that shows runs as they go: ``floret watch``.

The server listens on 127.0.0.1 alone and serves two things, the page and what is new since the page asked last. Both
need the token of the address, which no other page and no other user of the machine knows; a request that came by
another host name (DNS rebinding) is refused. No part of a request is ever the path of a file.
"""

import base64
import hashlib
import hmac
import json
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.client import HTTP_PORT
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from common.errors import FloretError
from results.follow import BUDGET, CLIENT, ROUND, Follower
from results.history import Json
from results.report import labels
from results.status import FILE
from results.watch_page import PAGE, SCRIPT, STYLE

# Runs that one page shows: the newest.
MOST_RUNS = 60
_RUN_FILES = ("config.json", FILE)


class Board:
    """The runs that a page shows.

    Args:
        find: returns their directories; called at each look, because runs begin while the page is open.
    """

    def __init__(self, find: Callable[[], Sequence[Path]]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._runs: dict[Path, tuple[int, Follower]] = {}
        self._ids = 0

    def news(self, seen: Mapping[int, tuple[int, int]]) -> Json:
        """Return what a page does not have.

        Args:
            seen: by the number of a run, the generation and the last round that the page has.
        """
        with self._lock:
            for directory in (found := _newest(self._find())):
                if directory not in self._runs:
                    self._ids += 1
                    self._runs[directory] = (self._ids, Follower(directory))
            self._runs = {directory: self._runs[directory] for directory in found}
            budget = BUDGET
            for _, follower in self._runs.values():
                budget = max(1, budget - follower.look(budget))
            return {
                "columns": {"round": ROUND, "client": CLIENT},
                "runs": [
                    {"id": number, "label": label, **follower.news(*seen.get(number, (0, 0)))}
                    for (number, follower), label in zip(self._runs.values(), self._labels(), strict=True)
                ],
            }

    def _labels(self) -> list[str]:
        """Return a name for each run that tells it from the others."""
        followers = [follower for _, follower in self._runs.values()]
        known = [follower.run for follower in followers if follower.run]
        named = dict(zip([run.directory for run in known], labels(known), strict=True))
        return [named.get(follower.directory, follower.directory.name) for follower in followers]


def directories(runs: Sequence[str], folder: Path) -> Callable[[], list[Path]]:
    """Return a function that finds the run directories to watch, in order.

    Args:
        runs: each is a run directory, the name of one in ``folder``, or the output of a sweep or an experiment, whose
            runs are all meant; none: the newest run in ``folder``, whichever that is when the function is called.
        folder: where run directories are.

    Raises:
        FloretError: one of ``runs`` is none of these; or there is none, and ``folder`` can be no folder.
    """
    if not runs:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise FloretError(f"--output-dir {folder}: {there} is a file; name the folder in which run directories are")
        return lambda: _runs_in(folder)[-1:]
    places = [_place(run, folder) for run in runs]

    def find() -> list[Path]:
        return list(dict.fromkeys(path for place in places for path in runs_at(place)))

    return find


def _place(run: str, folder: Path) -> Path:
    for path in (Path(run).expanduser(), folder / run):
        if _is_run(path) or (path / "cells").is_dir():
            return path.resolve()
    raise FloretError(f"{run}: neither a run directory nor the name of one in {folder}, nor the output of a sweep")


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in _RUN_FILES)


def _runs_in(folder: Path) -> list[Path]:
    return sorted({path.parent for name in _RUN_FILES for path in folder.glob(f"*/{name}")})


def runs_at(place: Path) -> list[Path]:
    """Return a run directory, or the newest run of each cell of a sweep or an experiment, as they began; else none."""
    if _is_run(place):
        return [place]
    return sorted((runs[-1] for cell in (place / "cells").glob("*") if (runs := _runs_in(cell))), key=_began)


def _began(run: Path) -> tuple[str, Path]:
    """Return what sorts runs by their beginning: a run's folder is named after it, that of its cell is not."""
    return run.name, run


def _newest(runs: Sequence[Path]) -> list[Path]:
    """Return the newest ``MOST_RUNS`` runs, in the order given."""
    newest = set(sorted(runs, key=_began)[-MOST_RUNS:])
    return [run for run in runs if run in newest]


class WatchServer(ThreadingHTTPServer):
    """Serves the page and its data on 127.0.0.1.

    Args:
        board: the runs.
        port: 0 for any that is free.

    Attributes:
        token: without it a request gets nothing.

    Raises:
        FloretError: the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, board: Board, port: int) -> None:
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise FloretError(f"--port {port}: cannot be used ({reason})") from error
        self.board, self.token = board, secrets.token_urlsafe(24)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def __enter__(self) -> Self:
        return self

    def server_bind(self) -> None:
        """Bind, without asking for the name of 127.0.0.1, as ``HTTPServer`` does: that may wait for a network."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a page that was closed while it was answered is no error."""


def _allowed(kind: str, text: str) -> str:
    """Return the source of a Content-Security-Policy that allows ``text`` and nothing else."""
    return f"{kind} 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_PAGE = PAGE.replace("{style}", STYLE).replace("{script}", SCRIPT).encode()
HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            _allowed("script-src", SCRIPT),
            _allowed("style-src", STYLE),
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    server: WatchServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "floret", ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer with the page, its data, or why not."""
        if self.headers.get_all("Host", []) not in [[host] for host in hosts(self.server.server_port)]:
            named = " or ".join(f"http://{host}/" for host in hosts(self.server.server_port))
            return self._say(HTTPStatus.FORBIDDEN, f"the address must begin with {named}")
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        token = query.get("token", [""])[-1]
        if not hmac.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            return self._say(
                HTTPStatus.FORBIDDEN, "the token is missing or wrong: use the address that floret watch prints"
            )
        if parts.path == "/":
            return self._send(HTTPStatus.OK, "text/html; charset=utf-8", _PAGE)
        if parts.path == "/data":
            news = self.server.board.news(_seen(query.get("seen", [""])[-1]))
            content = json.dumps(news, allow_nan=False, separators=(",", ":")).encode()
            return self._send(HTTPStatus.OK, "application/json", content)
        return self._say(HTTPStatus.NOT_FOUND, "there is nothing here")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no GET, or no HTTP."""
        self.close_connection = True
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._say(status, "only GET is answered" if status == HTTPStatus.METHOD_NOT_ALLOWED else status.phrase)

    def log_message(self, *_: Any) -> None:
        """Print nothing: the token is in the requests."""

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)


def hosts(port: int) -> list[str]:
    """Return what the address of the page may have as its host: without the port where it is that of HTTP."""
    names = ["127.0.0.1", "localhost"]
    return [f"{name}:{port}" for name in names] + (names if port == HTTP_PORT else [])


def _seen(text: str) -> dict[int, tuple[int, int]]:
    """Read ``number.generation.round`` of each run, separated by commas; what is not that is left out."""
    found = (re.fullmatch(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})", part, re.ASCII) for part in text.split(",")[:MOST_RUNS])
    return {int(match[1]): (int(match[2]), int(match[3])) for match in found if match}
