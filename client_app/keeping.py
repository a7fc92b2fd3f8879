"""Which versions of a client's personal model stay, whatever messages come: the rule that nothing personal is lost.

Versions form *lines*: what one run and the runs that resumed it made of the client. A message whose server goes back
behind what it had called its checkpoint, or to a round that is long over, begins a line of its own, so that it takes
nothing of the line that was there.

Of the line that goes on stays what the next messages may need (``ClientState.commit`` says what). Of every other line
stays its last intact version, of

* the ``Quota.runs`` lines that were there first,
* the line with the most rounds,
* and the line that was used last.

Of the last three stays also what their server could still go back to when they ended: it may yet be resumed.

Lines that come later never displace the first ones, however many they are and however often they are trained: of a
new line nothing stays but in the two places after them. Of a line stay also its ``Quota.milestones``: without them,
more rounds of the same run could replace all that it ever was. They are powers of two, so that a version of at
least half of the rounds before stays.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from common.errors import ConfigError

# No version may take more than this part of ``Quota.bytes``: so many fit in together, whatever stays beside them.
SHARE = 10
_GB = 10**9


@dataclass(frozen=True)
class Version:
    """The outcome of one round.

    Attributes:
        number: its place among a client's versions, from 1.
        lineage, attempt, round: of the server; ``attempt`` counts how often the run had been resumed.
        first: the first round of this lineage that the client took part in.
        about: how to build the model again.
        checkpointed: the last round that the server said it could go back to.
        line: the number of the first version of its line.
        trained: how many rounds in turn made it, of this line.
        beside: the numbers of the versions that later messages of its line may need, too; None: all that are there, as
            in a state from before this was written.
        size: bytes that it takes.
        start: the name of the start of the server; empty in a state from before starts had names.
    """

    number: int
    lineage: str
    attempt: int
    round: int
    first: int
    about: dict[str, Any] = field(default_factory=dict)
    checkpointed: int = 0
    line: int = 0
    trained: int = 1
    beside: tuple[int, ...] | None = None
    size: int = 0
    start: str = ""


@dataclass(frozen=True)
class Quota:
    """How much of a client's past a node keeps, in each federation and method; its own config says so, no server.

    Attributes:
        runs: the lines of versions that are kept because they were there first.
        bytes: what all versions together take at most. Beyond it, lines go as if ``runs`` were less, then milestones,
            but never the first line, the one with the most rounds, the last one, or what the run itself needs.
        milestones: after how many rounds of a line the version is kept besides.
    """

    runs: int = 8
    bytes: int = 20 * _GB
    milestones: tuple[int, ...] = tuple(1 << power for power in range(13))

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> Self:
        """Return that of a node config: ``keep-runs``, ``keep-gb``.

        Raises:
            ConfigError: one of them is not a whole number from 1.
        """
        values = {"keep-runs": cls.runs, "keep-gb": cls.bytes // _GB}
        for key in values:
            value = node.get(key, values[key])
            if type(value) is not int or value < 1:
                raise ConfigError(f"{key} = {value!r}: must be a whole number of at least 1")
            values[key] = value
        return cls(runs=values["keep-runs"], bytes=values["keep-gb"] * _GB)


def kept(
    versions: Sequence[Version],
    new: Version,
    needed: Iterable[Version],
    quota: Quota,
    intact: Callable[[Version], bool],
) -> set[int]:
    """Return the numbers of the versions that stay.

    Args:
        versions: all that are there, newest first, ``new`` among them.
        new: the version of the line that goes on.
        needed: what that line needs besides.
        quota: the node's.
        intact: whether the tensors of a version can be read; asked only where a line has more than one to choose from.
    """
    lines: dict[int, list[Version]] = {}
    for version in versions:
        lines.setdefault(version.line, []).append(version)
    stones = {line: _milestones(members, quota) for line, members in lines.items()}
    last = {line: _last(members, stones[line], intact) for line, members in lines.items() if line != new.line}
    size = {version.number: version.size for version in versions}
    stay = {new.number, *(version.number for version in needed)}
    if last:
        most = max(last, key=lambda line: (max(version.trained for version in lines[line]), -line))
        newest = max(last, key=lambda line: lines[line][0].number)
        safe = [min(last), most, newest]
        stay |= {last[line] for line in safe}
        stay |= {number for line in safe for number in _resumable(lines[line])}
        others = [line for line in sorted(last)[: quota.runs] if line not in safe]
    else:
        safe, others = [], []
    room = quota.bytes - sum(size[number] for number in stay)
    # The first line's come first, and what does not fit any more is left out with all that came later.
    for line in others:
        room -= size[last[line]] if last[line] not in stay else 0
        if room < 0:
            break
        stay.add(last[line])
    for line in sorted({*safe, *others, new.line}):
        for number in stones[line]:
            if number not in stay:
                room -= size[number]
                if room >= 0:
                    stay.add(number)
    return stay


def _resumable(members: list[Version]) -> list[int]:
    """Return the number of the version of a line that is over that its server could go back to, if it is there."""
    return [version.number for version in members if version.round <= members[0].checkpointed][:1]


def _milestones(members: list[Version], quota: Quota) -> list[int]:
    """Return the numbers of a line's milestones, earliest first; of a round that was trained twice the first one."""
    first = {version.trained: version.number for version in members}
    return [first[trained] for trained in quota.milestones if trained in first]


def _last(members: list[Version], stones: list[int], intact: Callable[[Version], bool]) -> int:
    """Return the number of the newest intact version of a line that is over; if there is none, of the newest."""
    if any(version.number not in stones for version in members[1:]):
        return next((version.number for version in members if intact(version)), members[0].number)
    return members[0].number  # looked at when the line ended
