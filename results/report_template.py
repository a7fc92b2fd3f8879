"""The report's pages as jinja2 templates: in a Python file, because Flower's app bundle carries no ``.html``.

Everything that is not a chart of ours is escaped: names and reasons come from the clients.
"""

from collections.abc import Mapping
from typing import Any

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1b1f24; --muted: #5b6471; --line: #e2e5ea; --surface: #ffffff; --page: #f6f7f9; --warn: #8a4b00;
  --warn-page: #fff4e0;
  --series-0: #0072b2; --series-1: #d55e00; --series-2: #009e73; --series-3: #cc79a7; --series-4: #e69f00;
  --series-5: #56b4e9; --series-6: #6b6b6b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e8eaed; --muted: #a3abb6; --line: #343a42; --surface: #1c2026; --page: #14171b; --warn: #f5c377;
    --warn-page: #3a2b12;
    --series-0: #4fadea; --series-1: #f0883e; --series-2: #2fc39a; --series-3: #e29ac3; --series-4: #f2b632;
    --series-5: #94d3f7; --series-6: #a8a8a8;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", "Noto Sans", "Liberation Sans", Arial, sans-serif; font-variant-numeric: tabular-nums;
}
main { max-width: 1120px; margin: 0 auto; padding: 36px 16px 56px; }
header { margin: 0 4px 20px; }
h1 { font-size: 28px; line-height: 1.2; letter-spacing: -0.01em; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 17px; line-height: 1.3; margin: 0 0 2px; }
p { margin: 0; }
.muted, figcaption, .note { color: var(--muted); }
.note, figcaption { font-size: 13px; }
.badge {
  display: inline-block; margin-top: 10px; padding: 2px 10px; border-radius: 4px; font-weight: 600; font-size: 14px;
  color: var(--warn); background: var(--warn-page);
}
section, .card { background: var(--surface); border: 1px solid var(--line); border-radius: 8px; }
section { padding: 18px 20px; margin: 0 0 16px; }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; margin: 0 0 16px; }
.card { padding: 12px 16px 13px; }
.card h3 { margin: 0; font-size: 13px; font-weight: 500; color: var(--muted); }
.card .value { font-size: 24px; line-height: 1.35; font-weight: 600; letter-spacing: -0.01em; }
.card .value small { font-size: 15px; font-weight: 400; letter-spacing: 0; color: var(--muted); }
.card p { font-size: 13px; color: var(--muted); }
.columns { display: grid; grid-template-columns: 2fr 1fr; gap: 28px; }
.halves { display: grid; grid-template-columns: 1fr 1fr; gap: 28px; }
.columns > *, .halves > * { min-width: 0; }
figure { margin: 0; }
figure + figure { margin-top: 18px; }
figure > svg { display: block; width: 100%; height: auto; margin-top: 6px; }
svg text { font-family: inherit !important; }
.scroll { overflow: auto; max-height: 560px; }
.whole { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; margin-top: 8px; }
th, td { padding: 5px 10px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 500; color: var(--muted); font-size: 13px; vertical-align: bottom; }
thead th { position: sticky; top: 0; background: var(--surface); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
th.text, td.text { text-align: left; white-space: normal; overflow-wrap: anywhere; }
tbody tr:last-child > * { border-bottom: 0; }
tbody th { color: var(--ink); font-size: 14px; }
td small { color: var(--muted); font-size: inherit; }
td.best { font-weight: 600; }
td small { font-weight: 400; }
.compact th, .compact td { padding-left: 7px; padding-right: 7px; }
.compact th:first-child { padding-left: 0; }
.compact thead th { white-space: normal; }
.compact td.text { min-width: 190px; max-width: 260px; padding-left: 36px; text-indent: -36px; }
.compact .swatch { margin-right: 10px; }
.swatch { width: 26px; height: 8px; margin-right: 8px; vertical-align: middle; stroke-width: 3; }
.key { display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 2px 0 14px; font-size: 14px; }
summary { cursor: pointer; font-weight: 600; }
.settings { display: grid; grid-template-columns: repeat(3, 1fr); gap: 6px 36px; margin: 4px 0 0; }
details h3 { margin: 16px 0 0; font-size: 13px; font-weight: 600; color: var(--muted); }
.settings div { display: flex; justify-content: space-between; gap: 12px; border-bottom: 1px solid var(--line);
  font-size: 13px; }
.settings dt { color: var(--muted); } .settings dd { margin: 0; text-align: right; overflow-wrap: anywhere; }
footer { color: var(--muted); font-size: 13px; margin: 0 4px; }
@media (max-width: 860px) {
  .cards, .settings { grid-template-columns: repeat(2, 1fr); }
  .columns, .halves { grid-template-columns: 1fr; }
  section { overflow-x: auto; }
}
@media print {
  body { background: none; } section, .card { break-inside: avoid; } .scroll { max-height: none; }
}
"""

MACROS = """
{% macro accuracy(value) %}
{%- if value is none %}{{ missing }}{% else %}<data value="{{ value }}">{{ value | percent }}</data>{% endif %}
{%- endmacro %}
{% macro spread(it) %}
{%- if it.mean is none %}{{ missing }}{% else %}<data value="{{ it.mean }}">{{ it.mean | percent }}</data>
{%- if it.std is not none %} <small>± <data value="{{ it.std }}">{{ "%.1f" | format(100 * it.std) }}</data></small>
{%- endif %}{% endif %}
{%- endmacro %}
{% macro mb(value) %}<data value="{{ value }}">{{ value | megabytes }}</data>{% endmacro %}
{% macro chart(title, svg, caption="") %}
<figure>
<h2>{{ title }}</h2>
{% if caption %}<figcaption>{{ caption }}</figcaption>{% endif %}
{{ svg }}
</figure>
{% endmacro %}
{% macro settings(title, values) %}
<h3>{{ title }}</h3>
<dl class="settings">
{% for key, value in values.items() %}
<div><dt>{{ key }}</dt><dd>{{ value | plain if value != "" else missing }}</dd></div>
{% endfor %}
</dl>
{% endmacro %}
"""

PAGE = """
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{% block title %}{% endblock %}</title>
<style>{{ style }}</style>
</head>
<body>
<main>
{% block body %}{% endblock %}
</main>
</body>
</html>
"""

RUN = """
{% extends "page" %}
{% from "macros" import accuracy, spread, mb, chart, settings %}
{% set figures = run.figures %}
{% set fewer = last is not none and 0 < last.measured("before") < last.measured() %}
{% block title %}{{ run.method }} on {{ run.dataset }}{% endblock %}
{% block body %}
<header>
<h1>{{ run.method }} on {{ run.dataset }}</h1>
<p class="muted">{{ run.setting("model") }} · {{ run.partition }} · {{ clients | length }}
client{{ "" if clients | length == 1 else "s" }} · {{ run.planned_rounds }}
round{{ "" if run.planned_rounds == 1 else "s" }} · seed {{ run.setting("seed") }}</p>
{% if run.fewer_rounds %}<p class="badge">{{ run.fewer_rounds }}</p>{% endif %}
{% if run.nothing_used %}<p class="badge">{{ run.nothing_used }}</p>{% endif %}
</header>

<div class="cards">
<div class="card" id="after"><h3>Accuracy after local training</h3><div class="value">{{ spread(figures.after) }}</div>
<p>{% if figures.after.mean is none and run.rounds %}nobody was measured in round {{ run.rounds[-1].round }}
{%- else %}mean ± std{% if run.over(last) %} over {{ run.over(last) }}{% endif %}
{%- if last %}, round {{ last.round }}{% endif %}{% endif %}</p></div>
<div class="card" id="before"><h3>Before local training</h3><div class="value">{{ spread(figures.before) }}</div>
{% set trained = last.measured("before") if last else 0 %}
<p>{{ "over the %d client%s that trained" % (trained, "" if trained == 1 else "s") if fewer else
  "what arrived, before any local step" }}</p></div>
<div class="card" id="worst"><h3>Worst decile of clients</h3>
<div class="value">{{ accuracy(figures.after.worst_decile) }}</div>
<p>before: {{ accuracy(figures.before.worst_decile) }}</p></div>
<div class="card" id="weighted"><h3>Weighted by samples</h3>
<div class="value">{{ accuracy(figures.after.weighted_mean) }}</div>
<p>before: {{ accuracy(figures.before.weighted_mean) }}</p></div>
<div class="card" id="best"><h3>Best round by validation</h3>
{% if figures.best_validation %}
<div class="value">{{ accuracy(figures.best_validation.test_mean) }}</div>
<p>test accuracy after round {{ figures.best_validation.round }}</p>
{% else %}<div class="value">{{ missing }}</div><p>no validation accuracy</p>{% endif %}</div>
<div class="card" id="bytes"><h3>Sent up / down</h3>
<div class="value">{{ mb(figures.bytes.up) }} / {{ mb(figures.bytes.down) }} <small>MB</small></div>
<p>all clients, all rounds</p></div>
<div class="card" id="seconds"><h3>Time</h3><div class="value">{{ figures.seconds | duration }}</div>
<p>{% if figures.seconds_per_round is not none %}median of a round {{ figures.seconds_per_round | duration }}{% endif %}
</p></div>
{% if figures.epsilon is not none %}
<div class="card" id="epsilon"><h3>Privacy spent</h3>
<div class="value"><data value="{{ figures.epsilon }}">&epsilon; {{ "%.3g" | format(figures.epsilon) }}</data></div>
<p>per {{ run.setting("privacy.unit") }}, &delta; = {{ run.setting("privacy.delta") }};
the client that spent most</p></div>
{% endif %}
<div class="card" id="refused"><h3>Refused replies</h3>
<div class="value"><data value="{{ figures.refused }}">{{ figures.refused }}</data></div>
<p>{{ "reasons below" if refusals else "every reply was used" }}</p></div>
</div>

{% if "curves" in charts or "bytes" in charts %}
<section class="columns">
<div>
{% if "curves" in charts %}
{{ chart("Learning curves", charts.curves, "Test accuracy, mean over clients ± 1 standard deviation." ~ (
  " Small dots: rounds that measured only part of the clients." if partial else "")) }}
{% endif %}
</div>
<div>
{% if "loss" in charts %}{{ chart("Training loss", charts.loss, "Mean over the clients that trained.") }}{% endif %}
{% if "bytes" in charts %}{{ chart("Sent in each round", charts.bytes) }}{% endif %}
</div>
</section>
{% endif %}

{% if milestones %}
<section>
<h2>Accuracy to quote</h2>
<p class="note">Mean ± standard deviation over clients
{%- if fewer %}; before local training over those that trained in the round{% endif %}.
{%- if run.not_exact %} {{ run.not_exact }}.{% endif %}</p>
<table id="milestones">
<thead><tr><th></th><th>round</th><th>clients</th><th>test, after</th><th>test, before</th><th>validation, after</th>
<th>validation, before</th></tr></thead>
<tbody>
{% for milestone in milestones %}
<tr><td class="text">{{ milestone.name }}</td><td>{{ milestone.round.round }}</td>
<td>{{ milestone.round.measured() }}</td>
<td>{{ spread(milestone.round.after.test) }}</td><td>{{ spread(milestone.round.before.test) }}</td>
<td>{{ spread(milestone.round.after.validation) }}</td><td>{{ spread(milestone.round.before.validation) }}</td></tr>
{% endfor %}
</tbody>
</table>
</section>
{% endif %}

{% if "clients" in charts %}
<section>{{ chart("Accuracy of each client", charts.clients,
  "On the client's own test split, round " ~ last.round ~ ".") }}</section>
{% endif %}
{% if "partition" in charts %}
<section>{{ chart("Partition", charts.partition,
  ("Training samples of each class at each client" ~ partition_note if labels_known
   else "Samples of each client. Labels never leave a client, so the classes are not known here.")) }}</section>
{% endif %}
{% if "graph" in charts %}
<section>{{ chart("Communication graph", charts.graph,
  "A line joins two clients of which one was sent what the other had published; the more rounds, the darker.") }}
</section>
{% endif %}

<section>
<h2>Clients</h2>
{% if last %}<p class="note">Accuracy on the test split, round {{ last.round }}; bytes over all rounds.</p>{% endif %}
<div class="scroll">
<table id="clients">
<thead><tr><th>client</th><th>before</th><th>after</th><th>train</th><th>validation</th><th>test</th>
{% if labels_known %}<th>classes</th>{% endif %}<th>rounds trained</th><th>MB up</th><th>MB down</th></tr></thead>
<tbody>
{% for client in clients %}
<tr><td class="text">{{ client.name }}</td><td>{{ accuracy(client.scores.before.test if client.scores else none) }}</td>
<td>{{ accuracy(client.scores.after.test if client.scores else none) }}</td>
{% for split in ("train", "validation", "test") %}<td>{{ client.samples.get(split, missing) }}</td>{% endfor %}
{% if labels_known %}<td>{{ missing if client.classes is none else client.classes }}</td>{% endif %}
<td>{{ client.trained }}</td><td>{{ mb(client.up) }}</td><td>{{ mb(client.down) }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
</section>

{% if refusals %}
<section>
<h2>Refused replies</h2>
<p class="note">The round went on without them.</p>
<div class="scroll">
<table id="refusals">
<thead><tr><th>round</th><th class="text">client</th><th class="text">reason</th></tr></thead>
<tbody>
{% for round, refusal in refusals %}
<tr><td>{{ round }}</td><td class="text">{{ refusal.client }}</td>
<td class="text">{{ refusal.reason }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
</section>
{% endif %}

<section>
<details>
<summary>Config and versions</summary>
{{ settings("Run config", run.config) }}
{% if run.parameters %}{{ settings("Parameters of " ~ run.method, run.parameters) }}{% endif %}
{{ settings("Versions", run.versions) }}
</details>
</section>
<footer>{% if run.run_id %}Run {{ run.run_id }}{% endif %}{% if run.started %}, started {{ run.started }}{% endif %}.
1 MB is 10<sup>6</sup> bytes, counted from the arrays that travelled.</footer>
{% endblock %}
"""

COMPARISON = """
{% extends "page" %}
{% from "macros" import accuracy, spread, mb, chart %}
{% block title %}{{ runs | length }} runs compared{% endblock %}
{% block body %}
<header>
<h1>{{ runs | length }} runs compared</h1>
<p class="muted">{% if same %}The same in all: {{ same | join(" · ") }}{% endif %}</p>
</header>

<section>
<h2>Figures</h2>
<p class="note">Accuracy on each client's own test split in the last round: mean ± standard deviation over clients.
{% if apart %}These runs differ in their data ({{ apart | join(", ") }}): none is better than another by these figures.
{%- else %}The highest mean is in bold.{% endif %}
{%- if fewer %} A dash before local training: only some of the clients were measured then.
{%- endif %}</p>
<div class="scroll">
<table id="figures" class="compact">
<thead><tr><th>run</th><th>after local training</th><th>before local training</th><th>weighted, after</th>
<th>worst decile, after</th><th>best by validation</th><th>MB up</th><th>MB down</th><th>time</th><th>rounds</th>
<th>refused</th>{% if private %}<th>&epsilon;</th>{% endif %}</tr></thead>
<tbody>
{% for run, name in runs %}
{% set figures = run.figures %}
<tr><td class="text">{{ swatch(loop.index0) }}{{ name }}</td>
<td{% if best is not none and figures.after.mean == best %} class="best"{% endif %}>{{ spread(figures.after) }}</td>
<td>{{ spread(run.before) }}</td><td>{{ accuracy(figures.after.weighted_mean) }}</td>
<td>{{ accuracy(figures.after.worst_decile) }}</td>
<td>{{ accuracy(figures.best_validation.test_mean if figures.best_validation else none) }}</td>
<td>{{ mb(figures.bytes.up) }}</td><td>{{ mb(figures.bytes.down) }}</td><td>{{ figures.seconds | duration }}</td>
<td>{{ run.last_round if run.finished else run.last_round ~ " of " ~ run.planned_rounds }}</td>
<td>{{ figures.refused }}</td>
{%- if private %}<td>{{ missing if figures.epsilon is none else "%.3g" | format(figures.epsilon) }}</td>{% endif %}</tr>
{% endfor %}
</tbody>
</table>
</div>
{% for run, name in runs if run.figures_over %}
<p class="note">{{ name }}: accuracies are over {{ run.figures_over }}</p>
{% endfor %}
{% for run, name in runs if run.not_exact %}
<p class="note">{{ name }}: {{ run.not_exact }}</p>
{% endfor %}
{% for run, name in runs if run.fewer_rounds %}
<p class="badge">{{ name }}: {{ run.fewer_rounds }}</p>
{% endfor %}
{% for run, name in runs if run.nothing_used %}
<p class="badge">{{ name }}: {{ run.nothing_used }}</p>
{% endfor %}
</section>

{% if "after" in charts %}
<section>
<div class="key">{% for run, name in runs %}<span>{{ swatch(loop.index0) }}{{ name }}</span>{% endfor %}</div>
<div class="halves">
<div>{{ chart("After local training", charts.after, "Test accuracy, mean over clients.") }}</div>
{% if "before" in charts %}
<div>{{ chart("Before local training", charts.before, "Test accuracy, mean over clients.") }}</div>
{% endif %}
</div>
</section>
<section>{{ chart("Accuracy of each client", charts.clients,
  "After local training, last round; a dot is a client, the box holds the middle half, the bar is the median.") }}
</section>
{% endif %}
{% if "bytes" in charts %}
<section>{{ chart("Accuracy for the bytes sent", charts.bytes,
  "Mean test accuracy after local training; the dot is the last round." ~ (
  " A run that sends nothing is not drawn." if silent else "")) }}</section>
{% endif %}

{% if differing %}
<section>
<h2>What differs</h2>
<div class="scroll">
<table id="differing">
<thead><tr><th>key</th>{% for run, name in runs %}<th>{{ swatch(loop.index0) }}{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for key, values in differing %}
<tr><td>{{ key }}</td>{% for value in values %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
</section>
{% endif %}
<footer>1 MB is 10<sup>6</sup> bytes, counted from the arrays that travelled.</footer>
{% endblock %}
"""


def render(page: str, content: Mapping[str, Any], filters: Mapping[str, Any], shared: Mapping[str, Any]) -> str:
    """Return ``page`` (``RUN`` or ``COMPARISON``) filled with ``content``, everything but ``Markup`` escaped."""
    from jinja2 import DictLoader, Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=DictLoader({"macros": MACROS, "page": PAGE.lstrip()}),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(filters)
    environment.globals.update(shared)
    return environment.from_string(page).render(style=Markup(STYLE), **content) + "\n"
