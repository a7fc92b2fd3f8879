"""Experiment files: a published table as data, the runs that it needs, and how their results are judged.

A file of ``experiments/`` holds the setting, rows and columns, the numbers that the paper reports and the orderings
that it claims. ``Experiment.read`` checks all of it; ``Experiment.planned_runs`` returns its runs.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean
from typing import Any, Protocol, Self, TypeVar

from common.config import RunConfig, check_keys, nearest, one_of, own_keys
from common.errors import ConfigError
from common.yamlfile import read_yaml
from results.history import History
from results.jobs import Job
from results.measured import Accuracies
from results.run import Run
from results.runs import PLACES, RunSpec
from results.text import percent_over_runs

# Samples of the pooled datasets, which a scale is a part of.
SIZES = {
    "digits": 1_797,
    "mnist": 70_000,
    "fashion-mnist": 70_000,
    "cifar10": 60_000,
    "cifar100": 60_000,
    "svhn": 99_289,
    "pathmnist": 107_180,
    "ag-news": 127_600,
}
# A scaled run has no fewer rounds and samples than these, unless there are fewer at full size.
LEAST_ROUNDS, LEAST_SAMPLES = 2, 200

# What a key of a file can be, for who left it out.
_EXAMPLES = {
    "title": "title: Accuracy of personalized models",
    "paper": "paper: PFAKD",
    "table": "table: 1",
    "measure": "measure: {when: after, last-rounds: 1}",
    "when": "when: after",
    "last-rounds": "last-rounds: 1",
    "clients": "clients: 20",
    "config": "config: {dataset: cifar10, rounds: 100}",
    "columns": "columns: [{name: CIFAR-10, config: {alpha: 0.1}}]",
    "rows": "rows: [{name: FedPer, config: {method: fedper}, reported: [80.1]}]",
    "name": "name: FedPer",
    "reported": "reported: [80.1]",
    "text": "text: FedPer is above Local",
    "higher": "higher: FedPer",
    "than": "than: [Local]",
}

Numbers = tuple[float | None, ...]


@dataclass(frozen=True)
class Measure:
    """What is compared: accuracy on the clients' test splits, averaged over the last ``last_rounds`` complete rounds.

    ``when`` is ``before`` or ``after`` local training.
    """

    when: str
    last_rounds: int

    def __str__(self) -> str:
        rounds = "in the last round" if self.last_rounds == 1 else f"averaged over the last {self.last_rounds} rounds"
        return f"mean accuracy over clients {self.when} local training, in percent, {rounds}"


@dataclass(frozen=True)
class Column:
    """A column of the table: the keys that it sets; number of clients, None for that of the table."""

    name: str
    config: Mapping[str, Any]
    clients: int | None


@dataclass(frozen=True)
class Row:
    """A row of the table: the keys that it sets, and the numbers that the paper reports.

    Attributes:
        name, config: of the row.
        clients: their number; None for that of the column or the table.
        missing: why Floret cannot run the row; empty if it can.
        when: ``before`` for rows that measure a global model, which is what a client has before training.
        baseline: a rival, though run by the method of the paper with its parts off.
        reported, spread: percent, one a column; None where the paper prints none.
    """

    name: str
    config: Mapping[str, Any]
    clients: int | None
    missing: str
    when: str
    baseline: bool
    reported: Numbers
    spread: Numbers


# Percent by row, column and seed.
CellNumbers = Mapping[str, Mapping[str, Mapping[int, float]]]


@dataclass(frozen=True)
class Claim:
    """An ordering that the paper claims: in ``columns`` (none: in all), row ``higher`` is above each row of ``than``.

    It leads by at least ``by`` points; if ``by`` is negative, it may be that many points behind.
    """

    text: str
    higher: str
    than: tuple[str, ...]
    columns: tuple[str, ...]
    by: float


class Placed(Protocol):
    """Something with a place in a table."""

    @property
    def row(self) -> str:
        """The name of its row."""

    @property
    def column(self) -> str:
        """The name of its column."""


PlacedT = TypeVar("PlacedT", bound=Placed)


@dataclass(frozen=True)
class PlannedRun:
    """A run and its place in the table."""

    row: str
    column: str
    seed: int
    spec: RunSpec

    @property
    def key(self) -> tuple[str, str, int]:
        """Row, column and seed."""
        return self.row, self.column, self.seed

    @property
    def label(self) -> str:
        """Row, column and seed on one line."""
        return f"{self.row} | {self.column} | seed {self.seed}"


@dataclass(frozen=True)
class Verdict:
    """In which columns a claim holds.

    Attributes:
        held: the columns in which it does.
        broken: those in which it does not, with the numbers.
        unmeasured: those without numbers.
        divided: those of ``held`` and ``broken`` of which the seeds differ.
        unfinished: those of ``held`` in which rivals with a printed number are not measured, with their names.
    """

    held: tuple[str, ...]
    broken: Mapping[str, str]
    unmeasured: tuple[str, ...]
    divided: tuple[str, ...]
    unfinished: Mapping[str, str]

    @property
    def measured(self) -> int:
        """Number of columns in which it is judged."""
        return len(self.held) + len(self.broken)

    @property
    def so_far(self) -> bool:
        """Whether there are columns, or rivals with a printed number, that are not measured."""
        return bool(self.unfinished or self.unmeasured)

    @property
    def short(self) -> str:
        """In how many of the measured columns it holds."""
        return f"{len(self.held)} of {self.measured}" if self.measured else "-"

    def __str__(self) -> str:
        if not self.measured:
            return "not measured"
        held = "held so far" if self.so_far else "held"
        outcome = held if not self.broken else "not held" if not self.held else "held in part"
        text = f"{outcome}: {len(self.held)} of {self.measured} columns"
        if self.unmeasured:
            text += f" ({len(self.unmeasured)} not measured)"
        text += "".join(f"; {column}: {why}" for column, why in (*self.broken.items(), *self.unfinished.items()))
        return text + (f"; seeds differ: {'; '.join(self.divided)}" if self.divided else "")


@dataclass(frozen=True)
class Experiment:
    """A published table.

    Attributes:
        stem: the name of its file, without the ending.
        title, paper, table: of which paper; the table's number there.
        measure: what is compared.
        spread: what the paper's second numbers are taken over, ``clients`` or ``runs``; empty if it prints none.
        clients: number of clients.
        own: the paper's own method; empty if the file names none.
        headline: of the rows that run it, the one that is compared with all others; empty without ``own``.
        config: keys of the run config for all runs.
        columns, rows, claims: of the table.
        chosen: a sentence on each thing that the paper leaves open, and what is run instead.
    """

    stem: str
    title: str
    paper: str
    table: int
    measure: Measure
    spread: str
    clients: int
    own: str
    headline: str
    config: Mapping[str, Any]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]
    chosen: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            ConfigError: names the file, the key and what is wrong.
        """
        content = read_yaml(path, str(path))
        return cls(stem=path.stem, **_Reader(str(path)).experiment(content))

    def planned_runs(
        self, seeds: Sequence[int], scale: float, data: "Data", federation: str, same: Mapping[str, Any]
    ) -> list[PlannedRun]:
        """Return the runs of the table, without those of rows that Floret does not have.

        Args:
            seeds: each is a run of every cell of the table.
            scale: this part of rounds and samples, in (0, 1].
            data: where datasets are.
            federation: the simulation's ``--federation-config`` besides the number of clients.
            same: keys of every run, which go before those of the file.

        Raises:
            ConfigError: a key that the scale or the measure needs cannot be used; the message names the place.
        """
        return [
            PlannedRun(row.name, column.name, seed, self._spec(row, column, seed, scale, data, federation, same))
            for column in self.columns
            for row in self.rows
            if not row.missing
            for seed in seeds
        ]

    def _spec(
        self,
        row: Row,
        column: Column,
        seed: int,
        scale: float,
        data: "Data",
        federation: str,
        same: Mapping[str, Any],
    ) -> RunSpec:
        keys = {**self.config, **column.config, **row.config, **same, "seed": seed}
        try:
            check_keys(RunConfig, keys, ("dataset", "participation", "rounds", "max-samples"))
            size = keys.get("max-samples") or (_size(keys["dataset"]) if scale < 1 else 0)
        except ConfigError as error:
            raise ConfigError(f"{self.stem}, {row.name}, {column.name}: {error}") from error
        if self.measure.last_rounds > 1 and keys.get("participation", 1.0) < 1:
            if keys.get("evaluate-every", 1) != 1:
                raise ConfigError(
                    f"{self.stem}: evaluate-every = {keys['evaluate-every']!r}: must be 1, as the table averages the "
                    f"last {self.measure.last_rounds} rounds and not all clients take part in each; leave it out"
                )
            keys["evaluate-every"] = 1
        if scale < 1:
            keys["rounds"] = min(keys["rounds"], max(LEAST_ROUNDS, round(keys["rounds"] * scale)))
            keys["max-samples"] = min(size, max(LEAST_SAMPLES, round(size * scale)))
        return RunSpec(data.added_to(keys), f"num-supernodes={self._clients(row, column)} {federation}".strip())

    def other_keys(
        self,
        key: tuple[str, str, int],
        scale: float,
        config: Mapping[str, Any],
        defaults: Mapping[str, Any],
        clients: int,
        varied: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Return the keys with which a run differs from the table's, places of data aside.

        Args:
            key: row, column and seed of the run.
            scale: as for ``planned_runs``.
            config: of the run; a key that it lacks, which came later, had its default.
            defaults: of every key.
            clients: how many the run had; ``num-supernodes`` if the table has another number.
            varied: keys of which the run may have any value.
        """
        row = next(row for row in self.rows if row.name == key[0])
        column = next(column for column in self.columns if column.name == key[1])
        same = {name: config[name] for name in varied if name in config and (name, config[name]) != ("dataset", "npz")}
        wanted = {**defaults, **self._spec(row, column, key[2], scale, Data("", {}, False), "", same).keys}
        others = {"num-supernodes": clients} if clients != self._clients(row, column) else {}
        return others | {
            name: value
            for name, value in own_keys({**defaults, **config}).items()
            if value != wanted.get(name) and name not in (*PLACES, *varied) and (name, value) != ("dataset", "npz")
        }

    def _clients(self, row: Row, column: Column) -> int:
        return row.clients or column.clients or self.clients

    def job(
        self, place: PlannedRun, scale: float, config: Mapping[str, Any], setting: Mapping[str, Any] | None = None
    ) -> Job:
        """Return a run of the table as a job; its weight is epochs times samples.

        Args:
            place: the run.
            scale: as for ``planned_runs``.
            config: every key of the run.
            setting: keys that the label names, too.
        """

        def describe(run: Run) -> str:
            value = self.value(place.row, run.history, scale)
            return f"{percent_over_runs([value], 2)} % {self.when(place.row)} local training"

        samples = config["max-samples"] or 60_000
        weight = float(config["rounds"] * config["local-epochs"] * config["participation"] * samples)
        label = " | ".join([place.label, *(f"{key}={value}" for key, value in (setting or {}).items())])
        return Job(place.spec, label, describe, weight)

    def when(self, row: str) -> str:
        """Return when a row's accuracy is measured: ``before`` or ``after`` local training."""
        return next(r.when for r in self.rows if r.name == row)

    def window(self, scale: float) -> int:
        """Return how many of the last rounds are averaged: as large a part of the run at every scale."""
        return max(1, round(self.measure.last_rounds * scale))

    def value(self, row: str, history: History, scale: float) -> float | None:
        """Return the measure of a row's run, in [0, 1]; None if no round is complete."""
        return Accuracies.of(history, self.when(row), self.window(scale)).window

    def judge(self, claim: Claim, numbers: CellNumbers) -> Verdict:
        """Return where a claim holds: of the means of two rows over the seeds that both have.

        Args:
            claim: one of this file's.
            numbers: percent; nothing where there is none.
        """
        held, broken, unmeasured, divided, unfinished = [], {}, [], [], {}
        reported = self.reported()
        for column in claim.columns or tuple(column.name for column in self.columns):
            cells = {row: numbers.get(row, {}).get(column, {}) for row in (claim.higher, *claim.than)}
            above = _rivals_above(claim, cells)
            if above is None:
                unmeasured.append(column)
                continue
            if above:
                said = dict[str, list[str]]()
                for row, (ours, theirs) in above.items():
                    said.setdefault(f"{claim.higher} {ours:.2f}", []).append(f"{row} {theirs:.2f}")
                broken[column] = "; ".join(", ".join([ours, *rivals]) for ours, rivals in said.items())
            else:
                held.append(column)
                printed = [row for row in claim.than if reported[row][column]]
                missing = [row for row in printed if not shared_means(cells[claim.higher], cells[row])]
                if missing:
                    unfinished[column] = f"{', '.join(missing)} not measured"
            if _divided(claim, cells):
                divided.append(column)
        return Verdict(tuple(held), broken, tuple(unmeasured), tuple(divided), unfinished)

    def is_own(self, row: str) -> bool:
        """Return whether a row runs the paper's own method."""
        return next(_runs(self.own, self.config, r) for r in self.rows if r.name == row)

    def reported(self) -> CellNumbers:
        """Return the paper's numbers, each as that of a seed 0; nothing where it prints none."""
        names = [column.name for column in self.columns]
        return {
            row.name: {
                name: {} if value is None else {0: value} for name, value in zip(names, row.reported, strict=True)
            }
            for row in self.rows
        }


def _rivals_above(claim: Claim, cells: Mapping[str, Mapping[int, float]]) -> dict[str, tuple[float, float]] | None:
    """Return the rivals that keep a claim from holding, with both means; None without numbers.

    Args:
        claim: the claim.
        cells: its rows' percent by seed, in one column.
    """
    found = {row: means for row in claim.than if (means := shared_means(cells[claim.higher], cells[row]))}
    if not found:
        return None
    # To the hundredths that papers print: a lead of 0.179 is the 0.18 that one claims.
    leads = {row: round(ours - theirs, 2) for row, (ours, theirs) in found.items()}
    return {row: found[row] for row, lead in leads.items() if lead < claim.by or lead == claim.by == 0}


def _divided(claim: Claim, cells: Mapping[str, Mapping[int, float]]) -> bool:
    """Return whether a claim holds with one seed and not with another, or in the mean of the seeds and with none.

    A rival that is above with every seed that it has decides alone: with another seed it may not have been run.
    """
    each = dict[int, dict[str, tuple[float, float]]]()
    for seed in cells[claim.higher]:
        alone = {row: {seed: values[seed]} if seed in values else {} for row, values in cells.items()}
        if (above := _rivals_above(claim, alone)) is not None:
            each[seed] = above
    if len({bool(above) for above in (*each.values(), _rivals_above(claim, cells))}) < 2:
        return False
    return not any(
        all(row in above for seed, above in each.items() if seed in cells[row])
        for row in claim.than
        if cells[row].keys() & each.keys()
    )


def shared_means(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, float] | None:
    """Return the means of two cells over the seeds that both have, None if there is none.

    Another seed draws other clients, which moves all methods alike, often by more than they differ.
    """
    seeds = ours.keys() & theirs.keys()
    return (mean(ours[s] for s in seeds), mean(theirs[s] for s in seeds)) if seeds else None


@dataclass(frozen=True)
class Data:
    """Where datasets are: ``folder`` for all, ``single`` a folder or an npz file by the name of its dataset."""

    folder: str
    single: Mapping[str, str]
    download: bool

    @classmethod
    def of(cls, places: Sequence[str], download: bool) -> Self:
        """Read ``PATH`` and ``NAME=PATH`` texts.

        Raises:
            ConfigError: a name is not that of a dataset, a path is empty, an npz file is given for all datasets, or two
                paths for the same.
        """
        folder, single = "", {}
        for text in places:
            name, equals, path = text.partition("=")
            if not equals or "/" in name:  # a folder with this sign in its path
                name, path = "", text
            if not path:
                raise ConfigError(f"--data {text!r}: names no path; it must be like ~/data or mnist=~/data")
            wrong = one_of(name, SIZES) if name else None
            if wrong:
                raise ConfigError(f"--data {text}: {name!r} {wrong}")
            place = str(Path(path).expanduser().resolve())
            if not name and place.endswith(".npz"):
                raise ConfigError(
                    f"--data {text}: an npz file takes the place of one dataset: name it, such as cifar10={text}"
                )
            if name in single or (not name and folder):
                of = name or "the folder of all datasets"
                raise ConfigError(f"--data {text}: {of} is given twice; give it once")
            if name:
                single[name] = place
            else:
                folder = place
        return cls(folder, single, download)

    def check_there(self) -> None:
        """Check that the places exist; into a folder that does not, datasets may still be downloaded.

        Raises:
            ConfigError: names the first that does not.
        """
        for place in filter(None, (self.folder, *self.single.values())):
            if not self.download and not Path(place).exists():
                raise ConfigError(f"--data {place}: is not there; name where the datasets are, or add --download")

    def unused(self, runs: Iterable[RunSpec]) -> list[str]:
        """Return a line for each dataset of which a place is given, and that no run reads."""
        read = {spec.keys.get("data-dir") for spec in runs}
        return [
            f"--data {name}={place} changes nothing: no run reads {name} from there"
            for name, place in self.single.items()
            if place not in read
        ]

    def added_to(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``keys`` with those that say where the data are; an npz file takes the place of its dataset."""
        place = self.single.get(keys["dataset"], self.folder)
        instead = {"dataset": "npz"} if place.endswith(".npz") else {}
        # The digits are a part of scikit-learn; only a file in their place lies anywhere.
        where = {"data-dir": place} if place and (instead or keys["dataset"] != "digits") else {}
        return {**keys, **instead, **where, "download": self.download}


def selected(tables: Sequence[Sequence[PlacedT]], patterns: Sequence[str]) -> list[list[PlacedT]]:
    """Return the runs whose row matches one of the patterns for rows, and whose column one of those for columns.

    Args:
        tables: the runs of each table.
        patterns: names of rows or columns, ``*`` for any text, case ignored; without patterns every run is returned.

    Raises:
        ConfigError: a pattern matches no name in any table, or no run has a row and a column of those wanted.
    """
    rows = {one.row for planned in tables for one in planned}
    columns = {one.column for planned in tables for one in planned}
    wanted_rows, wanted_columns = set[str](), set[str]()
    for pattern in patterns:
        in_rows, in_columns = _matching(pattern, rows), _matching(pattern, columns)
        if not in_rows and not in_columns:
            longer = _matching(f"{pattern}*", rows | columns)
            hint = f" (did you mean '{pattern}*'?)" if longer else nearest(pattern, rows | columns)
            rest = hint or f"; rows: {'; '.join(sorted(rows))}; columns: {'; '.join(sorted(columns))}"
            raise ConfigError(f"--only {pattern!r}: no row or column with runs has this name{rest}")
        wanted_rows |= in_rows
        wanted_columns |= in_columns
    found = [
        [
            one
            for one in planned
            if (not wanted_rows or one.row in wanted_rows) and (not wanted_columns or one.column in wanted_columns)
        ]
        for planned in tables
    ]
    if patterns and not any(found):
        raise ConfigError(
            f"--only {', '.join(map(repr, patterns))}: no run is in one of these rows and in one of these columns; "
            "name those of one table"
        )
    return found


def _size(dataset: str) -> int:
    """Return how many samples a dataset has.

    Raises:
        ConfigError: there is no such dataset, or it is the user's own.
    """
    if dataset in SIZES:
        return SIZES[dataset]
    from data import DATASETS

    wrong = one_of(dataset, DATASETS) or "its size is not known: a scale needs max-samples"
    raise ConfigError(f"dataset = {dataset!r}: {wrong}")


def _method(config: Mapping[str, Any], row: Row) -> str:
    return str({**config, **row.config}.get("method", ""))


def _runs(own: str, config: Mapping[str, Any], row: Row) -> bool:
    return not row.baseline and _method(config, row) == own


def _matching(pattern: str, names: Iterable[str]) -> set[str]:
    wanted = re.compile(".*".join(map(re.escape, pattern.casefold().split("*"))), re.DOTALL)
    return {name for name in names if wanted.fullmatch(name.casefold())}


class _Reader:
    """Checks the content of a file and makes dataclasses of it; errors begin with the file and the key."""

    def __init__(self, file: str) -> None:
        self._file = file

    def experiment(self, content: Any) -> dict[str, Any]:
        known = {field.name for field in fields(Experiment)} - {"stem"}
        table = self._table(content, "the file", known, known - {"spread", "own", "headline", "claims", "chosen"})
        measure = self._table(table["measure"], "measure", {"when", "last-rounds"}, {"when", "last-rounds"})
        when = self._when(measure["when"], "measure.when")
        columns = tuple(
            self._column(item, f"columns[{i}]") for i, item in enumerate(self._list(table["columns"], "columns"))
        )
        rows = tuple(
            self._row(item, f"rows[{i}]", len(columns), when)
            for i, item in enumerate(self._list(table["rows"], "rows"))
        )
        self._distinct([column.name for column in columns], "columns")
        self._distinct([row.name for row in rows], "rows")
        claims = tuple(
            self._claim(item, f"claims[{i}]", rows, columns)
            for i, item in enumerate(self._list(table.get("claims", []), "claims"))
        )
        spread = table.get("spread", "")
        if spread not in ("", "clients", "runs"):
            self._fail("spread", "must be clients or runs")
        self._check_cells(table["config"], columns, rows)
        own, methods = self._name(table, "own"), {_method(table["config"], row) for row in rows}
        if own and own not in methods:
            self._fail("own", f"{own!r} is the method of no row{nearest(str(own), methods)}")
        running = [row.name for row in rows if own and _runs(own, table["config"], row)]
        if own and not running:
            self._fail("own", f"{own!r} is run by rows with baseline: true alone; leave one without")
        headline = self._name(table, "headline", running[-1] if running else "")
        if headline and headline not in running:
            self._fail("headline", f"{headline!r} is no row that runs own{nearest(str(headline), running)}")
        return {
            "title": self._text(table["title"], "title"),
            "paper": self._text(table["paper"], "paper"),
            "table": self._count(table["table"], "table"),
            "measure": Measure(when, self._count(measure["last-rounds"], "measure.last-rounds")),
            "spread": spread,
            "clients": self._count(table["clients"], "clients"),
            "own": own,
            "headline": headline,
            "config": self._config(table["config"], "config"),
            "columns": columns,
            "rows": rows,
            "claims": claims,
            "chosen": tuple(self._text(line, "chosen") for line in self._list(table.get("chosen", []), "chosen")),
        }

    def _column(self, item: Any, key: str) -> Column:
        table = self._table(item, key, {"name", "config", "clients"}, {"name", "config"})
        return Column(
            self._text(table["name"], f"{key}.name"),
            self._config(table["config"], f"{key}.config"),
            self._own_clients(table, key),
        )

    def _row(self, item: Any, key: str, columns: int, when: str) -> Row:
        known = {"name", "config", "clients", "missing", "when", "baseline", "reported", "spread"}
        table = self._table(item, key, known, {"name", "reported"})
        if ("missing" in table) == ("config" in table):
            self._fail(key, "needs either config or missing")
        return Row(
            self._text(table["name"], f"{key}.name"),
            self._config(table.get("config", {}), f"{key}.config"),
            self._own_clients(table, key),
            self._text(table["missing"], f"{key}.missing") if "missing" in table else "",
            self._when(table.get("when", when), f"{key}.when"),
            self._switch(table.get("baseline", False), f"{key}.baseline"),
            self._numbers(table["reported"], f"{key}.reported", columns),
            self._numbers(table.get("spread", [None] * columns), f"{key}.spread", columns),
        )

    def _claim(self, item: Any, key: str, rows: Sequence[Row], columns: Sequence[Column]) -> Claim:
        table = self._table(item, key, {"text", "higher", "than", "columns", "by"}, {"text", "higher", "than"})
        names, places = [row.name for row in rows], [column.name for column in columns]
        for name in [table["higher"], *self._list(table["than"], f"{key}.than")]:
            if name not in names:
                self._fail(key, f"{name!r} is not a row{nearest(str(name), names)}")
        if not table["than"]:
            self._fail(f"{key}.than", "must name a row at least")
        if table["higher"] in table["than"]:
            self._fail(f"{key}.than", f"{table['higher']!r} is the row that is higher; name others")
        self._distinct(table["than"], f"{key}.than")
        for name in self._list(table.get("columns", []), f"{key}.columns"):
            if name not in places:
                self._fail(key, f"{name!r} is not a column{nearest(str(name), places)}")
        self._distinct(table.get("columns", []), f"{key}.columns")
        by = table.get("by", 0.0)
        if not isinstance(by, int | float) or isinstance(by, bool) or not abs(by) <= 100:
            self._fail(f"{key}.by", "must be points, from -100 to 100")
        text = self._text(table["text"], f"{key}.text")
        return Claim(text, table["higher"], tuple(table["than"]), tuple(table.get("columns", [])), float(by))

    def _check_cells(self, config: Any, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        for row in rows:
            for column in columns:
                keys = {**self._config(config, "config"), **column.config, **row.config}
                for key in ("dataset", "rounds", *([] if row.missing else ["method"])):
                    if key not in keys:
                        self._fail(f"row {row.name!r}, column {column.name!r}", f"has no {key}")
                if keys["dataset"] not in SIZES:
                    self._fail("dataset", f"{keys['dataset']!r} must be one of {', '.join(SIZES)}")

    def _config(self, value: Any, key: str) -> dict[str, Any]:
        if not isinstance(value, dict) or not all(isinstance(v, bool | int | float | str) for v in value.values()):
            self._fail(key, "must be keys of the run config with their values")
        if not all(isinstance(name, str) for name in value):
            self._fail(key, f"{next(n for n in value if not isinstance(n, str))!r} is no key of the run config")
        wrong = [name for name in value if name in (*PLACES, "seed")]
        if wrong:
            self._fail(key, f"{wrong[0]} is set by the command, not by the file")
        return dict(value)

    def _when(self, value: Any, key: str) -> str:
        if value not in ("before", "after"):
            self._fail(key, "must be before or after")
        return str(value)

    def _switch(self, value: Any, key: str) -> bool:
        if not isinstance(value, bool):
            self._fail(key, "must be true or false")
        return value is True

    def _table(self, value: Any, key: str, known: set[str], needed: set[str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._fail(key, f"must have the keys {', '.join(sorted(needed))}")
        for name in value:
            if name not in known:
                self._fail(key, f"{name!r} is not known{nearest(str(name), known)}")
        for name in sorted(needed):
            if name not in value:
                self._fail(key, f"{name!r} is missing, such as {_EXAMPLES[name]}")
        return dict(value)

    def _list(self, value: Any, key: str) -> list[Any]:
        if not isinstance(value, list):
            self._fail(key, "must be a list")
        return list(value)

    def _numbers(self, value: Any, key: str, count: int) -> Numbers:
        numbers = self._list(value, key)
        if len(numbers) != count:
            self._fail(key, f"has {len(numbers)} numbers for {count} columns")
        for number in numbers:
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if number is not None and not (is_number and 0 <= number <= 100):
                self._fail(key, f"{number!r} must be a number from 0 to 100, or null")
        return tuple(None if number is None else float(number) for number in numbers)

    def _count(self, value: Any, key: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self._fail(key, "must be a whole number of at least 1")
        return int(value)

    def _own_clients(self, table: Mapping[str, Any], key: str) -> int | None:
        return self._count(table["clients"], f"{key}.clients") if "clients" in table else None

    def _name(self, table: Mapping[str, Any], key: str, default: str = "") -> str:
        return self._text(table[key], key) if key in table else default

    def _text(self, value: Any, key: str) -> str:
        if not isinstance(value, str) or not value.strip():
            self._fail(key, "must be text")
        if not "".join(value.split()).isprintable():
            self._fail(key, f"{value!r} has signs that cannot be printed; leave them out")
        return str(value).strip()

    def _distinct(self, names: Sequence[str], key: str) -> None:
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            self._fail(key, f"{twice!r} is there twice")

    def _fail(self, key: str, wrong: str) -> None:
        raise ConfigError(f"{self._file}: {key}: {wrong}")
