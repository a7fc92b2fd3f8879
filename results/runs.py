"""A run of a sweep or a table and its folder: what is done is not made again, what was killed goes on."""

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import RunConfig, own_keys, read_keys
from common.durable import locked, open_file, write_whole
from common.errors import ConfigError, FloretError
from common.kernels import KERNELS, NATIVE
from common.resources import clients_of_simulation
from common.run_config import default_config, federation_text, merged, parse_federation_configs
from results.conditions import (
    commit,
    each_in_turn,
    in_turn,
    kernels_of,
    machine,
    other_code,
    other_data,
    other_kernels,
    parts_of,
)
from results.engines import POLL, Engine, reason_of
from results.run import Run, read_run

# Keys that change where a run finds and leaves its files, not what it computes.
PLACES = ("output-dir", "data-dir", "download", "resume", "tensorboard", "tracker")
# Those of them that the command itself sets in each run, and what says them.
SET_BY_COMMAND = {
    "output-dir": "--output says where runs go",
    "resume": "a run that was killed goes on when the command is repeated",
}
# Data of the user's own: another place most likely has others.
_OWN_DATA = ("npz", "npz-clients", "image-folder")
_FEDERATION = "--federation-config"
# What of it only says how clients share a machine.
_SHARED = ("client-resources-num-gpus", "init-args-num-cpus", "init-args-num-gpus")
# Keys that mean nothing in a simulation.
_REAL_NODES = ("return-timeout",)
# Seconds that a run waits for its clients unless its keys say otherwise: a client whose answer comes too late is left
# out of its round, and what a table has must not depend on how fast the machine was.
_PATIENT = 21_600.0
# On disk a run is a cell of its table: folders of runs that are done keep their names.
_FOLDER, _ABOUT, _STARTS = "cells", "cell.json", "starts.json"
_LOG = "log.txt"

Check = Callable[[Mapping[str, Any], int | None], None]


@dataclass(frozen=True)
class RunSpec:
    """A run to make: the ``keys`` of its run config that differ from the defaults, and its ``--federation-config``."""

    keys: Mapping[str, Any]
    federation: str


def without_places(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a run config that say what is computed, and not where files are."""
    return {key: value for key, value in values.items() if key not in PLACES}


def npz_name(config: Mapping[str, Any]) -> str | None:
    """Return the name of the npz file that a run with these keys reads; None if it reads none."""
    return Path(config["data-dir"]).name if config["dataset"] == "npz" else None


@dataclass(frozen=True)
class Outcome:
    """A finished run and the conditions it ran under.

    ``about`` has the ``run`` directory's name, ``config``, ``federation-config``, ``commit``, ``machine``, ``started``,
    ``resumed`` (how often), ``versions``, ``file``: the name of the npz file that it read, None if it read none, and
    ``digest``, see ``Run``. Of a run that went on with another commit, on another machine or with other versions, each
    of them is told in turn.
    """

    run: Run
    about: Mapping[str, Any]


class Runs:
    """The runs of an app and their folders.

    Args:
        app: the app's folder.
        output: runs are in folders below its ``cells/``, named after what is computed: two tables that need the same
            run share it, wherever its data are and whatever made it.
        check: raises FloretError if a run with these keys cannot start; it gets the number of clients of a simulation
            on this machine, or None.
        engine: makes the runs.
        exact: a run that was made with other kernels, or read its data elsewhere, is not done; it is made again.

    Attributes:
        defaults: every key of a run config.
    """

    def __init__(self, app: Path, output: Path, check: Check, engine: Engine, *, exact: bool = False) -> None:
        self._app, self._check, self.engine, self._exact = app, check, engine, exact
        self.defaults = default_config(app)
        self._folder = output.resolve() / _FOLDER
        self._commit = commit(app)
        # Of the folders of runs, by the name that their keys give as they are.
        self._names = dict[str, str]()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other programs from starting runs in the same folder.

        Raises:
            FloretError: one is doing so.
        """
        with ExitStack() as held:
            try:
                held.enter_context(locked(self._folder, wait=False))
            except BlockingIOError as error:
                raise FloretError(f"{self._folder}: another floret is starting runs there") from error
            yield

    def config(self, spec: RunSpec) -> dict[str, Any]:
        """Return every key of the run's config.

        Raises:
            ConfigError: a key is not known.
        """
        return merged(self.defaults, spec.keys)

    def folder(self, spec: RunSpec) -> Path:
        """Return the folder of a run.

        Its name depends on all keys but those of other methods, of places and of real nodes, and on the clients. A
        value such as 1 gives another name than 1.0, but not another folder if there is one of either.
        """
        config = self.config(spec)
        name = self._name(config, spec.federation)
        if name not in self._names:
            whole = {key: int(v) for key, v in spec.keys.items() if isinstance(v, float) and v.is_integer()}
            alike = [config, self._typed(config), config | whole]
            names = [self._name(each, spec.federation) for each in alike]
            self._names[name] = next((one for one in names if (self._folder / one).is_dir()), name)
        return self._folder / self._names[name]

    def identity(self, spec: RunSpec) -> str:
        """Return what is the same for all runs that compute the same."""
        return self._name(self._typed(self.config(spec)), spec.federation)

    def recorded(self, about: Mapping[str, Any]) -> str:
        """Return the ``identity`` of a run whose ``about`` was kept; keys that it lacks had their defaults."""
        return self._name(self._typed({**self.defaults, **about["config"]}), about["federation-config"])

    def _typed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config in which whole numbers are floats where the defaults are, as a run reads them."""
        return {
            key: float(value) if type(value) is int and isinstance(self.defaults.get(key), float) else value
            for key, value in config.items()
        }

    def differences(self, about: Mapping[str, Any], spec: RunSpec) -> list[str]:
        """Return a text for each key, and the federation config, in which a run whose ``about`` was kept is another."""
        then = _computed({**self.defaults, **about["config"]}, about["federation-config"])
        now = _computed(self.config(spec), spec.federation)
        return [
            f"{key}={json.dumps(then.get(key))} (here {json.dumps(now.get(key))})"
            for key in sorted(then.keys() | now.keys())
            if then.get(key) != now.get(key)
        ]

    @staticmethod
    def _name(config: Mapping[str, Any], federation: str) -> str:
        computed = _computed(config, federation)
        clients = computed.pop(_FEDERATION)
        text = json.dumps([computed, clients], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def done(self, spec: RunSpec) -> bool:
        """Return whether the run came to its end."""
        folder = self.folder(spec)
        run = _finished(folder)
        return run is not None and _is_told(folder, run) and not (self._exact and self._otherwise(run, spec))

    def otherwise(self, spec: RunSpec) -> list[str]:
        """Return in what a run that is done was made otherwise than it would be now, a text each."""
        folder = self.folder(spec)
        run = _finished(folder)
        if not run or not self.done(spec):
            return []
        try:
            then = str(json.loads((folder / _ABOUT).read_text(encoding="utf-8"))["commit"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            then = ""  # said by who reads all of it
        return [*self._otherwise(run, spec), *other_code(then, self._commit)]

    def _otherwise(self, run: Path, spec: RunSpec) -> list[str]:
        try:
            config = json.loads((run / "config.json").read_text(encoding="utf-8"))
            kernels, read = kernels_of(config).get("kernels", NATIVE), _path(config["config"].get("data-dir", ""))
            had = config.get("digest")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []  # said by who reads all of it
        found, values = other_kernels(kernels, self.engine.kernels), self.config(spec)
        given = _path(values["data-dir"])
        has = digest_of(values) if had else None
        if has or self._exact or values["dataset"] in _OWN_DATA:
            found += other_data(read or "no data-dir", had, given or "no data-dir", has)
        return found

    def outcome(self, spec: RunSpec) -> Outcome | None:
        """Read what the run measured; None if it has not come to its end.

        Raises:
            FloretError: a file of the run cannot be read.
        """
        folder = self.folder(spec)
        if not self.done(spec):
            return None
        try:
            about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
            run = read_run(folder / about["run"])
            if run.cut_short:
                raise FloretError(f"{about['run']}/history.jsonl: {run.fewer_rounds}")
            about |= {"file": npz_name(run.config), "digest": run.digest}
            check_about(about)
            return Outcome(run, about)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, FloretError) as error:
            raise FloretError(f"{folder}: cannot be read ({error}); remove it to make the run again") from error

    def check(self, spec: RunSpec) -> str:
        """Return why a run cannot start, or an empty text."""
        try:
            self._check(self.config(spec), self.engine.clients(spec.federation))
        except FloretError as error:
            return str(error)
        return ""

    def run(self, spec: RunSpec, watch: Callable[[int], None], *, keep_models: bool = False) -> str:
        """Make a run, to its end; return why it failed, or an empty text.

        A run that was killed goes on after its last checkpoint; one that is still going, because only the program that
        started it was killed, is waited for. When this program is interrupted or ``watch`` raises, the run is stopped.

        Args:
            spec: what to run; a config that the app accepts.
            watch: called with the number of finished rounds, twice a second.
            keep_models: leave the personal models and checkpoints in the run directory.
        """
        wrong = self.check(spec)
        if wrong:
            return wrong
        folder = self.folder(spec)
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / _LOG
        for lock in folder.glob("*/.lock"):
            with suppress(FileNotFoundError):  # one that nobody joined takes its directory away
                _wait_for(lock.parent, watch)  # it may be so new that it has no config.json yet
        before, fresh = _last_run(folder), True
        if before and _ended(before):
            fresh = bool(read_run(before).nothing_used)
        elif before:
            otherwise = self._otherwise(before, spec)
            if _resumable(before) and otherwise and not self._exact:
                # To go on would mix both, to begin anew would lose what there is.
                return f"{before} is half done; its rounds {' and '.join(otherwise)}: give the same, or remove it"
            if _resumable(before) and not otherwise:
                resumed = _resumed(before)
                self._start(spec, folder, {"resume": str(before)}, watch)
                if not _ended(before) and _resumed(before) > resumed:
                    return reason_of(log)  # it did go on, and was ended again; the next command goes on from there
            fresh = not _ended(before)
        earlier = _finished(folder)
        if fresh or not self._wanted(folder, spec):
            self._start(spec, folder, {}, watch)
            if _finished(folder) == earlier:
                return reason_of(log)
        run = self._wanted(folder, spec)
        if not run:
            return reason_of(log)
        if nothing := read_run(run).nothing_used:
            return f"{nothing} (see {log})"
        if not keep_models:
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
        _write(folder / _ABOUT, self._about(spec, run))
        return ""

    def _wanted(self, folder: Path, spec: RunSpec) -> Path | None:
        """Return the newest finished run of a folder; None without one, or if it does not count (``exact``)."""
        run = _finished(folder)
        return None if run and self._exact and self._otherwise(run, spec) else run

    def _start(self, spec: RunSpec, folder: Path, more: Mapping[str, str], watch: Callable[[int], None]) -> None:
        earlier = _starts(folder) if "resume" in more else []

        def begins(code: str) -> None:
            _write(folder / _STARTS, [*earlier, self._conditions(spec, code)])

        keys = {"round-timeout": _PATIENT, **spec.keys, "output-dir": str(folder), **more}
        values = merged(self.defaults, keys)
        self.engine.run(keys, values, spec.federation, folder / _LOG, lambda: watch(_rounds(folder)), begins)

    def _about(self, spec: RunSpec, run: Path) -> dict[str, Any]:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        starts = _starts(run.parent) or [self._conditions(spec, self._commit)]
        return {
            "run": run.name,
            "config": without_places(self.config(spec)),
            "federation-config": spec.federation,
            "commit": in_turn([start["commit"] for start in starts]),
            "machine": each_in_turn([start["machine"] for start in starts]) | kernels_of(config),
            "started": config.get("started"),
            "resumed": len(config.get("resumed", [])),
            "versions": each_in_turn([part["versions"] for part in parts_of(config) if "versions" in part]),
        }

    def _conditions(self, spec: RunSpec, code: str) -> dict[str, Any]:
        """Return what the run's own ``config.json`` does not say of a start."""
        return {"commit": code, "machine": self._machine(spec.federation)}

    def _machine(self, federation: str) -> dict[str, Any]:
        """Return this machine, with the CPUs that a run has at least, and without GPUs if its clients got none."""
        found = machine()
        gpus = found["gpus"] if self.engine.gpus(federation) else []
        return found | {"cpus": max(1, found["cpus"] // self.engine.at_once), "gpus": gpus}


def clients_alone(federation: str) -> str:
    """Return a federation config without what only says how its clients share a machine, in an order of its own."""
    keys = parse_federation_configs(["", federation])  # a text alone may be the path of a file
    first = {key: keys[key] for key in ("num-supernodes",) if key in keys}
    return federation_text(first | {key: keys[key] for key in sorted(keys.keys() - first.keys() - {*_SHARED})})


def _computed(config: Mapping[str, Any], federation: str) -> dict[str, Any]:
    """Return the keys of a config, and the part of a federation config, that change what a run computes.

    On how many processes and GPUs the same numbers come out, as on another machine, but for their last digits.
    """
    keys = {key: value for key, value in without_places(own_keys(config)).items() if key not in _REAL_NODES}
    return keys | {_FEDERATION: clients_alone(federation)}


def _path(place: str) -> str:
    """Return the path that a ``data-dir`` names, an empty text if it names none."""
    return str(Path(place).expanduser().resolve()) if place else ""


def check_about(about: Mapping[str, Any]) -> None:
    """Check the types of what a run of a file says of itself, as ``Outcome.about`` has it.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: a part is missing, or is not like that of a run.
    """
    for key in ("file", "digest"):
        if not isinstance(about[key], str | None):
            raise TypeError(f"the {key} of a run is no text")
    if not isinstance(about["commit"], str) or not isinstance(about["versions"], dict):
        raise TypeError("a run has no commit or versions")
    kinds, told = {"cpus": int, "cpu": str, "gpus": list, "kernels": str}, about["machine"]
    # All parts of a machine may be missing.
    if not isinstance(told, dict) or not all(isinstance(told.get(k, kind()), kind) for k, kind in kinds.items()):
        raise TypeError("a machine is not like one of a run")
    if told.get("kernels", NATIVE) not in KERNELS:
        raise ValueError(f"kernels {told['kernels']!r} must be {' or '.join(KERNELS)}")
    config = about["config"]
    if not isinstance(config, dict) or not all(isinstance(config.get(key), str) for key in ("method", "dataset")):
        raise TypeError("the config of a run has no method or no dataset")
    try:
        clients_of_simulation(["", about["federation-config"]])  # alone it may be the path of a file
    except ConfigError as error:
        raise ValueError(str(error)) from error


def digest_of(values: Mapping[str, Any]) -> str | None:
    """Return ``data.digest`` of a run config; None, too, if it cannot be told."""
    import data

    try:
        return data.digest(read_keys(RunConfig, values))
    except FloretError:
        return None  # said by the run


def _write(file: Path, content: Any) -> None:
    write_whole(file, (json.dumps(content, indent=1) + "\n").encode())


def _starts(folder: Path) -> list[dict[str, Any]]:
    """Return the conditions of each start of the run, in order; none if an earlier version began it.

    Raises:
        FloretError: the file cannot be read.
    """
    file = folder / _STARTS
    try:
        starts = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        return [{"commit": str(start["commit"]), "machine": dict(start["machine"])} for start in starts]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FloretError(f"{file}: cannot be read ({error}); remove {folder} to make the run again") from error


def _last_run(folder: Path) -> Path | None:
    runs = sorted(path.parent for path in folder.glob("*/config.json"))
    return runs[-1] if runs else None


def _finished(folder: Path) -> Path | None:
    runs = sorted(path.parent for path in folder.glob("*/summary.json"))
    return runs[-1] if runs else None


def _ended(run: Path) -> bool:
    """Return whether a run came to its end."""
    return (run / "summary.json").is_file()


def _is_told(folder: Path, run: Path) -> bool:
    """Return whether what stands beside the runs of a folder is about ``run``, or cannot be read."""
    try:
        return bool(json.loads((folder / _ABOUT).read_text(encoding="utf-8"))["run"] == run.name)
    except FileNotFoundError:
        return False  # its program was killed before it wrote it
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True  # said by who reads all of it


def _resumable(run: Path) -> bool:
    return any((run / "checkpoints").glob("round-*.json"))


def _resumed(run: Path) -> int:
    """Return how often a run was resumed."""
    try:
        return len(json.loads((run / "config.json").read_text(encoding="utf-8")).get("resumed", []))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return 0  # one that cannot be read cannot be resumed


def _rounds(folder: Path) -> int:
    """Return how many rounds the newest run in a folder has finished."""
    run = _last_run(folder)
    try:
        return (run / "history.jsonl").read_bytes().count(b"\n") if run else 0
    except FileNotFoundError:
        return 0


def _wait_for(run: Path, watch: Callable[[int], None]) -> None:
    """Return when no process is writing a run directory."""
    with open_file(run / ".lock", "ab", private=False) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                watch(_rounds(run.parent))
                time.sleep(POLL)
