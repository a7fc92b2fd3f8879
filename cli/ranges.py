"""Ranges of numbers that options take."""

import math
from typing import Any

import click


class WholeRange(click.IntRange):
    """A range whose error says what a text that is no number must be: click's says "integer range"."""

    name = "integer"


class NumberRange(click.FloatRange):
    """A range that, other than click's, has no ``nan`` in it."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or fail."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number
