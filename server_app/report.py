"""The report of a run: a page that needs no network, and plain-text tables for the terminal.

``read_run`` reads a run directory (``config.json``, ``history.jsonl``, ``summary.json``), finished or killed;
``write_report`` makes the page of one run, or the page that compares several. The charts are in ``report_charts`` and
the page's template in ``report_template``; both are imported when a page is written, so that reading stays light.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.errors import FloretError, one_line
from common.names import natural_key

T = TypeVar("T")

# A round in which fewer than this share of the clients was measured says something about those clients, not about the
# federation: it is drawn, but it is not compared with rounds in which (nearly) all were measured.
WIDE = 2 / 3
LONGEST_CLIENT_TABLE = 40
MISSING = "\N{EN DASH}"


@dataclass(frozen=True)
class Spread:
    """Accuracy over clients, each figure in [0, 1]; None where it was not measured."""

    mean: float | None = None
    weighted_mean: float | None = None
    std: float | None = None
    worst_decile: float | None = None


@dataclass(frozen=True)
class Scores:
    """One client's accuracy in [0, 1] on its own splits; None where it was not measured."""

    test: float | None = None
    validation: float | None = None


@dataclass(frozen=True)
class Traffic:
    """Bytes of the arrays that travelled: ``up`` to the server, ``down`` to the client."""

    up: int = 0
    down: int = 0


@dataclass(frozen=True)
class ClientRound:
    """What one client did in one round."""

    trained: bool
    before: Scores
    after: Scores
    bytes: Traffic


@dataclass(frozen=True)
class Refusal:
    """A reply that was not used, and why."""

    round: int
    client: str
    reason: str


@dataclass(frozen=True)
class Round:
    """One line of ``history.jsonl``; ``before`` and ``after`` map ``test`` and ``validation`` to their spread."""

    round: int
    clients: Mapping[str, ClientRound]
    before: Mapping[str, Spread]
    after: Mapping[str, Spread]
    loss: float | None
    bytes: Traffic
    refused: tuple[Refusal, ...]
    seconds: float

    def measured(self, when: str = "after", split: str = "test") -> int:
        """Return the number of clients whose accuracy was measured in this round."""
        return sum(getattr(getattr(client, when), split) is not None for client in self.clients.values())


@dataclass(frozen=True)
class Client:
    """One client's data: samples per split, and samples per class of its training split if labels are known."""

    samples: Mapping[str, int]
    labels: tuple[int, ...] | None


@dataclass(frozen=True)
class Best:
    """The best round by validation accuracy, and the mean test accuracy in it."""

    round: int
    test_mean: float | None


@dataclass(frozen=True)
class Figures:
    """A run in figures, on the test split, as in ``summary.json``; of a killed run, as far as its history goes."""

    before: Spread
    after: Spread
    best_validation: Best | None
    bytes: Traffic
    seconds: float | None
    seconds_per_round: float | None
    refused: int


@dataclass(frozen=True)
class Milestone:
    """A round that the table of accuracies names, and why."""

    name: str
    round: Round


@dataclass(frozen=True)
class Run:
    """A run directory, read."""

    directory: Path
    run_id: str
    started: str
    config: Mapping[str, Any]
    parameters: Mapping[str, Any]
    versions: Mapping[str, Any]
    num_classes: int | None
    clients: Mapping[str, Client]
    rounds: tuple[Round, ...]
    figures: Figures
    finished: bool

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.setting("method")

    @property
    def planned_rounds(self) -> int:
        """The number of rounds that the config asks for."""
        planned = self.config.get("rounds")
        return planned if isinstance(planned, int) else len(self.rounds)

    @property
    def last_round(self) -> int:
        """The number of the last round in the history, 0 if there is none."""
        return self.rounds[-1].round if self.rounds else 0

    @property
    def unfinished(self) -> str | None:
        """Such as ``"unfinished: 7 of 20 rounds"``; None for a run that wrote its summary."""
        return None if self.finished else f"unfinished: {self.last_round} of {self.planned_rounds} rounds"

    @property
    def partition(self) -> str:
        """The partition in words, such as ``"pathological, 2 classes per client"``."""
        if self.config.get("dataset") == "npz-clients":
            return "each client's own data"
        name = self.setting("partition")
        words = {
            "iid": "IID",
            "dirichlet": f"Dirichlet, alpha {self.setting('alpha')}",
            "pathological": f"pathological, {self._counted('classes-per-client', 'class', 'classes')} per client",
            "shards": f"shards, {self._counted('shards-per-client', 'shard', 'shards')} per client",
        }
        return words.get(name, name)

    def _counted(self, key: str, one: str, many: str) -> str:
        return f"{self.setting(key)} {one if self.config.get(key) == 1 else many}"

    def setting(self, key: str) -> str:
        """Return a key of the run config as text, ``"?"`` if the run does not have it."""
        return _text(self.config.get(key, "?"))

    @property
    def bytes_sent(self) -> int:
        """Bytes of all rounds so far, up and down together."""
        return sum(line.bytes.up + line.bytes.down for line in self.rounds)

    @property
    def settings(self) -> dict[str, Any]:
        """The run config and the method's own parameters, these with the method's name in front."""
        own = {key if "." in key else f"{self.method}.{key}": value for key, value in self.parameters.items()}
        return {**self.config, **own}

    def client_names(self) -> list[str]:
        """Return every client of the run, those that joined later included, numbers in numerical order."""
        names = {*self.clients, *(name for line in self.rounds for name in line.clients)}
        return sorted(names, key=natural_key)

    def wide_rounds(self, when: str = "after", split: str = "test") -> list[Round]:
        """Return the rounds in which (nearly) as many clients were measured as in any round.

        With partial participation these are the rounds in which all clients were evaluated.
        """
        most = max((line.measured(when, split) for line in self.rounds), default=0)
        return [line for line in self.rounds if most and line.measured(when, split) >= WIDE * most]

    def last_measured(self) -> Round | None:
        """Return the last round in which (nearly) all clients were measured, if there is one."""
        wide = self.wide_rounds()
        return wide[-1] if wide else None

    def milestones(self) -> list[Milestone]:
        """Return the rounds to quote: the last, the best by validation and the best on test, as far as there are."""
        wide, found = self.wide_rounds(), []
        if wide:
            found.append(Milestone("Last round", wide[-1]))
        best = self.figures.best_validation
        found += [
            Milestone("Best round by validation", line) for line in self.rounds if best and line.round == best.round
        ]
        if wide:
            top = max(wide, key=lambda line: _or_nothing(line.after["test"].mean))
            found.append(Milestone("Best on test, only to compare with papers that report it", top))
        return found


def read_run(directory: Path) -> Run:
    """Read a run directory; a killed run has no summary and may end in half a line.

    Raises:
        FloretError: it is not a run directory, or one of its files cannot be read; one line that names the file.
    """
    file = directory / "config.json"
    if not file.is_file():
        raise FloretError(f"{directory} is not a run directory: it has no config.json")
    start = _parse(file, "a run's config", lambda text: _config(json.loads(text)), _read(file))
    rounds = _history(directory / "history.jsonl")
    file = directory / "summary.json"
    finished = file.is_file()
    if finished:
        figures = _parse(file, "a run's summary", lambda text: _summary(json.loads(text)), _read(file))
    else:
        figures = _figures(rounds)
    return Run(directory=directory, rounds=rounds, figures=figures, finished=finished, **start)


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode(errors="replace")
    except OSError as error:
        raise FloretError(f"cannot read {file}: {error.strerror}") from error


def _parse(file: Path, what: str, build: Callable[[Any], T], source: Any) -> T:
    try:
        return build(source)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FloretError(f"{file} is not {what}: {_printable(_reason(error))}") from error


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _config(record: Mapping[str, Any]) -> dict[str, Any]:
    clients = {
        str(name): Client(
            samples={split: int(count) for split, count in (client.get("samples") or {}).items()},
            labels=None if client.get("labels") is None else tuple(int(count) for count in client["labels"]),
        )
        for name, client in (record.get("clients") or {}).items()
    }
    return {
        "run_id": str(record.get("run_id") or ""),
        "started": str(record.get("started") or ""),
        "config": dict(record["config"]),
        "parameters": dict(record.get("parameters") or {}),
        "versions": dict(record.get("versions") or {}),
        "num_classes": record.get("num_classes"),
        "clients": clients,
    }


def _history(file: Path) -> tuple[Round, ...]:
    if not file.is_file():
        return ()
    rounds: list[Round] = []
    lines = [line for line in _read(file).split("\n") if line.strip()]
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # The run was killed while it wrote this line.
                break
            raise FloretError(f"{file}, line {number}: not a line of a history: {_printable(str(error))}") from error
        new = _parse(file, f"a history (line {number})", _round, record)
        # A run that resumed from an older checkpoint writes its rounds again; the later line is the one that counts.
        rounds = [old for old in rounds if old.round < new.round]
        rounds.append(new)
    return tuple(rounds)


def _round(record: Mapping[str, Any]) -> Round:
    number = int(record["round"])
    accuracy = record.get("accuracy") or {}
    clients = {
        str(name): ClientRound(
            trained=bool(client.get("trained")),
            before=_scores(client.get("before")),
            after=_scores(client.get("after")),
            bytes=_traffic(client.get("bytes")),
        )
        for name, client in (record.get("clients") or {}).items()
    }
    return Round(
        round=number,
        clients=clients,
        before=_spreads(accuracy.get("before")),
        after=_spreads(accuracy.get("after")),
        loss=_number(record.get("loss")),
        bytes=_traffic(record.get("bytes")),
        refused=tuple(Refusal(number, str(one["client"]), str(one["reason"])) for one in record.get("refused") or ()),
        seconds=_number(record.get("seconds")) or 0.0,
    )


def _summary(record: Mapping[str, Any]) -> Figures:
    accuracy = record.get("accuracy") or {}
    seconds = record.get("seconds") or {}
    best = record.get("best_validation")
    return Figures(
        before=_spread(accuracy.get("before")),
        after=_spread(accuracy.get("after")),
        best_validation=Best(int(best["round"]), _number(best.get("test_mean"))) if best else None,
        bytes=_traffic(record.get("bytes")),
        seconds=_number(seconds.get("total")),
        seconds_per_round=_number(seconds.get("per_round_median")),
        refused=int(record.get("refused") or 0),
    )


def _figures(rounds: Sequence[Round]) -> Figures:
    """What the summary would say, of a run that was killed before it wrote one."""
    most = max((line.measured() for line in rounds), default=0)
    wide = [line for line in rounds if most and line.measured() >= WIDE * most]
    validated = [line for line in wide if line.after["validation"].mean is not None]
    best = max(validated, key=lambda line: _or_nothing(line.after["validation"].mean), default=None)
    return Figures(
        before=wide[-1].before["test"] if wide else Spread(),
        after=wide[-1].after["test"] if wide else Spread(),
        best_validation=Best(best.round, best.after["test"].mean) if best else None,
        bytes=Traffic(sum(line.bytes.up for line in rounds), sum(line.bytes.down for line in rounds)),
        seconds=sum(line.seconds for line in rounds) if rounds else None,
        seconds_per_round=statistics.median(line.seconds for line in rounds) if rounds else None,
        refused=sum(len(line.refused) for line in rounds),
    )


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value) if math.isfinite(value) else None


def _scores(record: Mapping[str, Any] | None) -> Scores:
    record = record or {}
    return Scores(_number(record.get("test")), _number(record.get("validation")))


def _spread(record: Mapping[str, Any] | None) -> Spread:
    record = record or {}
    return Spread(*(_number(record.get(key)) for key in ("mean", "weighted_mean", "std", "worst_decile")))


def _spreads(record: Mapping[str, Any] | None) -> dict[str, Spread]:
    return {split: _spread((record or {}).get(split)) for split in ("test", "validation")}


def _traffic(record: Mapping[str, Any] | None) -> Traffic:
    record = record or {}
    return Traffic(int(record.get("up") or 0), int(record.get("down") or 0))


def _or_nothing(value: float | None) -> float:
    return -1.0 if value is None else value


# Text


def percent(value: float | None) -> str:
    """Return 0.9731 as ``"97.3 %"`` (the space does not break), None as a dash."""
    return MISSING if value is None else f"{100 * value:.1f}\u00a0%"


def megabytes(count: float | None) -> str:
    """Return bytes as MB (10^6), with three figures below 100 MB, without the unit."""
    if count is None:
        return MISSING
    amount = count / 1e6
    if amount == 0:
        return "0"
    digits = 0 if amount >= 100 else min(4, max(0, 2 - math.floor(math.log10(amount))))
    return f"{amount:,.{digits}f}"


def duration(seconds: float | None) -> str:
    """Return seconds as ``"4.2 s"``, ``"4 min 12 s"`` or ``"2 h 05 min"``."""
    if seconds is None:
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


FILTERS: dict[str, Callable[[Any], str]] = {
    "percent": percent,
    "megabytes": megabytes,
    "duration": duration,
    "plain": _text,
}


def _printable(text: str) -> str:
    """A client's name or reason comes from another machine: no line break, no control code for the terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in one_line(text))


def short(name: str, length: int = 28) -> str:
    """Return a client's name on one line, cut to ``length`` in the middle: names often differ only at their end."""
    name = _printable(name)
    if len(name) <= length:
        return name
    end = (length - 1) // 2
    return f"{name[: length - 1 - end]}…{name[-end:]}"


def labels(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run that tells it from the others: its method, then the settings that differ."""
    names = []
    for run in runs:
        peers = [other for other in runs if other.method == run.method]
        parts = [run.method]
        parts += [f"{key} {_text(run.settings.get(key, MISSING))}" for key in differences(peers)[:3]]
        names.append(", ".join(parts))
    return [
        f"{name}, {run.directory.resolve().name}" if names.count(name) > 1 else name
        for name, run in zip(names, runs, strict=True)
    ]


def differences(runs: Sequence[Run], ignore: Collection[str] = ("method", "output-dir", "data-dir")) -> list[str]:
    """Return the settings whose values differ between those of ``runs`` that have them."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in ignore)
    return [key for key in keys if len({_text(run.settings[key]) for run in runs if key in run.settings}) > 1]


def _plus_minus(spread: Spread) -> str:
    if spread.mean is None:
        return MISSING
    return percent(spread.mean) if spread.std is None else f"{100 * spread.mean:.1f} ± {100 * spread.std:.1f}\u00a0%"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lay out a heading and rows in columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(line.rstrip() for line in lines).replace("\u00a0", " ")


def table(runs: Sequence[Run]) -> str:
    """Return a plain-text table that compares runs, one row each: accuracy on the test split, bytes, time."""
    rows = [["run", "after", "before", "worst 10 %", "MB up", "MB down", "time", "rounds"]]
    for run, name in zip(runs, labels(runs), strict=True):
        figures = run.figures
        rows.append(
            [
                short(name, 36),
                _plus_minus(figures.after),
                percent(figures.before.mean),
                percent(figures.after.worst_decile),
                megabytes(figures.bytes.up),
                megabytes(figures.bytes.down),
                duration(figures.seconds),
                str(run.last_round) if run.finished else f"{run.last_round} of {run.planned_rounds}",
            ]
        )
    return _aligned(rows)


def client_table(run: Run) -> str:
    """Return a plain-text table of accuracy per client on its own test split, in the last round that measured all.

    More than 40 clients: the ten worst and the ten best, and a line that says so.
    """
    line = run.last_measured()
    if line is None:
        return "\n".join(filter(None, ["no accuracy per client: no round measured one", run.unfinished]))
    names = sorted(line.clients, key=natural_key)
    groups: list[tuple[str, list[str]]] = [("", names)]
    if len(names) > LONGEST_CLIENT_TABLE:
        names = [name for name in names if line.clients[name].after.test is not None]
        names.sort(key=lambda name: _or_nothing(line.clients[name].after.test))
        groups = [("worst", names[:10]), ("best", names[-10:])]
    rows = [["client", "before", "after", "train", "test"]]
    breaks = []
    for _, members in groups:
        for name in members:
            samples = run.clients[name].samples if name in run.clients else {}
            before, after = line.clients[name].before.test, line.clients[name].after.test
            counts = [str(samples.get(split, MISSING)) for split in ("train", "test")]
            rows.append([short(name), percent(before), percent(after), *counts])
        breaks.append(len(rows))
    rows.append(["mean", percent(line.before["test"].mean), percent(line.after["test"].mean), "", ""])
    text = _aligned(rows).splitlines()
    rule = text[1]
    for position in reversed(breaks):
        text.insert(position + 1, rule)
    heading = f"accuracy on each client's own test split, before and after local training, round {line.round}"
    if len(groups) > 1:
        heading += f"\n{len(line.clients)} clients: the 10 worst and the 10 best are shown, the report has all"
    return "\n".join([heading, "", *text, *([run.unfinished] if run.unfinished else [])])


# Page


def write_report(runs: Sequence[Run], path: Path) -> None:
    """Write a page that needs no network: the report of one run, or a comparison of several.

    The same runs give the same bytes. A run without ``summary.json`` is reported as unfinished, so a run that ends
    writes its summary first.

    Raises:
        FloretError: there is no run, or the file cannot be written.
    """
    from server_app import report_charts, report_template

    if not runs:
        raise FloretError("a report needs at least one run")
    page = report_template.RUN if len(runs) == 1 else report_template.COMPARISON
    content = _run_page(runs[0]) if len(runs) == 1 else _comparison_page(runs)
    html = report_template.render(page, content, FILTERS, {"missing": MISSING, "swatch": report_charts.swatch})
    # Renamed into place: a browser that reloads never sees half a page.
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(html, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise FloretError(f"cannot write {path}: {error.strerror}") from error


def _run_page(run: Run) -> dict[str, Any]:
    from server_app import report_charts

    def measured(when: str) -> int:
        return sum(line.measured(when) > 0 for line in run.rounds)

    last = run.last_measured()
    names = run.client_names()
    clients = []
    for name in names:
        own = [line.clients[name] for line in run.rounds if name in line.clients]
        data = run.clients.get(name, Client({}, None))
        clients.append(
            {
                "name": name,
                "samples": data.samples,
                "classes": None if data.labels is None else sum(count > 0 for count in data.labels),
                "scores": last.clients.get(name) if last else None,
                "trained": sum(line.trained for line in own),
                "up": sum(line.bytes.up for line in own),
                "down": sum(line.bytes.down for line in own),
            }
        )
    return {
        "run": run,
        "last": last,
        "clients": clients,
        "refusals": [refusal for line in run.rounds for refusal in line.refused],
        "labels_known": any(client.labels for client in run.clients.values()),
        "milestones": run.milestones(),
        "partial": any(len(run.wide_rounds(when)) < measured(when) for when in ("before", "after")),
        "partition_note": report_charts.partition_note(run),
        "charts": report_charts.of_run(run),
    }


def _comparison_page(runs: Sequence[Run]) -> dict[str, Any]:
    from server_app import report_charts

    names = labels(runs)
    shared: dict[str, Callable[[Run], str]] = {
        "dataset": lambda run: run.setting("dataset"),
        "model": lambda run: run.setting("model"),
        "partition": lambda run: run.partition,
        "clients": lambda run: f"{len(run.client_names())} clients",
        "rounds": lambda run: f"{run.planned_rounds} rounds",
        "seed": lambda run: f"seed {run.setting('seed')}",
    }
    values = {key: {say(run) for run in runs} for key, say in shared.items()}
    return {
        "runs": list(zip(runs, names, strict=True)),
        "same": [found.pop() for found in values.values() if len(found) == 1],
        "differing": differences(runs),
        "silent": any(not run.bytes_sent for run in runs),
        "best": max((run.figures.after.mean for run in runs if run.figures.after.mean is not None), default=None),
        "charts": report_charts.of_comparison(runs, names),
    }
