"""How large updates usually are, and which one is absurd beside the others."""

import math
from bisect import insort
from collections.abc import Collection, Iterable, Mapping
from statistics import median

import numpy as np

from common.errors import FloretError
from common.norms import group_of, root_mean_squares
from common.tensors import NamedArrays

# So many times the usual size is absurd. An honest client whose data are a hundred times the others' makes updates ten
# times as large at most when its steps all go the same way, since sizes count by the square root of the steps.
ABSURD = 20.0
# So many times the usual size is what more training samples than the median explain, where they count for more, too.
EXPLAINED = 5.0
# In what is handed on to other clients no tensor may be so many times the usual size of its group: they refuse a
# message with one of a thousand times their own. Honest running variances are up to 300 times.
_ABSURD_TENSOR = 500.0
# Nor in what goes into a mean, in which there are others.
_ABSURD_IN_MEAN = 800.0
_LEAST_OF_TENSORS = 1e-3
# What is usual counts as no less than this part of the global tensors' size. While clients learn, updates of an
# extractor are 0.7 to 2 % of it; when most know their data by heart they are 0.1 %, and who still learns seems absurd.
_LEAST_USUAL = 5e-3
# Rounds that count for what is usual.
_ROUNDS = 5
# From so many clients on the sizes of the rounds before say what is usual: one alone would refuse all others for good.
_LEAST_CLIENTS = 2
# In a checkpoint: whose updates were accepted, and the groups. Neither is the name of a group.
_MET, _GROUPS = "clients/", "groups/"
# So many replies are waited for in the first two rounds, when nothing is known of what is usual, before one is judged.
HELD = 16


class UpdateNorms:
    """Sizes of updates by group of tensors: ``extractor``, ``head``, ``prototype``, the name of a network.

    A size is the root mean square over the elements that a client sent: of trained weights that of the difference to
    the global ones, divided by the square root of the local steps; of anything else, such as prototypes or models that
    are passed on to others, that of the tensor itself, since a class that is new has no global one.
    What is usual is the median over clients of the median of each one's sizes in the last rounds, if these are of two
    clients at least: with ``participation`` below 1 a round may have one client alone. The first round does not count:
    its features and steps are those of a network that nobody had trained, and terms of a loss that need an aggregate
    begin after it. Until it is known what is usual, it is the median over those that came up to now.

    Nor does what a client sends the first time it takes part, but for differences: with FedDFPA that is features of a
    network that it has not trained, whatever the round. It counts while nothing else is known.

    What was refused does not count, unless these were most clients of the round, and more than half as many as say what
    is usual: then more likely that was wrong.
    """

    def __init__(self) -> None:
        self._rounds: list[dict[str, dict[str, float]]] = []  # after the first: by group and client
        self._groups: set[str] | None = None  # what is expected; None before a round has ended
        self._usual: dict[str, float] = {}  # of the rounds before
        self._now: dict[str, dict[str, float]] = {}
        self._aside: dict[str, dict[str, float]] = {}  # likewise, of clients that take part for the first time
        self._in_order: dict[tuple[str, bool], list[float]] = {}  # both, by group and whether they are set aside
        self._refused: set[str] = set()  # clients of this round
        self._met: set[str] = set()  # clients of which an update was accepted

    @property
    def known(self) -> bool:
        """Whether the rounds before say what is usual, for each group."""
        return self._groups is not None and self._groups <= self._usual.keys()

    def usual(self, group: str) -> float | None:
        """Return the usual size; None if nothing is known."""
        if group in self._usual:
            return self._usual[group]
        counted, aside = (self._in_order.get((group, which), []) for which in (False, True))
        now = self._now.get(group, {})
        earlier = [size for client, size in self._before(group).items() if client not in now]
        counted = sorted([*counted, *earlier]) if earlier else counted
        if len(counted) >= _LEAST_CLIENTS:
            return _middle(counted)
        everything = sorted([*counted, *aside]) if counted else aside
        if not everything:
            return None
        # One client alone may be honest and larger than features of networks that nobody has trained, or hostile and
        # of any size.
        middle = _middle(everything)
        alone = max(counted, default=middle)
        return max(middle, min(alone, ABSURD * middle) if len(everything) > _LEAST_CLIENTS else alone)

    def check(self, sizes: Mapping[str, float], floors: Mapping[str, float]) -> None:
        """Refuse an update that is absurd beside the usual ones.

        Args:
            sizes: of the update by group.
            floors: root mean squares of the global tensors by group.

        Raises:
            FloretError: says how large it is.
        """
        for group, size in sizes.items():
            most = self.most(group, floors.get(group, 0.0))
            if not size <= most:
                raise FloretError(
                    f"its update of {group} is {ABSURD * size / most:.3g} times as large as usual; from {ABSURD:g} "
                    "times on it is refused"
                )

    def most(self, group: str, floor: float, times: float = ABSURD) -> float:
        """Return so many times the usual size; infinite if nothing is known.

        Args:
            group: of tensors.
            floor: their root mean square.
            times: by default those from which on a size is absurd.
        """
        usual = self.usual(group)
        return math.inf if usual is None else times * max(usual, _LEAST_USUAL * floor, 1e-12)

    def check_tensors(self, arrays: NamedArrays, weights: Mapping[str, float], *, in_mean: bool = False) -> None:
        """Refuse an upload of a usual size by group that has most of it in one small tensor.

        Args:
            arrays: what would be handed on to other clients.
            in_mean: they are handed on in a mean.
            weights: root mean squares of the global tensors by group; where there are none, usual sizes are of weights.

        Raises:
            FloretError: names the first that is too large, and says how large it is.
        """
        most = _ABSURD_IN_MEAN if in_mean else _ABSURD_TENSOR
        groups = {group_of(name) for name in arrays}
        of_groups = {group: weights[group] if group in weights else self.usual(group) for group in groups}
        for name, array in arrays.items():
            group = group_of(name)
            known = of_groups[group]
            if known is None:
                continue
            usual = max(known, _LEAST_OF_TENSORS)
            size = root_mean_squares({name: array}, {}).get(group, 0.0)
            if not size <= most * usual:
                raise FloretError(
                    f"its {name} has a root mean square of {size:.3g}, {size / usual:.3g} times what is usual for "
                    f"{group}; from {most:g} times on it is refused"
                )

    def note(self, client: str, sizes: Mapping[str, float], whole: Collection[str] = ()) -> None:
        """Let an update count for what is usual, unless it is refused.

        Args:
            client: who sent it.
            sizes: of the update by group.
            whole: the groups whose sizes are not those of differences.
        """
        for group, size in sizes.items():
            aside = group in whole and client not in self._met
            (self._aside if aside else self._now).setdefault(group, {})[client] = size
            insort(self._in_order.setdefault((group, aside), []), size)

    def accept(self, client: str) -> None:
        """Note that an update of a client was used."""
        self._met.add(client)

    def refuse(self, client: str) -> None:
        """Note that the update of a client, which was noted, is not used."""
        self._refused.add(client)

    def end_round(self, *, changed: bool = True) -> None:
        """Let this round count for the next ones, if it was not the first.

        Args:
            changed: whether the round changed the model; if not, it counts only if most of it was refused.
        """
        sent = {*self._now, *self._aside}
        clients = {client for sizes in (self._now, self._aside) for group in sizes.values() for client in group}
        before = {client for groups in self._rounds for sizes in groups.values() for client in sizes}
        doubtful = 2 * len(self._refused) > max(len(clients), len(before))
        if self._groups is None:
            if changed:
                self._groups = sent
        elif changed or doubtful:
            if doubtful:
                for group, aside in self._aside.items():
                    self._now.setdefault(group, {}).update({c: aside[c] for c in aside.keys() & self._refused})
            counted = {
                group: {client: size for client, size in sizes.items() if doubtful or client not in self._refused}
                for group, sizes in self._now.items()
            }
            counted = {group: sizes for group, sizes in counted.items() if sizes}
            if counted:
                self._rounds = [*self._rounds, counted][-_ROUNDS:]
            # A group that is not sent any more is not waited for.
            self._groups = sent.union(*self._rounds)
            self._count()
        self.forget_round()

    def forget_round(self) -> None:
        """Drop what was noted in this round."""
        self._now, self._aside, self._in_order, self._refused = {}, {}, {}, set()

    def state_dict(self) -> NamedArrays:
        """Return what is usual and of whom an update was accepted, for a checkpoint."""
        arrays = {_MET: _joined(sorted(self._met))}
        if self._groups is not None:
            arrays[_GROUPS] = _joined(sorted(self._groups))
        for i, groups in enumerate(self._rounds):
            for group, sizes in groups.items():
                arrays[f"{i}/{group}"] = np.array([*sizes.values()])
                arrays[f"{i}/{_MET}{group}"] = _joined(sizes)
        return arrays

    def load_state_dict(self, arrays: NamedArrays) -> None:
        """Take back what ``state_dict`` returned."""
        self._met = {*_split(arrays[_MET])} if _MET in arrays else set()
        self._groups = {*_split(arrays[_GROUPS])} if _GROUPS in arrays else None
        self._rounds = []
        for i in range(_ROUNDS):
            prefix = f"{i}/{_MET}"
            groups = [name.removeprefix(prefix) for name in arrays if name.startswith(prefix)]
            if groups:
                self._rounds.append(
                    {
                        group: dict(zip(_split(arrays[prefix + group]), arrays[f"{i}/{group}"].tolist(), strict=True))
                        for group in groups
                    }
                )
        self._count()

    def _count(self) -> None:
        """Find what is usual of the rounds before."""
        found = {group: self._before(group) for group in set[str]().union(*self._rounds)}
        self._usual = {group: median(sizes.values()) for group, sizes in found.items() if len(sizes) >= _LEAST_CLIENTS}

    def _before(self, group: str) -> dict[str, float]:
        """Return the median of the last rounds' sizes of each client."""
        sizes: dict[str, list[float]] = {}
        for groups in self._rounds:
            for client, size in groups.get(group, {}).items():
                sizes.setdefault(client, []).append(size)
        return {client: median(one) for client, one in sizes.items()}


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


def _joined(names: Iterable[str]) -> np.ndarray:
    return np.frombuffer("\n".join(names).encode(), np.uint8)


def _split(names: np.ndarray) -> list[str]:
    return names.tobytes().decode().split("\n") if names.size else []
