"""Accuracy over the values of a key or over rounds: a table and a picture with a panel for each part of a study."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, NamedTuple, Self

from markupsafe import escape

from common.config import one_of
from common.durable import read_plain, write_whole
from common.errors import FloretError, printable
from results.experiment import selected
from results.history import is_number, whole
from results.measured import ENVIRONMENT, LARGEST, MeasuredRun, loaded
from results.report_charts import MUTED, SETTINGS, painted, style
from results.sweep import markdown, unread
from results.tables import environment_notes
from results.text import percent_over_runs, plain

# KEY for accuracy over rounds, which no run config has.
ROUND = "round"
_PANEL, _HEIGHT, _BESIDE = 400, 340, 3  # px of a panel; how many stand beside each other
_MOST_ROUNDS = 8  # in a table
_FIRST_ROUND = "A line begins with the first round by which every client, in all seeds, was measured."
_MOST_MISSING = 20  # runs that are named
_LONGEST = 100_000  # characters of the keys of a sweep
MEASURES = {"after": "test", "before": "before", "worst decile": "worst_decile"}
Point = tuple[Path, Mapping[str, Any], Mapping[str, Any]]
# Of one machine, and no part of what was run.
_PATHS = re.compile(r"""(?<![\w.-])(data-dir|output-dir|resume|tracker)\s*=\s*("[^"]*"|'[^']*')\s*""")
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


class _Cell(NamedTuple):
    """A run of a table."""

    row: str
    column: str
    run: MeasuredRun


class _Source(NamedTuple):
    """What a panel gets from a sweep, or from a column of a table.

    Attributes:
        runs: what was measured; over rounds each of them.
        unfinished: the keys of runs that no sweep has finished.
        about: of each run that says it.
        kept: what the study keeps of it.
    """

    runs: Sequence[Point]
    unfinished: Sequence[Mapping[str, Any]]
    about: Sequence[Mapping[str, Any]]
    kept: Mapping[str, Any]


@dataclass(frozen=True)
class Study:
    """Sweeps over one key, or sweeps and tables over rounds.

    Attributes:
        key: the key of the horizontal axis, or ``ROUND``.
        without: what the place of sweeps without the key is called.
        panels: in order.
        sweeps: what they were read from: by panel, each sweep.json without what a run says of itself, and of a table
            its rows.
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
        """Return the study of sweeps' folders and, over rounds, files of tables, each with the name of its panel.

        A table has a panel for each of its columns, with the name before that of the column if it is not empty.

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
        tables = {place: _cells(place) for _, place in places if place.suffix == ".json"} if key == ROUND else {}
        if only and not tables:
            raise FloretError(f"--only {only[0]!r}: chooses rows and columns of tables; there is none")
        chosen = dict(zip(tables, selected(list(tables.values()), only), strict=True))
        runs: dict[str, list[Point]] = {}
        sweeps: dict[str, list[Mapping[str, Any]]] = {}
        about: list[Mapping[str, Any]] = []
        unfinished: dict[str, list[Mapping[str, Any]]] = {}
        for name, place in places:
            if place in chosen:
                found = _of_table(name, place, chosen[place])
            else:
                found = {name: _of_sweep(place / "sweep.json", over_rounds=key == ROUND)}
            for heading, source in found.items():
                runs.setdefault(heading, []).extend(source.runs)
                unfinished.setdefault(heading, []).extend(source.unfinished)
                about += source.about
                sweeps.setdefault(heading, []).append(source.kept)
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
            note = f" {_FIRST_ROUND}" if self.key == ROUND else ""
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
            marks = {"marker": ""} if self.key == ROUND else {}
            handles = [
                axis
                for i, name in enumerate(names)
                for axis in all_axes[0, 0].plot([], [], **_style(i) | marks, label=name)
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
            how = _style(names.index(line)) | {"marker": ""}
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
            how = _style(names.index(line))
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

    def _some(self, values: Sequence[float | None]) -> Sequence[float | None]:
        """Return the values that a table shows; of rounds every so many, and the last."""
        step = -(-len(values) // _MOST_ROUNDS) if self.key == ROUND else 1
        return values[::-1][::step][::-1]

    @staticmethod
    def _keys(sweep: Mapping[str, Any]) -> list[str]:
        parts = (sweep.get("table"), sweep.get("run-config"), sweep.get("federation-config"))
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


def _of_sweep(file: Path, *, over_rounds: bool) -> _Source:
    """Read a sweep.json.

    Raises:
        FloretError: it cannot be read, or is of a version that kept no curves where they are wanted.
    """
    try:
        sweep = json.loads(read_plain(file, LARGEST))
        done = [run for run in sweep["runs"] if run["summary"]]
        failed = [dict(run["keys"]) for run in sweep["runs"] if not run["summary"]]
        grid = [printable(each, _LONGEST) for each in sweep.get("grid", ())]
        configs = {part: sweep.get(part, "") for part in ("run-config", "federation-config")}
        if not all(isinstance(text, str) for text in configs.values()):
            raise TypeError("a config is no text")
        told = [run["about"] for run in sweep["runs"] if "about" in run]
        about = [
            {part: each[part] for part in ENVIRONMENT} | {part: each.get(part) for part in ("file", "digest")}
            for each in told
        ]
        environment_notes(about)
        found: list[Point] = []
        for run in done:
            keys = _keys_and_seed(run)
            if not over_rounds:
                found.append((file, keys, run["summary"]))
            elif "curve" in run:
                found += _points(file, keys, run["curve"])
            else:
                raise FloretError(f"{file}: has no curves; give its floret sweep again, which makes no run again")
        if not all(s[m] is None or is_number(s[m]) for _, _, s in found for m in MEASURES.values()):
            raise ValueError("an accuracy is no number")
    except OSError as error:
        raise FloretError(unread(file, error)) from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise FloretError(f"{file}: is not the sweep.json of a sweep ({error})") from error
    parts = ("keys", "summary", "curve") if over_rounds else ("keys", "summary")
    same = configs | {"run-config": _PATHS.sub("", configs["run-config"])}
    texts = {part: printable(text, _LONGEST) for part, text in same.items()}
    kept = {**sweep, "grid": grid, **texts, "runs": [{part: run[part] for part in parts} for run in done]}
    return _Source(found, failed, about, kept)


def _cells(file: Path) -> list[_Cell]:
    """Return the runs of a table that are done.

    Raises:
        FloretError: the file is none that ``floret reproduce`` wrote.
    """
    runs = loaded(file, advice="name a file that floret reproduce wrote")[1]
    if not runs:
        raise FloretError(f"{file}: has no run that is done, or is not there; name a file that floret reproduce wrote")
    return [_Cell(str(entry["row"]), str(entry["column"]), run) for entry, run in runs]


def _of_table(name: str, file: Path, cells: Sequence[_Cell]) -> dict[str, _Source]:
    """Return what the columns of a table give, by the names of their panels."""
    found: dict[str, _Source] = {}
    for column in dict.fromkeys(cell.column for cell in cells):
        runs = [(cell.row, cell.run) for cell in cells if cell.column == column]
        points, kept = list[Point](), list[Any]()
        for row, run in runs:
            seed = run.about["config"]["seed"]
            points += _points(file, {"method": row, "seed": seed}, run.curve)
            kept.append({"row": row, "seed": seed, "curve": run.curve})
        panel = printable(f"{name}: {column}" if name else column)
        table = {"table": printable(f"{file.name}, {column}"), "runs": kept}
        found[panel] = _Source(points, (), [run.about for _, run in runs], table)
    return found


def _points(file: Path, keys: Mapping[str, Any], curve: Iterable[Sequence[Any]]) -> list[Point]:
    """Return a run's rounds: number, accuracy before and after local training."""
    return [
        (file, {**keys, ROUND: whole(number)}, {"before": before, "test": after, "worst_decile": None})
        for number, before, after in curve
    ]


def _keys_and_seed(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a run of a sweep, and its seed if it was none of them."""
    config = run.get("about", {}).get("config", {})
    return {**({"seed": config["seed"]} if "seed" in config else {}), **run["keys"]}


def _style(number: int) -> dict[str, Any]:
    colour, dashes = style(number)
    return {"color": colour, "dashes": dashes or (None, None), "marker": "osD^v"[number % 5], "markersize": 5}
