"""Accuracy over the values of a key or over rounds: a table and a picture with a panel for each part of a study."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, Self

from markupsafe import escape

from common.config import one_of
from common.durable import write_whole
from common.errors import FloretError, printable
from results.curve_sources import MEASURES, ROUND, Point, Source, of_runs, of_sweep, of_table, runs_of_table
from results.experiment import selected
from results.history import is_number
from results.report_charts import MUTED, SETTINGS, painted, style
from results.run import Run, read_run
from results.sweep import markdown
from results.tables import environment_notes
from results.text import percent_over_runs, plain

_PANEL, _HEIGHT, _BESIDE = 400, 340, 3  # px of a panel; how many stand beside each other
_MOST_ROUNDS = 8  # in a table
_OF_ROUNDS = (
    "A line begins with the first round by which every client, in all seeds, was measured; before training it may be "
    "of those alone that train in the round."
)
_MOST_MISSING = 20  # runs that are named
Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Panel:
    """The runs of the sweeps of one name.

    Attributes:
        name: its heading.
        lines: by name of the line, by value of the key and by seed, in order, what was measured; the value is None for
            sweeps without the key.
    """

    name: str
    lines: Mapping[str, Mapping[float | None, Mapping[int, Summary]]]

    @classmethod
    def of(cls, name: str, key: str, runs: Sequence[Point]) -> Self:
        """Return the panel of runs, each the file that it is of, its keys, and what it measured.

        Of rounds those remain that all seeds of a line have.

        Raises:
            FloretError: a value of the key is no number, or two runs have the same keys.
        """
        lines: dict[str, dict[float | None, dict[int, Summary]]] = {}
        for file, keys, summary in runs:
            others = dict(keys)
            value, seed = others.pop(key, None), others.pop("seed", 0)
            if value is not None and not is_number(value):
                raise FloretError(f"{file}: {key} = {value!r}: a curve is over the values of a number")
            if type(seed) is not int:
                raise FloretError(f"{file}: seed = {seed!r}: must be a whole number")
            texts = (plain(v) if k == "method" else f"{printable(k)}={plain(v)}" for k, v in others.items())
            line = ", ".join(texts) or "all"
            seen = lines.setdefault(line, {}).setdefault(value if value is None else float(value), {})
            if seed in seen:
                raise FloretError(f"{file}: {name}: two runs of {line} have {key} = {value} and seed {seed}")
            seen[seed] = summary
        in_order = {
            line: {value: dict(sorted(each.items())) for value, each in values.items()}
            for line, values in lines.items()
        }
        if key == ROUND:
            for values in in_order.values():
                seeds = set().union(*values.values())
                for value in [value for value, each in values.items() if len(each) < len(seeds)]:
                    del values[value]
        return cls(name, in_order)

    @property
    def values(self) -> list[float | None]:
        """The values of the key in order, and None last."""
        found = {value for values in self.lines.values() for value in values}
        return [*sorted(v for v in found if v is not None), *([None] if None in found else [])]

    def accuracies(self, line: str, value: float | None, measure: str) -> list[float]:
        """Return what each seed measured, in [0, 1]; nothing if one of them has no number.

        Of some of the seeds alone the mean would be none of those beside it.
        """
        found = [summary[measure] for summary in self.lines[line].get(value, {}).values()]
        return [] if None in found else [float(each) for each in found]

    def seeds(self, shown: Callable[[float | None], str]) -> str:
        """Return the seeds as text: those of all points, or, where they are not the same, those of each line.

        Args:
            shown: a value of the key as text.
        """

        def listed(seeds: Iterable[int]) -> str:
            return ", ".join(map(str, seeds))

        every = {tuple(each) for values in self.lines.values() for each in values.values()}
        if len(every) == 1:
            return f"over seeds {listed(every.pop())}"
        parts = []
        for line, values in self.lines.items():
            of_line = {tuple(each) for each in values.values()}
            alone = "; ".join(f"{shown(value)}: {listed(values[value])}" for value in self.values if value in values)
            parts.append(f"`{line}` " + (listed(of_line.pop()) if len(of_line) == 1 else f"({alone})"))
        return f"over seeds, not the same ones for all points: {'; '.join(parts)}"


@dataclass(frozen=True)
class Study:
    """Sweeps over one key, or sweeps, tables and single runs over rounds.

    Attributes:
        key: the key of the horizontal axis, or ``ROUND``.
        without: what the place of sweeps without the key is called.
        panels: in order.
        sweeps: what they were read from: by panel, each sweep.json without what a run says of itself, the rows of
            tables, and runs.
        about: of each run that says it, from which npz file, of which digest, with which commit, machine and versions
            it was made.
        missing: by panel, the keys of each run of the grids that no sweep has finished.
        when: ``before`` or ``after`` local training, in the picture.
    """

    key: str
    without: str
    panels: tuple[Panel, ...]
    sweeps: Mapping[str, Sequence[Mapping[str, Any]]]
    about: Sequence[Mapping[str, Any]]
    missing: Mapping[str, Sequence[str]]
    when: str = "after"

    @classmethod
    def read(
        cls,
        key: str,
        without: str,
        places: Sequence[tuple[str, Path]],
        *,
        when: str = "after",
        only: Sequence[str] = (),
    ) -> Self:
        """Return the study of sweeps' folders and, over rounds, files of tables and run directories.

        Each has the name of its panel. A table has a panel for each of its columns, with the name before that of the
        column if it is not empty.

        Args:
            key: the key, or ``ROUND``.
            without: as the attribute.
            places: name and folder or file.
            when: as the attribute.
            only: names of rows and columns of the tables; see ``experiment.selected``.

        Raises:
            FloretError: a file cannot be read or does not fit, or no sweep of a panel has the key.
        """
        if key == "seed":
            raise FloretError("KEY seed: a point is the mean over seeds; name another key of the grid")
        tables = {place: runs_of_table(place) for _, place in places if place.suffix == ".json"} if key == ROUND else {}
        if only and not tables:
            raise FloretError(f"--only {only[0]!r}: chooses rows and columns of tables; there is none")
        chosen = dict(zip(tables, selected(list(tables.values()), only), strict=True))
        runs: dict[str, list[Point]] = {}
        sweeps: dict[str, list[Mapping[str, Any]]] = {}
        about: list[Mapping[str, Any]] = []
        unfinished: dict[str, list[Mapping[str, Any]]] = {}
        alone: dict[str, list[Run]] = {}
        sources: list[tuple[str, Source]] = []
        for name, place in places:
            if place in chosen:
                sources += of_table(name, place, chosen[place]).items()
            elif key == ROUND and (place / "config.json").is_file():
                alone.setdefault(name, []).append(read_run(place))
            else:
                sources.append((name, of_sweep(place / "sweep.json", over_rounds=key == ROUND)))
        sources += ((name, of_runs(each)) for name, each in alone.items())
        for name, source in sources:
            runs.setdefault(name, []).extend(source.runs)
            unfinished.setdefault(name, []).extend(source.unfinished)
            about += source.about
            sweeps.setdefault(name, []).append(source.kept)
        panels = tuple(Panel.of(name, key, each) for name, each in runs.items())
        for panel in panels:
            if key == ROUND and not panel.values:
                raise FloretError(f"{panel.name}: has no round in which all seeds of a line measured every client")
            if all(value is None for value in panel.values):
                every = (keys.items() for _, keys, _ in runs[panel.name])
                had = dict.fromkeys(
                    name for keys in every for name, value in keys if name != "seed" and is_number(value)
                )
                hint = f"; KEY {one_of(key, had)}" if had else ""
                raise FloretError(f"{panel.name}: no finished run of its sweeps has {key} in the grid{hint}")
        missing = {
            name: [
                printable(" ".join(f"{key}={value}" for key, value in keys.items()))
                for keys in failed
                if not any(keys.items() <= had.items() for _, had, _ in runs[name])
            ]
            for name, failed in unfinished.items()
        }
        return cls(key, without, panels, sweeps, about, missing, when)

    def write(self, output: Path) -> list[Path]:
        """Write the picture, the tables and what both are made of beside each other; return the files."""
        data = {
            "key": self.key,
            "without": self.without,
            "environment": environment_notes(self.about),
            "sweeps": self.sweeps,
        }
        files = {
            ".svg": self.picture(),
            ".md": self.page(),
            ".json": json.dumps(data, indent=1) + "\n",
        }
        for suffix, text in files.items():
            write_whole(output.with_name(output.name + suffix), text.encode())
        return [output.with_name(output.name + suffix) for suffix in files]

    def page(self) -> str:
        """Return the tables as Markdown: mean ± standard deviation over seeds, percent."""
        notes = ["\n".join(f"- {note}" for note in environment_notes(self.about))] if self.about else []
        parts = [f"# {self._title}", *notes]
        for panel in self.panels:
            spread = f"mean ± standard deviation (population) {panel.seeds(self._shown)}"
            note = f" {_OF_ROUNDS}" if self.key == ROUND else ""
            parts.append(f"## {panel.name}\n\nAccuracy on the test split in percent, {spread}.{note}")
            parts.append("\n".join(f"- `{' '.join(self._keys(sweep))}`" for sweep in self.sweeps[panel.name]))
            if missing := self.missing[panel.name]:
                shown = "; ".join(f"`{keys}`" for keys in missing[:_MOST_MISSING])
                rest = f"; and {len(missing) - _MOST_MISSING} more" if len(missing) > _MOST_MISSING else ""
                parts.append(f"Not finished, so not in the tables: {shown}{rest}.")
            values = self._some(panel.values)
            # Of a round only the means are kept.
            for shown, measure in list(MEASURES.items())[: 2 if self.key == ROUND else None]:
                head = [f"{shown}; {self.key}", *map(self._shown, values)]
                rows = [
                    [f"`{line}`", *(percent_over_runs(panel.accuracies(line, value, measure)) for value in values)]
                    for line in panel.lines
                ]
                parts.append(markdown(head, rows))
        return "\n\n".join(parts) + "\n"

    def picture(self) -> str:
        """Return accuracy before or after local training as an SVG document, which also has the numbers as text."""
        beside = min(len(self.panels), _BESIDE)
        below = -(-len(self.panels) // beside)
        width, height = _PANEL * beside, _HEIGHT * below

        def paint(figure: Any) -> None:
            all_axes = figure.subplots(below, beside, squeeze=False, sharey=True)
            names = list(dict.fromkeys(line for panel in self.panels for line in panel.lines))
            draw = self._draw_rounds if self.key == ROUND else self._draw
            for axes, panel in zip(all_axes.flat, self.panels, strict=False):
                draw(axes, panel, names)
                axes.set_xlabel(self.key)
                axes.set_title(panel.name, fontsize=12, loc="left", color=MUTED)
            for axes in all_axes.flat[len(self.panels) :]:
                axes.remove()
            for axes in all_axes[:, 0]:
                axes.set_ylabel(f"accuracy {self.when} local training, %")
            handles = [
                axis
                for i, name in enumerate(names)
                for axis in all_axes[0, 0].plot([], [], **self._style(i), label=name)
            ]
            figure.legend(handles=handles, loc="outside upper left", ncols=min(len(names), 3 * beside))

        svg = painted(width, height, paint, SETTINGS | {"figure.facecolor": "white"})
        text = escape("\n".join(self._says(panel) for panel in self.panels))
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{width}" '
            f'height="{height}" viewBox="0 0 {width} {height}" role="img">\n'
            f"<title>{escape(self._title)}</title>\n<desc>{text}</desc>"
        )
        return re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)

    def _draw_rounds(self, axes: Any, panel: Panel, names: Sequence[str]) -> None:
        from matplotlib.ticker import MaxNLocator

        for line in panel.lines:
            found = [(value, panel.accuracies(line, value, self._measure)) for value in panel.values]
            shown = [(value, 100 * mean(values), 100 * pstdev(values)) for value, values in found if values]
            rounds, means, spreads = zip(*shown, strict=True) if shown else ((), (), ())
            how = self._style(names.index(line))
            axes.plot(rounds, means, **how)
            if any(spreads):
                low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
                axes.fill_between(rounds, low, high, color=how["color"], alpha=0.2, linewidth=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    def _draw(self, axes: Any, panel: Panel, names: Sequence[str]) -> None:
        places = {value: place for place, value in enumerate(panel.values)}
        for line in panel.lines:
            # Lines a little beside each other: where they meet, deviations would hide each other.
            aside = 0.06 * (names.index(line) - (len(names) - 1) / 2)
            found = {value: [100 * a for a in panel.accuracies(line, value, self._measure)] for value in panel.values}
            shown = {places[value]: values for value, values in found.items() if values}
            how = self._style(names.index(line))
            for x, values in shown.items():
                spread = pstdev(values)
                axes.plot(
                    [x + aside] * 2, [mean(values) - spread, mean(values) + spread], color=how["color"], linewidth=1.2
                )
            joined = [x for x in shown if panel.values[x] is not None]
            axes.plot([x + aside for x in joined], [mean(shown[x]) for x in joined], **how)
            for x in set(shown) - set(joined):
                axes.plot(x + aside, mean(shown[x]), **how)
        axes.set_xticks(range(len(places)), [self._shown(value) for value in panel.values])

    @property
    def _title(self) -> str:
        return "Accuracy over rounds" if self.key == ROUND else f"Accuracy over {self.key}"

    @property
    def _measure(self) -> str:
        return MEASURES[self.when]

    def _style(self, number: int) -> dict[str, Any]:
        """Return how a line looks; over rounds its points are too many for marks."""
        colour, dashes = style(number)
        mark = "" if self.key == ROUND else "osD^v"[number % 5]
        return {"color": colour, "dashes": dashes or (None, None), "marker": mark, "markersize": 5}

    def _some(self, values: Sequence[float | None]) -> Sequence[float | None]:
        """Return the values that a table shows; of rounds every so many, and the last."""
        step = -(-len(values) // _MOST_ROUNDS) if self.key == ROUND else 1
        return values[::-1][::step][::-1]

    @staticmethod
    def _keys(sweep: Mapping[str, Any]) -> list[str]:
        parts = (sweep.get("read"), sweep.get("run-config"), sweep.get("federation-config"))
        return [*sweep.get("grid", ()), *filter(None, parts)]

    def _says(self, panel: Panel) -> str:
        lines = (
            f"{line}: "
            + ", ".join(
                f"{self._shown(value)} {percent_over_runs(panel.accuracies(line, value, self._measure))}"
                for value in self._some(panel.values)
            )
            for line in panel.lines
        )
        return f"{panel.name}, {self.key}: {'; '.join(lines)}."

    def _shown(self, value: float | None) -> str:
        return self.without if value is None else plain(value)
