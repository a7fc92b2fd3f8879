"""What the runs of an experiment measured, beside what the paper reports: as JSON, as Markdown."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from common.durable import write_whole
from results.experiment import Experiment, PlannedRun, Verdict
from results.history import Figures, History
from results.runs import Runs


@dataclass(frozen=True)
class MeasuredRun:
    """A run of the table that is done, without its history, which is large.

    Attributes:
        place: its place in the table.
        value: the experiment's measure, in [0, 1].
        std: over clients, in the last complete round, in [0, 1].
        curve: round, mean test accuracy before and after local training in [0, 1], for each complete round.
        clients: their number.
        figures: of the whole run.
        about: the conditions it ran under, see ``results.runs.Outcome``.
        folder: name of the folder that its run directory is in.
    """

    place: PlannedRun
    value: float | None
    std: float | None
    curve: tuple[tuple[int, float | None, float | None], ...]
    clients: int
    figures: Figures
    about: Mapping[str, Any]
    folder: str


@dataclass(frozen=True)
class Entry:
    """A cell of the table, all numbers in percent.

    Attributes:
        reported, reported_spread: the paper's.
        values: ours, one a seed.
        clients: our standard deviation over clients, mean over seeds.
        missing: why Floret cannot run it; empty if it can.
    """

    reported: float | None
    reported_spread: float | None
    values: tuple[float, ...]
    clients: float | None
    missing: str

    @property
    def mean(self) -> float | None:
        """Mean over seeds."""
        return mean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """Standard deviation over seeds (population); None of a single one."""
        return pstdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, in points."""
        return None if self.mean is None or self.reported is None else self.mean - self.reported


@dataclass(frozen=True)
class ExperimentResults:
    """What the runs of an experiment at one scale measured.

    Attributes:
        experiment: the table.
        scale: the part of rounds and samples that was run.
        runs: those that are done.
        planned: all of them.
        failed: why a run failed, by row, column and seed.
        instead: the file that stood for a dataset, by the dataset's name.
    """

    experiment: Experiment
    scale: float
    runs: tuple[MeasuredRun, ...]
    planned: tuple[PlannedRun, ...]
    failed: Mapping[tuple[str, str, int], str]
    instead: Mapping[str, str]

    @classmethod
    def gather(
        cls,
        experiment: Experiment,
        scale: float,
        runs: Runs,
        planned: Sequence[PlannedRun],
        failed: Mapping[str, str],
        instead: Mapping[str, str],
    ) -> "ExperimentResults":
        """Read the runs that are done; ``failed`` is by the name of the run's folder."""
        measured = []
        reasons: dict[tuple[str, str, int], str] = {}
        for place in planned:
            folder = runs.folder(place.spec).name
            outcome = runs.outcome(place.spec)
            if outcome:
                run, when = outcome.run, experiment.when(place.row)
                last = run.history.last_complete(when)
                measured.append(
                    MeasuredRun(
                        place=place,
                        value=experiment.value(place.row, run.history, scale),
                        std=last.accuracy(when).std if last else None,
                        curve=_curve(run.history, when),
                        clients=len(run.client_names()),
                        figures=run.figures,
                        about=outcome.about,
                        folder=folder,
                    )
                )
            elif folder in failed:
                reasons[place.row, place.column, place.seed] = failed[folder]
        return cls(experiment, scale, tuple(measured), tuple(planned), reasons, dict(instead))

    @property
    def stem(self) -> str:
        """The name of the result's files, without their endings."""
        return self.experiment.stem + (f"-scale{self.scale:g}" if self.scale < 1 else "")

    def write(self, folder: Path) -> str:
        """Write the Markdown and the JSON file, and return the Markdown."""
        text = self.markdown()
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{self.stem}.md", text.encode())
        write_whole(folder / f"{self.stem}.json", (json.dumps(self.data(), indent=1) + "\n").encode())
        return text

    def entry(self, row: str, column: str) -> Entry:
        """Return a cell of the table."""
        place = [c.name for c in self.experiment.columns].index(column)
        (wanted,) = (r for r in self.experiment.rows if r.name == row)
        runs = [run for run in self.runs if (run.place.row, run.place.column) == (row, column)]
        stds = [run.std for run in runs if run.std is not None]
        return Entry(
            wanted.reported[place],
            wanted.spread[place],
            tuple(100 * run.value for run in runs if run.value is not None),
            100 * mean(stds) if stds else None,
            wanted.missing,
        )

    def numbers(self) -> dict[str, dict[str, float | None]]:
        """Return our means, percent by row and column."""
        experiment = self.experiment
        return {
            row.name: {column.name: self.entry(row.name, column.name).mean for column in experiment.columns}
            for row in experiment.rows
        }

    def verdicts(self) -> list[tuple[str, Verdict, Verdict]]:
        """Return each claim with where it holds in the paper's own numbers, and in ours."""
        experiment, ours = self.experiment, self.numbers()
        theirs = experiment.reported()
        return [
            (claim.text, experiment.judge(claim, theirs), experiment.judge(claim, ours)) for claim in experiment.claims
        ]

    def seeds(self) -> list[int]:
        """Return the seeds that were planned."""
        return sorted({place.seed for place in self.planned})

    def notes(self) -> list[str]:
        """Return the conditions under which our numbers were measured, a sentence each."""
        notes = [f"Measured: {self.experiment.measure}."]
        for row in self.experiment.rows:
            if row.when != self.experiment.measure.when:
                notes.append(f"{row.name}: {row.when} local training.")
        if self.scale < 1:
            notes.append(
                f"Scaled down: {self.scale:g} of the rounds and {self.scale:g} of the samples of the paper's setting, "
                "so these numbers are not the paper's experiment."
            )
            if self.experiment.measure.last_rounds > 1:
                notes[-1] += f" Averaged over the last {self.experiment.window(self.scale)} rounds."
        notes += [f"{name} was read from {file}." for name, file in sorted(self.instead.items())]
        total = sum(run.figures.seconds or 0.0 for run in self.runs)
        seeds = ", ".join(map(str, self.seeds()))
        notes.append(f"{len(self.runs)} of {len(self.planned)} runs (seeds {seeds}), {total / 60:.0f} minutes of runs.")
        for key, text in (("commit", "Commit"), ("machine", "Machine"), ("versions", "Versions")):
            found = {_plain(key, run.about[key]) for run in self.runs}
            notes += [f"{text}: {'; '.join(sorted(found))}."] if found else []
        return notes

    def data(self) -> dict[str, Any]:
        """Return everything as JSON."""
        experiment = self.experiment
        done = {(run.place.row, run.place.column, run.place.seed): run for run in self.runs}
        table = []
        for column in experiment.columns:
            for row in experiment.rows:
                entry = self.entry(row.name, column.name)
                table.append(
                    {
                        "row": row.name,
                        "column": column.name,
                        "reported": entry.reported,
                        "reported_spread": entry.reported_spread,
                        "mean": entry.mean,
                        "std": entry.std,
                        "std_over_clients": entry.clients,
                        "difference": entry.difference,
                        "runs": len(entry.values),
                        "missing": entry.missing or None,
                    }
                )
        return {
            "experiment": experiment.stem,
            "title": experiment.title,
            "paper": experiment.paper,
            "table": table,
            "unit": "percent",
            "measure": str(experiment.measure),
            "scale": self.scale,
            "seeds": self.seeds(),
            "instead": dict(self.instead),
            "claims": [
                {"claim": text, "in_the_paper": str(paper), "here": str(ours)} for text, paper, ours in self.verdicts()
            ],
            "chosen": list(experiment.chosen),
            "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "runs": [self._run(place, done.get((place.row, place.column, place.seed))) for place in self.planned],
        }

    def _run(self, place: PlannedRun, run: MeasuredRun | None) -> dict[str, Any]:
        where = {"row": place.row, "column": place.column, "seed": place.seed}
        if run is None:
            reason = self.failed.get((place.row, place.column, place.seed))
            return {**where, "status": "failed" if reason else "not run", "reason": reason}
        return {
            **where,
            "status": "done",
            "value": run.value,
            "std_over_clients": run.std,
            "clients": run.clients,
            "bytes": run.figures.bytes.to_json(),
            "seconds": run.figures.seconds,
            "refused": run.figures.refused,
            "curve": {"round, before, after": run.curve},
            **{key: value for key, value in run.about.items() if key != "run"},
            "folder": run.folder,
        }

    def markdown(self) -> str:
        """Return title, tables, claims and conditions as Markdown."""
        experiment = self.experiment
        lines = [f"# {experiment.title}", "", f"{experiment.paper}. Table {experiment.table}.", ""]
        lines += [f"- {note}" for note in self.notes()]
        touched = {run.place.column for run in self.runs} | {column for _, column, _ in self.failed}
        untouched = [column.name for column in experiment.columns if column.name not in touched]
        if untouched:
            lines.append(f"- Not run: {'; '.join(untouched)}.")
        for column in experiment.columns:
            if column.name not in touched:
                continue
            lines += ["", f"## {column.name}", ""]
            head = ["method", "reported", "ours", "difference", "seeds"]
            if experiment.spread:
                head.insert(2, f"± over {experiment.spread}, reported")
                if experiment.spread == "clients":
                    head.insert(4, "over clients, ours")
            lines += ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
            for row in experiment.rows:
                lines.append("| " + " | ".join(self._texts(row.name, column.name)) + " |")
        if experiment.claims:
            lines += ["", "## What the paper claims", "", "| claim | in the paper's numbers | here |", "|---|---|---|"]
            lines += [f"| {text} | {paper} | {ours} |" for text, paper, ours in self.verdicts()]
        if self.failed:
            lines += ["", "## Failed", ""]
            lines += [f"- {row}, {column}, seed {seed}: {why}" for (row, column, seed), why in self.failed.items()]
        if experiment.chosen:
            lines += ["", "## What the paper leaves open", "", *(f"- {line}" for line in experiment.chosen)]
        return "\n".join(lines) + "\n"

    def _texts(self, row: str, column: str) -> list[str]:
        entry = self.entry(row, column)
        planned = any((place.row, place.column) == (row, column) for place in self.planned)
        failed = any((row, column) == (r, c) for r, c, _ in self.failed)
        nothing = "missing" if entry.missing else "failed" if failed else "not run" if planned else "-"
        ours = nothing if entry.mean is None else f"{entry.mean:.2f}"
        if entry.std is not None:
            ours += f" ± {entry.std:.2f}"
        texts = [row, number(entry.reported), ours, number(entry.difference, "+.2f"), str(len(entry.values) or "-")]
        if self.experiment.spread:
            texts.insert(2, number(entry.reported_spread))
            if self.experiment.spread == "clients":
                texts.insert(4, number(entry.clients))
        return texts


def number(value: float | None, form: str = ".2f") -> str:
    """Return a number as text, a hyphen for none."""
    return "-" if value is None else format(value, form)


def _curve(history: History, when: str) -> tuple[tuple[int, float | None, float | None], ...]:
    return tuple(
        (line.round, line.accuracy("before").mean, line.accuracy("after").mean)
        for line in history.complete_rounds(when)
    )


def _plain(key: str, value: Any) -> str:
    if key == "machine":
        return ", ".join([f"{value['cpus']} CPUs", *([value["cpu"]] if value["cpu"] else []), *value["gpus"]])
    if key == "versions":
        return ", ".join(f"{name} {version}" for name, version in value.items())
    return str(value)
