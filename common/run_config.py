"""The run config as text: the app's defaults in ``pyproject.toml``, the keys in ``--run-config``, both merged."""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from common.config import check_known
from common.errors import ConfigError

# As `flwr run` reads it: pairs of key and value, the value perhaps quoted, separated by white space.
PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")
# What was meant as a text, without its quotes.
_WORD = re.compile(r"[A-Za-z~/][\w.,:/~+-]*")


def as_pairs(keys: Mapping[str, Any]) -> str:
    """Return keys as ``flwr run`` reads a ``--run-config``, and a SuperNode its ``--node-config``.

    A text with a double quote in it is not read back: ``PAIR`` ends a value there.
    """
    return " ".join(f"{key}={_as_toml(value)}" for key, value in keys.items())


def _as_toml(value: Any) -> str:
    # What JSON leaves as it is, TOML takes, but for the sign 127; of JSON's escapes it does not take those of pairs.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")


def parse_run_config(text: str) -> dict[str, Any]:
    """Return the keys of a ``--run-config``: ``'alpha=0.5 method="fedper"'``, or the path of a TOML file.

    Raises:
        ConfigError: the text or the file cannot be read as such.
    """
    return _parse(text, "run config", """'method="fedper" alpha=0.5 download=true'""")


def parse_federation_configs(texts: Iterable[str]) -> dict[str, str]:
    """Return the keys of several ``--federation-config``, each with its value as TOML has it, the last one of a key.

    Keys have hyphens, as Flower's documentation has them; it takes underscores, too.

    Raises:
        ConfigError: a text is not such keys, nor is it the only one and the path of a TOML file.
    """
    of, texts = "--federation-config", list(texts)
    keys: dict[str, str] = {}
    for text in texts:
        if len(texts) == 1 and text.endswith(".toml"):
            keys |= {
                key.replace("_", "-"): _as_toml(value) for key, value in _parse(text, of, "num-supernodes = 3").items()
            }
        else:
            keys |= {key.replace("_", "-"): value for key, value in _pairs(text, of)}
    return keys


def federation_text(keys: Mapping[str, str]) -> str:
    """Return keys of ``parse_federation_configs`` as one ``--federation-config``."""
    return " ".join(f"{key}={value}" for key, value in keys.items())


def _parse(text: str, of: str, example: str) -> dict[str, Any]:
    file = text.endswith(".toml")
    try:
        if file:
            return flat(tomllib.loads(_read(text, of)))
        return flat(tomllib.loads("\n".join(f"{key} = {value}" for key, value in _pairs(text, of))))
    except OSError as error:
        raise ConfigError(f"{of} {text}: {error.strerror}") from error
    except ValueError as error:  # a TOMLDecodeError, or a number of more digits than Python reads
        right = "a TOML file, with one key = value on a line" if file else f"like {example}"
        wrong = "" if file else next((wrong for pair in _pairs(text, of) if (wrong := _wrong(*pair))), "")
        raise ConfigError(f"{of} {text!r} cannot be read ({wrong or error}); it must be {right}") from error


def _wrong(key: str, value: str) -> str:
    """Return what is wrong with a key or its value, or an empty text."""
    try:
        tomllib.loads(f"{key} = 0")
    except ValueError:
        return f"{key!r} is not the name of a key"
    try:
        tomllib.loads(f"{key} = {value}")
    except ValueError:
        if value.lower() in ("true", "false"):
            return f"{key}: {value} has small letters here, {value.lower()}"
        if _WORD.fullmatch(value):
            return f'{key}: a text has double quotes, {key}="{value}"'
        return f"{key}: {value:.60} is no number that can be read, nor true, false or a text in quotes"
    return ""


def _pairs(text: str, of: str) -> list[tuple[str, str]]:
    left = PAIR.sub("", text).split()
    if left:
        raise ConfigError(f"{of} {text!r}: {left[0]!r} is not key=value, without blanks around the '='")
    pairs = PAIR.findall(text)
    twice = next((key for key, many in Counter(key for key, _ in pairs).items() if many > 1), None)
    if twice:
        raise ConfigError(f"{of} {text!r}: {twice} is there twice; give it once")
    return pairs


def _read(file: str, of: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (UnicodeDecodeError, RuntimeError) as error:
        raise ConfigError(f"{of} {file}: {error}; it must be a TOML file in UTF-8") from error


def parse_run_configs(texts: Iterable[str]) -> dict[str, Any]:
    """Return the keys of several ``--run-config``, the last one of a key.

    Raises:
        ConfigError: as of ``parse_run_config``; or a TOML file is not the only one, which `flwr run` refuses.
    """
    texts = list(texts)
    file = next((text for text in texts if text.endswith(".toml")), "")
    if file and len(texts) > 1:
        raise ConfigError(f"run config {file}: a TOML file must be the only --run-config; write the other keys into it")
    keys: dict[str, Any] = {}
    for text in texts:
        keys |= parse_run_config(text)
    return keys


def run_config_text(texts: Iterable[str]) -> str:
    """Return several ``--run-config`` that ``parse_run_configs`` reads as one, which has each key once."""
    texts = list(texts)
    if any(text.endswith(".toml") for text in texts):
        return " ".join(texts)
    return " ".join(f"{key}={value}" for key, value in dict(pair for t in texts for pair in _pairs(t, "")).items())


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested table as a flat one with dotted keys."""
    keys: dict[str, Any] = {}
    for key, value in table.items():
        keys |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return keys


def default_config(app: Path) -> dict[str, Any]:
    """Return the run config of the app in folder ``app``, every key with its default.

    Raises:
        ConfigError: there is no app.
    """
    file = app / "pyproject.toml"
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))
        return flat(project["tool"]["flwr"]["app"]["config"])
    except (OSError, KeyError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} is not that of a Flower app with a run config; start in Floret's folder") from error


def own_config() -> dict[str, Any]:
    """Return the run config of the Floret that is installed here, every key with its default."""
    folder = Path(__file__).resolve().parent
    # A wheel has the file beside this module, a checkout in its root.
    return default_config(folder if (folder / "pyproject.toml").exists() else folder.parent)


def merged(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults with the overrides in place.

    Raises:
        ConfigError: names a key that there is no default for, and the nearest one.
    """
    check_known(overrides, defaults)
    return {**defaults, **overrides}
