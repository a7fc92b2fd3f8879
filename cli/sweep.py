"""``floret sweep``: a grid over any keys of the run config; the validation split decides."""

import itertools
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import click

from cli.cells import Cell, Cells, Job, Outcome, percent, run_missing
from cli.run import parse_run_config
from common.durable import write_whole
from common.errors import ConfigError, FloretError

Keys = dict[str, Any]
HEAD = ("seeds", "validation", "test after", "test before", "std over clients", "worst decile", "MB up", "MB down")


@click.command()
@click.argument("app", default=".", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--grid", "grids", multiple=True, required=True, metavar="KEY=[...]", help="Values of a key; repeatable.")
@click.option("--run-config", "-c", default="", help="Keys that are the same in every run, as for `flwr run`.")
@click.option("--federation-config", default="", help="Passed on to `flwr run`.")
@click.option("--superlink", default="", help="The SuperLink connection to run on, as for `flwr run`.")
@click.option("--keep-models", is_flag=True, help="Keep the personal models and checkpoints of each run.")
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path), help="Where runs and results go.")
def sweep(
    app: Path,
    grids: tuple[str, ...],
    run_config: str,
    federation_config: str,
    superlink: str,
    keep_models: bool,
    output: Path,
) -> None:
    """Run every combination of the --grid values, one simulation after another, and compare.

    Combinations that differ in `seed` alone are one row: mean and standard deviation over seeds. Rows are ordered by
    accuracy on the validation split. A run that is done is not run again and one that was killed goes on, so a sweep
    that was stopped is finished by the same command; a run that fails says so and the rest goes on. The results are
    printed and written to sweep.md, sweep.json and, with a plot, sweep.html.
    """
    from server_app.settings import read_config

    same = parse_run_config(run_config)
    cells = Cells(app, output, superlink)
    varied = [grid.partition("=")[0].strip() for grid in grids]
    runs = [(keys, Cell(same | keys, federation_config)) for keys in combinations(grids)]
    for _, cell in runs:
        read_config(cells.config(cell))

    def told(cell: Cell) -> str:
        summary = summary_of(cells.outcome(cell))
        return f"validation {percent([summary['validation']])}, test {percent([summary['test']])}" if summary else "-"

    jobs = [Job(cell, " ".join(f"{key}={keys[key]}" for key in varied)) for keys, cell in runs]
    failed = run_missing(cells, jobs, told, keep_models=keep_models)
    outcomes = [(keys, cells.outcome(cell)) for keys, cell in runs]
    found = rows([(keys, summary_of(outcome)) for keys, outcome in outcomes], varied)
    texts = [table_row(shown, summaries) for shown, summaries in found]
    table = markdown([*(key for key in varied if key != "seed"), *HEAD], texts)
    click.echo("\n" + table)
    write_whole(output / "sweep.md", (table + "\n").encode())
    results = [
        {"keys": keys, "summary": summary_of(outcome), **({"about": outcome.about} if outcome else {})}
        for keys, outcome in outcomes
    ]
    about = {"grid": list(grids), "run-config": run_config, "federation-config": federation_config}
    write_whole(output / "sweep.json", (json.dumps(about | {"runs": results}, indent=1) + "\n").encode())
    _write_page(varied, f"{run_config} {federation_config}".strip(), found, texts, output / "sweep.html")
    if failed:
        raise FloretError(f"{len(failed)} of {len(runs)} runs failed; see above")


def combinations(grids: Sequence[str]) -> list[Keys]:
    """Return every combination of the values of ``KEY=[...]`` texts, the last key changing fastest.

    Raises:
        ConfigError: a text is not a key and a list of values.
    """
    axes: list[list[Keys]] = []
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


def summary_of(outcome: Outcome | None) -> dict[str, Any] | None:
    """Return what a run measured in its last round, or None if it is not done.

    ``validation`` and ``test`` after and ``before`` local training, means over clients in [0, 1]; ``std`` and
    ``worst_decile`` over clients after training; ``up`` and ``down`` in bytes; ``seconds``.
    """
    if outcome is None:
        return None
    last = outcome.history[-1]["accuracy"]
    after, before = last["after"], last["before"]["test"]
    if not after["test"]:
        return None
    return {
        "validation": after["validation"] and after["validation"]["mean"],
        "test": after["test"]["mean"],
        "before": before and before["mean"],
        "std": after["test"]["std"],
        "worst_decile": after["test"]["worst_decile"],
        "up": outcome.summary["bytes"]["up"],
        "down": outcome.summary["bytes"]["down"],
        "seconds": outcome.summary["seconds"]["total"],
    }


def rows(
    runs: Sequence[tuple[Keys, dict[str, Any] | None]], varied: Sequence[str]
) -> list[tuple[Keys, list[dict[str, Any]]]]:
    """Return the summaries, those that differ in the seed alone together, best validation first."""
    grouped: dict[str, tuple[Keys, list[dict[str, Any]]]] = {}
    for keys, summary in runs:
        shown = {key: keys[key] for key in varied if key != "seed"}
        group = grouped.setdefault(json.dumps(shown), (shown, []))
        if summary is not None:
            group[1].append(summary)
    if not any(found for _, found in grouped.values()):
        raise FloretError("no run of the sweep finished; see above")
    return sorted(grouped.values(), key=lambda row: -mean([s["validation"] or 0 for s in row[1]] or [-1]))


def table_row(shown: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a row of the table; accuracies in percent, mean ± standard deviation over seeds."""
    measured = (percent([s[name] for s in found]) for name in ("validation", "test", "before", "std", "worst_decile"))
    sent = (f"{mean(s[way] for s in found) / 1e6:.1f}" if found else "-" for way in ("up", "down"))
    return [*map(str, shown.values()), str(len(found)), *measured, *sent]


def markdown(head: Sequence[str], texts: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in texts)])


def _write_page(
    varied: Sequence[str],
    conditions: str,
    found: Sequence[tuple[Keys, list[dict[str, Any]]]],
    texts: Sequence[Sequence[str]],
    path: Path,
) -> None:
    from cli.results_page import write_sweep_page

    points = [
        (
            ", ".join(f"{key}={value}" for key, value in shown.items()) or "all",
            [s["validation"] for s in summaries if s["validation"] is not None],
            [s["test"] for s in summaries],
        )
        for shown, summaries in found
        if summaries
    ]
    write_sweep_page(varied, conditions, [*(key for key in varied if key != "seed"), *HEAD], texts, points, path)
