"""What a node lets happen on its device and lets leave it, whatever the server asks: ``floret node --policy FILE``.

A simulation has no policy: there all clients are the user's own. A policy can only refuse or take away; what it refuses
is an error of one line, which this node logs and the server is told.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from flwr.app import ArrayRecord

from client_app.inventory import remove_unused, size_of_states, states_of
from client_app.node_config import partition_of
from client_app.protection import Budget
from common.accuracies import EXACT, NONE, ROUNDED, STEP, TELLING
from common.config import RunConfig, between, check_known, choice, folder_name, key_of, keys_of, one_of, read_keys
from common.errors import ConfigError, FloretError
from common.extras import require
from common.filters import Payload
from common.norms import group_of
from common.privacy.calibration import noise_of_clients
from common.registry import load_class
from common.tensors import MASK, NamedArrays
from common.wire import unpacked_bytes
from common.yamlfile import read_yaml
from data import ClientData
from models import MODELS, build_model, count_values, head_layers
from strategies import METHODS
from strategies.core import FloretStrategy, Method, Setup

ALL = "all"
# What can leave, by the group of its tensors. Of other names, those of networks beside the model are
# ``<network>.<tensor>``; what has no such name was computed from the data.
KINDS = {"extractor": "extractor", "head": "head", "prototype": "prototypes", "mean": "prototypes"}
NETWORKS, REPRESENTATIONS = "networks", "representations"
EVERY = (*dict.fromkeys(KINDS.values()), NETWORKS, REPRESENTATIONS)
# The whole model, in the key ``leaves``.
MODEL = ("extractor", "head")


class PolicyError(FloretError):
    """The node's policy refuses what a server asks for."""


def _names(known: tuple[str, ...] | None = None) -> Any:
    """Declare a list of names, of ``known`` ones or else such as federations have."""

    def check(names: tuple[str, ...]) -> str | None:
        for name in names:
            if "," in name:
                return f"names are a list, as in [{name}]"
            wrong = one_of(name, [*known, ALL]) if known is not None else folder_name(name)
            if wrong:
                return f"{name!r}: {wrong}"
        return None

    return field(default=(ALL,), metadata={"check": check})


def _number(default: float, low: float, high: float = math.inf) -> Any:
    return field(default=default, metadata=between(low, high).metadata)


def _leaves() -> Any:
    return field(default=("model", NETWORKS, "prototypes"), metadata=_names(("model", *EVERY)).metadata)


class Declared(NamedTuple):
    """What a method says of a run.

    Attributes:
        head_layers: how many layers are the head.
        kinds: of tensors that it sends.
        beside: how many values the tensors of its networks beside the model have, and what it makes with them.
    """

    head_layers: int
    kinds: frozenset[str]
    beside: int


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The keys of a policy, each with its default; ``docs/policy.md`` says what each means.

    Sizes are in units of 10^6 (mb) and 10^9 (gb) bytes.
    """

    methods: tuple[str, ...] = _names(tuple(METHODS))
    federations: tuple[str, ...] = _names()
    leaves: tuple[str, ...] = _leaves()
    class_names: bool = True
    accuracies: str = field(default=ROUNDED, metadata=choice(*TELLING).metadata)
    hidden_below: int = _number(20, 0)
    min_samples: int = _number(10, 1)
    min_class_samples: int = _number(5, 1)
    min_steps: int = _number(2, 1)
    min_batch_size: int = _number(8, 1)
    max_samples: int = _number(0, 0)
    validation_fraction: float = _number(0.1, 0, 0.5)
    max_local_epochs: int = _number(1000, 1)
    max_batch_size: int = _number(4096, 1)
    max_decay: float = field(default=0.1, metadata=between(0, infinite=True).metadata)
    max_rounds_a_day: int = _number(5000, 1)
    max_model_mb: int = _number(1000, 1)
    max_received_mb: int = _number(4000, 1)
    max_image_size: int = _number(1024, 1)
    max_classes: int = _number(10_000, 1)
    max_federations: int = _number(16, 1)
    max_state_gb: int = _number(100, 1)
    privacy: tuple[str, ...] = _names(("none", "example", "client"))
    noise_by_server: bool = False
    min_noise: float = _number(0.1, 0)
    max_epsilon: float = _number(0.0, 0)
    delta: float = field(default=1e-5, metadata=between(0, 0.1, above=True).metadata)

    @classmethod
    def public(cls) -> Self:
        """Return the policy of a node whose data are a partition of the run's dataset, and nobody's own."""
        return cls(
            leaves=(ALL,),
            accuracies=EXACT,
            hidden_below=0,
            min_samples=1,
            min_class_samples=1,
            min_steps=1,
            min_batch_size=1,
            max_decay=math.inf,
            noise_by_server=True,
            min_noise=0.0,
        )

    @classmethod
    def read(cls, path: Path, base: Self | None = None) -> Self:
        """Return the policy in a YAML file; a key that is not in it is as in ``base``, by default of own data.

        Raises:
            ConfigError: names the file, the key, and what is wrong.
        """
        content = read_yaml(path, f"policy {path}")
        content = {} if content is None else content
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise ConfigError(f"policy {path}: is not a table of keys and values, such as 'min-samples: 50'")
        try:
            check_known(content, cls().values(), "a policy", "docs/policy.md")
            return read_keys(cls, {**(base or cls()).values(), **content})
        except ConfigError as error:
            raise ConfigError(f"policy {path}: {error}") from error

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> Self:
        """Return that of a node config: its ``policy`` file; without one, as its data are its own or the run's.

        The file is read for every message, so that what is changed in it holds from the next one on.

        Raises:
            ConfigError: as ``read`` and ``partition_of``.
        """
        path = str(node.get("policy", ""))
        base = cls.public() if partition_of(node) else cls()
        return cls.read(Path(path).expanduser(), base) if path else base

    def values(self) -> dict[str, Any]:
        """Return the keys as in a file, lists as tuples."""
        return {key_of(item.name): getattr(self, item.name) for item in fields(self)}

    # What may happen

    def check_installed(self) -> None:
        """Check that this node has what the policy demands.

        Raises:
            FloretError: differential privacy is demanded, and its extra is not installed.
        """
        if self.max_epsilon or not {ALL, "none"} & set(self.privacy):
            require("opacus", "privacy", "a policy with max-epsilon or privacy")

    def check_run(self, config: RunConfig, parameters: Any) -> None:
        """Check what a run config says; ``parameters`` are the method's own.

        Raises:
            PolicyError: a key is not permitted here.
            BudgetError: ``privacy.noise`` is less than is permitted here.
        """
        for key, name, permitted in (
            ("methods", config.method, self.methods),
            ("federations", config.federation, self.federations),
        ):
            if ALL not in permitted and name not in permitted:
                raise _refused(key, permitted, f"{key[:-1]} = {name!r}")
        epochs = {"local-epochs": config.local_epochs}
        if config.privacy.unit == "example":
            epochs["privacy.head-epochs"] = config.privacy.head_epochs
        for name, value in keys_of(parameters).items():
            key = f"{config.method}.{name}"
            if name.endswith("inner-steps"):  # so many on each batch
                epochs[f"local-epochs times {key}"] = config.local_epochs * value
            elif name.endswith(("epochs", "steps")):
                epochs[key] = value
        for key, value in epochs.items():
            self._bound("max-local-epochs", key, value)
        method = load_class("strategies", config.method, FloretStrategy)
        for key, value in method.decays(config, parameters).items():
            self._bound("max-decay", key, value)
        for key, value in method.mixtures(config, parameters).items():
            if not value <= max(self.max_decay, 2.0):
                raise _refused("max-decay", self.max_decay, f"{key} = {value:g}, above 2")
        self._bound("max-image-size", "image-size", config.image_size)
        self._bound("max-classes", "num-classes", config.num_classes)
        unit = config.privacy.unit
        if ALL not in self.privacy and unit not in self.privacy:
            raise _refused("privacy", self.privacy, f"privacy.unit = {unit!r}")
        if self.max_epsilon and unit == "none":
            raise _refused("max-epsilon", f"{self.max_epsilon:g}", "privacy.unit = 'none'")
        if config.privacy.on and self.max_samples:
            # One example more would be in the place of another, which the accountant does not know of.
            raise _refused("max-samples", self.max_samples, f"privacy.unit = {unit!r} needs all of the data")
        if not config.privacy.on or config.privacy.by_server:
            # A node with fewer samples than that is refused whatever the batches are.
            self._check_batch(config, self.min_samples)
        if config.privacy.by_server and not self.noise_by_server:
            raise _refused("noise-by-server", "false", "privacy.where = 'server'")
        if config.privacy.on and config.privacy.noise and not config.privacy.by_server:
            self.budget().check_noise(config.privacy.noise)

    def check_calibrated(self, config: RunConfig) -> None:
        """Check the noise that is calibrated to ``privacy.epsilon``, as far as a run config alone tells it.

        A node checks it when it pays for a round. With ``privacy.unit = "example"`` it depends on the data.

        Raises:
            BudgetError: it is less than is permitted here.
            ConfigError: no noise is enough for the target.
        """
        privacy = config.privacy
        if privacy.unit == "client" and not privacy.noise and not privacy.by_server:
            self.budget().check_noise(noise_of_clients(config))

    def check_model(self, config: RunConfig, parameters: Any, shape: tuple[int, ...], classes: int) -> Declared:
        """Check the size of the model and of the networks beside it, before they are made.

        Args:
            config: of the run.
            parameters: the method's own.
            shape: that of an input.
            classes: the number of them.

        Returns:
            What the method says of the run.

        Raises:
            PolicyError: they are larger than permitted here.
            ConfigError: there is no such model, or it cannot take such inputs.
        """
        self._bound("max-classes", "num-classes", classes)
        wrong = one_of(config.model, MODELS)
        if wrong:
            raise ConfigError(f"model = {config.model!r:.60}: {wrong}")
        size, said = 4 * count_values(config.model, shape, classes), f"the model {config.model!r} has"
        if size <= self.max_model_mb * 1e6:
            found = declared(config, parameters, shape, classes)
            size += 4 * found.beside
            if size <= self.max_model_mb * 1e6:
                return found
            said = f"the model {config.model!r} and what {config.method} has beside it have"
        raise _refused("max-model-mb", self.max_model_mb, f"{said} {size / 1e6:.1f} MB")

    def check_received(self, record: ArrayRecord) -> None:
        """Check what the tensors of a message will take in memory, with those of peers, before they are unpacked.

        Raises:
            PolicyError: it is more than permitted here.
            TensorError: one says that it has a shape that no array has.
        """
        size = unpacked_bytes(record)
        if size > self.max_received_mb * 1e6:
            raise _refused("max-received-mb", self.max_received_mb, f"the message has tensors of {size / 1e6:.1f} MB")

    def check_data(self, config: RunConfig, data: ClientData) -> None:
        """Check that so many samples and steps stand behind what leaves that they may, and not too many make a batch.

        Raises:
            PolicyError: they are too few, or too many.
        """
        # Of a protected run a refusal must not tell whether there are so many.
        largest = config.batch_size if config.privacy.on else min(config.batch_size, len(data.train))
        if largest > self.max_batch_size:
            raise _refused("max-batch-size", self.max_batch_size, f"batch-size = {config.batch_size}")
        if config.privacy.on and not config.privacy.by_server:
            # What leaves has the noise of ``min-noise`` at least, and a refusal would tell of the number.
            return
        samples, told = len(data.train), not config.privacy.on
        if samples < self.min_samples:
            found = f"{samples}" if told else "fewer"
            raise _refused("min-samples", self.min_samples, f"there are {found} training samples")
        self._check_batch(config, samples)
        batches, rest = divmod(samples, config.batch_size)
        # So few are part of the batch before them; a single one is with batch normalisation, too.
        steps = config.local_epochs * max(1, batches + (rest >= max(2, self.min_batch_size)))
        if steps < self.min_steps:
            said = f"local-epochs = {config.local_epochs}, batch-size = {config.batch_size}"
            found = f"{steps}" if told else "fewer"
            raise _refused("min-steps", self.min_steps, f"a round would have {found} steps ({said})")

    def check_day(self, rounds: int) -> None:
        """Check the number of rounds of this day, with the one that is asked for.

        Raises:
            PolicyError: there were enough.
        """
        if rounds > self.max_rounds_a_day:
            raise _refused("max-rounds-a-day", self.max_rounds_a_day, f"this would be round {rounds} of the day (UTC)")

    def check_disk(self, state_dir: Path, config: RunConfig) -> None:
        """Check that there is room for the states of one more federation, or for more of one that is known.

        Raises:
            PolicyError: there is none.
        """
        wrong = self._full(state_dir, config)
        if wrong and remove_unused(state_dir):
            wrong = self._full(state_dir, config)
        if wrong:
            raise wrong

    def check_method(self, method: str, kinds: Set[str]) -> None:
        """Check that a method that sends these kinds of tensors sends only what may leave.

        Raises:
            PolicyError: names the kind of tensors that may not.
        """
        wrong = sorted(kinds - self.kinds())
        if wrong:
            raise _refused("leaves", self.leaves, f"method = {method!r} sends {' and '.join(wrong)}")

    def objection(self, method: str, kinds: Set[str]) -> str:
        """Return why a method that sends these kinds of tensors is not permitted; an empty text if it is."""
        if ALL not in self.methods and method not in self.methods:
            return "it is not among methods"
        wrong = sorted(kinds - self.kinds())
        return f"it sends {' and '.join(wrong)}" if wrong else ""

    def of_setting(self) -> dict[str, Any]:
        """Return the keys that a client half goes by, as the fields of ``ClientSetting`` of the same names."""
        return {
            "min_class_samples": self.min_class_samples,
            "min_batch_size": self.min_batch_size,
            "hidden_below": self.hidden_below,
            "accuracies": self.accuracies,
        }

    def budget(self) -> Budget:
        """Return what may be spent on privacy over all runs together, and the least noise."""
        return Budget(self.max_epsilon, self.delta, self.min_noise)

    def kinds(self) -> set[str]:
        """Return the kinds of tensors that may leave."""
        if ALL in self.leaves:
            return set(EVERY)
        return set(self.leaves) & set(EVERY) | (set(MODEL) if "model" in self.leaves else set())

    def _check_batch(self, config: RunConfig, samples: int) -> None:
        if config.batch_size < min(self.min_batch_size, samples):
            raise _refused("min-batch-size", self.min_batch_size, f"batch-size = {config.batch_size}")

    def _full(self, state_dir: Path, config: RunConfig) -> PolicyError | None:
        """Return why there is no room, None if there is."""
        known = states_of(state_dir)
        if config.federation not in known and len(known) >= self.max_federations:
            more = f"federation = {config.federation!r} would be one more; see floret state remove"
            return _refused("max-federations", self.max_federations, more)
        size = size_of_states(state_dir)
        if size >= self.max_state_gb * 1e9:
            said = f"{state_dir} has {size / 1e9:.1f} GB; see floret state remove"
            return _refused("max-state-gb", self.max_state_gb, said)
        return None

    def _bound(self, key: str, what: str, value: float) -> None:
        most = self.values()[key]
        if not value <= most:
            raise _refused(key, most, f"{what} = {value}" if isinstance(value, int) else f"{what} = {value:g}")


class Outgoing:
    """The filter that everything passes which leaves a node, as its policy says."""

    def __init__(self, policy: Policy, data: ClientData) -> None:
        self.policy = policy
        self._samples = {split: len(getattr(data, split)) for split in ("train", "validation", "test")}
        self._of_class = data.train.y.bincount().tolist()

    def __call__(self, payload: Payload) -> Payload:
        """Return what may leave of a reply.

        Raises:
            PolicyError: a tensor is of a kind that may not.
        """
        permitted = self.policy.kinds()
        tensors: NamedArrays = {}
        for name, array in payload.tensors.items():
            kind = kind_of(name)
            if kind not in permitted:
                raise _refused("leaves", self.policy.leaves, f"{name} is of the kind {kind}")
            if kind != "prototypes" or self._samples_of(name) >= self.policy.min_class_samples:
                tensors[name] = array
        scalars = payload.scalars if payload.kind == "plan" else self._measured(payload)
        return replace(payload, tensors=tensors, scalars=scalars)

    def _samples_of(self, name: str) -> int:
        """Return the number of training samples of the class whose prototype is called ``name``."""
        number = int(name.rpartition(".")[2])
        return self._of_class[number] if number < len(self._of_class) else 0

    def _measured(self, payload: Payload) -> dict[str, Any]:
        """Return the metrics of a reply as they may leave."""
        kept: dict[str, Any] = {}
        for name, value in payload.scalars.items():
            when, _, split = name.partition(".")
            accuracy = when in ("before", "after")
            if not accuracy and name != "loss":
                kept[name] = value
                continue
            of = split if accuracy else "train"
            if self.policy.accuracies == NONE or self._samples[of] < self.policy.hidden_below:
                continue
            if self.policy.accuracies == ROUNDED:
                value = round(round(value / STEP) * STEP, 6) if accuracy else float(f"{value:.0e}")
            kept[name] = value
        return kept


def setup_of(config: RunConfig, method: type[Method], parameters: Any, shape: tuple[int, ...], classes: int) -> Setup:
    """Return what a method works with on data of this shape, with a model that has no weights of its own.

    Raises:
        ConfigError: the model cannot take such inputs.
    """
    cut = config.head_layers or head_layers(config.model, shape, method.head)
    return Setup(config, parameters, build_model(config.model, shape, classes, cut, None), cut, shape)


# Every message of a run is checked, and asks the same.
@lru_cache(maxsize=8)
def declared(config: RunConfig, parameters: Any, shape: tuple[int, ...], classes: int) -> Declared:
    """Return what a method says of a run, without making a model or a network.

    Raises:
        ConfigError: the model cannot take such inputs, or a network is larger than any computer can have.
    """
    method = load_class("strategies", config.method, FloretStrategy)
    with torch.device("meta"):
        setup = setup_of(config, method, parameters, shape, classes)
        beside = method.values_beside(setup)
        return Declared(setup.head_layers, frozenset(kind_of(name) for name in method.uplink(setup)), beside)


def kinds_sent(config: RunConfig, parameters: Any) -> frozenset[str]:
    """Return the kinds of tensors that a method sends, on inputs of a shape that the run's model takes.

    Raises:
        ConfigError: the model cannot be cut at ``head-layers``, or a network beside it takes no such inputs.
    """
    return declared(config, parameters, (64,) if config.model == "fasttext" else (3, 64, 64), 10).kinds


def kind_of(name: str) -> str:
    """Return the kind of a tensor that a client sends; the mask of a sparse one is of its kind."""
    name = name.removeprefix(MASK)
    return KINDS.get(group_of(name)) or (NETWORKS if "." in name else REPRESENTATIONS)


def _refused(key: str, value: object, what: str) -> PolicyError:
    said = ", ".join(value) if isinstance(value, tuple) else value
    return PolicyError(f"this node's policy has {key} = {said}, and {what}")
