"""The page of an experiment or a sweep: tables and curves in one file that needs no network."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from markupsafe import Markup

from common.durable import write_whole
from common.errors import FloretError
from results import report_charts, report_template
from results.tables import ExperimentResults, number
from results.text import FILTERS

PAGE = """
{% extends "page" %}
{% from "macros" import chart %}
{% block title %}{{ results.experiment.title }}{% endblock %}
{% block body %}
<header>
<h1>{{ results.experiment.title }}</h1>
<p class="muted">{{ results.experiment.paper }}. Table {{ results.experiment.table }}.</p>
</header>
<section>
<h2>Conditions</h2>
<ul>{% for note in results.notes() %}<li>{{ note }}</li>{% endfor %}</ul>
</section>
<section>
<h2>Reported and measured</h2>
<p class="note">Percent. Each cell: what the paper reports, then ours (mean ± population standard deviation over
seeds), then the difference in points. A dash: no number.</p>
<div class="whole">
<table id="table" class="compact">
<thead><tr><th class="text">method</th>{% for column in results.experiment.columns %}<th>{{ column.name }}</th>
{% endfor %}</tr></thead>
<tbody>
{% for row in results.experiment.rows %}
<tr><td class="text">{{ swatch(loop.index0) }}{{ row.name }}{% if row.missing %} <small>(missing)</small>{% endif %}
</td>
{% for column in results.experiment.columns %}
{% set entry = results.entry(row.name, column.name) %}
<td>{{ entry.reported | number }}<br><b>{{ entry.mean | number }}</b>{% if entry.std is not none %}
 <small>± {{ entry.std | number }}</small>{% endif %}<br><small>{{ entry.difference | signed }}</small></td>
{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
</section>
{% if verdicts %}
<section>
<h2>What the paper claims</h2>
<div class="whole">
<table id="claims">
<thead><tr><th class="text">claim</th>
<th class="text">in the paper's numbers</th><th class="text">here</th></tr></thead>
<tbody>
{% for text, paper, ours in verdicts %}
<tr><td class="text wrap">{{ text }}</td><td class="text wrap">{{ paper }}</td>
<td class="text wrap">{{ ours }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
</section>
{% endif %}
{% if readings and readings[0][1] | length > 1 %}
<section>
<h2>If the same runs are read in another way</h2>
<p class="note">{{ readings_note }}</p>
<div class="whole">
<table id="readings" class="compact">
<thead><tr><th class="text">claim</th>{% for reading, _ in readings[0][1] %}<th>{{ reading.title }}</th>
{% endfor %}</tr></thead>
<tbody>
{% for claim, found in readings %}
<tr><td class="text wrap">{{ claim.text }}</td>
{% for _, verdict in found %}<td>{{ verdict.short }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
</section>
{% endif %}
{% if charts %}
<section>
<p class="note">Test accuracy in each round, mean over clients and seeds. The dashed line is the highest number that the
paper reports.</p>
<div class="key">{% for row in results.experiment.rows %}{% if row.name in drawn %}
<span>{{ swatch(loop.index0) }}{{ row.name }}</span>{% endif %}{% endfor %}</div>
<div class="halves">
{% for name, svg in charts %}
<div>{{ chart(name, svg) }}</div>
{% endfor %}
</div>
</section>
{% endif %}
{% if results.failed %}
<section>
<h2>Failed</h2>
<ul>{% for place, reason in results.failed.items() %}<li>{{ place | join(", ") }}: {{ reason }}</li>{% endfor %}</ul>
</section>
{% endif %}
{% if results.experiment.chosen %}
<section>
<h2>What the paper leaves open</h2>
<ul>{% for line in results.experiment.chosen %}<li>{{ line }}</li>{% endfor %}</ul>
</section>
{% endif %}
<footer>Written by floret reproduce.</footer>
{% endblock %}
"""

SWEEP = """
{% extends "page" %}
{% from "macros" import chart %}
{% block title %}Sweep over {{ varied | join(", ") }}{% endblock %}
{% block body %}
<header>
<h1>Sweep over {{ varied | join(", ") }}</h1>
<p class="muted">{{ conditions }}</p>
</header>
{% set order = "The validation split decides the order." if validated
  else "Without a validation split the order is that of the grid." %}
<section>{{ chart("Accuracy of each combination", svg,
  "Mean over clients after local training; a dot is a seed, the bar the mean. " ~ order) }}</section>
<section>
<h2>Figures</h2>
<div class="whole">
<table id="sweep" class="compact">
<thead><tr>{% for name in head %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr>{% for text in row %}<td>{{ text }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
{% for note in notes %}
<p class="note">{{ note }}</p>
{% endfor %}
</section>
<footer>Written by floret sweep.</footer>
{% endblock %}
"""


def write_results_page(results: ExperimentResults, path: Path) -> None:
    """Write the page of an experiment.

    Raises:
        FloretError: the file cannot be written.
    """
    rows = [row.name for row in results.experiment.rows]
    charts = []
    for column in results.experiment.columns:
        curves = _curves(results, column.name)
        if curves:
            entries = [results.entry(row, column.name) for row in rows]
            best = max((entry.reported for entry in entries if entry.reported is not None), default=None)
            charts.append((column.name, _chart(column.name, rows, curves, best)))
    content = {
        "results": results,
        "verdicts": results.verdicts(),
        "readings": results.readings() if results.runs else [],
        "readings_note": results.readings_note,
        "charts": charts,
        "drawn": {row for row, _, _ in results.runs},
    }
    _write(PAGE, content, path)


def write_sweep_page(
    varied: Sequence[str],
    conditions: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    points: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    path: Path,
) -> None:
    """Write the page of a sweep.

    Args:
        varied: the keys of the grid.
        conditions: the keys that are the same in all combinations, as text.
        head: of the table.
        rows: of the table, best first.
        notes: lines below it.
        points: name, validation and test accuracies in [0, 1] (a number a seed; none for a split that is empty) of each
            combination, best first.
        path: of the page.

    Raises:
        FloretError: the file cannot be written.
    """

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        validation, test = [point[1] for point in points], [point[2] for point in points]
        splits = [("validation", -0.15, report_charts.AFTER, validation), ("test", 0.15, report_charts.BEFORE, test)]
        for split, side, colour, accuracies in splits:
            named = {"label": split}
            for nth, values in enumerate(accuracies):
                if values:
                    place = len(points) - 1 - nth - side
                    axes.plot(values, [place] * len(values), "o", color=colour, markersize=6, alpha=0.75, **named)
                    axes.plot([mean(values)] * 2, [place - 0.13, place + 0.13], color=colour)
                    named = {}
        axes.set_yticks(range(len(points)), [name for name, _, _ in reversed(points)])
        axes.grid(axis="x")
        report_charts.percent_axis(axes, [value for values in validation + test for value in values], "x")
        report_charts.legend_above(axes)

    svg = report_charts.draw(report_charts.WIDTH, 90 + 34 * len(points), "Accuracy of each combination", paint)
    validated = any(validation for _, validation, _ in points)
    content = {
        "varied": varied,
        "conditions": conditions,
        "head": head,
        "rows": rows,
        "notes": notes,
        "svg": svg,
        "validated": validated,
    }
    _write(SWEEP, content, path)


def _write(page: str, content: Mapping[str, Any], path: Path) -> None:
    filters = {**FILTERS, "number": number, "signed": lambda value: number(value, "+.2f")}
    html = report_template.render(page, content, filters, {"missing": "-", "swatch": report_charts.swatch})
    try:
        write_whole(path, html.encode(errors="replace"))
    except OSError as error:
        raise FloretError(f"{path}: cannot be written ({error.strerror})") from error


def _curves(results: ExperimentResults, column: str) -> dict[str, list[tuple[int, float]]]:
    """Return round and accuracy in [0, 1], mean over seeds, by row; rounds that all seeds measured."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in results.experiment.rows:
        place = 1 if row.when == "before" else 2
        runs = [run.curve for (r, c, _), run in results.runs.items() if (r, c) == (row.name, column)]
        found: dict[int, list[float]] = {}
        for curve in runs:
            for point in curve:
                value = point[place]
                if value is not None:
                    found.setdefault(point[0], []).append(float(value))
        points = [(number, mean(values)) for number, values in sorted(found.items()) if len(values) == len(runs)]
        if points:
            curves[row.name] = points
    return curves


def _chart(
    column: str, rows: Sequence[str], curves: Mapping[str, Sequence[tuple[int, float]]], best: float | None
) -> Markup:
    def paint(figure: Any) -> None:
        axes = figure.subplots()
        values = [value for points in curves.values() for _, value in points]
        for nth, row in enumerate(rows):
            if row in curves:
                x, y = zip(*curves[row], strict=True)
                axes.plot(x, y, **report_charts.line_style(nth), **report_charts.markers(x))
        if best is not None:
            axes.axhline(best / 100, color=report_charts.MUTED, linewidth=1, dashes=(4, 4))
            values.append(best / 100)
        report_charts.rounds_axis(axes, max(points[-1][0] for points in curves.values()))
        report_charts.percent_axis(axes, values)

    return report_charts.draw(510, 330, f"Accuracy in each round, {column}", paint)
