"""How large updates usually are, and which one is absurd beside the others."""

import math
from bisect import insort
from collections.abc import Collection, Mapping
from statistics import median

import numpy as np

from common.errors import FloretError
from common.norms import group_of, root_mean_squares
from common.tensors import NamedArrays

# So many times the usual size is absurd. An honest client whose data are a hundred times the others' makes updates ten
# times as large at most when its steps all go the same way, since sizes count by the square root of the steps.
ABSURD = 20.0
# In what is handed on to other clients no tensor may be so many times the usual size of its group: they refuse a
# message with one of a thousand times their own. Honest running variances are up to 300 times.
_ABSURD_TENSOR = 500.0
_LEAST_OF_TENSORS = 1e-3
# What is usual counts as no less than this part of the global tensors' size. While clients learn, updates of an
# extractor are 0.7 to 2 % of it; when most know their data by heart they are 0.1 %, and who still learns seems absurd.
_LEAST_USUAL = 5e-3
# Rounds that count for what is usual.
_ROUNDS = 5
# Under what the names of clients are in a checkpoint; no group is called so.
_MET = "clients/"
# So many replies are waited for in the first two rounds, when nothing is known of what is usual, before one is judged.
HELD = 16


class UpdateNorms:
    """Sizes of updates by group of tensors: ``extractor``, ``head``, ``prototype``, the name of a network.

    A size is the root mean square over the elements that a client sent: of trained weights that of the difference to
    the global ones, divided by the square root of the local steps; of anything else, such as prototypes or models that
    are passed on to others, that of the tensor itself, since a class that is new has no global one.
    What is usual is the median over the last rounds of the medians over clients. The first round does not count: its
    features and steps are those of a network that nobody had trained, and terms of a loss that need an aggregate begin
    after it. So in the first two rounds it is the median over those that came up to now.

    Nor does what a client sends the first time it takes part, but for differences: with FedDFPA that is features of a
    network that it has not trained, whatever the round. It counts while nothing else is known.
    """

    def __init__(self) -> None:
        self._rounds: dict[str, list[float]] = {}  # after the first round: of its groups, and empty
        self._now: dict[str, list[float]] = {}  # in order of size
        self._aside: dict[str, list[float]] = {}  # likewise, of clients that take part for the first time
        self._met: set[str] = set()  # clients of which an update was accepted

    @property
    def known(self) -> bool:
        """Whether there is a round before that counts, for each group."""
        return bool(self._rounds) and all(self._rounds.values())

    def usual(self, group: str) -> float | None:
        """Return the usual size; None if nothing is known."""
        if self._rounds.get(group):
            return median(self._rounds[group])
        for sizes in (self._now, self._aside):
            if group in sizes:
                return _middle(sizes[group])
        return None

    def check(self, sizes: Mapping[str, float], floors: Mapping[str, float]) -> None:
        """Refuse an update that is absurd beside the usual ones.

        Args:
            sizes: of the update by group.
            floors: root mean squares of the global tensors by group.

        Raises:
            FloretError: says how large it is.
        """
        for group, size in sizes.items():
            usual = self.usual(group)
            if usual is None:
                continue
            usual = max(usual, _LEAST_USUAL * floors.get(group, 0.0), 1e-12)
            if not size <= ABSURD * usual:
                raise FloretError(
                    f"its update of {group} is {size / usual:.3g} times as large as usual; from {ABSURD:g} times on it "
                    "is refused"
                )

    def check_tensors(self, arrays: NamedArrays, weights: Mapping[str, float]) -> None:
        """Refuse an upload of a usual size by group that has most of it in one small tensor.

        Args:
            arrays: what would be handed on to other clients.
            weights: root mean squares of the global tensors by group; where there are none, usual sizes are of weights.

        Raises:
            FloretError: names the first that is too large, and says how large it is.
        """
        for name, array in arrays.items():
            group = group_of(name)
            known = weights.get(group, self.usual(group))
            if known is None:
                continue
            usual = max(known, _LEAST_OF_TENSORS)
            size = root_mean_squares({name: array}, {}).get(group, 0.0)
            if not size <= _ABSURD_TENSOR * usual:
                raise FloretError(
                    f"its {name} has a root mean square of {size:.3g}, {size / usual:.3g} times what is usual for "
                    f"{group}; from {_ABSURD_TENSOR:g} times on it is refused"
                )

    def note(self, client: str, sizes: Mapping[str, float], whole: Collection[str] = ()) -> None:
        """Let an update count for what is usual.

        Args:
            client: who sent it.
            sizes: of the update by group.
            whole: the groups whose sizes are not those of differences.
        """
        for group, size in sizes.items():
            aside = group in whole and client not in self._met
            insort((self._aside if aside else self._now).setdefault(group, []), size)

    def accept(self, client: str) -> None:
        """Note that an update of a client was used."""
        self._met.add(client)

    def end_round(self) -> None:
        """Let this round count for the next ones, if it was not the first."""
        sent = {**self._now, **self._aside}
        if not self._rounds:
            self._rounds = {group: [] for group in sent}
            self._now = {}
        for group, sizes in self._now.items():
            self._rounds.setdefault(group, []).append(_middle(sizes))
            del self._rounds[group][:-_ROUNDS]
        # A group that is not sent any more is not waited for.
        self._rounds = {group: sizes for group, sizes in self._rounds.items() if sizes or group in sent}
        self.forget_round()

    def forget_round(self) -> None:
        """Drop what was noted in this round."""
        self._now, self._aside = {}, {}

    def state_dict(self) -> NamedArrays:
        """Return what is usual and of whom an update was accepted, for a checkpoint."""
        met = np.frombuffer("\n".join(sorted(self._met)).encode(), np.uint8)
        return {group: np.array(sizes) for group, sizes in self._rounds.items()} | {_MET: met}

    def load_state_dict(self, arrays: NamedArrays) -> None:
        """Take back what ``state_dict`` returned."""
        self._met = set(arrays[_MET].tobytes().decode().split("\n")) if _MET in arrays else set()
        self._rounds = {group: sizes.tolist() for group, sizes in arrays.items() if group != _MET}


def clipped(
    arrays: NamedArrays, known: Mapping[str, np.ndarray], sizes: Mapping[str, float], usual: Mapping[str, float]
) -> NamedArrays:
    """Return ``arrays`` with the updates of each group shortened to the usual size where they are larger.

    A tensor without one in ``known`` is shortened itself, since its size is its own.
    """
    shares = {group: usual[group] / size for group, size in sizes.items() if size > usual.get(group, math.inf)}
    result = dict(arrays)
    for name, array in arrays.items():
        share = shares.get(group_of(name))
        if share is not None and array.dtype.kind == "f":
            before = known.get(name, array.dtype.type(0))
            result[name] = before + (array - before) * array.dtype.type(share)
    return result


def _middle(sizes: list[float]) -> float:
    """Return the median of numbers that are in order."""
    half = len(sizes) // 2
    return sizes[half] if len(sizes) % 2 else (sizes[half - 1] + sizes[half]) / 2
