"""The picture of the evidence: margins of the papers' own methods, reported and ours, a line for each column."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import escape

from results.report_charts import INK, LINE, MUTED, SERIES, SETTINGS, painted
from results.text import short

WIDTH = 800  # px: one unit of the picture is one pixel
_LEFT, _RIGHT, _TOP, _BOTTOM = 210, 105, 60, 50  # px around the axes: names of columns, rivals, legend, axis
_COLUMN, _HEAD, _END = 21, 30, 5  # px of a line, of a heading above lines, and below the last line
# White, for pages dark and light.
_SETTINGS = SETTINGS | {"figure.facecolor": "white", "axes.grid.axis": "x"}
_FULL, _SCALED = SERIES[0], SERIES[1]
_RING = {"linestyle": "none", "marker": "o", "markersize": 11, "markerfacecolor": "white", "markeredgecolor": INK}


@dataclass(frozen=True)
class Line:
    """A line of the picture, in points; see ``results.evidence.Margin``.

    ``rivals`` says how many of them were run.
    """

    name: str
    reported: float | None
    ours: float
    span: tuple[float, float] | None
    rivals: str


@dataclass(frozen=True)
class Group:
    """Lines of a table with a heading; those that were not run at full size look different."""

    paper: str
    title: str
    full: bool
    lines: tuple[Line, ...]

    def says(self) -> str:
        """Return the numbers as a sentence."""
        lines = (
            f"{line.name}: reported {_number(line.reported)}, ours {_number(line.ours)}"
            + (f" ({line.span[0]:+.2f} to {line.span[1]:+.2f})" if line.span else "")
            + f", {line.rivals}"
            for line in self.lines
        )
        return f"{self.title}: {'; '.join(lines)}."


def picture(groups: Sequence[Group]) -> str:
    """Return the picture as an SVG document: the same bytes for the same numbers, which it also has as text."""
    height = _TOP + _BOTTOM + _END + sum(_HEAD + _COLUMN * len(group.lines) for group in groups)

    def paint(figure: Any) -> None:
        figure.set_layout_engine("none")
        axes = figure.add_axes(
            (_LEFT / WIDTH, _BOTTOM / height, 1 - (_LEFT + _RIGHT) / WIDTH, 1 - (_TOP + _BOTTOM) / height)
        )
        place = 0  # px from the upper edge of the axes
        beside = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
        for i, group in enumerate(groups):
            if i and group.paper != groups[i - 1].paper:
                axes.annotate(
                    "",
                    (15 / WIDTH, place + 6),
                    (1 - 15 / WIDTH, place + 6),
                    xycoords=("figure fraction", "data"),
                    arrowprops={"arrowstyle": "-", "color": LINE, "linewidth": 1.5, "shrinkA": 0, "shrinkB": 0},
                )
            place += _HEAD
            axes.annotate(
                group.title, (0, place - 7), xytext=(15 - _LEFT, 0), weight="bold", backgroundcolor="white", **beside
            )
            for line in group.lines:
                middle = place + _COLUMN / 2
                _draw(axes, middle, line, group.full)
                axes.annotate(short(line.name, 26), (0, middle), xytext=(-10, 0), ha="right", **beside)
                axes.annotate(line.rivals, (1, middle), xytext=(10, 0), color=MUTED, fontsize=11, **beside)
                place += _COLUMN
        axes.axvline(0, color=MUTED, linewidth=1.2, zorder=1)
        axes.set_ylim(place + _END, 0)
        axes.set_yticks([])
        axes.margins(x=0.05)
        axes.tick_params(labeltop=True)  # for a picture that is longer than a screen
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("points that the paper's own method is above the best rival that was run")
        _legend(figure, axes)

    svg = painted(WIDTH, height, paint, _SETTINGS)
    text = escape("\n".join(group.says() for group in groups))
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{WIDTH}" '
        f'height="{height}" viewBox="0 0 {WIDTH} {height}" role="img">\n<title>Margins of the papers\' own methods '
        f"over their best rivals</title>\n<desc>{text}</desc>"
    )
    return re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)


def _draw(axes: Any, place: float, line: Line, full: bool) -> None:
    colour = _FULL if full else _SCALED
    if line.reported is not None:
        axes.plot([line.reported, line.ours], [place] * 2, color=LINE, linewidth=2, zorder=2)
        # Larger than ours, so that a margin that is met shows as a ring around it.
        axes.plot(line.reported, place, **_RING, zorder=3)
    if line.span:
        axes.plot(line.span, [place] * 2, color=colour, marker="|", markersize=9, linewidth=2, zorder=4)
    axes.plot(line.ours, place, **_dot(full), zorder=5)


def _dot(full: bool) -> dict[str, Any]:
    colour, marker = (_FULL, "o") if full else (_SCALED, "D")
    return {"linestyle": "none", "marker": marker, "markersize": 7 if full else 6, "color": colour}


def _legend(figure: Any, axes: Any) -> None:
    marks = [
        *axes.plot([], [], **_RING, label="reported"),
        *axes.plot([], [], **_dot(True), label="ours, full size"),
        *axes.plot([], [], **_dot(False), label="ours, scaled down or other keys"),
        *axes.plot([], [], color=MUTED, marker="|", markersize=9, label="over seeds"),
    ]
    figure.legend(handles=marks, loc="upper left", ncols=len(marks), bbox_to_anchor=(0.01, 1), borderaxespad=0.8)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
