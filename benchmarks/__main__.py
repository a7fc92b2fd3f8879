"""``python -m benchmarks [NAME ...] [-o FILE] [--plot FILE]``: run benchmarks, print a table, write JSON."""

import argparse
import importlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import Row, hardware, table

NAMES = {
    "engine": "the local engine against flwr run: start, rounds, sweeps, memory, small clients",
    "simulation": "a round of flwr run with all that is around training, against the bare training of its clients",
    "methods": "a round of every method against FedAvg's, with 20 and with 100 clients",
    "scale": "a round of flwr run and its memory, from 10 to 1,000 clients",
    "server": "memory and throughput of folding replies, against numpy's in-place multiply-add",
    "latency": "seconds a round on real processes: stock Flower, Floret's app on stock nodes, Floret's nodes",
    "device": "memory of a node between rounds, and at rest",
    "training": "samples a second in local training: Floret's clients, the same written by hand, plain PyTorch",
    "threads": "clients that train at once on the same CPUs: one thread each, or as many as CPUs",
    "kernels": "local training with portable kernels, which give the same digits on other CPUs, against native ones",
    "privacy": "lower bounds of epsilon by canaries, against the claim; a private step against one without privacy",
    "gpu": "training on a CUDA device against the same by hand; rounds with several clients at once on one GPU",
}


def main() -> None:
    """Run the requested benchmarks in turn."""
    text = "; ".join(f"{name}: {what}" for name, what in NAMES.items())
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=f"Benchmarks. {text}.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all by default")
    parser.add_argument("-o", "--output", type=Path, help="write the figures as JSON here, too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures of scale as SVG here")
    parser.add_argument("--repeats", type=int, default=3, help="how often each pair is run; the median counts")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    if arguments.plot and "scale" not in (arguments.names or NAMES):
        parser.error("--plot draws the figures of scale, which is not among the benchmarks to run")
    rows: list[Row] = []
    started = time.time()
    for name in arguments.names or NAMES:
        print(f"{name}: {NAMES[name]}", file=sys.stderr, flush=True)
        rows += importlib.import_module(f"benchmarks.{name}").run(arguments.repeats)
    if not rows:
        return
    print(table(rows))
    machine = hardware()
    print(f"\n{machine['cpu']}, {machine['cores']} cores; torch {machine['torch']}, flwr {machine['flwr']}")
    if arguments.plot:
        importlib.import_module("benchmarks.scale").draw(rows, arguments.plot)
    if arguments.output:
        content = {"hardware": machine, "seconds": time.time() - started, "rows": [asdict(row) for row in rows]}
        arguments.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
