"""Packages that only some roles need: they come with an extra of the package ``floret``."""

from importlib.util import find_spec

from common.errors import FloretError


def require(package: str, extra: str, what: str) -> None:
    """Check that a package is installed which ``what`` needs.

    Raises:
        FloretError: it is not; names the extra that brings it.
    """
    if find_spec(package) is None:
        raise FloretError(
            f"{what}: the package {package} is not installed here; in Floret's folder: pip install '.[{extra}]'"
        )
