"""A sweep: every combination of the values of some keys, compared by accuracy on the validation split."""

import itertools
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Self

from common.durable import write_whole
from common.errors import ConfigError, FloretError, printable
from common.run_config import federation_text, parse_federation_configs, parse_run_configs
from results.jobs import Job
from results.measured import thin_curve
from results.run import Run
from results.runs import PLACES, SET_BY_COMMAND, Runs, RunSpec
from results.text import cells, percent_over_runs

Keys = dict[str, Any]
HEAD = ("seeds", "validation", "test after", "test before", "std over clients", "worst decile", "MB up", "MB down")


@dataclass(frozen=True)
class Sweep:
    """The runs of a grid.

    Attributes:
        grids: ``KEY=[...]`` texts.
        run_config: the keys that are the same in every run, as text.
        federation_config: that of every run, as text.
        runs: the keys of the grid with their values, and the run, in the order of the grid.
    """

    grids: tuple[str, ...]
    run_config: str
    federation_config: str
    runs: tuple[tuple[Keys, RunSpec], ...]

    @classmethod
    def of(cls, grids: Sequence[str], run_configs: Sequence[str], federation_configs: Sequence[str]) -> Self:
        """Return every combination of the grids, with what all runs share: of a key that is given twice the last value.

        Raises:
            ConfigError: a grid, the run config or the federation config cannot be read.
        """
        same = parse_run_configs(run_configs)
        federation = federation_text(parse_federation_configs(federation_configs))
        for key, instead in SET_BY_COMMAND.items():
            if key in same:
                raise ConfigError(f"{key} = {same[key]!r}: cannot be set for a sweep: {instead}")
        runs = tuple((keys, RunSpec(same | keys, federation)) for keys in combinations(grids, same))
        return cls(tuple(grids), " ".join(run_configs), federation, runs)

    @property
    def varied(self) -> list[str]:
        """The keys of the grid."""
        return [grid.partition("=")[0].strip() for grid in self.grids]

    def jobs(self) -> list[Job]:
        """Return the runs as jobs."""
        return [Job(spec, self._label(keys), _describe) for keys, spec in self.runs]

    def _label(self, keys: Keys) -> str:
        return " ".join(f"{key}={keys[key]}" for key in self.varied)

    def left_out(self, runs: Runs, folder: Path) -> int:
        """Return how many runs with results the sweep.json in ``folder`` has that are not of this grid.

        0, too, if there is none that can be read: what ``write`` leaves out of it is not known then.
        """
        wanted = {runs.identity(spec) for _, spec in self.runs}
        try:
            entries = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["runs"]
            measured = [entry["about"] for entry in entries if entry.get("summary") and "about" in entry]
            return sum(runs.recorded(about) not in wanted for about in measured)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return 0

    def _caption(self, several: bool, commits: Sequence[str]) -> str:
        """Return under which conditions the table holds, as one line.

        Args:
            several: a row is over several seeds.
            commits: those of its runs; an empty text where it is not known.
        """
        same, federation = (" ".join(text.split()) for text in (self.run_config, self.federation_config))
        parts = [
            "Accuracies in percent, means over clients in the last complete round, on each client's own test split "
            "(column validation: on its own validation split)",
            *(["± is the standard deviation (population) over seeds"] if several else []),
            f"run config: {f'`{same}`' if same else 'the defaults'}",
            f"federation config: {f'`{federation}`' if federation else 'the default'}",
            f"commit{'s' if len(commits) > 1 else ''}: {', '.join(one or 'not known' for one in commits)}",
        ]
        return printable("; ".join(parts) + ".", 100_000)

    def write(self, runs: Runs, folder: Path, failed: Mapping[str, str]) -> str:
        """Write sweep.md, sweep.json and sweep.html from the runs that are done, and return the text of sweep.md.

        It is a table, a line for each run that is not in it or whose figures are of some of the clients, and a caption.

        Args:
            runs: where they are.
            folder: for the files.
            failed: why a run failed, by the name of its folder, as ``run_missing`` returns it.

        Raises:
            FloretError: no run is done.
        """
        from results.page import write_sweep_page

        measured: list[tuple[Keys, Keys | None]] = []
        entries, notes, commits = [], [], dict[str, None]()
        for keys, spec in self.runs:
            reason, outcome = failed.get(runs.folder(spec).name, ""), None
            with suppress(FloretError):  # ``failed`` says it
                outcome = runs.outcome(spec)
            summary = summary_of(outcome.run) if outcome else None
            if outcome and summary:
                commits[str(outcome.about["commit"])] = None
            measured.append((keys, summary))
            ended = outcome.run.ended_after if outcome else None
            entries.append(
                {
                    "keys": keys,
                    "summary": summary,
                    **({"curve": thin_curve(outcome.run.history, "after")} if outcome and summary else {}),
                    **({} if ended is None else {"ended_after": ended}),
                    **({"about": outcome.about} if outcome else {}),
                }
            )
            if summary is None:
                notes.append(f"{self._label(keys)} is not in the table: {reason or 'it measured no accuracy'}")
            elif outcome and (over := outcome.run.over(outcome.run.history.last_complete())):
                notes.append(f"{self._label(keys)}: accuracies are over {over}")
            if outcome and ended is not None:
                notes.append(f"{self._label(keys)}: {outcome.run.fewer_rounds}")
        notes = [printable(note) for note in notes]
        found = rows(measured, self.varied)
        head = [*(key for key in self.varied if key != "seed"), *HEAD]
        texts = [table_row(shown, summaries) for shown, summaries in found]
        several = any(len(summaries) > 1 for _, summaries in found)
        text = "\n".join(
            [markdown(head, texts), *(f"\n{note}" for note in (*notes, self._caption(several, list(commits))))]
        )
        write_whole(folder / "sweep.md", (text + "\n").encode())
        about = {"grid": self.grids, "run-config": self.run_config, "federation-config": self.federation_config}
        write_whole(folder / "sweep.json", (json.dumps(about | {"runs": entries}, indent=1) + "\n").encode())
        points = [
            (
                ", ".join(f"{key}={value}" for key, value in shown.items()) or "all",
                [s["validation"] for s in summaries if s["validation"] is not None],
                [s["test"] for s in summaries],
            )
            for shown, summaries in found
            if summaries
        ]
        conditions = f"{self.run_config} {self.federation_config}".strip()
        write_sweep_page(self.varied, conditions, head, texts, notes, points, folder / "sweep.html")
        return text


def combinations(grids: Sequence[str], same: Iterable[str] = ()) -> list[Keys]:
    """Return every combination of the values of ``KEY=[...]`` texts, the last key changing fastest.

    Args:
        grids: the texts.
        same: keys that have one value in all combinations, which a grid must not have.

    Raises:
        ConfigError: a text is not a key and a list of values, its key is a place, or a key or a value is given twice.
    """
    axes: dict[str, list[Keys]] = {}
    for text in grids:
        name, _, values = text.partition("=")
        key = name.strip()
        try:
            listed = tomllib.loads(f"values = {values}")["values"]
        except tomllib.TOMLDecodeError:
            listed = None
        if not isinstance(listed, list) or not listed:
            raise ConfigError(f"--grid {text!r}: must be like 'alpha=[0.1, 0.5]' or 'method=[\"fedper\", \"pfakd\"]'")
        if key in PLACES:
            raise ConfigError(
                f"--grid {text!r}: {key} is no part of what a run computes, so its values would share one run; "
                "make a command of its own for each, with another -o"
            )
        if key in axes:
            raise ConfigError(f"--grid {text!r}: {key} is in another --grid, too; write all its values into one list")
        if key in same:
            raise ConfigError(f"--grid {text!r}: {key} is among the keys of every run (-c), too; leave one of them out")
        twice = next((value for i, value in enumerate(listed) if any(_same(value, v) for v in listed[:i])), None)
        if twice is not None:
            raise ConfigError(f"--grid {text!r}: {key} has the value {json.dumps(twice)} twice; write each value once")
        axes[key] = [{key: value} for value in listed]
    cells = itertools.product(*axes.values())
    return [{key: value for part in cell for key, value in part.items()} for cell in cells]


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are the same, as 1 and 1.0 are, but not 1 and true."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def summary_of(run: Run) -> dict[str, Any] | None:
    """Return what a run measured in its last complete round, or None if there is none.

    ``validation`` and ``test`` after and ``before`` local training, means over clients in [0, 1], ``before`` None if it
    is of fewer clients; ``std`` and ``worst_decile`` over clients after training; ``up`` and ``down`` in bytes;
    ``seconds``.
    """
    last = run.history.last_complete()
    if last is None:
        return None
    return {
        "validation": last.accuracy("after", "validation").mean,
        "test": last.accuracy().mean,
        "before": None if last.fewer_before else last.accuracy("before").mean,
        "std": last.accuracy().std,
        "worst_decile": last.accuracy().worst_decile,
        **run.figures.bytes.to_json(),
        "seconds": run.figures.seconds,
    }


def _describe(run: Run) -> str:
    summary = summary_of(run)
    if summary is None:
        return "-"
    return f"validation {percent_over_runs([summary['validation']])}, test {percent_over_runs([summary['test']])}"


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
    """Return a row of the table; accuracies in percent, mean ± standard deviation over seeds that all have it."""
    names = ("validation", "test", "before", "std", "worst_decile")
    values = ([s[name] for s in found] for name in names)
    # Of some of the seeds alone it would be no mean of those beside it.
    measured = (percent_over_runs([] if None in each else each) for each in values)
    sent = (f"{mean(s[way] for s in found) / 1e6:.1f}" if found else "-" for way in ("up", "down"))
    return [*map(str, shown.values()), str(len(found)), *measured, *sent]


def unread(file: Path, error: OSError) -> str:
    """Return what to say of a sweep.json that cannot be read."""
    return f"{file}: {error.strerror}; name the folder that floret sweep wrote"


def markdown(head: Sequence[str], texts: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join([cells(head), "|" + "---|" * len(head), *map(cells, texts)])
