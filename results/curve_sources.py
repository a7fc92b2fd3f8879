"""What ``floret curve`` draws: the runs of sweeps, of tables and of run directories, each point with its keys."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.durable import read_plain
from common.errors import FloretError, printable
from results.history import is_number, whole
from results.measured import ENVIRONMENT, LARGEST, MeasuredRun, loaded, thin_curve
from results.report import differences, value_of
from results.run import Run
from results.sweep import unread
from results.tables import environment_notes

# KEY for accuracy over rounds, which no run config has.
ROUND = "round"
MEASURES = {"after": "test", "before": "before", "worst decile": "worst_decile"}
_LONGEST = 100_000  # characters of the keys of a sweep
# Of one machine, and no part of what was run.
_PATHS = re.compile(r"""(?<![\w.-])(data-dir|output-dir|resume|tracker)\s*=\s*("[^"]*"|'[^']*')\s*""")
# The file that it is of, the keys, and what was measured.
Point = tuple[Path, Mapping[str, Any], Mapping[str, Any]]


class TableRun(NamedTuple):
    """A run of a table."""

    row: str
    column: str
    run: MeasuredRun


class Source(NamedTuple):
    """What a panel gets from a sweep, from a column of a table, or from single runs.

    Attributes:
        runs: what was measured; over rounds each of them.
        unfinished: the keys of runs that no sweep has finished.
        about: of each run that says it.
        kept: what the study keeps of it.
    """

    runs: Sequence[Point]
    unfinished: Sequence[Mapping[str, Any]]
    about: Sequence[Mapping[str, Any]]
    kept: Mapping[str, Any]


def of_sweep(file: Path, *, over_rounds: bool) -> Source:
    """Read a sweep.json.

    Raises:
        FloretError: it cannot be read, or is of a version that kept no curves where they are wanted.
    """
    try:
        sweep = json.loads(read_plain(file, LARGEST))
        done = [run for run in sweep["runs"] if run["summary"]]
        failed = [dict(run["keys"]) for run in sweep["runs"] if not run["summary"]]
        grid = [printable(each, _LONGEST) for each in sweep.get("grid", ())]
        configs = {part: sweep.get(part, "") for part in ("run-config", "federation-config")}
        if not all(isinstance(text, str) for text in configs.values()):
            raise TypeError("a config is no text")
        told = [run["about"] for run in sweep["runs"] if "about" in run]
        about = [
            {part: each[part] for part in ENVIRONMENT} | {part: each.get(part) for part in ("file", "digest")}
            for each in told
        ]
        environment_notes(about)
        found: list[Point] = []
        for run in done:
            keys = _keys_and_seed(run)
            if not over_rounds:
                found.append((file, keys, run["summary"]))
            elif "curve" in run:
                found += _points(file, keys, run["curve"])
            else:
                raise FloretError(f"{file}: has no curves; give its floret sweep again, which makes no run again")
        if not all(s[m] is None or is_number(s[m]) for _, _, s in found for m in MEASURES.values()):
            raise ValueError("an accuracy is no number")
    except OSError as error:
        raise FloretError(unread(file, error)) from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise FloretError(f"{file}: is not the sweep.json of a sweep ({error})") from error
    parts = ("keys", "summary", "curve") if over_rounds else ("keys", "summary")
    same = configs | {"run-config": _PATHS.sub("", configs["run-config"])}
    texts = {part: printable(text, _LONGEST) for part, text in same.items()}
    kept = {**sweep, "grid": grid, **texts, "runs": [{part: run[part] for part in parts} for run in done]}
    return Source(found, failed, about, kept)


def runs_of_table(file: Path) -> list[TableRun]:
    """Return the runs of a table that are done.

    Raises:
        FloretError: the file is none that ``floret reproduce`` wrote.
    """
    runs = loaded(file, advice="name a file that floret reproduce wrote")[1]
    if not runs:
        raise FloretError(f"{file}: has no run that is done, or is not there; name a file that floret reproduce wrote")
    return [TableRun(str(entry["row"]), str(entry["column"]), run) for entry, run in runs]


def of_table(name: str, file: Path, cells: Sequence[TableRun]) -> dict[str, Source]:
    """Return what the columns of a table give, by the names of their panels."""
    found: dict[str, Source] = {}
    for column in dict.fromkeys(cell.column for cell in cells):
        runs = [(cell.row, cell.run) for cell in cells if cell.column == column]
        points, kept = list[Point](), list[Any]()
        for row, run in runs:
            seed = run.about["config"]["seed"]
            points += _points(file, {"method": row, "seed": seed}, run.curve)
            kept.append({"row": row, "seed": seed, "curve": run.curve})
        panel = printable(f"{name}: {column}" if name else column)
        table = {"read": printable(f"{file.name}, {column}"), "runs": kept}
        found[panel] = Source(points, (), [run.about for _, run in runs], table)
    return found


def of_runs(runs: Sequence[Run]) -> Source:
    """Return what single runs give: a line for each method and each combination of the settings that differ."""
    keys = [key for key in differences(runs) if key != "seed"]
    points, kept = list[Point](), list[Any]()
    for run in runs:
        own = {"method": run.method, **{key: value_of(run, key) for key in keys}, "seed": run.config["seed"]}
        curve = thin_curve(run.history, "after")
        points += _points(run.directory, own, curve)
        kept.append({"keys": own, "curve": curve})
    read = ", ".join(printable(run.directory.name) for run in runs)
    return Source(points, (), (), {"read": read, "runs": kept})


def _points(file: Path, keys: Mapping[str, Any], curve: Iterable[Sequence[Any]]) -> list[Point]:
    """Return a run's rounds: number, accuracy before and after local training."""
    return [
        (file, {**keys, ROUND: whole(number)}, {"before": before, "test": after, "worst_decile": None})
        for number, before, after in curve
    ]


def _keys_and_seed(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a run of a sweep, and its seed if it was none of them."""
    config = run.get("about", {}).get("config", {})
    return {**({"seed": config["seed"]} if "seed" in config else {}), **run["keys"]}
