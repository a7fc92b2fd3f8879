"""Accuracy over the values of a key, from sweeps: a table and a picture with a panel for each part of a study."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, Self

from markupsafe import escape

from common.config import one_of
from common.durable import read_plain, write_whole
from common.errors import FloretError, printable
from results.history import is_number
from results.measured import ENVIRONMENT, LARGEST
from results.report_charts import MUTED, SETTINGS, painted, style
from results.sweep import markdown, unread
from results.tables import environment_notes
from results.text import percent_over_runs, plain

_PANEL, _HEIGHT = 400, 340  # px of a panel
_MOST_MISSING = 20  # runs that are named
_LONGEST = 100_000  # characters of the keys of a sweep
MEASURES = {"after": "test", "before": "before", "worst decile": "worst_decile"}
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
    def of(cls, name: str, key: str, runs: Sequence[tuple[Path, Mapping[str, Any], Summary]]) -> Self:
        """Return the panel of runs, each the file that it is of, its keys, and what it measured.

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
    """Sweeps over one key.

    Attributes:
        key: the key of the horizontal axis.
        without: what the place of sweeps without the key is called.
        panels: in order.
        sweeps: what they were read from: by panel, each sweep.json without what a run says of itself.
        about: of each run that says it, from which npz file, of which digest, with which commit, machine and versions
            it was made.
        missing: by panel, the keys of each run of the grids that no sweep has finished.
    """

    key: str
    without: str
    panels: tuple[Panel, ...]
    sweeps: Mapping[str, Sequence[Mapping[str, Any]]]
    about: Sequence[Mapping[str, Any]]
    missing: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls, key: str, without: str, folders: Sequence[tuple[str, Path]]) -> Self:
        """Return the study of sweeps' folders, each with the name of its panel.

        Raises:
            FloretError: a sweep.json cannot be read or does not fit, or no sweep of a panel has the key.
        """
        if key == "seed":
            raise FloretError("KEY seed: a point is the mean over seeds; name another key of the grid")
        runs: dict[str, list[tuple[Path, Mapping[str, Any], Summary]]] = {}
        sweeps: dict[str, list[Mapping[str, Any]]] = {}
        about: list[Mapping[str, Any]] = []
        unfinished: dict[str, list[Mapping[str, Any]]] = {}
        for name, folder in folders:
            file = folder / "sweep.json"
            try:
                sweep = json.loads(read_plain(file, LARGEST))
                found = [(file, _keys_and_seed(run), run["summary"]) for run in sweep["runs"] if run["summary"]]
                failed = [dict(run["keys"]) for run in sweep["runs"] if not run["summary"]]
                grid = [printable(each, _LONGEST) for each in sweep.get("grid", ())]
                configs = {part: sweep.get(part, "") for part in ("run-config", "federation-config")}
                if not all(isinstance(text, str) for text in configs.values()):
                    raise TypeError("a config is no text")
                told = [run["about"] for run in sweep["runs"] if "about" in run]
                abouts = [
                    {part: each[part] for part in ENVIRONMENT} | {part: each.get(part) for part in ("file", "digest")}
                    for each in told
                ]
                environment_notes(abouts)
                if not all(s[m] is None or is_number(s[m]) for _, _, s in found for m in MEASURES.values()):
                    raise ValueError("an accuracy is no number")
            except OSError as error:
                raise FloretError(unread(file, error)) from error
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
                raise FloretError(f"{file}: is not the sweep.json of a sweep ({error})") from error
            runs.setdefault(name, []).extend(found)
            unfinished.setdefault(name, []).extend(failed)
            about += abouts
            shown = [{"keys": run["keys"], "summary": run["summary"]} for run in sweep["runs"] if run["summary"]]
            same = configs | {"run-config": _PATHS.sub("", configs["run-config"])}
            texts = {part: printable(text, _LONGEST) for part, text in same.items()}
            sweeps.setdefault(name, []).append({**sweep, "grid": grid, **texts, "runs": shown})
        panels = tuple(Panel.of(name, key, each) for name, each in runs.items())
        for panel in panels:
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
        return cls(key, without, panels, sweeps, about, missing)

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
        parts = [f"# Accuracy over {self.key}", *notes]
        for panel in self.panels:
            spread = f"mean ± standard deviation (population) {panel.seeds(self._shown)}"
            parts.append(f"## {panel.name}\n\nAccuracy on the test split in percent, {spread}.")
            parts.append("\n".join(f"- `{' '.join(self._keys(sweep))}`" for sweep in self.sweeps[panel.name]))
            if missing := self.missing[panel.name]:
                shown = "; ".join(f"`{keys}`" for keys in missing[:_MOST_MISSING])
                rest = f"; and {len(missing) - _MOST_MISSING} more" if len(missing) > _MOST_MISSING else ""
                parts.append(f"Not finished, so not in the tables: {shown}{rest}.")
            for shown, measure in MEASURES.items():
                head = [f"{shown}; {self.key}", *map(self._shown, panel.values)]
                rows = [
                    [
                        f"`{line}`",
                        *(percent_over_runs(panel.accuracies(line, value, measure)) for value in panel.values),
                    ]
                    for line in panel.lines
                ]
                parts.append(markdown(head, rows))
        return "\n\n".join(parts) + "\n"

    def picture(self) -> str:
        """Return accuracy after local training as an SVG document, which also has the numbers as text."""
        width = _PANEL * len(self.panels)

        def paint(figure: Any) -> None:
            all_axes = figure.subplots(1, len(self.panels), squeeze=False, sharey=True)[0]
            names = list(dict.fromkeys(line for panel in self.panels for line in panel.lines))
            for axes, panel in zip(all_axes, self.panels, strict=True):
                self._draw(axes, panel, names)
            all_axes[0].set_ylabel("accuracy after local training, %")
            handles = [
                axis for i, name in enumerate(names) for axis in all_axes[0].plot([], [], **_style(i), label=name)
            ]
            figure.legend(handles=handles, loc="outside upper left", ncols=min(len(names), 3 * len(self.panels)))

        svg = painted(width, _HEIGHT, paint, SETTINGS | {"figure.facecolor": "white"})
        text = escape("\n".join(self._says(panel) for panel in self.panels))
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{width}" '
            f'height="{_HEIGHT}" viewBox="0 0 {width} {_HEIGHT}" role="img">\n'
            f"<title>Accuracy over {escape(self.key)}</title>\n<desc>{text}</desc>"
        )
        return re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)

    def _draw(self, axes: Any, panel: Panel, names: Sequence[str]) -> None:
        places = {value: place for place, value in enumerate(panel.values)}
        for line in panel.lines:
            # Lines a little beside each other: where they meet, deviations would hide each other.
            aside = 0.06 * (names.index(line) - (len(names) - 1) / 2)
            found = {value: [100 * a for a in panel.accuracies(line, value, "test")] for value in panel.values}
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
        axes.set_xlabel(self.key)
        axes.set_title(panel.name, fontsize=12, loc="left", color=MUTED)

    @staticmethod
    def _keys(sweep: Mapping[str, Any]) -> list[str]:
        return [*sweep.get("grid", ()), *filter(None, (sweep.get("run-config"), sweep.get("federation-config")))]

    def _says(self, panel: Panel) -> str:
        lines = (
            f"{line}: "
            + ", ".join(
                f"{self._shown(value)} {percent_over_runs(panel.accuracies(line, value, 'test'))}"
                for value in panel.values
            )
            for line in panel.lines
        )
        return f"{panel.name}, {self.key}: {'; '.join(lines)}."

    def _shown(self, value: float | None) -> str:
        return self.without if value is None else plain(value)


def _keys_and_seed(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a run of a sweep, and its seed if it was none of them."""
    config = run.get("about", {}).get("config", {})
    return {**({"seed": config["seed"]} if "seed" in config else {}), **run["keys"]}


def _style(number: int) -> dict[str, Any]:
    colour, dashes = style(number)
    return {"color": colour, "dashes": dashes or (None, None), "marker": "osD^v"[number % 5], "markersize": 5}
