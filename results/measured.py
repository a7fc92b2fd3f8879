"""What a finished run of a table measured, in a few kilobytes, and the file that keeps it.

A file of results is read again before its table is run: a run that it has is not made again. So it can be committed
while a table of many hours is run, and gone on with on another machine.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Self

from common.config import own_keys
from common.durable import read_plain
from common.errors import FloretError
from common.kernels import NATIVE
from common.run_config import merged
from results.conditions import counted, other_data, other_kernels
from results.history import History, Json, Traffic, is_number, whole
from results.runs import Outcome, Runs, RunSpec, check_about, digest_of, npz_name

log = logging.getLogger("flwr")

FORMAT = 2
# A curve of more rounds is thinned to about so many points.
POINTS = 40
# As many of the keys in which runs differ stand in a message.
_NAMED = 3
_ABOUT = ("started", "resumed", "federation-config", "file", "digest")
ENVIRONMENT = ("commit", "machine", "versions")
# Methods whose clients use the global model itself: those that ``serves_global`` of their strategies marks.
GLOBAL_MODEL = frozenset({"criticalfl", "fedavg", "fedpa", "fedprox"})
_MODEL_IN_USE = "model in use"
# Bytes of a file of results or of a sweep.
LARGEST = 2**30
# Half of a sign that UTF-16 has in two parts: alone it is in no text that can be written.
_HALF_SIGN = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Accuracies:
    """Mean test accuracy over clients in [0, 1], before or after local training, read in several ways.

    All are over complete rounds; None where none is complete, and where results of an earlier format did not keep it.

    Attributes:
        window: mean over the rounds that the experiment's measure names.
        last: in the last round.
        best: in the round in which it is highest, which is chosen on the test split.
        weighted: as ``window``, clients weighted by their test samples.
        std: over clients, in the last round.
    """

    window: float | None = None
    last: float | None = None
    best: float | None = None
    weighted: float | None = None
    std: float | None = None

    @classmethod
    def of(cls, history: History, when: str, window: int) -> Self:
        """Read a history, ``when`` being ``before`` or ``after``, with a ``window`` of so many rounds."""
        spreads = [line.accuracy(when) for line in history.complete_rounds(when)]
        if not spreads:
            return cls()
        shown = spreads[-window:]
        return cls(
            window=_mean(spread.mean for spread in shown),
            last=spreads[-1].mean,
            best=max((spread.mean for spread in spreads if spread.mean is not None), default=None),
            weighted=_mean(spread.weighted_mean for spread in shown),
            std=spreads[-1].std,
        )


@dataclass(frozen=True)
class Reading:
    """A way to read a table.

    Attributes:
        title: of it.
        when: ``before`` or ``after`` for every row; ``model in use``: before for a global model, which is what
            clients have then, after for the rest; empty where each row is measured as the file says.
        figure: a field of ``Accuracies``.
    """

    title: str
    when: str
    figure: str


AS_MEASURED = Reading("as measured", "", "window")
READINGS = (
    AS_MEASURED,
    Reading("all rows before training", "before", "window"),
    Reading("all rows after training", "after", "window"),
    Reading("global models before, others after", _MODEL_IN_USE, "window"),
    Reading("last round", "", "last"),
    Reading("best round on test", "", "best"),
    Reading("weighted by samples", "", "weighted"),
)


@dataclass(frozen=True)
class MeasuredRun:
    """A run that is done, without its history, which is large.

    Attributes:
        accuracies: by ``before`` and ``after``.
        curve: round, mean test accuracy before and after local training in [0, 1], for complete rounds.
        clients: their number.
        samples: of all clients in all splits; None if the file does not say, as older ones do not.
        bytes: of all rounds.
        seconds: that it took.
        refused: number of replies.
        about: the conditions it ran under, see ``results.runs.Outcome``; ``config`` without other methods' keys;
            ``file`` and ``digest`` are None, too, if the file of results does not say, as older ones do not.
        ended_after: its last round if that came before the last one planned, because ``privacy.epsilon`` was spent.
    """

    accuracies: Mapping[str, Accuracies]
    curve: tuple[tuple[int, float | None, float | None], ...]
    clients: int
    samples: int | None
    bytes: Traffic
    seconds: float | None
    refused: int
    about: Mapping[str, Any]
    ended_after: int | None = None

    @classmethod
    def of(cls, outcome: Outcome, when: str, window: int) -> Self:
        """Read a finished run.

        Args:
            outcome: the run.
            when: ``before`` or ``after``: the rounds that measured it are those of the curve.
            window: number of rounds that are averaged.
        """
        run = outcome.run
        return cls(
            accuracies={at: Accuracies.of(run.history, at, window) for at in ("before", "after")},
            curve=thin_curve(run.history, when),
            clients=len(run.client_names()),
            samples=run.samples or None,
            bytes=run.figures.bytes,
            seconds=run.figures.seconds,
            refused=run.figures.refused,
            about={
                **{key: outcome.about[key] for key in (*_ABOUT, *ENVIRONMENT)},
                "config": own_keys(outcome.about["config"]),
            },
            ended_after=run.ended_after,
        )

    @property
    def kernels(self) -> str:
        """The kernels that it was made with, one of ``common.kernels.KERNELS``."""
        return str(self.about["machine"].get("kernels", NATIVE))

    @property
    def of_all_before(self) -> bool:
        """Whether accuracy before local training is of all clients, not only of those that trained in its round."""
        config = self.about["config"]
        return config.get("participation", 1.0) == 1 or config["method"] in GLOBAL_MODEL

    def read(self, reading: Reading, when: str) -> float | None:
        """Return the accuracy in [0, 1] of a row that the file measures ``when``."""
        at = reading.when or when
        if at == _MODEL_IN_USE:
            at = "before" if self.about["config"]["method"] in GLOBAL_MODEL else "after"
        value: float | None = getattr(self.accuracies[at], reading.figure)
        return value


class OtherFileError(FloretError):
    """A file is none of results, or of another format, or its runs average another number of rounds."""


class Records:
    """The runs of a table that are done: those of its file of results, of files beside it, and of the runs' folders.

    Attributes:
        seeds: those that the table's own file has.

    Args:
        runs: where runs are made.
        file: of results; need not exist.
        window: number of rounds that are averaged.

    Raises:
        FloretError: the file is something else.
    """

    def __init__(self, runs: Runs, file: Path, window: int) -> None:
        self._runs, self._file, self._window = runs, file, window
        self._known = _shared(file, window, runs)
        self._kept = frozenset(self._known)
        self.read_again()

    def read_again(self) -> None:
        """Read the table's file again: another command may have written it, whose runs must not be lost.

        Raises:
            FloretError: the file is something else.
        """
        own = {self._runs.recorded(run.about): run for _, run in loaded(self._file, self._window)[1]}
        self._own = frozenset(own)
        self._kept |= self._own
        self._known |= own
        self.seeds = frozenset(run.about["config"]["seed"] for run in own.values())

    def need(self, specs: Iterable[RunSpec]) -> None:
        """Check that these are all the runs that the table's file has, so that none is lost when it is written.

        Raises:
            FloretError: there are others.
        """
        wanted = tuple(specs)
        others = self._own - {self._runs.identity(spec) for spec in wanted}
        if others:
            runs = [self._known[name].about for name in sorted(others)]
            keys = min((self._runs.differences(run, spec) for run in runs for spec in wanted), key=len, default=[])
            shown = keys[:_NAMED] + [f"and {len(keys) - _NAMED} more"] * (len(keys) > _NAMED)
            raise FloretError(
                f"{self._file}: has {len(others)} runs with other keys than those of this command"
                + (f" (the nearest has {', '.join(shown)})" if shown else "")
                + "; give it the same keys, or another --results folder"
            )

    def kept(self, spec: RunSpec) -> MeasuredRun | None:
        """Return the run that the table's file of results, or one beside it, had; None if none had it."""
        name = self._runs.identity(spec)
        return self._known[name] if name in self._kept else None

    def get(self, spec: RunSpec, when: str) -> MeasuredRun | None:
        """Return what a run measured, ``when`` being that of its row; None if it is not done.

        Raises:
            FloretError: a file of the run cannot be read.
        """
        name = self._runs.identity(spec)
        if name not in self._known:
            outcome = self._runs.outcome(spec)
            if outcome is None:
                return None
            self._known[name] = MeasuredRun.of(outcome, when, self._window)
        return self._known[name]


def other_files(runs: Iterable[tuple[MeasuredRun, RunSpec]], defaults: Mapping[str, Any]) -> list[str]:
    """Return a text for each of the user's own files that runs read where one with another content is given.

    Of a run that does not tell the content, where an npz file of another name is given.

    Args:
        runs: that are done, and what would be run now.
        defaults: the run config with the default of every key.
    """
    texts = list[str]()
    for run, spec in runs:
        read, given, had = run.about["file"], npz_name(spec.keys), run.about["digest"]
        if had or read:
            has = digest_of(merged(defaults, spec.keys)) if had else None
            texts += other_data(read or "files", had, given or "files", has)
    return counted(texts)


def made_with_others(runs: Iterable[MeasuredRun], kernels: str) -> list[str]:
    """Return a text if some runs were made with other kernels than these, which are empty if they are not known."""
    return counted(text for run in runs for text in other_kernels(run.kernels, kernels))


def ended_early(runs: Iterable[tuple[str, MeasuredRun]]) -> list[str]:
    """Return a sentence that names the runs, given with their names, that ended before their last round; or nothing."""
    found = [
        f"{run.ended_after} of {run.about['config']['rounds']} rounds of {name}"
        for name, run in runs
        if run.ended_after is not None
    ]
    return [f"Ended where privacy.epsilon was spent: {'; '.join(found)}."] if found else []


def thin_curve(history: History, when: str) -> tuple[tuple[int, float | None, float | None], ...]:
    """Return number and accuracies of complete rounds; of a long run every so many, and the last."""
    rounds = history.complete_rounds(when)
    step = -(-len(rounds) // POINTS) or 1
    # Counted from the end, so that the last round is there.
    shown = rounds[::-1][::step][::-1]
    return tuple(
        (line.round, _rounded(line.accuracy("before").mean), _rounded(line.accuracy("after").mean)) for line in shown
    )


def dumped(runs: Sequence[tuple[Json, MeasuredRun | None]], window: int) -> Json:
    """Return runs as JSON: what they share stands once.

    Args:
        runs: what to say of each run besides, and the run; None if it is not done.
        window: number of rounds that were averaged.
    """
    done = [run for _, run in runs if run is not None]
    configs = [run.about["config"] for run in done]
    same = (
        {key: value for key, value in configs[0].items() if all(_has(c, key, value) for c in configs)} if done else {}
    )
    environments: list[Json] = []
    entries = []
    for about, run in runs:
        entry = dict(about)
        if run is not None:
            environment = {key: run.about[key] for key in ENVIRONMENT}
            if environment not in environments:
                environments.append(environment)
            entry |= {
                "accuracy": {when: asdict(accuracies) for when, accuracies in run.accuracies.items()},
                "curve": run.curve,
                "clients": run.clients,
                "samples": run.samples,
                "bytes": run.bytes.to_json(),
                "seconds": run.seconds,
                "refused": run.refused,
                **({} if run.ended_after is None else {"ended_after": run.ended_after}),
                "config": {key: value for key, value in run.about["config"].items() if key not in same},
                "environment": environments.index(environment),
                **{key: run.about[key] for key in _ABOUT if key != "digest" or run.about[key]},
            }
        entries.append(entry)
    return {"format": FORMAT, "window": window, "config": same, "environments": environments, "runs": entries}


def loaded(
    path: Path, window: int | None = None, *, advice: str = "move it, or name another folder"
) -> tuple[Json, list[tuple[Json, MeasuredRun]]]:
    """Read a file of results: all of it, and its runs that are done with what it says of them besides.

    There is nothing to read, ({}, []), if there is no such file.

    Args:
        path: of the file.
        window: number of rounds that its runs average; None for any.
        advice: what to do about a file that is something else.

    Raises:
        OtherFileError: it is something else, which is left as it is.
        FloretError: it cannot be read.
    """
    try:
        text = read_plain(path, LARGEST).decode()
        content = json.loads(text)
        if _HALF_SIGN.search(text):
            json.dumps(content, ensure_ascii=False).encode()  # raises a ValueError if the other half is not there
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            of_sweep = isinstance(content, dict) and "grid" in content
            what = "is of a sweep" if of_sweep else "is not of this version's format"
            raise OtherFileError(f"{path}: {what}; {advice}")
        if type(content["window"]) is not int or content["window"] < 1:
            raise TypeError("its window is no number of rounds")
        if window is not None and content["window"] != window:
            raise OtherFileError(f"{path}: averages the last {content['window']} rounds, not {window}; {advice}")
        return content, [(entry, _loaded(entry, content)) for entry in content["runs"] if "accuracy" in entry]
    except FileNotFoundError:
        return {}, []
    except NotADirectoryError as error:
        raise FloretError(f"{path}: {path.parent} is not a folder; name one") from error
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        OverflowError,
        RecursionError,
    ) as error:
        said = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise FloretError(f"{path}: is no file of results ({said}); {advice}") from error


def _shared(file: Path, window: int, runs: Runs) -> dict[str, MeasuredRun]:
    """Return the runs of other files of results in the same folder, by their ``identity``.

    Files of something else, and those that average another number of rounds, are passed over; of one that cannot be
    read a line says so.
    """
    found: dict[str, MeasuredRun] = {}
    for other in sorted(file.parent.glob("*.json")):
        if other.name != file.name:
            try:
                found |= {runs.recorded(run.about): run for _, run in loaded(other, window)[1]}
            except OtherFileError:
                continue
            except FloretError as error:
                log.warning("%s: %s", file.name, error)
    return found


def _loaded(entry: Json, content: Json) -> MeasuredRun:
    told = {"file": None, "digest": None, **entry}
    about = {key: told[key] for key in _ABOUT} | content["environments"][entry["environment"]]
    config = {**content["config"], **entry["config"]}
    seeds, places = (config["seed"], entry["seed"]), (entry["row"], entry["column"])
    if not all(isinstance(v, int) for v in seeds) or not all(isinstance(v, str) for v in places):
        raise TypeError("a run has no seed, row or column")
    accuracies = {when: Accuracies(**entry["accuracy"][when]) for when in ("before", "after")}
    values = [value for one in accuracies.values() for value in asdict(one).values()]
    values += [number for _, *point in entry["curve"] for number in point]
    if not all(value is None or (is_number(value) and 0 <= value <= 1) for value in values):
        raise TypeError("an accuracy, or one of its curve, is no number from 0 to 1")
    if not is_number(entry["seconds"]):
        raise TypeError("its seconds are no number")
    check_about(about | {"config": config})
    return MeasuredRun(
        accuracies=accuracies,
        curve=tuple((_count(number), before, after) for number, before, after in entry["curve"]),
        clients=_count(entry["clients"]),
        samples=None if entry.get("samples") is None else _count(entry["samples"]),
        bytes=Traffic.from_json(entry["bytes"]),
        seconds=entry["seconds"],
        refused=_count(entry["refused"]),
        about=about | {"config": config},
        ended_after=None if entry.get("ended_after") is None else whole(entry["ended_after"]),
    )


def _count(value: Any) -> int:
    number = whole(value)
    if number < 0:
        raise ValueError(f"{number} is below 0")
    return number


def _has(config: Mapping[str, Any], key: str, value: Any) -> bool:
    # 1 is not 1.0 here: the file is to say what it was given.
    return key in config and config[key] == value and type(config[key]) is type(value)


def _mean(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return mean(measured) if measured else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
