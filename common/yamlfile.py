"""YAML files that a user writes, read with errors of one line."""

from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError, one_line


def read_yaml(path: Path, name: str) -> Any:
    """Return the content of a YAML file; ``name`` is what errors call it.

    Raises:
        ConfigError: it cannot be read, is nested too deeply, or is not YAML.
    """
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror})") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: is nested too deeply") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: is not YAML ({one_line(error)})") from error
