"""The report of a run: a page that needs no network, and plain-text tables for the terminal.

``write_report`` makes the page of one run, or the page that compares several. The charts are in ``report_charts`` and
the page's template in ``report_template``; both are imported when a page is written, so that the tables stay light.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from common.durable import write_whole
from common.errors import FloretError
from common.names import natural_key
from results.run import ClientData, Run
from results.text import FILTERS, MISSING, cut, duration, megabytes, percent, percent_over_clients, plain, short

LONGEST_CLIENT_TABLE = 40
# Keys besides dataset, partition and seeds that say which samples clients have; the second ones by its words alone, as
# not every partition uses them.
_OF_DATA = ("max-samples", "min-samples", "test-fraction", "validation-fraction")
_OF_PARTITION = ("alpha", "classes-per-client", "shards-per-client")


def labels(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run that tells it from the others: its method, then the settings that differ."""
    names = []
    for run in runs:
        peers = [other for other in runs if other.method == run.method]
        parts = [run.method]
        parts += [f"{key} {value_of(run, key)}" for key in differences(peers)[:3]]
        names.append(", ".join(parts))
    return [
        f"{name}, {run.directory.resolve().name}" if names.count(name) > 1 else name
        for name, run in zip(names, runs, strict=True)
    ]


def differences(runs: Sequence[Run], ignore: Collection[str] = ("method", "output-dir", "data-dir")) -> list[str]:
    """Return the settings whose values differ between those of ``runs`` that have them.

    ``data`` are the user's own files, where datasets do not differ; ``clients`` is the number of clients.
    """
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in ignore)
    found = [key for key in keys if len({value_of(run, key) for run in runs} - {MISSING}) > 1]
    if "dataset" not in found and len({value_of(run, "data") for run in runs}) > 1:
        found.insert(0, "data")
    return found + ["clients"] * (len({value_of(run, "clients") for run in runs}) > 1)


def value_of(run: Run, key: str) -> str:
    """Return what a run has for one of ``differences``; a dash where it has no such setting."""
    if key == "clients":
        return str(len(run.client_names()))
    if key == "data":
        return run.files
    if key in ("dataset", "partition") and run.has_own_data:
        return run.dataset if key == "dataset" else run.partition
    # A run that protects nothing has no settings of privacy.
    return plain(run.settings.get(key, "none" if key == "privacy.unit" else MISSING))


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
    """Return a plain-text table that compares runs, one row each: accuracy on the test split, bytes, time.

    A dash for *before* of a run in which fewer clients have it than *after*: means over others are not compared. Lines
    after the table say of which runs not all clients were measured.
    """
    rows = [["run", "after", "before", "worst 10 %", "MB up", "MB down", "time", "rounds"]]
    named = list(zip(runs, cut(labels(runs), 36), strict=True))
    for run, name in named:
        figures = run.figures
        rows.append(
            [
                name,
                percent_over_clients(figures.after),
                percent(run.before.mean),
                percent(figures.after.worst_decile),
                megabytes(figures.bytes.up),
                megabytes(figures.bytes.down),
                duration(figures.seconds),
                str(run.last_round) if run.finished else f"{run.last_round} of {run.planned_rounds}",
            ]
        )
    over = [f"{name}: accuracies are over {run.figures_over}" for run, name in named if run.figures_over]
    telling = [f"{name}: {run.not_exact}" for run, name in named if run.not_exact]
    telling += [f"{name}: {run.nothing_used}" for run, name in named if run.nothing_used]
    telling += [f"{name}: {run.fewer_rounds}" for run, name in named if run.cut_short]
    spent = [f"{name}: privacy spent, epsilon {e:.3g}" for run, name in named if (e := run.figures.epsilon) is not None]
    if apart := _apart(runs):
        spent.append(f"these runs differ in their data: {', '.join(apart)}")
    return "\n".join([_aligned(rows), *over, *telling, *spent])


def _apart(runs: Sequence[Run]) -> list[str]:
    """Return in what the data of runs differ, so that their accuracies say nothing of which one is better."""
    found = {*differences(runs)}
    apart = found & {"dataset", "data", "partition", "clients", *_OF_DATA}
    if len({run.partition for run in runs}) > 1:
        apart |= found & {*_OF_PARTITION}
    return sorted(apart | (found & _drawn_by(runs)))


def _drawn_by(runs: Sequence[Run]) -> set[str]:
    """Return the keys by which clients are drawn if runs have others; none where runs that differ in more than the seed
    have each the same draws, as methods in a sweep over seeds.
    """
    if all(run.has_own_data for run in runs):
        return set()
    draws: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        setting = [value_of(run, key) for key in differences(runs) if key not in ("seed", "data-seed")]
        draws.setdefault((run.method, *setting), []).append(value_of(run, _seed_of_data(run)))
    each = {tuple(sorted(set(drawn))) for drawn in draws.values()}
    if len(each) == 1 and (len(draws) > 1 or len(each.pop()) == 1):
        return set()
    return {"data-seed", *map(_seed_of_data, runs)}


def _seed_of_data(run: Run) -> str:
    seed = run.config.get("data-seed", -1)
    return "data-seed" if isinstance(seed, int) and seed >= 0 else "seed"


def client_table(run: Run) -> str:
    """Return a plain-text table of accuracy per client on its own test split, in the last complete round.

    More than 40 clients: the ten worst and the ten best, and a line that says so.
    """
    line = run.history.last_complete()
    if line is None:
        return "\n".join(filter(None, ["no accuracy per client: no round measured one", run.fewer_rounds]))
    names = sorted(line.clients, key=natural_key)
    groups: list[tuple[str, list[str]]] = [("", names)]
    if len(names) > LONGEST_CLIENT_TABLE:
        names = [name for name in names if line.clients[name].after.test is not None]
        names.sort(key=lambda name: line.clients[name].after.test or 0.0)
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
    before = None if line.fewer_before else line.before["test"].mean
    rows.append(["mean", percent(before), percent(line.after["test"].mean), "", ""])
    text = _aligned(rows).splitlines()
    rule = text[1]
    for position in reversed(breaks):
        text.insert(position + 1, rule)
    heading = f"accuracy on each client's own test split, before and after local training, round {line.round}"
    if run.over(line):
        heading += f"; the mean is over {run.over(line)}"
    if run.not_exact:
        heading += f"\n{run.not_exact}"
    if len(groups) > 1:
        heading += f"\n{len(line.clients)} clients: the 10 worst and the 10 best are shown, the report has all"
    return "\n".join([heading, "", *text, *filter(None, [run.fewer_rounds, run.nothing_used])])


# Page


def write_report(runs: Sequence[Run], path: Path) -> None:
    """Write a page that needs no network: the report of one run, or a comparison of several.

    The same runs give the same bytes. A run without ``summary.json`` is reported as unfinished, so a run that ends
    writes its summary first.

    Raises:
        FloretError: there is no run, or the file cannot be written.
    """
    from results import report_charts, report_template

    if not runs:
        raise FloretError("a report needs at least one run")
    page = report_template.RUN if len(runs) == 1 else report_template.COMPARISON
    content = _run_page(runs[0]) if len(runs) == 1 else _comparison_page(runs)
    html = report_template.render(page, content, FILTERS, {"missing": MISSING, "swatch": report_charts.swatch})
    try:
        write_whole(path, html.encode(errors="replace"))
    except OSError as error:
        raise FloretError(f"cannot write {path}: {error.strerror}") from error


def _run_page(run: Run) -> dict[str, Any]:
    from results import report_charts

    def measured(when: str) -> int:
        return sum(line.measured(when) > 0 for line in run.rounds)

    last = run.history.last_complete()
    names = run.client_names()
    clients = []
    for name in names:
        own = [line.clients[name] for line in run.rounds if name in line.clients]
        data = run.clients.get(name, ClientData({}, None))
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
        "refusals": [(line.round, refusal) for line in run.rounds for refusal in line.refused],
        "labels_known": any(client.labels for client in run.clients.values()),
        "milestones": run.milestones(),
        "partial": any(len(run.history.complete_rounds(when)) < measured(when) for when in ("before", "after")),
        "partition_note": report_charts.partition_note(run),
        "charts": report_charts.of_run(run),
    }


def _comparison_page(runs: Sequence[Run]) -> dict[str, Any]:
    from results import report_charts

    names = labels(runs)
    shared: dict[str, Callable[[Run], str]] = {
        "dataset": lambda run: f"{run.dataset} {run.files}".rstrip(f" {MISSING}"),
        "model": lambda run: run.setting("model"),
        "partition": lambda run: run.partition,
        "clients": lambda run: f"{len(run.client_names())} clients",
        "rounds": lambda run: f"{run.planned_rounds} rounds",
        "seed": lambda run: f"seed {run.setting('seed')}",
    }
    values = {key: {say(run) for run in runs} for key, say in shared.items()}
    means = [run.figures.after.mean for run in runs if run.figures.after.mean is not None]
    apart = _apart(runs)
    return {
        "runs": list(zip(runs, names, strict=True)),
        "apart": apart,
        "same": [found.pop() for found in values.values() if len(found) == 1],
        "differing": [(key, [value_of(run, key) for run in runs]) for key in differences(runs)],
        "private": any(run.figures.epsilon is not None for run in runs),
        "fewer": any(run.before != run.figures.before for run in runs),
        "silent": any(not run.bytes_sent for run in runs),
        "best": None if apart else max(means, default=None),
        "charts": report_charts.of_comparison(runs, names),
    }
