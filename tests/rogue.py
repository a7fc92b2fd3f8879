"""``floret node`` that corrupts its client's replies. Arguments as of ``floret node``.

The environment variable ``ROGUE`` is a list of faults, one for each train message in turn (the last one stays).
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message

from cli.main import main
from client_app.node import tasks
from common.wire import from_record, to_record

honest = tasks._answer
faults = os.environ["ROGUE"].split(",")


def nan(arrays: dict[str, np.ndarray]) -> None:
    name = next(iter(arrays))
    arrays[name] = np.full_like(arrays[name], np.nan)


def shape(arrays: dict[str, np.ndarray]) -> None:
    name = next(iter(arrays))
    arrays[name] = arrays[name][..., :-1]


def unknown(arrays: dict[str, np.ndarray]) -> None:
    arrays["extra"] = np.zeros(3, dtype=np.float32)


def missing(arrays: dict[str, np.ndarray]) -> None:
    arrays.pop(next(iter(arrays)))


SPOIL: dict[str, Callable[[dict[str, np.ndarray]], None]] = {
    "nan": nan,
    "shape": shape,
    "unknown": unknown,
    "missing": missing,
}


def answer(message: Message, context: Context, *rest: Any) -> Message:
    reply = honest(message, context, *rest)
    if message.metadata.message_type != "train":
        return reply
    fault = faults.pop(0) if len(faults) > 1 else faults[0]
    if fault == "twice":
        return honest(message, context, *rest)
    if fault in SPOIL:
        arrays = {name: array.copy() for name, array in from_record(reply.content.array_records["arrays"]).items()}
        SPOIL[fault](arrays)
        record: ArrayRecord = to_record(arrays)
        reply.content["arrays"] = record
    elif fault == "negative":
        reply.content.metric_records["metrics"]["num-examples"] = -5
    return reply


if __name__ == "__main__":
    tasks._answer = answer  # type: ignore[assignment]
    sys.argv[0] = "floret"
    main()
