"""YAML files that a user writes, read with errors of one line."""

import re
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError, one_line


class _Loader(yaml.SafeLoader):
    """Reads ``1e-5`` as a number, as YAML 1.2 has it; to YAML 1.1 it is a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path, name: str) -> Any:
    """Return the content of a YAML file; ``name`` is what errors call it.

    Raises:
        ConfigError: it cannot be read, is nested too deeply, or is not YAML.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror})") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: is nested too deeply") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: is not YAML ({one_line(error)})") from error
