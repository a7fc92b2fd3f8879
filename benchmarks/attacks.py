"""Accuracy of honest clients beside hostile ones, for each aggregation: ``python -m benchmarks.attacks``.

Ten clients on the embedded digits; the first one or three of them attack in every round. The rows of ``none`` are a run
without attackers, its accuracy that of the same honest clients. Everything runs in this process, through the real
ServerApp and ClientApp.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, pstdev
from typing import Any
from unittest import mock

import numpy as np
from flwr.app import Message

from client_app.app import Request
from common.tensors import NamedArrays
from common.wire import from_record, to_record
from data import ClientData
from strategies.core import AGGREGATIONS
from tests.harness import ON_MLP, federate

CLIENTS = 10
FIRST_NODE = 1000
KEYS: dict[str, Any] = {"partition": "dirichlet", "alpha": 0.5, "min_samples": 20, "local_epochs": 2, "model": "mlp"}


def _scaled(sent: NamedArrays, received: NamedArrays, factor: float) -> NamedArrays:
    """Return what was received, moved by ``factor`` times the honest update."""
    scaled: NamedArrays = {}
    for name, array in sent.items():
        start = received.get(name, np.zeros_like(array))
        scaled[name] = start + np.float32(factor) * (array - start)
    return scaled


def _wrong_classes(sent: NamedArrays, received: NamedArrays) -> NamedArrays:
    """Return the honest extractor with each prototype under the name of the next class."""
    own = sorted(name for name in sent if name.startswith("prototype."))
    return {**sent, **{name: sent[other] for name, other in zip(own, own[1:] + own[:1], strict=True)}}


def _nan(sent: NamedArrays, received: NamedArrays) -> NamedArrays:
    """Return an honest reply with one value that is none."""
    name = min(sent)
    spoilt = sent[name].copy()
    spoilt.reshape(-1)[0] = np.nan
    return {**sent, name: spoilt}


Forge = Callable[[NamedArrays, NamedArrays], NamedArrays]
# What an attacker sends in the place of what it trained and was sent; label-flipping is in what it trains on.
ATTACKS: dict[str, Forge] = {
    "1e30": lambda sent, received: {name: np.full_like(array, 1e30) for name, array in sent.items()},
    "x100": lambda sent, received: _scaled(sent, received, 100.0),
    "sign-flipped": lambda sent, received: _scaled(sent, received, -1.0),
    "labels flipped": lambda sent, received: sent,
    "nan": _nan,
    "wrong prototypes": _wrong_classes,
}


@dataclass(frozen=True)
class Result:
    """Mean accuracy of the honest clients in the last round, in [0, 1]; how many replies were refused in all."""

    before: float
    after: float
    refused: int


def attacked(
    folder: Path, method: str, aggregation: str, attack: str, attackers: int, *, seed: int, rounds: int
) -> Result:
    """Run a federation in which the first ``attackers`` clients send what ``attack`` makes of their updates."""
    nodes = range(FIRST_NODE, FIRST_NODE + attackers)

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id in nodes and attack in ATTACKS:
            sent, received = (from_record(m.content.array_records["arrays"]) for m in (reply, message))
            reply.content["arrays"] = to_record(ATTACKS[attack](sent, received))
        return reply

    honest_data = vars(Request)["data"].func

    def flipped(request: Request) -> ClientData:
        data: ClientData = honest_data(request)
        if attack == "labels flipped" and request.context.node_id in nodes:
            data = replace(data, train=replace(data.train, y=data.num_classes - 1 - data.train.y))
        return data

    with mock.patch.object(Request, "data", property(flipped)):
        keys = KEYS | ON_MLP.get(method, {}) | {"method": method, "aggregation": aggregation, "trim": 0.3}
        outcome = federate(folder / "runs", CLIENTS, tamper=tamper, seed=seed, rounds=rounds, **keys)
    last = outcome.history[-1]["clients"]
    honest = [last[str(i)] for i in range(attackers, CLIENTS)]
    before = [c["before"]["test"] for c in honest if c["before"]]
    return Result(mean(before), mean(c["after"]["test"] for c in honest), outcome.summary["refused"])


def cell(results: Sequence[Result]) -> str:
    """Return before and after in percent, mean ± standard deviation over seeds."""
    texts = []
    for values in ([r.before for r in results], [r.after for r in results]):
        texts.append(f"{100 * mean(values):.1f} ± {100 * pstdev(values):.1f}")
    return " / ".join(texts)


def main(arguments: Sequence[str]) -> None:
    """Print a table for each method, as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--methods", nargs="+", default=["fedper", "fedcpd"])
    parser.add_argument("--aggregations", nargs="+", choices=AGGREGATIONS, default=AGGREGATIONS)
    options = parser.parse_args(arguments)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    for method in options.methods:
        print(f"\n{method}: accuracy of the honest clients before / after local training, percent\n")
        print("| attack | attackers | " + " | ".join(options.aggregations) + " |")
        print("|---|---|" + "---|" * len(options.aggregations))
        for attack in ("none", *ATTACKS):
            if attack == "wrong prototypes" and method != "fedcpd":
                continue
            for attackers in (0, 1, 3) if attack == "none" else (1, 3):
                row = []
                for aggregation in options.aggregations:
                    with tempfile.TemporaryDirectory() as folder:
                        what = (Path(folder), method, aggregation, attack, attackers)
                        seeds = range(options.seeds)
                        row.append(cell([attacked(*what, seed=seed, rounds=options.rounds) for seed in seeds]))
                print(f"| {attack} | {attackers} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
