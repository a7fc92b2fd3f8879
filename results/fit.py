"""Settings that a paper does not print, judged by how near its baselines come to their reported numbers.

The paper's own method is never run here, so what is chosen is not chosen for it.
"""

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, Self

from common.durable import write_whole
from common.errors import ConfigError, FloretError, printable
from common.resources import clients_of_simulation
from results.conditions import counted, other_data
from results.experiment import Experiment, PlannedRun
from results.measured import AS_MEASURED, READINGS, MeasuredRun, Reading, Records, dumped, ended_early, loaded
from results.runs import clients_alone
from results.sweep import markdown
from results.tables import environment_notes, number, stem
from results.text import plain


@dataclass(frozen=True)
class Trial:
    """A run of a baseline, and its place in the table."""

    row: str
    column: str
    seed: int
    run: MeasuredRun

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from other trials."""
        return self.row, self.column, self.run.about["config"], self.run.about["federation-config"]

    @property
    def method(self) -> str:
        """The method that it ran."""
        return str(self.run.about["config"]["method"])

    def values(self, keys: Iterable[str]) -> list[Any]:
        """Return the values of keys; None for one that the run did not have."""
        return [self.run.about["config"].get(key) for key in keys]


@dataclass(frozen=True)
class Setting:
    """The trials with the same values of the varied keys.

    Attributes:
        values: those that were varied; None for a key that the trials' version did not have, or that is in the table of
            a method that none of them ran.
        differences: ours minus reported, in points, mean over seeds, by reading's title, then row and column.
        ours: percent, as measured, by row, mean over columns and seeds.
        others: by row and column, the keys with which the trials of a cell differ from those that it has now.
        left_out: trials of cells that have others, which are not averaged with those.
    """

    values: tuple[Any, ...]
    differences: Mapping[str, Mapping[tuple[str, str], float]]
    ours: Mapping[str, float]
    others: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    left_out: tuple[Trial, ...] = ()

    def distance(self, reading: Reading = AS_MEASURED) -> float | None:
        """Return the mean over rows and columns of the absolute difference, in points; None without a number."""
        found = self.differences[reading.title].values()
        return mean(map(abs, found)) if found else None

    @property
    def measured(self) -> Mapping[tuple[str, str], float]:
        """Ours minus reported as measured, in points, by row and column."""
        return self.differences[AS_MEASURED.title]

    @property
    def offset(self) -> float | None:
        """Mean over rows and columns of the difference, in points: below 0 if our numbers are lower."""
        found = self.measured.values()
        return mean(found) if found else None

    def difference(self, row: str) -> float | None:
        """Return the mean over columns of a row's difference, in points."""
        found = [points for (r, _), points in self.measured.items() if r == row]
        return mean(found) if found else None


@dataclass(frozen=True)
class Fit:
    """All trials of a table so far, those of earlier grids, too.

    Attributes:
        experiment, scale: of the table.
        varied: keys that any grid had, or every run of a command.
        trials: that are done.
        failed: what could not be run and why, a line each.
        defaults: of every key of a run.
    """

    experiment: Experiment
    scale: float
    varied: tuple[str, ...]
    trials: tuple[Trial, ...]
    failed: tuple[str, ...]
    defaults: Mapping[str, Any]

    @classmethod
    def gather(
        cls,
        experiment: Experiment,
        scale: float,
        file: Path,
        records: Records,
        planned: Sequence[tuple[Mapping[str, Any], PlannedRun]],
        failed: Sequence[str],
        defaults: Mapping[str, Any],
    ) -> Self:
        """Return the trials that the file has, and those of ``planned`` that are done. One that cannot be read failed.

        Args:
            experiment: the table.
            scale: the part of rounds and samples that was run.
            file: of the fit's results; need not exist.
            records: what is done.
            planned: the keys of a setting, and a run with it.
            failed: what could not be run and why.
            defaults: of every key of a run.

        Raises:
            FloretError: the file of results cannot be read.
        """
        content, kept = loaded(file, experiment.window(scale))
        varied = content.get("varied", [])
        if not isinstance(varied, list) or not all(isinstance(key, str) for key in varied):
            raise FloretError(f"{file}: varied: must be a list of keys; move it, or name another folder")
        names = (*varied, *(key for setting, _ in planned for key in setting))
        trials = [Trial(entry["row"], entry["column"], entry["seed"], run) for entry, run in kept]
        failures = list(failed)
        for setting, place in planned:
            try:
                run = records.get(place.spec, experiment.when(place.row))
            except FloretError as error:
                failures.append(failure(place, setting, str(error)))
                continue
            trial = Trial(place.row, place.column, place.seed, run) if run else None
            if trial and all(trial.key != other.key for other in trials):
                trials.append(trial)
        keys, lines = tuple(dict.fromkeys(names)), tuple(dict.fromkeys(failures))
        return cls(experiment, scale, keys, tuple(trials), lines, defaults)

    def settings(self) -> list[Setting]:
        """Return the settings, those with most cells first, among them the nearest first.

        Cells of which only trials with other keys than their present ones are there count after all others.
        """
        experiment, groups = self.experiment, dict[str, list[Trial]]()
        known = {(row.name, column.name) for row in experiment.rows for column in experiment.columns}
        methods = {trial.method for trial in self.trials}
        shared = [key for key in self.varied if key.partition(".")[0] not in methods]
        for trial in (trial for trial in self.trials if (trial.row, trial.column) in known):
            groups.setdefault(json.dumps(trial.values(shared)), []).append(trial)
        settings = [self._setting(trials) for group in groups.values() for trials in self._apart(group)]

        def order(setting: Setting) -> tuple[int, int, float]:
            present = setting.measured.keys() - setting.others.keys()
            return -len(present), -len(setting.measured), setting.distance() or 0.0

        return sorted(settings, key=order)

    def write(self, folder: Path) -> str:
        """Write the Markdown and the JSON file into a folder that is there, and return the Markdown."""
        text = self.markdown()
        write_whole(folder / f"{fit_stem(self.experiment, self.scale)}.md", text.encode())
        about = {
            "experiment": self.experiment.stem,
            "title": self.experiment.title,
            "measure": str(self.experiment.measure),
            "scale": self.scale,
            "varied": self.varied,
            "settings": [
                {
                    "keys": dict(zip(self.varied, setting.values, strict=True)),
                    "cells": len(setting.measured),
                    "distance": {reading.title: setting.distance(reading) for reading in READINGS},
                    "offset": setting.offset,
                    **({"other_keys": told} if (told := _by_row(setting)) else {}),
                }
                for setting in self.settings()
            ],
            "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        runs: list[tuple[dict[str, Any], MeasuredRun | None]] = [
            ({"row": t.row, "column": t.column, "seed": t.seed}, t.run) for t in self.trials
        ]
        content = about | dumped(runs, self.experiment.window(self.scale))
        write_whole(
            folder / f"{fit_stem(self.experiment, self.scale)}.json", (json.dumps(content, indent=1) + "\n").encode()
        )
        return text

    def markdown(self) -> str:
        """Return what was tried, the nearest setting first, as Markdown."""
        experiment, settings = self.experiment, self.settings()
        rows = [row.name for row in experiment.rows if any(trial.row == row.name for trial in self.trials)]
        columns = [c.name for c in experiment.columns if any(trial.column == c.name for trial in self.trials)]
        others = [
            reading
            for reading in READINGS
            if reading != AS_MEASURED and any(s.distance(reading) != s.distance() for s in settings)
        ]
        columns_of = [[c for c in columns if any(c == column for _, column in s.measured)] for s in settings]
        mixed = ["columns"] if any(own != columns for own in columns_of) else []
        head = [*self.varied, "cells", *mixed, "distance", "offset", *(reading.title for reading in others), *rows]
        lines = [
            [
                *("-" if value is None else plain(value) for value in setting.values),
                str(len(setting.measured)),
                *("; ".join(own) for _ in mixed),
                number(setting.distance()),
                number(setting.offset, "+.2f"),
                *(number(setting.distance(reading)) for reading in others),
                *(
                    f"{number(setting.ours.get(row))} ({number(setting.difference(row), '+.2f')})"
                    + "*" * (row in _by_row(setting))
                    for row in rows
                ),
            ]
            for setting, own in zip(settings, columns_of, strict=True)
        ]
        notes = [
            f"Measured: {experiment.measure}; columns: {'; '.join(columns)}.",
            *(
                f"{row.name}: {row.when} local training."
                for row in experiment.rows
                if row.name in rows and row.when != experiment.measure.when
            ),
            self._size(),
            f"The paper's own method, `{experiment.own}`, is not run.",
            "*distance* is the mean over rows and columns of |ours - reported| in points, *offset* that of ours - "
            "reported; the columns after it have the distance if the same runs are read in other ways. A row's number "
            "is ours, in percent, its difference to the reported one in brackets.",
            *self._others(settings),
            *ended_early((f"{t.row}, {t.column}, seed {t.seed} ({self._told(t)})", t.run) for t in self.trials),
            *environment_notes([trial.run.about for trial in self.trials]),
        ]
        text = [f"# {experiment.title}: settings that the paper does not print", ""]
        text += [*(f"- {note}" for note in notes), "", markdown(head, lines)]
        if self.failed:
            text += ["", "## Failed", "", *(f"- {line}" for line in self.failed)]
        return "\n".join(text) + "\n"

    def _others(self, settings: Sequence[Setting]) -> list[str]:
        """Return what is said of trials that are not of their cells as they are now, or not like others of them."""
        kept = {f"{row}: {_keys(others)}": None for s in settings for (row, _), others in s.others.items()}
        notes = [f"\\* of runs with other keys than the row has now: {'; '.join(kept)}."] if kept else []
        lost = {id(trial): trial for setting in settings for trial in setting.left_out}
        texts = counted(f"of {t.row}, {t.column} ({self._told(t)})" for t in lost.values())
        return notes + ([f"Left out, since other runs stand in their cells: {'; '.join(texts)}."] if texts else [])

    def _told(self, trial: Trial) -> str:
        about = trial.run.about
        texts = [_keys(others)] if (others := self._other_keys(trial)) else []
        read = [f"read {about['file'] or 'files'}" + f" {about['digest'] or ''}".rstrip()] if about["file"] else []
        return "; ".join([*texts, about["federation-config"] or "the default federation", *read])

    def _other_keys(self, trial: Trial) -> dict[str, Any]:
        """Return the keys, but for the varied ones, with which a trial differs from what its cell is now."""
        about, key = trial.run.about, (trial.row, trial.column, trial.seed)
        clients = clients_of_simulation([about["federation-config"]]) or trial.run.clients
        return self.experiment.other_keys(key, self.scale, about["config"], self.defaults, clients, self.varied)

    def _alike(self, trials: Sequence[Trial]) -> tuple[list[Trial], dict[str, Any]]:
        """Return which trials of a cell are averaged, and the keys with which they differ from what it is now.

        They are like the last of those that do not differ, or else like the last one, also in their clients and data.
        """
        others = {id(trial): self._other_keys(trial) for trial in trials}
        last = ([trial for trial in trials if not others[id(trial)]] or trials)[-1]

        def like(trial: Trial) -> bool:
            about, wanted = trial.run.about, last.run.about
            read, had = (one["file"] or "" for one in (about, wanted))
            return (
                others[id(trial)] == others[id(last)]
                and clients_alone(about["federation-config"]) == clients_alone(wanted["federation-config"])
                and not other_data(read, about["digest"], had, wanted["digest"])
            )

        return [trial for trial in trials if like(trial)], others[id(last)]

    def _size(self) -> str:
        said = f"{self.scale:g} of the rounds and samples of the paper's setting" if self.scale < 1 else "At full size"
        other = [key for key in self.varied if key in ("rounds", "max-samples")]
        return f"{said}, but for {' and '.join(other)}: see the table." if other else f"{said}."

    def _apart(self, trials: Sequence[Trial]) -> list[list[Trial]]:
        """Divide trials by the values of the varied keys that methods have in tables of their own.

        A method without such a key is the same in every setting, so its trials are in each of them.
        """
        methods = dict[str, dict[str, list[Trial]]]()
        for trial in trials:
            own = [key for key in self.varied if key.startswith(f"{trial.method}.")]
            methods.setdefault(trial.method, {}).setdefault(json.dumps(trial.values(own)), []).append(trial)
        return [
            [trial for part in chosen for trial in part]
            for chosen in product(*(groups.values() for groups in methods.values()))
        ]

    def _setting(self, trials: Sequence[Trial]) -> Setting:
        experiment = self.experiment
        when = {row.name: row.when for row in experiment.rows}
        reported = experiment.reported()
        cells = sorted({(trial.row, trial.column) for trial in trials})
        alike = {cell: self._alike([t for t in trials if (t.row, t.column) == cell]) for cell in cells}
        taken = {id(trial) for found, _ in alike.values() for trial in found}
        others = {cell: keys for cell, (_, keys) in alike.items() if keys}

        def ours(row: str, column: str, reading: Reading) -> float | None:
            values = [trial.run.read(reading, when[row]) for trial in alike[row, column][0]]
            measured = [value for value in values if value is not None]
            return 100 * mean(measured) if measured else None

        differences: dict[str, dict[tuple[str, str], float]] = {}
        for reading in READINGS:
            found = differences.setdefault(reading.title, {})
            for row, column in cells:
                value, paper = ours(row, column, reading), reported[row][column].get(0)
                if value is not None and paper is not None:
                    found[row, column] = value - paper
        means = {
            row: mean(values)
            for row in {row for row, _ in cells}
            if (values := [v for r, c in cells if r == row and (v := ours(r, c, AS_MEASURED)) is not None])
        }
        shown = [
            next((value for trial in trials if (value := trial.values([key])[0]) is not None), None)
            for key in self.varied
        ]
        left_out = tuple(trial for trial in trials if id(trial) not in taken)
        return Setting(tuple(shown), differences, means, others, left_out)


def _keys(others: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in sorted(others.items()))


def _by_row(setting: Setting) -> dict[str, dict[str, Any]]:
    """Return the keys with which the trials of a row differ from those that it has now, in any column."""
    found = dict[str, dict[str, Any]]()
    for (row, _), others in setting.others.items():
        found.setdefault(row, {}).update(others)
    return found


def failure(place: PlannedRun, setting: Mapping[str, Any], reason: str) -> str:
    """Return the line of a run that failed."""
    return printable(f"{place.label}, {dict(setting)}: {reason}")


def fit_stem(experiment: Experiment, scale: float) -> str:
    """Return the name of a fit's files, without their endings."""
    return f"{stem(experiment, scale)}-fit"


def baselines(experiment: Experiment, planned: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs that are not of the paper's own method.

    Raises:
        ConfigError: the file does not name that method, or nothing else is left.
    """
    if not experiment.own:
        raise ConfigError(f"{experiment.stem}: own: is missing: name the paper's own method, which a fit does not run")
    found = [place for place in planned if not experiment.is_own(place.row)]
    if not found:
        raise ConfigError(f"{experiment.stem}: no baseline is left: {experiment.own} is the paper's own method")
    return found
