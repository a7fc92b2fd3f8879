"""What left a node: files on the device with a line of JSON for each message that was answered.

It is written before the answer leaves. A file grows to ``_LARGEST`` bytes; then it is renamed, and the one renamed
before goes. Refusals and joining, of which a server may have as many as it likes, have a file of their own, so that
they cannot push out what left in a round.
"""

import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from common.durable import DamagedError, make_folder, open_file, read_manifest, write_manifest
from common.errors import FloretError
from common.wire import bytes_of, find_record, norm_of, payload_bytes

log = logging.getLogger("flwr")

_LARGEST = 64 * 2**20
# Characters of a text in a line; of a longer one the beginning, and how long it was.
_TEXT = 1000
# Where what is not a federation stands in a state directory; in it, where that stands which no round was counted for.
_FOLDER, _UNCOUNTED = ".audit", "uncounted"


class Audit:
    """The audit files of a client in the node's state directory.

    ``.audit/<client>.jsonl`` has the rounds, ``.audit/uncounted/<client>.jsonl`` refusals and joining.
    """

    def __init__(self, state_dir: Path, client: str) -> None:
        self._rounds = state_dir / _FOLDER / f"{client}.jsonl"
        self._others = state_dir / _FOLDER / _UNCOUNTED / f"{client}.jsonl"
        self._count = state_dir / _FOLDER / f"{client}.rounds.json"

    def write(self, message: Message, reply: RecordDict, about: dict[str, Any]) -> None:
        """Add the line of an answered message.

        The line has ``time`` (UTC), ``message`` (its kind), ``run``, ``node`` and ``round``, what is ``about`` it, and
        of what leaves: ``tensors``, a list of ``name``, ``shape``, ``bytes`` and ``norm`` (Euclidean), their ``bytes``
        together, and every other record of the reply as it is, but for what texts have beyond ``_TEXT`` characters.
        Where the message has no ``round`` that is a whole number, that is null.

        Raises:
            FloretError: it cannot be written.
        """
        arrays = {name: record for name, record in reply.items() if isinstance(record, ArrayRecord)}
        others = {
            name: dict(record) for name, record in reply.items() if isinstance(record, ConfigRecord | MetricRecord)
        }
        config = find_record(message.content, "config", ConfigRecord) if message.has_content() else None
        server_round = config.get("round") if config else None
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "message": message.metadata.message_type,
            # As text: many readers of JSON round whole numbers above 2^53.
            "run": str(message.metadata.run_id),
            "node": str(message.metadata.dst_node_id),
            "round": server_round if type(server_round) is int else None,
            **about,
            "tensors": [
                {"name": name, "shape": list(array.shape), "bytes": bytes_of(array), "norm": norm_of(array)}
                for record in arrays.values()
                for name, array in record.items()
            ],
            "bytes": sum(payload_bytes(record) for record in arrays.values()),
            "records": others,
        }
        text = json.dumps(_bounded(line)) + "\n"
        uncounted = "error" in reply or message.metadata.message_type == "query.describe"
        path = self._others if uncounted else self._rounds
        try:
            make_folder(path.parent, private=True)
            if path.exists() and path.stat().st_size + len(text) > _LARGEST:
                # A client may be called anything.1, and its file would be that.jsonl.
                path.replace(path.with_name(f"{path.name}.1"))
            with open_file(path, "ab", private=True) as file:
                # A line that a full disk cut short stays, and this one is not part of it.
                file.write(("\n" * _ends_within_a_line(path) + text).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FloretError(f"{path} cannot be written ({error.strerror}); nothing leaves without it") from error

    def count_round(self) -> int:
        """Count one more round of this day (UTC) and return how many there were with it.

        A clock that is set back does not begin a day anew.

        Raises:
            FloretError: the count cannot be read or written.
        """
        day = datetime.now(UTC).date().isoformat()
        last, count = "", 0
        try:
            if self._count.exists():
                said = read_manifest(self._count)
                last, count = str(said["day"]), int(said["rounds"])
        except (DamagedError, KeyError, TypeError, ValueError):
            last = day  # it counts from here on
        count = count + 1 if day <= last else 1
        if day < last:
            log.warning(
                "%s: counts the rounds of %s, and the clock says %s; if it was wrong then, remove the file",
                self._count,
                last,
                day,
            )
        try:
            make_folder(self._count.parent, private=True)
            write_manifest(self._count, {"day": max(day, last), "rounds": count}, private=True)
        except OSError as error:
            raise FloretError(f"{self._count} cannot be written ({error.strerror})") from error
        return count


def _bounded(value: Any) -> Any:
    """Return a part of a line with no text longer than it may be; what JSON does not know becomes a text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {name: _bounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_bounded(part) for part in value]
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}... ({len(text)} characters)"


def _ends_within_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
