"""The charts of a report: inline SVG from matplotlib, drawn in colours that the page's style sheet replaces.

Matplotlib is imported when a chart is drawn. No chart depends on the user's matplotlib settings, on the time, or on
anything else than the run, so the same run gives the same bytes.
"""

import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from typing import Any

from markupsafe import Markup, escape

from common.names import natural_key
from results.history import Round, Spread
from results.run import Run
from results.text import cut, short

Axes = Any  # matplotlib carries no types that mypy's strict mode can follow
Figure = Any

INK, MUTED, LINE, SURFACE = "#1b1f24", "#5b6471", "#e2e5ea", "#fefefe"
# Okabe and Ito's palette, which stays distinct for colour-blind readers.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b")
DASHES = ((), (6, 2), (1.5, 2), (7, 2, 1.5, 2))
AFTER, BEFORE = SERIES[0], SERIES[1]
WIDTH = 1040  # px of the page's text column: one unit in a chart is one pixel there
MOST_LINES = 2000  # as many edges of a graph are lines; more are a picture, which takes fewer bytes

# What matplotlib writes -> the name the page's style sheet gives it, in light and in dark mode.
VARIABLES = {INK: "ink", MUTED: "muted", LINE: "line", SURFACE: "surface"} | {
    colour: f"series-{number}" for number, colour in enumerate(SERIES)
}

SETTINGS = {
    "axes.axisbelow": True,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 12,
    "axes.linewidth": 1,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 12,
    "grid.color": LINE,
    "grid.linewidth": 1,
    "legend.borderpad": 0.1,
    "legend.columnspacing": 1.6,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "floret",
    "text.color": INK,
    "text.parse_math": False,  # a client may be called "$x$"
    "xtick.color": MUTED,
    "xtick.labelsize": 12,
    "xtick.major.size": 0,
    "ytick.color": MUTED,
    "ytick.labelsize": 12,
    "ytick.major.size": 0,
}


def draw(width: int, height: int, says: str, paint: Callable[[Figure], None]) -> Markup:
    """Return a chart of ``width`` x ``height`` px as an ``<svg>`` element; ``says`` is read out by a screen reader."""
    svg = painted(width, height, paint, SETTINGS)
    # Several charts share one page: names of groups, which nothing refers to, would occur twice.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    opening = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(says)}">'
    svg = re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)
    for colour, name in VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    return Markup(svg)


def painted(width: int, height: int, paint: Callable[[Figure], None], settings: Mapping[str, Any]) -> str:
    """Return what ``paint`` draws with ``settings`` of matplotlib's as an ``<svg>`` element, without a date."""
    # It warns of a home that it cannot write, before it works without.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib.style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    target = StringIO()
    with matplotlib.style.context(["default", settings]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matplotlib's own font may lack a sign that the reader's has
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure)
        figure.savefig(target, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = target.getvalue()
    return svg[svg.index("<svg") :]


def of_run(run: Run) -> dict[str, Markup]:
    """Return the charts of one run by name; a chart that has nothing to show is not there."""
    charts = {}
    if run.history.complete_rounds():
        charts["curves"] = _learning_curves(run)
        charts["clients"] = _accuracy_per_client(run)
    if any(line.loss is not None for line in run.rounds):
        charts["loss"] = _loss(run)
    if run.bytes_sent:
        charts["bytes"] = _bytes(run)
    if any(client.labels for client in run.clients.values()):
        charts["partition"] = _classes_per_client(run)
    elif any(client.samples for client in run.clients.values()):
        charts["partition"] = _samples_per_client(run)
    if meetings(run):
        charts["graph"] = _graph(run)
    return charts


def of_comparison(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Markup]:
    """Return the charts that compare runs by name; a chart that has nothing to show is not there."""
    charts = {}
    if any(run.history.complete_rounds() for run in runs):
        charts["after"] = _curves_of_runs(runs, "after")
        charts["clients"] = _clients_of_runs(runs, names)
    if any(run.bytes_sent and run.history.complete_rounds() for run in runs):
        charts["bytes"] = _accuracy_by_bytes(runs)
    if any(run.history.complete_rounds("before") for run in runs):
        charts["before"] = _curves_of_runs(runs, "before")
    return charts


def style(number: int) -> tuple[str, tuple[float, ...]]:
    """Return colour and dashes of the ``number``-th run of a comparison: beyond seven runs, colours come again."""
    return SERIES[number % len(SERIES)], DASHES[number // len(SERIES) % len(DASHES)]


def swatch(number: int) -> Markup:
    """Return a short line in the style of the ``number``-th run, for the tables."""
    colour, dashes = style(number)
    pattern = " ".join(f"{length * 2:g}" for length in dashes) or "none"
    return Markup(
        '<svg class="swatch" viewBox="0 0 26 8" aria-hidden="true">'
        '<line x1="1" y1="4" x2="25" y2="4" style="stroke:var(--{});stroke-dasharray:{}"/></svg>'
    ).format(VARIABLES[colour], pattern)


def meetings(run: Run) -> dict[tuple[str, str], int]:
    """Return by pair of clients in how many rounds one of them was sent what the other published."""
    counts: dict[tuple[str, str], int] = {}
    for line in run.rounds:
        pairs = {(min(a, b), max(a, b)) for a, client in line.clients.items() for b in client.peers if a != b}
        for pair in sorted(pairs):
            counts[pair] = counts.get(pair, 0) + 1
    return counts


def partition_note(run: Run) -> str:
    """Return the rest of the caption of the partition chart: how to read an amount from it."""
    rows = [client.labels for client in run.clients.values() if client.labels]
    if not rows:
        return ""
    if not _bubbles(run):
        return "; none is blank."
    return f"; a dot's area is their number, {max(map(max, rows))} for the largest."


# One run


def _learning_curves(run: Run) -> Markup:
    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        values: list[float] = []
        for when, colour in (("before", BEFORE), ("after", AFTER)):
            complete = _points(run.history.complete_rounds(when), when)
            every = _points([line for line in run.rounds if line.measured(when)], when)
            if not complete:
                continue
            rounds, means = [number for number, _ in complete], [_mean(spread) for _, spread in complete]
            low = [max(0.0, _mean(spread) - (spread.std or 0)) for _, spread in complete]
            high = [min(1.0, _mean(spread) + (spread.std or 0)) for _, spread in complete]
            values += low + high
            axes.fill_between(rounds, low, high, color=colour, alpha=0.14, linewidth=0)
            thin = {"linewidth": 1.4} if len(rounds) > 60 else markers(rounds)
            axes.plot(rounds, means, color=colour, label=f"{when} local training", **thin)
            part = [(number, _mean(spread)) for number, spread in every if number not in rounds]
            if part:
                axes.plot(*zip(*part, strict=True), color=colour, linestyle="none", marker="o", markersize=3, alpha=0.4)
                values += [mean for _, mean in part]
        validation = _points(run.history.complete_rounds("after", "validation"), "after", "validation")
        if validation:
            means = [_mean(spread) for _, spread in validation]
            values += means
            rounds = [number for number, _ in validation]
            axes.plot(rounds, means, color=AFTER, linewidth=1.2, dashes=(4, 3), label="after, validation split")
        rounds_axis(axes, run.last_round)
        percent_axis(axes, values)
        legend_above(axes)

    return draw(680, 440, "Learning curves: mean accuracy over clients in each round", paint)


def _loss(run: Run) -> Markup:
    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        points = [(line.round, line.loss) for line in run.rounds if line.loss is not None]
        rounds, losses = zip(*points, strict=True)
        axes.plot(rounds, losses, color=INK, linewidth=1.6, **markers(rounds))
        axes.set_ylim(bottom=min(0, *losses) if len(losses) > 1 else None)
        rounds_axis(axes, run.last_round)

    return draw(340, 190, "Training loss in each round", paint)


def _bytes(run: Run) -> Markup:
    def paint(figure: Figure) -> None:
        from matplotlib.ticker import FuncFormatter

        axes = figure.subplots()
        rounds = [line.round for line in run.rounds]
        up = [line.bytes.up / 1e6 for line in run.rounds]
        down = [-line.bytes.down / 1e6 for line in run.rounds]
        for amounts, colour, label in ((up, SERIES[2], "up"), (down, SERIES[3], "down")):
            if len(rounds) <= 60:
                axes.bar(rounds, amounts, 0.7, color=colour, label=label)
            else:
                axes.fill_between(rounds, amounts, step="mid", color=colour, linewidth=0, label=label)
        axes.axhline(0, color=MUTED, linewidth=1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{abs(value):g}"))
        axes.set_ylabel("MB")
        rounds_axis(axes, run.last_round)
        legend_above(axes)

    return draw(340, 210, "Megabytes sent to the server (up) and to the clients (down) in each round", paint)


def _accuracy_per_client(run: Run) -> Markup:
    last = run.history.complete_rounds()[-1]
    scores = {name: client for name, client in last.clients.items() if client.after.test is not None}
    names = sorted(scores, key=lambda name: (scores[name].after.test, scores[name].before.test or 0, name))
    few = len(names) <= 40
    spread = last.after["test"]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        places = range(len(names))
        after = [scores[name].after.test or 0.0 for name in names]
        pairs = [(place, scores[name].before.test) for place, name in enumerate(names)]
        before = [(place, value) for place, value in pairs if value is not None]
        size = max(2.0, min(9.0, 560 / len(names)))
        dots = {"linestyle": "none", "marker": "o", "markersize": size, "markeredgecolor": SURFACE}
        dots |= {"markeredgewidth": 1 if few else 0, "clip_on": False}
        if before:
            # One path with gaps instead of a line for each client: a thousand clients stay light.
            gaps = [(place, value) for place, low in before for value in (low, after[place], math.nan)]
            axes.plot(*zip(*gaps, strict=True), color=MUTED, alpha=0.45, linewidth=2 if few else 0.8)
            # A little larger: where training changed nothing, it shows as a ring around the dot of after.
            ring = {**dots, "markersize": 1.5 * size}
            axes.plot(*zip(*before, strict=True), color=BEFORE, label="before local training", **ring)
        axes.plot(places, after, color=AFTER, label="after local training", **dots)
        if spread.mean is not None:
            axes.axhline(spread.mean, color=AFTER, linewidth=1, dashes=(4, 3), label="mean after")
        margin = max(0.6, len(names) * 0.01)
        axes.set_xlim(-margin, len(names) - 1 + margin)
        if few:
            _client_ticks(axes, names)
            axes.set_xlabel("client, from the lowest accuracy after local training to the highest")
        else:
            axes.set_xlabel(f"{len(names)} clients, from the lowest accuracy after local training to the highest")
        percent_axis(axes, [*after, *(value for _, value in before)])
        legend_above(axes)

    return draw(WIDTH, 340, f"Accuracy of each client in round {last.round}", paint)


def _classes_per_client(run: Run) -> Markup:
    """Clients along x, classes along y: bubbles while they are legible, a heat map for more."""
    names = [name for name in run.client_names() if name in run.clients and run.clients[name].labels]
    counts = [run.clients[name].labels or () for name in names]
    classes = max(len(row) for row in counts)
    most = max(1, max(max(row) for row in counts))
    bubbles = _bubbles(run)
    height = 90 + min(560, max(24 * classes if bubbles else 5 * classes, 170))

    def paint(figure: Figure) -> None:
        if bubbles:
            axes = figure.subplots()
            axes.grid(visible=True, axis="both")
            room = min(1.5 * (WIDTH - 90) / len(names), (height - 70) / classes)
            cells = [(place, label, n) for place, row in enumerate(counts) for label, n in enumerate(row) if n]
            x, y, amounts = zip(*cells, strict=True) if cells else ((), (), ())
            areas = [max(4.0, (1.05 * room) ** 2 * count / most) for count in amounts]
            axes.scatter(x, y, areas, color=AFTER, alpha=0.85, linewidth=1, edgecolor=SURFACE)
            _client_ticks(axes, names)
            axes.set_xlim(-0.7, len(names) - 0.3)
            axes.set_ylim(-0.7, classes - 0.3)
            axes.set_xlabel("client")
        else:
            axes, scale = figure.subplots(1, 2, width_ratios=(60, 1))
            _heat_map(axes, scale, counts, classes, most)
            axes.set_xlabel(f"client ({len(names)}, in the order of the table below)")
        step = classes * 16 / (height - 70)
        step = next((nice for nice in (1, 2, 5, 10, 20, 50, 100, 200, 500) if nice >= step), 1000)
        axes.set_yticks(range(0, classes, step))
        axes.set_ylabel("class")

    return draw(WIDTH, height, "Training samples of each class at each client", paint)


def _bubbles(run: Run) -> bool:
    classes = max(len(client.labels or ()) for client in run.clients.values())
    return len(run.clients) <= 40 and classes <= 25


def _heat_map(axes: Axes, scale: Axes, counts: Sequence[Sequence[int]], classes: int, most: int) -> None:
    """Paint counts as more or less opaque, on any background; by square root, so that small counts show."""
    import numpy as np
    from matplotlib.colors import to_rgb

    def shades(values: Any) -> Any:
        opacity = np.where(values > 0, 0.07 + 0.93 * np.sqrt(values / most), 0.0)
        return np.dstack([*(np.full(values.shape, part) for part in to_rgb(AFTER)), opacity])

    table = np.zeros((classes, len(counts)))
    for place, row in enumerate(counts):
        table[: len(row), place] = row
    options = {"origin": "lower", "aspect": "auto", "interpolation": "none"}
    axes.imshow(shades(table), **options)
    scale.imshow(shades(np.linspace(0, most, 64)[:, None]), extent=(0, 1, 0, most), **options)
    scale.set_xticks([])
    scale.yaxis.tick_right()
    scale.yaxis.set_label_position("right")
    scale.set_ylabel("samples")
    for part in (axes, scale):
        part.grid(visible=False)


def _samples_per_client(run: Run) -> Markup:
    names = [name for name in run.client_names() if name in run.clients]
    few = len(names) <= 40

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        floor = [0] * len(names)
        for split, colour in (("train", SERIES[0]), ("validation", SERIES[4]), ("test", SERIES[5])):
            counts = [run.clients[name].samples.get(split, 0) for name in names]
            if any(counts):
                axes.bar(range(len(names)), counts, 0.7 if few else 1.0, floor, color=colour, label=split)
                floor = [below + count for below, count in zip(floor, counts, strict=True)]
        if few:
            _client_ticks(axes, names)
        axes.set_xlim(-0.7, len(names) - 0.3)
        axes.set_xlabel("client" if few else f"client ({len(names)}, in the order of the table below)")
        axes.set_ylabel("samples")
        legend_above(axes)

    return draw(WIDTH, 280, "Samples of each client", paint)


def _graph(run: Run) -> Markup:
    """Clients on a circle, from the top clockwise; an edge is the more opaque the more often it was used."""
    counts = meetings(run)
    names = sorted({*run.client_names(), *(name for pair in counts for name in pair)}, key=natural_key)
    turn = 2 * math.pi / len(names)
    places = {name: (math.sin(turn * i), math.cos(turn * i)) for i, name in enumerate(names)}
    few = len(names) <= 40

    def paint(figure: Figure) -> None:
        from matplotlib.collections import LineCollection

        axes = figure.subplots()
        axes.set_axis_off()
        axes.set_aspect("equal")
        most = max(counts.values())
        edges = LineCollection(
            [(places[a], places[b]) for a, b in counts],
            colors=AFTER,
            alpha=[0.1 + 0.6 * count / most for count in counts.values()],
            linewidths=2 if len(counts) <= 60 else 1,
            rasterized=len(counts) > MOST_LINES,
        )
        axes.add_collection(edges)
        size = max(2.0, min(9.0, 300 / len(names)))
        dots = zip(*places.values(), strict=True)
        axes.plot(*dots, "o", color=AFTER, markersize=size, markeredgecolor=SURFACE, clip_on=False)
        for name, (x, y) in places.items() if few else ():
            side = "center" if abs(x) < 0.05 else "left" if x > 0 else "right"
            height = "center" if abs(x) >= 0.05 else "bottom" if y > 0 else "top"
            axes.text(1.07 * x, 1.07 * y, short(name, 18), ha=side, va=height)
        axes.set_xlim(-2.6, 2.6)
        axes.set_ylim(-1.15, 1.15)

    return draw(WIDTH, 400, "Which clients exchanged models", paint)


# Several runs


def _curves_of_runs(runs: Sequence[Run], when: str) -> Markup:
    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        values: list[float] = []
        for number, run in enumerate(runs):
            points = _points(run.history.complete_rounds(when), when)
            if points:
                rounds, means = [number for number, _ in points], [_mean(spread) for _, spread in points]
                axes.plot(rounds, means, **line_style(number), **markers(rounds))
                values += means
        rounds_axis(axes, max(run.last_round for run in runs))
        percent_axis(axes, values)

    return draw(510, 350, f"Mean accuracy over clients {when} local training in each round, for each run", paint)


def _accuracy_by_bytes(runs: Sequence[Run]) -> Markup:
    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        values: list[float] = []
        totals: list[float] = []
        for number, run in enumerate(runs):
            sent, points = 0, []
            complete = {line.round for line in run.history.complete_rounds()}
            for line in run.rounds:
                sent += line.bytes.up + line.bytes.down
                mean = line.after["test"].mean
                if line.round in complete and mean is not None and sent:
                    points.append((sent / 1e6, mean))
            if points:
                amounts, means = zip(*points, strict=True)
                axes.plot(amounts, means, **line_style(number), alpha=0.55)
                axes.plot(amounts[-1], means[-1], color=style(number)[0], marker="o", markersize=8)
                values += means
                totals.append(amounts[-1])
        if totals and max(totals) > 8 * min(totals):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(_plain_numbers())
            axes.xaxis.set_minor_formatter("")
        axes.grid(visible=True, axis="x")
        axes.set_xlabel("MB sent, up and down, over all clients")
        percent_axis(axes, values)

    return draw(WIDTH, 340, "Mean accuracy after local training against the megabytes sent until then", paint)


def _clients_of_runs(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    """A box and a dot for each client: runs from top to bottom, so that long names have room."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        values: list[float] = []
        for number, run in enumerate(runs):
            last = run.history.last_complete()
            if last is None:
                continue
            scores = sorted(c.after.test for c in last.clients.values() if c.after.test is not None)
            values += scores
            colour = style(number)[0]
            # The golden ratio spreads neighbours evenly, and the same way each time.
            places = [number - 0.17 + 0.34 * (rank * 0.618034 % 1) for rank in range(len(scores))]
            size = 5.0 if len(scores) <= 60 else 3.0
            dots = {"linestyle": "none", "marker": "o", "markersize": size, "markeredgewidth": 0}
            axes.plot(scores, places, color=colour, alpha=0.5, **dots)
            if len(scores) >= 4:
                axes.boxplot(
                    scores,
                    positions=[number],
                    orientation="horizontal",
                    widths=0.56,
                    showfliers=False,
                    boxprops={"color": colour, "linewidth": 1.2},
                    whiskerprops={"color": colour, "linewidth": 1.2},
                    capprops={"linewidth": 0},
                    medianprops={"color": INK, "linewidth": 2},
                )
        axes.set_yticks(range(len(runs)), cut(names, 36))
        axes.tick_params(axis="y", colors=INK)
        axes.set_ylim(len(runs) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        percent_axis(axes, values, along="x")

    return draw(WIDTH, 70 + 54 * len(runs), "Accuracy of each client after local training, for each run", paint)


def line_style(number: int) -> dict[str, Any]:
    """Return how matplotlib draws the ``number``-th run."""
    colour, dashes = style(number)
    return {"color": colour, "dashes": dashes} if dashes else {"color": colour}


# Parts


def _points(lines: Iterable[Round], when: str, split: str = "test") -> list[tuple[int, Spread]]:
    spreads = [(line.round, line.accuracy(when, split)) for line in lines]
    return [(number, spread) for number, spread in spreads if spread.mean is not None]


def _mean(spread: Spread) -> float:
    assert spread.mean is not None  # _points leaves out the others
    return spread.mean


def markers(rounds: Sequence[int]) -> dict[str, Any]:
    """Return the dots of a curve: none where there are many rounds."""
    return {"marker": "o", "markersize": 5 if len(rounds) > 12 else 6} if len(rounds) <= 25 else {}


def _client_ticks(axes: Axes, names: Sequence[str]) -> None:
    """Name each place along x after its client, slanted where the names would touch."""
    room = 110  # characters that fit side by side
    labels = [short(name, max(18, room // len(names))) for name in names]
    if max(map(len, labels)) * len(labels) > room:
        axes.set_xticks(range(len(names)), labels, rotation=50, ha="right", rotation_mode="anchor")
    else:
        axes.set_xticks(range(len(names)), labels)


def rounds_axis(axes: Axes, last: int) -> None:
    """Show the rounds up to ``last``."""
    from matplotlib.ticker import MaxNLocator

    last = max(last, 1)
    axes.set_xlim(0.5, last + max(0.5, 0.02 * last))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.set_xlabel("round")


def percent_axis(axes: Axes, values: Sequence[float], along: str = "y") -> None:
    """Show accuracies in [0, 1] in percent, from the 5 % step below the least to the one above the greatest."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    low = math.floor(20 * (min(values, default=0.0) - 0.01)) / 20
    high = math.ceil(20 * (max(values, default=1.0) + 0.01)) / 20
    low, high = max(0.0, min(low, high - 0.1)), min(1.0, high)
    margin = 0.02 * (high - low)
    (axes.set_ylim if along == "y" else axes.set_xlim)(low - margin, high + margin)
    axis = axes.yaxis if along == "y" else axes.xaxis
    axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))


def _plain_numbers() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:g}")


def legend_above(axes: Axes) -> None:
    """Put the legend above the axes, where there is more than one thing to tell apart."""
    handles, _ = axes.get_legend_handles_labels()
    if len(handles) > 1:
        legend = axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), borderaxespad=0.3)
        for handle in legend.legend_handles:
            if getattr(handle, "get_linestyle", str)() == "None":
                handle.set_markersize(7)  # however small the dots of many clients are
