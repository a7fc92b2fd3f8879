"""What the runs of an experiment measured, beside what the paper reports: as JSON, as Markdown."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from common.durable import write_whole
from common.errors import FloretError, printable
from common.resources import clients_of_simulation
from results.experiment import CellNumbers, Claim, Experiment, PlannedRun, Verdict
from results.measured import AS_MEASURED, READINGS, MeasuredRun, Reading, Records, dumped, ended_early
from results.runs import Runs
from results.text import cells

_READINGS_NOTE = (
    "Columns in which the claim holds, of those measured. The best round on test is chosen by the accuracy that is "
    "reported, as some published code does; it is here to see whether it makes the difference."
)
_MIXED_NOTE = (
    " Where not all clients train in each round, a global model is measured before training on all of them, any other "
    "model on those that train: the two are not compared, so global models are left out if all rows are read before it."
)


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
        runs: those that are done, by row, column and seed.
        planned: all of them.
        failed: why a run failed, by row, column and seed.
        other_keys: keys with which runs differ from the table's, each with its value or values.
    """

    experiment: Experiment
    scale: float
    runs: Mapping[tuple[str, str, int], MeasuredRun]
    planned: tuple[PlannedRun, ...]
    failed: Mapping[tuple[str, str, int], str]
    other_keys: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def gather(
        cls,
        experiment: Experiment,
        scale: float,
        runs: Runs,
        records: Records,
        planned: Sequence[PlannedRun],
        failed: Mapping[str, str],
    ) -> "ExperimentResults":
        """Read the runs that are done; ``failed`` is by the name of the run's folder. What cannot be read failed."""
        measured: dict[tuple[str, str, int], MeasuredRun] = {}
        reasons: dict[tuple[str, str, int], str] = {}
        for place in planned:
            folder = runs.folder(place.spec).name
            try:
                run = records.get(place.spec, experiment.when(place.row))
            except FloretError as error:
                reasons[place.key] = str(error)
                continue
            if run:
                measured[place.key] = run
            elif folder in failed:
                reasons[place.key] = failed[folder]
        others = other_keys(experiment, scale, measured, runs.defaults)
        return cls(experiment, scale, measured, tuple(planned), reasons, others)

    @property
    def stem(self) -> str:
        """The name of the result's files, without their endings."""
        return stem(self.experiment, self.scale)

    def write(self, folder: Path) -> str:
        """Write the Markdown and the JSON file into a folder that is there, and return the Markdown."""
        text = self.markdown()
        write_whole(folder / f"{self.stem}.md", text.encode())
        write_whole(folder / f"{self.stem}.json", (json.dumps(self.data(), indent=1) + "\n").encode())
        return text

    def entry(self, row: str, column: str, reading: Reading = AS_MEASURED) -> Entry:
        """Return a cell of the table."""
        place = [c.name for c in self.experiment.columns].index(column)
        (wanted,) = (r for r in self.experiment.rows if r.name == row)
        runs = [run for (r, c, _), run in self.runs.items() if (r, c) == (row, column)]
        values = [run.read(reading, wanted.when) for run in runs]
        stds = [std for run in runs if (std := run.accuracies[wanted.when].std) is not None]
        return Entry(
            wanted.reported[place],
            wanted.spread[place],
            tuple(100 * value for value in values if value is not None),
            100 * mean(stds) if stds else None,
            wanted.missing,
        )

    def numbers(self, reading: Reading = AS_MEASURED) -> CellNumbers:
        """Return our numbers.

        If ``reading`` takes all rows before training, means over all clients are left out of a column that has others
        over those that train: the two are not compared.
        """
        experiment = self.experiment
        columns = [column.name for column in experiment.columns]
        found = {row.name: {column: dict[int, float]() for column in columns} for row in experiment.rows}
        mixed = self._mixed_before if reading.when == "before" else set()
        for (row, column, seed), run in self.runs.items():
            value = run.read(reading, experiment.when(row))
            left_out = column in mixed and run.of_all_before
            if value is not None and not left_out:
                found[row][column][seed] = 100 * value
        return found

    @property
    def readings_note(self) -> str:
        """What is said above the table of ``readings``."""
        return _READINGS_NOTE + _MIXED_NOTE * bool(self._mixed_before)

    @property
    def _mixed_before(self) -> set[str]:
        """The columns in which some means before training are over all clients, and others over those that train."""
        over_all, over_some = (
            {column for (_, column, _), run in self.runs.items() if run.of_all_before is everybody}
            for everybody in (True, False)
        )
        return over_all & over_some

    def readings(self) -> list[tuple[Claim, list[tuple[Reading, Verdict]]]]:
        """Return each claim with where it holds in our numbers if they are read in other ways.

        A way is left out that gives the same number as the file's own in every cell, or in which no claim is judged.
        """
        claims, ours = self.experiment.claims, self.numbers()
        found = [(AS_MEASURED, [self.experiment.judge(claim, ours) for claim in claims])]
        for reading in READINGS:
            numbers = self.numbers(reading)
            verdicts = [self.experiment.judge(claim, numbers) for claim in claims]
            if numbers != ours and any(verdict.measured for verdict in verdicts):
                found.append((reading, verdicts))
        return [(claim, [(reading, verdicts[i]) for reading, verdicts in found]) for i, claim in enumerate(claims)]

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
        window = self.experiment.window(self.scale)
        if self.scale < 1:
            notes.append(
                f"Scaled down: {self.scale:g} of the rounds and {self.scale:g} of the samples of the paper's setting, "
                "so these numbers are not the paper's experiment."
            )
            if self.experiment.measure.last_rounds > 1:
                notes[-1] += f" Averaged over the last {window} rounds." if window > 1 else " Of the last round alone."
        fewest = min((run.about["config"].get("rounds", window) for run in self.runs.values()), default=window)
        if fewest < window:
            notes.append(f"Some runs have only {fewest} rounds, of which all are averaged.")
        if self.other_keys:
            said = ", ".join(f"{key} = {values}" for key, values in self.other_keys.items())
            notes.append(f"With other keys than the table's: {said}.")
        refused = [
            f"{run.refused} of {row}, {column}, seed {seed}"
            for (row, column, seed), run in self.runs.items()
            if run.refused
        ]
        if refused:
            notes.append(f"Replies that were refused, and so are in no aggregate: {'; '.join(refused)}.")
        notes += self._other_data()
        notes += ended_early((f"{row}, {column}, seed {seed}", run) for (row, column, seed), run in self.runs.items())
        total = sum(run.seconds or 0.0 for run in self.runs.values())
        seeds = ", ".join(map(str, self.seeds()))
        notes.append(f"{len(self.runs)} of {len(self.planned)} runs (seeds {seeds}), {total / 60:.0f} minutes of runs.")
        return notes + environment_notes([run.about for run in self.runs.values()])

    def _other_data(self) -> list[str]:
        """Return a sentence for each column whose runs did not all have the same data, as far as they tell."""
        notes = []
        for column in self.experiment.columns:
            runs = [(seed, run) for (_, name, seed), run in self.runs.items() if name == column.name]
            digests = sorted({run.about["digest"] for _, run in runs if run.about["digest"]})
            # Another seed may leave out other samples.
            of_seed = ({run.samples for s, run in runs if s == seed and run.samples} for seed, _ in runs)
            samples = sorted(set[int]().union(*(found for found in of_seed if len(found) > 1)))
            said = [f"SHA-256 {' and '.join(digests)}"] if len(digests) > 1 else []
            said += [f"{' and '.join(map(str, samples))} samples"] if samples else []
            if said:
                notes.append(f"{column.name}: compared though runs had different data ({'; '.join(said)}).")
        return notes

    def data(self) -> dict[str, Any]:
        """Return everything as JSON."""
        experiment = self.experiment
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
            "claims": [
                {"claim": text, "in_the_paper": str(paper), "here": str(ours)} for text, paper, ours in self.verdicts()
            ],
            "chosen": list(experiment.chosen),
            "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "readings": [
                {"claim": claim.text, **{reading.title: str(verdict) for reading, verdict in found}}
                for claim, found in self.readings()
            ],
            **dumped(
                [(self._about(place), self.runs.get(place.key)) for place in self.planned],
                experiment.window(self.scale),
            ),
        }

    def _about(self, place: PlannedRun) -> dict[str, Any]:
        where = {"row": place.row, "column": place.column, "seed": place.seed}
        if place.key in self.runs:
            return {**where, "status": "done"}
        reason = self.failed.get(place.key)
        return {**where, "status": "failed", "reason": reason} if reason else {**where, "status": "not run"}

    def markdown(self) -> str:
        """Return title, tables, claims and conditions as Markdown."""
        experiment = self.experiment
        lines = [f"# {experiment.title}", "", f"{experiment.paper}. Table {experiment.table}.", ""]
        lines += [f"- {note}" for note in self.notes()]
        touched = {column for _, column, _ in self.runs} | {column for _, column, _ in self.failed}
        untouched = [column.name for column in experiment.columns if column.name not in touched]
        if untouched:
            lines.append(f"- Not run: {'; '.join(untouched)}.")
        for column in experiment.columns:
            if column.name not in touched:
                continue
            lines += ["", f"## {column.name}{', with other keys' if self.other_keys else ''}", ""]
            head = ["method", "reported", "ours", "difference", "seeds"]
            if experiment.spread:
                head.insert(2, f"± over {experiment.spread}, reported")
                if experiment.spread == "clients":
                    head.insert(4, "over clients, ours")
            lines += [cells(head), "|---|" + "---:|" * (len(head) - 1)]
            lines += [cells(self._texts(row.name, column.name)) for row in experiment.rows]
        if experiment.claims:
            lines += ["", "## What the paper claims", "", "| claim | in the paper's numbers | here |", "|---|---|---|"]
            lines += [cells([text, str(paper), str(ours)]) for text, paper, ours in self.verdicts()]
            read = self.readings()
            titles = [reading.title for reading, _ in read[0][1]]
            if self.runs and len(titles) > 1:
                lines += ["", "### If the same runs are read in another way", ""]
                lines += [
                    self.readings_note,
                    "",
                    cells(["claim", *titles]),
                    "|---|" + "---|" * len(titles),
                ]
                lines += [cells([claim.text, *(verdict.short for _, verdict in found)]) for claim, found in read]
        if self.failed:
            lines += ["", "## Failed", ""]
            lines += [
                f"- {row}, {column}, seed {seed}: {printable(why)}" for (row, column, seed), why in self.failed.items()
            ]
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


def other_keys(
    experiment: Experiment,
    scale: float,
    runs: Mapping[tuple[str, str, int], MeasuredRun],
    defaults: Mapping[str, Any],
) -> dict[str, str]:
    """Return the keys with which runs differ from the table's, each with its value or values as text.

    Args:
        experiment: the table.
        scale: of the runs.
        runs: by row, column and seed.
        defaults: of every key.
    """
    found: dict[str, set[str]] = {}
    for key, run in runs.items():
        clients = clients_of_simulation([run.about["federation-config"]]) or run.clients
        for name, value in experiment.other_keys(key, scale, run.about["config"], defaults, clients).items():
            found.setdefault(printable(name), set()).add(json.dumps(value))
    return {name: " or ".join(sorted(values)) for name, values in sorted(found.items())}


def stem(experiment: Experiment, scale: float) -> str:
    """Return the name of the result's files, without their endings."""
    return experiment.stem + (f"-scale{scale:g}" if scale < 1 else "")


def number(value: float | None, form: str = ".2f") -> str:
    """Return a number as text, a hyphen for none."""
    return "-" if value is None else format(value, form)


def environment_notes(abouts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return from which files, of which commit, on which machine and with which versions runs were made.

    A sentence each.

    Args:
        abouts: what the runs say of themselves; see ``results.runs.Outcome``.
    """
    files = sorted({printable(about["file"]) for about in abouts if about["file"]})
    notes = [f"Read from: {'; '.join(files)}."] if files else []
    digests = sorted({printable(about["digest"]) for about in abouts if about.get("digest")})
    if digests:
        notes += [f"The SHA-256 of what was read begins with {' or '.join(digests)}, where runs tell it."]
    for key, text in (("commit", "Commit"), ("machine", "Machine"), ("versions", "Versions")):
        found = {printable(_plain(key, about[key])) for about in abouts}
        notes += [f"{text}: {'; '.join(sorted(found))}."] if found else []
    return notes


def _plain(key: str, value: Any) -> str:
    if key == "machine":
        kernels = [f"{value['kernels']} kernels"] if "kernels" in value else []
        cpus = [f"{value['cpus']} CPUs"] if "cpus" in value else []
        return ", ".join(map(str, [*cpus, *filter(None, [value.get("cpu")]), *value.get("gpus", ()), *kernels]))
    if key == "versions":
        return ", ".join(f"{name} {version}" for name, version in value.items())
    return str(value)
