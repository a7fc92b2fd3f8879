"""The run config: flat kebab-case keys, read once into frozen dataclasses that validate.

The defaults stand in ``pyproject.toml`` under ``[tool.flwr.app.config]`` and nowhere else; a dataclass here gives each
key its type and the values it may take. ``RunConfig`` holds the keys of every run; a method's own keys (``pfakd.beta``)
are read by ``read_keys`` into the dataclass that its server half declares.
"""

import difflib
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin

from common.errors import ConfigError

Scalar = bool | int | float | str
# Files of a node's own in its state directory, beside the folders of the federations.
IDENTITY, SEED = "identity", "seed"
T = TypeVar("T")
Check = Callable[[Any], str | None]


def between(low: float, high: float = math.inf, *, above: bool = False, infinite: bool = False) -> Any:
    """Declare a number in [low, high], or in (low, high] with ``above``; an infinite one only with ``infinite``."""

    def check(value: float) -> str | None:
        fine = (low < value if above else low <= value) and value <= high
        wide = abs(value) == math.inf and not infinite
        upper = f" and at most {high:g}" if high < math.inf else " and finite" if wide else ""
        return None if fine and not wide else f"must be {'above' if above else 'at least'} {low:g}{upper}"

    return field(metadata={"check": check})


def choice(*names: str) -> Any:
    """Declare a text that is one of ``names``."""
    return field(metadata={"check": lambda value: one_of(value, names), "choices": names})


def any_of(*numbers: int) -> Any:
    """Declare a number that is one of ``numbers``."""
    names = ", ".join(map(str, numbers))
    return field(metadata={"check": lambda value: None if value in numbers else f"must be one of {names}"})


def one_of(value: str, names: Iterable[str]) -> str | None:
    """Return None if ``value`` is one of ``names``, else what is wrong: the choices, and the nearest one."""
    names = list(names)
    if value in names:
        return None
    return f"must be one of {', '.join(names)}{nearest(value, names)}"


def device_name(value: str) -> str | None:
    """Return None if ``value`` can name a device, here or on another machine, else what it must be."""
    fine = re.fullmatch(r"auto|cpu|(cuda|mps|xpu)(:\d+)?", value)
    return None if fine else "must be auto, cpu, or an accelerator like cuda or cuda:1"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the name most like ``name`` but for case, or an empty text."""
    known = {each.casefold(): each for each in names}
    matches = difflib.get_close_matches(name.casefold(), known, n=1, cutoff=0.6)
    return f" (did you mean {known[matches[0]]!r}?)" if matches else ""


def absolute_path(value: str) -> str | None:
    """Return None if ``value`` is empty or absolute (``~`` counts), else what is wrong."""
    try:
        if not value or Path(value).expanduser().is_absolute():
            return None
    except RuntimeError:
        return f"{Path(value).parts[0]} is not the home of a user of this machine; name the absolute path"
    return "must be an absolute path (the working directory of a Flower process is not yours)"


def run_to_resume(value: str) -> str | None:
    """Return None if ``value`` is ``latest``, empty or absolute, else what is wrong."""
    wrong = None if value == "latest" else absolute_path(value)
    return wrong and f'{wrong}, or "latest"'


def folder_name(value: str) -> str | None:
    """Return None if ``value`` can be the name of a folder on every system, else what is wrong."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        return None
    return "must be 1 to 100 letters, digits, '.', '-' or '_', beginning with a letter or digit"


def federation_name(value: str) -> str | None:
    """Return None if ``value`` can be the name of a federation, else what is wrong."""
    if value.casefold() in (IDENTITY, SEED):
        return f"must not be {IDENTITY} or {SEED}, which are files of a node's own beside the folders of federations"
    return folder_name(value)


def split_names(value: str) -> tuple[str, ...]:
    """Return the names in a text that separates them by commas, stripped and in Unicode's form NFC."""
    return tuple(unicodedata.normalize("NFC", name.strip()) for name in value.split(",")) if value.strip() else ()


def distinct_names(value: str) -> str | None:
    """Return None if ``value`` is empty or distinct names separated by commas, else what is wrong."""
    names = split_names(value)
    for i, name in enumerate(names):
        if not name or name in names[:i]:
            return f"has {repr(name) + ' twice' if name else 'an empty name'}; must be distinct names, as in 'cat,dog'"
    return None


def read_keys(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Fill the frozen dataclass ``kind`` from ``values``: field ``lr_decay`` from key ``prefix + "lr-decay"``.

    An integer is accepted for a float, and a single name for a list of names. A trailing underscore of a field name
    (``lambda_``) is dropped. A field that is itself such a dataclass is a table: its keys are ``<field>.<key>``.

    Raises:
        ConfigError: a key is missing, of the wrong type or outside what its field declares; the message is one line
            that names the key, the value and what would be right.
    """
    kwargs: dict[str, Any] = {}
    for item in fields(kind):  # type: ignore[arg-type]
        key = prefix + key_of(item.name)
        if isinstance(item.type, type) and is_dataclass(item.type):
            kwargs[item.name] = read_keys(item.type, values, f"{key}.")
            continue
        if key not in values:
            table = f"[tool.flwr.app.config{'.' if prefix else ''}{prefix.rstrip('.')}]"
            raise ConfigError(
                f"{key} is missing from the run config: it has no default; add one to {table} in pyproject.toml"
            )
        kwargs[item.name] = _read(item, key, values[key])
    return kind(**kwargs)


def check_keys(kind: type, values: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Check those of ``keys`` that ``values`` has, as ``read_keys`` would, and leave the others.

    Raises:
        ConfigError: as of ``read_keys``, for one of these keys.
    """
    items = {key_of(item.name): item for item in fields(kind)}
    for key in keys:
        if key in values:
            _read(items[key], key, values[key])


def keys_of(keys: Any, prefix: str = "") -> dict[str, Any]:
    """Return the keys that ``read_keys`` filled a dataclass from, each with its value; none for None."""
    found: dict[str, Any] = {}
    for item in fields(keys) if keys is not None else ():
        value = getattr(keys, item.name)
        key = prefix + key_of(item.name)
        found |= keys_of(value, f"{key}.") if is_dataclass(value) else {key: value}
    return found


def key_of(field_name: str) -> str:
    """Return the run-config key of a dataclass field: ``lr_decay`` is ``lr-decay``, ``lambda_`` is ``lambda``."""
    return field_name.rstrip("_").replace("_", "-")


def _read(item: Field[Any], key: str, value: Any) -> Scalar | tuple[str, ...]:
    choices = item.metadata.get("choices")
    if choices and type(value) is not str:  # such as YAML's no, which is false
        raise ConfigError(f"{key} = {value!r}: must be one of {', '.join(choices)}, as a text")
    read = _typed(key, value, item.type)
    check: Check | None = item.metadata.get("check")
    wrong = check(read) if check else None
    if wrong:
        raise ConfigError(f"{key} = {value!r}: {wrong}")
    return read


def _typed(key: str, value: Any, kind: Any) -> Scalar | tuple[str, ...]:
    if get_origin(kind) is tuple:
        listed = (value,) if isinstance(value, str) else value
        if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
            raise ConfigError(f"{key} = {value!r}: must be a list of names")
        return tuple(listed)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError as error:
            raise ConfigError(f"{key}: has a number of more than 308 digits; write one that is below 1e308") from error
    if type(value) is not kind or value != value:
        raise ConfigError(f"{key} = {value!r}: must be {names[kind]}")
    return value  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """The keys of differential privacy, ``privacy.*``; ``docs/privacy.md`` says what each means.

    ``unit`` is what the number protects: a training ``"example"``, or a ``"client"`` with all that it has.
    """

    unit: str = choice("none", "client", "example")
    where: str = choice("node", "server")
    epsilon: float = between(0, 1e4)
    delta: float = between(0, 0.1, above=True)
    noise: float = between(0, 1e4)
    clip: float = between(1e-4, 1e6)
    clip_quantile: float = between(0, 0.99)
    sampling: str = choice("poisson", "fixed")
    accountant: str = choice("rdp", "prv")
    head_epochs: int = between(0)

    @property
    def on(self) -> bool:
        """Whether anything is protected."""
        return self.unit != "none"

    @property
    def by_server(self) -> bool:
        """Whether the server adds the noise, which is then trusted with what each client sends."""
        return self.on and self.where == "server"

    def __post_init__(self) -> None:
        """Check keys against each other.

        Raises:
            ConfigError: there is neither a noise nor a target for it, or a key does not go with the unit.
        """
        if self.on and not self.epsilon and not self.noise:
            raise ConfigError(
                f"privacy.unit = {self.unit!r}: needs privacy.epsilon, to which noise is calibrated, or privacy.noise"
            )
        if self.unit == "example" and self.where == "server":
            raise ConfigError(
                "privacy.where = 'server': with privacy.unit = 'example' each client adds noise to its own gradients; "
                "use node"
            )
        if self.clip_quantile and not self.by_server:
            raise ConfigError(
                f"privacy.clip-quantile = {self.clip_quantile:g}: the clipping adapts where the server adds the noise, "
                "with privacy.unit = 'client' and privacy.where = 'server'; use 0"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The keys of every run; ``docs/configuration.md`` says what each means."""

    method: str
    seed: int = between(0)
    data_seed: int = between(-1)
    dataset: str
    data_dir: str = field(metadata={"check": absolute_path})
    download: bool
    max_samples: int = between(0)
    image_size: int = between(0)
    image_channels: int = any_of(0, 1, 3)
    class_names: str = field(metadata={"check": distinct_names})
    partition: str
    alpha: float = between(0, above=True)
    classes_per_client: int = between(1)
    shards_per_client: int = between(1)
    min_samples: int = between(1)
    validation_fraction: float = between(0, 0.9)
    test_fraction: float = between(0, 0.9, above=True)
    model: str
    head_layers: int = between(0)
    batch_norm: str = choice("shared", "local")
    num_classes: int = between(0, 65536)
    rounds: int = between(1)
    participation: float = between(0, 1, above=True)
    evaluate_every: int = between(1)
    min_clients: int = between(1)
    min_replies: int = between(1)
    round_timeout: float = between(0, above=True)
    return_timeout: float = between(0)
    wire: str = choice("float32", "float16")
    aggregation: str = choice("mean", "clipped-mean", "median", "trimmed-mean")
    trim: float = between(0, 0.49, above=True)
    local_epochs: int = between(1)
    batch_size: int = between(1, 1e9)
    lr: float = between(0, above=True)
    lr_decay: float = between(0, 1, above=True)
    momentum: float = between(0, 0.9999)
    weight_decay: float = between(0)
    device: str = field(metadata={"check": device_name})
    precision: str = choice("float32", "bfloat16", "auto")
    threads: int = between(1)
    output_dir: str = field(metadata={"check": absolute_path})
    tensorboard: bool
    tracker: str
    checkpoint_every: int = between(0)
    resume: str = field(metadata={"check": run_to_resume})
    federation: str = field(metadata={"check": federation_name})
    client_state: str = choice("continue", "fresh")
    new_owners: str = field(metadata={"check": distinct_names})
    privacy: Privacy

    def __post_init__(self) -> None:
        """Check keys against each other.

        Raises:
            ConfigError: validation and test fraction leave nothing to train on, or a key does not go with privacy.
        """
        if self.validation_fraction + self.test_fraction > 0.95 + 1e-9:
            raise ConfigError(
                f"validation-fraction = {self.validation_fraction:g} and test-fraction = {self.test_fraction:g}: "
                "together they must leave at least 0.05 for training"
            )
        if self.privacy.unit == "example" and self.precision != "float32":
            raise ConfigError(
                f"precision = {self.precision!r}: privacy.unit = 'example' clips gradients, whose norms need float32"
            )
        if self.privacy.unit == "example" and self.threads != 1:
            # With several, the rounding of an example's row depends on how many others there are, from any number on.
            raise ConfigError(
                f"threads = {self.threads}: privacy.unit = 'example' needs 1, with which the rounding of an example "
                "does not depend on the others"
            )

    @property
    def seed_of_data(self) -> int:
        """What partition, splits and the choice of ``max_samples`` are drawn from."""
        return self.seed if self.data_seed < 0 else self.data_seed

    def check_classes_are_given(self) -> None:
        """Check that a protected run on real nodes says how many classes there are: no client tells.

        Raises:
            ConfigError: it does not.
        """
        if self.privacy.on and not self.num_classes:
            raise ConfigError(
                f"num-classes = 0: with privacy.unit = {self.privacy.unit!r} no client tells its classes; the run "
                "config must have their number"
            )

    def decayed(self, rate: float, server_round: int) -> float:
        """Return a learning rate as it is in a round, from 1: multiplied by ``lr-decay`` after each."""
        return rate * self.lr_decay ** (server_round - 1)


def own_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a run config's run depends on: without other methods' tables, and without that of privacy if
    nothing is protected.
    """
    tables = [f"{values['method']}."]
    if values.get("privacy.unit", "none") != "none":
        tables.append("privacy.")
    return {key: value for key, value in values.items() if "." not in key or key.startswith(tuple(tables))}


def check_known(
    values: Mapping[str, Any], known: Iterable[str], of: str = "the run config", page: str = "docs/configuration.md"
) -> None:
    """Refuse a key that ``of``, which ``page`` is about, does not have.

    Raises:
        ConfigError: names the key and the nearest known one, or those that have its name in tables of methods.
    """
    known = list(known)
    for key in values:
        if key not in known:
            hint = _in_tables(key, str(values.get("method", "")), known) or nearest(key, known) or f"; see {page}"
            raise ConfigError(f"{key} is not a key of {of}{hint}")


def _in_tables(key: str, method: str, known: Sequence[str]) -> str:
    """Return ``" (did you mean 'fedprox.mu' or 'gpfl.mu'?)"`` for ``mu``, that of ``method`` alone if it has one."""
    found = [name for name in known if name.endswith(f".{key}")]
    if f"{method}.{key}" in found:
        found = [f"{method}.{key}"]
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""
