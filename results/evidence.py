"""What the results of published tables say of the papers' claims: a front page's section, a picture, a page of claims.

They are made from the files of results and of experiments alone, so they say what those say.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from common.durable import write_whole
from common.errors import FloretError
from common.run_config import default_config
from results.evidence_chart import Group, Line, picture
from results.experiment import Claim, Experiment, Verdict, shared_means
from results.history import is_number
from results.measured import MeasuredRun, loaded
from results.ranking import half_interval
from results.tables import ExperimentResults, number, other_keys

BEGIN = "<!-- Written by `floret evidence`, as far as the comment below; change the results, not this. -->"
END = "<!-- End of what `floret evidence` writes. -->"
PAGE, PICTURE, CLAIMS = "README.md", "evidence.svg", "claims.md"
# What an outcome counts as. Undecided: with one seed the claim holds, with another it does not. Held so far: against
# some rivals, and others were not run. Mixed: in some columns it holds, in others it does not.
HELD, SO_FAR, NOT_HELD, UNDECIDED, MIXED = "held", "held so far", "not held", "undecided", "mixed"
# What follows a table's name in that of a file: its scale, and what else tells it from others.
_REST = re.compile(r"(?:-scale(\d+(?:\.\d+)?(?:e-\d+)?))?(?:-(.+))?")
_NOTE = """\
*Reported* and *ours* are margins in points: the row that the claim sets higher, above the best of its rivals that we
ran, in the paper's numbers and in ours; the least and the greatest where there are several columns. With several seeds
ours is that of the means over the seeds that both rows have, in brackets over those seeds; with three or more, ± is
half of the 95 % interval (a paired t test), which takes in 0 where seeds do not tell the rows apart. *Held* asks for
what the claim asks, to a hundredth, which may be a least margin (*above, by less*); in bold: at full size. *Held so
far*: in the columns and against the rivals that we ran, while others of the claim were not run. A scaled-down run has
that part of the paper's rounds and samples: it shows whether an ordering is there at that size, and is listed where no
full-size run judges the claim. A name after the scale says that the runs have other keys than the table's; they are
not counted above. *Mixed*: held in some columns, or at one of two scales. *Undecided*: held with one seed of a column
and not with another, and refuted in no other column and at no other scale."""


@dataclass(frozen=True)
class Margin:
    """How far a row is above the best of its rivals in a column, in points; the rivals are those that were run.

    Attributes:
        column: of the table.
        reported: in the paper's numbers; None where it prints none.
        ours: the least over rivals, of the means over the seeds that row and rival both have.
        span: the least and the greatest over those seeds, above the same rival; None for a single seed.
        error: half of the 95 % interval that those seeds give, paired; None for fewer than three.
        rivals: how many were run.
        seeds: how many seeds the row shares with a rival, the least and the greatest number.
    """

    column: str
    reported: float | None
    ours: float
    span: tuple[float, float] | None
    error: float | None
    rivals: int
    seeds: tuple[int, int]


@dataclass(frozen=True)
class TableResult:
    """A file of results.

    Attributes:
        name: of the file, without its ending.
        variant: what its name has after table and scale, or says which keys are other than the table's.
        results: what it has.
    """

    name: str
    variant: str
    results: ExperimentResults

    @classmethod
    def read(cls, path: Path, experiment: Experiment, scale: float, variant: str, defaults: Mapping[str, Any]) -> Self:
        """Read a file of results, ``defaults`` being those of every key of a run.

        Raises:
            FloretError: it is something else, or not of this table and scale.
        """
        content, kept = loaded(path, experiment.window(scale))
        told: Any = content.get("scale")
        # To the digits that a name has.
        if content.get("experiment") != experiment.stem or not is_number(told) or f"{told:g}" != f"{scale:g}":
            said = f"{content.get('experiment')} at scale {told}"
            raise FloretError(f"{path}: has results of {said}; its name must begin with those")
        scale = told
        known = {(row.name, column.name) for row in experiment.rows for column in experiment.columns}
        runs = dict[tuple[str, str, int], MeasuredRun]()
        for entry, run in kept:
            cell = entry["row"], entry["column"]
            if cell not in known:
                raise FloretError(f"{path}: has a run of {', '.join(cell)}, which is no cell of {experiment.stem}")
            seed = run.about["config"]["seed"]
            if (*cell, seed) in runs:
                raise FloretError(f"{path}: has the run of {', '.join(cell)}, seed {seed} twice; remove one of them")
            runs[*cell, seed] = run
        others = other_keys(experiment, scale, runs, defaults)
        named = variant.replace("-", " ") or (f"with other {', '.join(others)}" if others else "")
        return cls(path.stem, named, ExperimentResults(experiment, scale, runs, (), {}, others))

    @property
    def experiment(self) -> Experiment:
        """The table."""
        return self.results.experiment

    @property
    def at_full_size(self) -> bool:
        """Whether the runs are those of the table as it is."""
        return self.results.scale == 1 and not self.variant

    @property
    def size(self) -> str:
        """At which size the runs were made."""
        others = self.results.other_keys.keys() & {"rounds", "max-samples"}
        whole = {0: "full size", 1: "all samples" if "rounds" in others else "all rounds", 2: "another size"}
        size = whole[len(others)] if self.results.scale == 1 else f"scale {self.results.scale:g}"
        return size + (f", {self.variant}" if self.variant else "")

    def margin(self, row: str, rivals: Iterable[str], column: str) -> Margin | None:
        """Return the margin of a row over those of ``rivals`` that were run; None without the row or any of them."""
        numbers, reported = self.results.numbers(), self.experiment.reported()
        ours, paper = numbers[row][column], reported[row][column].get(0)
        found = {rival: means for rival in rivals if (means := shared_means(ours, numbers[rival][column]))}
        if not found:
            return None
        nearest = min(found, key=lambda rival: found[rival][0] - found[rival][1])
        seeds = {rival: ours.keys() & numbers[rival][column].keys() for rival in found}
        leads = [ours[seed] - numbers[nearest][column][seed] for seed in seeds[nearest]]
        printed = [value for rival in found if (value := reported[rival][column].get(0)) is not None]
        counts = [len(shared) for shared in seeds.values()]
        return Margin(
            column,
            None if paper is None or not printed else paper - max(printed),
            found[nearest][0] - found[nearest][1],
            (min(leads), max(leads)) if len(leads) > 1 else None,
            half_interval(leads) if len(leads) > 2 else None,
            len(found),
            (min(counts), max(counts)),
        )

    @property
    def rivals(self) -> list[str]:
        """The rows that the headline is compared with: all others that the paper has."""
        printed = [row.name for row in self.experiment.rows if any(number is not None for number in row.reported)]
        return [name for name in printed if name != self.experiment.headline]

    def lead(self) -> list[Margin]:
        """Return the margins of the paper's own method, the table's headline, over its rivals."""
        columns, own = self.experiment.columns, self.experiment.headline
        return [m for column in columns if own and (m := self.margin(own, self.rivals, column.name))]

    @property
    def lacking(self) -> str:
        """What is missing for a ``lead``; empty if there is one."""
        own, ran = self.experiment.headline, {row for row, _, _ in self.results.runs}
        if self.lead():
            return ""
        if not own:
            return "its file does not name the paper's own method (own)"
        return f"{own} was not run" if own not in ran else f"{own} was run in no column with a seed of a rival"

    def lines(self) -> tuple[Line, ...]:
        """Return the same for the picture."""
        whole = len(self.rivals)
        return tuple(Line(m.column, m.reported, m.ours, m.span, f"{m.rivals} of {whole} rivals") for m in self.lead())

    def conditions(self, margins: Sequence[Margin], columns: int, rivals: int) -> str:
        """Return size, columns, rivals and seeds of the runs that margins are of, of so many columns and rivals."""
        ran = margins[0].column if len(margins) == 1 else f"{len(margins)} of {columns} columns"
        found = _range([margin.rivals for margin in margins])
        seeds = _range([count for margin in margins for count in margin.seeds])
        some = [] if found == str(rivals) else [f"{found} of {rivals} rivals"]
        return "; ".join([self.size, ran, *some, f"{seeds} seed" if seeds == "1" else f"{seeds} seeds"])


@dataclass(frozen=True)
class Finding:
    """What a file of results says of a claim that it can judge: ``margins`` are those of the columns it has."""

    result: TableResult
    claim: Claim
    verdict: Verdict
    margins: tuple[Margin, ...]

    @property
    def kind(self) -> str:
        """What the outcome counts as."""
        undecided = set(self.verdict.divided)
        held, refuted = set(self.verdict.held) - undecided, self.verdict.broken.keys() - undecided
        if refuted:
            return MIXED if held else NOT_HELD
        if undecided:
            return UNDECIDED
        return SO_FAR if self.verdict.so_far else HELD

    @property
    def outcome(self) -> str:
        """Whether the claim holds."""
        undecided, measured = self.verdict.divided, self.verdict.measured
        if undecided and measured == 1:
            return f"{UNDECIDED}: seeds differ, {'held' if self.verdict.held else 'not held'} in their mean"
        held = set(self.verdict.held) - set(undecided)
        so_far = len(held & self.verdict.unfinished.keys())
        if self.verdict.so_far and len(held) == measured:
            return SO_FAR
        counts = {HELD: len(held) - so_far, SO_FAR: so_far, UNDECIDED: len(undecided)}
        found = {outcome: count for outcome, count in counts.items() if count}
        if not found:
            above = self.claim.by > 0 and all(margin.ours > 0 for margin in self.margins)
            return NOT_HELD + ": above, by less" * above
        if list(found.values()) == [measured]:
            return next(iter(found))
        return ", ".join(f"{outcome} in {count}" for outcome, count in found.items()) + f" of {measured} columns"

    @property
    def conditions(self) -> str:
        """Size, columns, rivals and seeds of the runs."""
        columns = len(self.claim.columns) or len(self.result.experiment.columns)
        return self.result.conditions(self.margins, columns, len(self.claim.than))


@dataclass(frozen=True)
class Evidence:
    """All results of a folder, beside what the papers claim.

    Attributes:
        folder: of the results.
        tables: the folder of the experiments' files.
        experiments: all of them, by name.
        results: those with runs, by table, then the largest scale first.
        fits: names of the pages of searched settings, by the table's name.
    """

    folder: Path
    tables: Path
    experiments: Mapping[str, Experiment]
    results: tuple[TableResult, ...]
    fits: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls, folder: Path, tables: Path, app: Path) -> Self:
        """Read all results of ``folder`` whose tables are in the folder ``tables``; ``app`` is Floret's.

        Raises:
            FloretError: a file is not what its name says, or there is none, or no table.
        """
        defaults = default_config(app)
        experiments = {path.stem: Experiment.read(path) for path in sorted(tables.glob("*.yaml"))}
        if not experiments:
            raise FloretError(f"{tables}: has no file of a table (*.yaml); see --experiments")
        results, fits = list[TableResult](), dict[str, list[str]]()
        for path in sorted(folder.glob("*.json")):
            place = _place(path.stem, experiments)
            if place is None:
                continue
            table, scale, variant = place
            if variant == "fit":
                fits.setdefault(table, []).append(path.stem)
            else:
                results.append(TableResult.read(path, experiments[table], scale, variant, defaults))
        if not results:
            raise FloretError(f"{folder}: has no JSON file that floret reproduce wrote; name the folder of --results")
        results.sort(key=lambda result: (result.experiment.stem, -result.results.scale, result.variant))
        return cls(folder, tables, experiments, tuple(result for result in results if result.results.runs), fits)

    def findings(self) -> list[Finding]:
        """Return what the results say of each claim; those scaled down only where no full-size run judges it."""
        shown = []
        for experiment in self.experiments.values():
            results = [result for result in self.results if result.experiment == experiment]
            for claim in experiment.claims:
                found = [finding for result in results if (finding := _finding(result, claim))]
                full = any(finding.result.at_full_size for finding in found)
                shown += [finding for finding in found if finding.result.results.scale == 1 or not full]
        return shown

    def summary(self) -> str:
        """Return how much was run and how much of it holds, in two sentences."""
        run = {result.experiment.stem for result in self.results}
        full = {result.experiment.stem for result in self.results if result.at_full_size}
        papers = len({experiment.paper for experiment in self.experiments.values()})
        claims = sum(len(experiment.claims) for experiment in self.experiments.values())
        outcomes: dict[bool, dict[tuple[str, Claim], set[str]]] = {True: {}, False: {}}
        for finding in self.findings():
            if not finding.result.variant:
                key = finding.result.experiment.stem, finding.claim
                outcomes[finding.result.at_full_size].setdefault(key, set()).add(finding.kind)
        return (
            f"Of {len(self.experiments)} tables of {papers} papers, {len(run)} have runs, {len(full)} of them at full "
            f"size. Of {claims} claims, at full size {_counted(outcomes[True].values())}; scaled down "
            f"{_counted(outcomes[False].values())}."
        )

    def papers(self) -> list[str]:
        """Return the lines of a table with a line a paper: its largest run, of one size that of the first table."""
        lines = [
            "| Paper | Its method above the best rival | Reported | Ours | Claims |",
            "|---|---|---:|---:|---|",
        ]
        findings = [finding for finding in self.findings() if not finding.result.variant]
        for paper in dict.fromkeys(map(_paper, self.experiments)):
            tables = [experiment for stem, experiment in self.experiments.items() if _paper(stem) == paper]
            name, page = short_title(tables[0]).partition(",")[0], f"{paper}.md"
            link = f"[{name}]({page})" if (self.folder / page).is_file() else name
            ran = [result for result in self.results if result.experiment in tables]
            own_keys = [result for result in ran if not result.variant]
            results = [result for result in own_keys if result.lead()] or own_keys
            outcomes: dict[tuple[str, Claim], set[str]] = {}
            for finding in findings:
                if finding.result.experiment in tables:
                    outcomes.setdefault((finding.result.experiment.stem, finding.claim), set()).add(finding.kind)
            counts = _outcomes(outcomes.values())
            said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "none judged"
            judged = f"{said}, of {sum(len(table.claims) for table in tables)}"
            if not results:
                lines.append(_row(link, "run with other keys alone" if ran else "not run", "-", "-", judged))
                continue
            largest = max(results, key=lambda result: (result.results.scale, -result.experiment.table))
            margins, experiment = largest.lead(), largest.experiment
            place = f"[Table {experiment.table}]({largest.name}.md); "
            if largest.lacking:
                lines.append(_row(link, f"{place}{largest.size}; {largest.lacking}", "-", "-", judged))
                continue
            place += largest.conditions(margins, len(experiment.columns), len(largest.rivals))
            lines.append(_row(link, place, _span([margin.reported for margin in margins]), _ours(margins), judged))
        return lines

    def claims(self) -> str:
        """Return the page that has every claim with every file of results that can judge it."""
        findings = self.findings()
        lines = ["| Table | Claim | Run at | Reported | Ours | Outcome |", "|---|---|---|---:|---:|---|"]
        not_run = []
        for table, experiment in self.experiments.items():
            results = [result for result in self.results if result.experiment.stem == table]
            found = [finding for finding in findings if finding.result.experiment.stem == table]
            fits = "".join(f", [fit]({name}.md)" for name in self.fits.get(table, ()))
            title, nothing = short_title(experiment), (_claims(experiment), "-", "-", "-")
            for finding in found:
                place = f"[{title}]({finding.result.name}.md){fits}"
                reported = _span([margin.reported for margin in finding.margins])
                outcome = f"**{finding.outcome}**" if finding.result.at_full_size else finding.outcome
                lines.append(
                    _row(place, finding.claim.text, finding.conditions, reported, _ours(finding.margins), outcome)
                )
                fits = ""
            if results and not found:
                files = ", ".join(f"[{title}]({result.name}.md)" for result in results)
                lines.append(_row(files + fits, *nothing, "run, but no claim can be judged"))
            if not results:
                file = Path(os.path.relpath(self.tables / f"{table}.yaml", self.folder)).as_posix()
                not_run.append(_row(f"[{title}]({file}){fits}", *nothing, "not run"))
        head = ["# Claim by claim", "", f"Written by `floret evidence`, beside [the front page]({PAGE}).", ""]
        return "\n".join([*head, self.summary(), "", *lines, *not_run, "", _NOTE, ""])

    def section(self) -> str:
        """Return the section of the front page, with its comments."""
        image = f"![Margins of the papers' own methods over their best rivals, reported and ours]({PICTURE})"
        under = (
            "The table has a paper's largest run with its own keys, the picture the largest of each of its tables. "
            f"Smaller runs, runs with other keys, and how each claim is judged: [claim by claim]({CLAIMS})."
        )
        return "\n".join([BEGIN, "", self.summary(), "", *self.papers(), "", image, "", under, "", END])

    def page(self) -> str:
        """Return the page with the section as it is now; if there is none yet, one with a heading and the section.

        Raises:
            FloretError: the page has no place for the section.
        """
        path = self.folder / PAGE
        if not path.exists():
            return f"# Results\n\n{self.section()}\n"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise FloretError(f"{path}: cannot be read ({error})") from error
        before, begin, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end or BEGIN in rest or END in before + after:
            raise FloretError(f"{path}: must have each of these lines once, in this order: {BEGIN} and {END}")
        return before + self.section() + after

    def groups(self) -> list[Group]:
        """Return what the picture shows: the margins of the papers' own methods over all other rows of their tables.

        Of a table it is the largest run, one with the table's own keys if there is any.
        """
        groups = []
        for experiment in self.experiments.values():
            results = [result for result in self.results if result.experiment == experiment and result.lines()]
            if results:
                largest = max(results, key=lambda result: (not result.variant, result.results.scale))
                title = f"{short_title(experiment)}, {largest.size}"
                groups.append(Group(experiment.paper, title, largest.at_full_size, largest.lines()))
        return groups

    def write(self) -> list[Path]:
        """Write front page, picture and the page of claims, and return where they are.

        Raises:
            FloretError: the page has no place for the section.
        """
        contents = {PAGE: self.page(), PICTURE: picture(self.groups()), CLAIMS: self.claims()}
        for name, content in contents.items():
            write_whole(self.folder / name, content.encode())
        return [self.folder / name for name in contents]


def short_title(experiment: Experiment) -> str:
    """Return the title without what the table is of: ``PFAKD, Table 1``."""
    return experiment.title.partition(":")[0]


def _paper(stem: str) -> str:
    """Return what the files of a paper begin with: of ``pfakd-table1`` it is ``pfakd``."""
    return stem.rpartition("-table")[0] or stem


def _place(name: str, stems: Iterable[str]) -> tuple[str, float, str] | None:
    """Return table, scale and variant that a file's name says; None if it is of no table."""
    for table in sorted(stems, key=len, reverse=True):
        found = _REST.fullmatch(name.removeprefix(table)) if name.startswith(table) else None
        if found:
            return table, float(found[1] or 1), found[2] or ""
    return None


def _finding(result: TableResult, claim: Claim) -> Finding | None:
    columns = claim.columns or [column.name for column in result.experiment.columns]
    margins = tuple(m for column in columns if (m := result.margin(claim.higher, claim.than, column)))
    verdict = result.experiment.judge(claim, result.results.numbers())
    return Finding(result, claim, verdict, margins) if margins else None


def _counted(outcomes: Iterable[set[str]]) -> str:
    """Return how many claims are judged, and how, as ``_outcomes`` does."""
    counts = _outcomes(outcomes)
    total = sum(counts.values())
    if not total:
        return "none is judged"
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return f"{total} {'is' if total == 1 else 'are'} judged ({said})"


def _outcomes(outcomes: Iterable[set[str]]) -> dict[str, int]:
    """Return how many claims have which outcome, of their outcomes in each file of results.

    Mixed are those that hold in some columns alone, or at one of two scales; not held are others that a file refutes;
    undecided are the rest in which seeds differ somewhere; held so far are those that hold, but not yet against all
    rivals in all columns.
    """
    found = list(outcomes)
    held = found.count({HELD})
    so_far = sum(SO_FAR in outcomes and outcomes <= {HELD, SO_FAR} for outcomes in found)
    broken = sum(NOT_HELD in outcomes and outcomes <= {NOT_HELD, UNDECIDED} for outcomes in found)
    undecided = sum(UNDECIDED in outcomes and not outcomes & {MIXED, NOT_HELD} for outcomes in found)
    mixed = len(found) - held - so_far - broken - undecided
    return {HELD: held, SO_FAR: so_far, NOT_HELD: broken, UNDECIDED: undecided, MIXED: mixed}


def _claims(experiment: Experiment) -> str:
    if not experiment.claims:
        return "none that a number can judge"
    more = len(experiment.claims) - 1
    return experiment.claims[0].text + (f"; and {more} more" if more else "")


def _ours(margins: Sequence[Margin]) -> str:
    if len(margins) == 1 and margins[0].span:
        (low, high), error = margins[0].span, margins[0].error
        within = "" if error is None else f" ±{error:.2f}"
        return f"{number(margins[0].ours, '+.2f')}{within} ({low:+.2f} to {high:+.2f})"
    return _span([margin.ours for margin in margins])


def _span(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = f"{min(known):+.2f}", f"{max(known):+.2f}"
    return low if low == high else f"{low} to {high}"


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
