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


# Characters of a text that another machine sent, such as a reason: enough for several paths, too few to fill a log.
LONGEST_TEXT = 1000


def printable(text: object, longest: int = LONGEST_TEXT) -> str:
    """Return a text of another machine as it may stand in a log: one line, no control codes, not too long.

    What cannot be printed (control characters, escape codes, lone surrogates, signs that turn the direction of writing)
    becomes ``?``; of a text beyond ``longest`` characters the beginning is left, and an ellipsis.
    """
    # A text of many megabytes is cut before it is gone through; of white space less is left than there was.
    line = one_line(str(text)[: 4 * longest])
    line = line if len(line) <= longest else line[: longest - 1] + "…"
    return line if line.isprintable() else "".join(sign if sign.isprintable() else "?" for sign in line)
