"""``floret sweep``: a grid over any keys of the run config; the validation split decides."""

import hashlib
import itertools
import json
import os
import platform
import subprocess
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import click

from cli.run import default_config, merged, parse_run_config
from common.errors import ConfigError, FloretError

Cell = dict[str, Any]


@click.command()
@click.argument("app", default=".", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--grid", "grids", multiple=True, required=True, metavar="KEY=[...]", help="Values of a key; repeatable.")
@click.option("--run-config", "-c", default="", help="Keys that are the same in every cell, as for `flwr run`.")
@click.option("--federation-config", default="", help="Passed on to `flwr run`.")
@click.option("--superlink", default="", help="The SuperLink connection to run on, as for `flwr run`.")
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path), help="Where runs and results go.")
def sweep(
    app: Path, grids: tuple[str, ...], run_config: str, federation_config: str, superlink: str, output: Path
) -> None:
    """Run every combination of the --grid values, one simulation after another, and compare.

    Cells that differ in `seed` alone are one row: mean and standard deviation over seeds. Rows are ordered by accuracy
    on the validation split. A cell that is done is not run again, so a sweep that was stopped goes on; a cell that
    fails says so and the rest goes on. The results are printed and written to sweep.md and sweep.json.
    """
    from server_app.rundir import versions
    from server_app.settings import read_config

    same = parse_run_config(run_config)
    defaults = default_config(app)
    cells = [same | cell for cell in combinations(grids)]
    for cell in cells:
        read_config(merged(defaults, cell))
    command = ["flwr", "run", str(app), *([superlink] if superlink else []), "--stream"]
    if federation_config:
        command += ["--federation-config", federation_config]
    # Other clients are other cells.
    runs = output.resolve() / "cells" / digest(federation_config)
    runs.mkdir(parents=True, exist_ok=True)
    varied = [grid.partition("=")[0].strip() for grid in grids]
    durations: list[float] = []
    for place, cell in enumerate(cells, 1):
        label = " ".join(f"{key}={cell[key]}" for key in varied)
        if summary_of(runs, cell) is None:
            started = time.monotonic()
            run_cell(command, runs, cell)
            durations.append(time.monotonic() - started)
        left = round(mean(durations) * (len(cells) - place)) if durations else 0
        click.echo(f"[{place}/{len(cells)}] {label}: {told(runs, cell)} | {left // 60}:{left % 60:02d} left")
    table = markdown(rows(runs, cells, varied), varied)
    click.echo("\n" + table)
    (output / "sweep.md").write_text(table + "\n", encoding="utf-8")
    results = [{"keys": cell, "summary": summary_of(runs, cell)} for cell in cells]
    about = {
        "grid": list(grids),
        "run-config": run_config,
        "federation-config": federation_config,
        "commit": commit(app),
        "machine": f"{os.cpu_count()} CPUs, {platform.processor() or platform.machine()}",
        "versions": versions(),
    }
    (output / "sweep.json").write_text(json.dumps(about | {"cells": results}, indent=1) + "\n", encoding="utf-8")


def combinations(grids: Sequence[str]) -> list[Cell]:
    """Return every combination of the values of ``KEY=[...]`` texts, the last key changing fastest.

    Raises:
        ConfigError: a text is not a key and a list of values.
    """
    axes: list[list[Cell]] = []
    for text in grids:
        key, _, values = text.partition("=")
        try:
            listed = tomllib.loads(f"values = {values}")["values"]
        except tomllib.TOMLDecodeError:
            listed = None
        if not isinstance(listed, list) or not listed:
            raise ConfigError(f"--grid {text!r}: must be like 'alpha=[0.1, 0.5]' or 'method=[\"fedper\", \"pfakd\"]'")
        axes.append([{key.strip(): value} for value in listed])
    return [{key: value for part in cell for key, value in part.items()} for cell in itertools.product(*axes)]


def digest(value: Any) -> str:
    """Return a short name that depends on ``value`` alone."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def run_cell(command: Sequence[str], runs: Path, cell: Cell) -> None:
    """Run one cell to its end; its log goes to its folder."""
    folder = runs / digest(cell)
    folder.mkdir(parents=True, exist_ok=True)
    keys = " ".join(f"{key}={json.dumps(value)}" for key, value in (cell | {"output-dir": str(folder)}).items())
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        subprocess.run([*command, "--run-config", keys], stdout=log, stderr=subprocess.STDOUT, check=False)


def summary_of(runs: Path, cell: Cell) -> dict[str, Any] | None:
    """Return what a finished run of the cell measured in its last round, or None if there is none.

    ``validation`` and ``test`` after and ``before`` local training, means over clients in [0, 1]; ``std`` and
    ``worst_decile`` over clients after training; ``up`` and ``down`` in bytes; ``seconds``.
    """
    for file in sorted((runs / digest(cell)).glob("*/summary.json")):
        summary = json.loads(file.read_text(encoding="utf-8"))
        last = json.loads((file.parent / "history.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        after, before = last["accuracy"]["after"], last["accuracy"]["before"]["test"]
        if after["test"]:
            return {
                "validation": after["validation"] and after["validation"]["mean"],
                "test": after["test"]["mean"],
                "before": before and before["mean"],
                "std": after["test"]["std"],
                "worst_decile": after["test"]["worst_decile"],
                "up": summary["bytes"]["up"],
                "down": summary["bytes"]["down"],
                "seconds": summary["seconds"]["total"],
            }
    return None


def told(runs: Path, cell: Cell) -> str:
    """Return what is said of a cell when its turn is over."""
    summary = summary_of(runs, cell)
    if summary is None:
        return f"failed, see {runs / digest(cell) / 'log.txt'}"
    return f"validation {_percent([summary['validation']])}, test {_percent([summary['test']])}"


def rows(runs: Path, cells: Sequence[Cell], varied: Sequence[str]) -> list[tuple[Cell, list[dict[str, Any]]]]:
    """Return the summaries of the cells, those that differ in the seed alone together, best validation first."""
    grouped: dict[str, tuple[Cell, list[dict[str, Any]]]] = {}
    for cell in cells:
        shown = {key: cell[key] for key in varied if key != "seed"}
        group = grouped.setdefault(json.dumps(shown), (shown, []))
        summary = summary_of(runs, cell)
        if summary is not None:
            group[1].append(summary)
    if not any(found for _, found in grouped.values()):
        raise FloretError("no cell of the sweep finished; see the log.txt of each under cells/")
    return sorted(grouped.values(), key=lambda row: -mean([s["validation"] or 0 for s in row[1]] or [-1]))


def markdown(table: Sequence[tuple[Mapping[str, Any], list[dict[str, Any]]]], varied: Sequence[str]) -> str:
    """Return the results as a Markdown table; accuracies in percent, mean ± standard deviation over seeds."""
    keys = [key for key in varied if key != "seed"]
    head = [
        *keys,
        "seeds",
        "validation",
        "test after",
        "test before",
        "std over clients",
        "worst decile",
        "MB up",
        "MB down",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for shown, found in table:
        measured = [
            *(_percent([s[name] for s in found]) for name in ("validation", "test", "before", "std", "worst_decile")),
            *(f"{mean(s[way] for s in found) / 1e6:.1f}" if found else "-" for way in ("up", "down")),
        ]
        lines.append("| " + " | ".join([*(str(shown[key]) for key in keys), str(len(found)), *measured]) + " |")
    return "\n".join(lines)


def commit(app: Path) -> str:
    """Return the commit of the app's folder, with ``-dirty`` if it differs; empty if it is not a git checkout."""
    command = ["git", "-C", str(app), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _percent(values: Sequence[float | None]) -> str:
    measured = [100 * value for value in values if value is not None]
    if not measured:
        return "-"
    return f"{mean(measured):.1f}" + (f" ± {pstdev(measured):.1f}" if len(measured) > 1 else "")
