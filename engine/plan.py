"""What a run of the local engine consists of."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from common.resources import WHOLE, Part, Resources


@dataclass(frozen=True)
class Plan:
    """A run: its whole run config, its resources, and the number that names it."""

    values: Mapping[str, Any]
    resources: Resources
    run_id: int

    @classmethod
    def of(cls, values: Mapping[str, Any], texts: Sequence[str], part: Part = WHOLE) -> Self:
        """Return a new run; arguments and errors as of ``Resources.of``."""
        return cls(values, Resources.of(texts, part), secrets.randbits(63) | 1)
