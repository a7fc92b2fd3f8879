"""Errors whose message is one line for the user: what is named, what is wrong, what would be right."""


class FloretError(Exception):
    """Base of the errors that Floret raises for a user to read; the message is a single line."""


class ConfigError(FloretError):
    """A key of the run config has a value that cannot be used."""


class DataError(FloretError):
    """A dataset, a file of it, or a partition of it cannot be used."""


def one_line(text: object) -> str:
    """Return ``text`` as one line: runs of white space become single spaces."""
    return " ".join(str(text).split())
