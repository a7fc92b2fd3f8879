"""What both halves of a method agree on: its parameters, what travels, where the model is cut, its other networks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, get_args

import torch
from torch import nn

from common.config import RunConfig, one_of, read_keys
from common.errors import ConfigError, FloretError
from common.prototypes import name_of
from common.seeds import torch_generator
from common.tensors import Specs, TensorSpec
from models import Head, Part, SplitModel, initialise, output_widths, tensor_names

_UNITS = frozenset({"client", "example"})


@dataclass(frozen=True)
class Network:
    """A network beside the model; ``build`` makes it, its weights are drawn afterwards, with the ``gain`` of its kind.

    A ``shared`` one begins with the same weights everywhere and travels like the shared part of the model; one that is
    not begins with weights of the client's own and never leaves it. One that is ``as_model`` is of the model's kind and
    begins with the weights of the initial model.
    """

    build: Callable[[], nn.Module]
    shared: bool
    gain: float = 1.0
    as_model: bool = False

    def new(self, seed: int, name: str, client: str = "") -> nn.Module:
        """Return the network ``name`` with its first weights: those of everybody, or of this client if not shared."""
        network = self.bare()
        purpose = ("model",) if self.as_model else ("network", name) if self.shared else (name, client)
        initialise(network, torch_generator(seed, *purpose), self.gain)
        return network

    def bare(self) -> nn.Module:
        """Return the network with any weights."""
        # Constructors of layers draw from the global generator, which is put back.
        with torch.random.fork_rng(devices=[]):
            return self.build()


@dataclass(frozen=True)
class Setup:
    """What both halves know of a run; ``head_layers`` is how many of the last layers are the head."""

    config: RunConfig
    parameters: Any
    model: SplitModel
    head_layers: int
    input_shape: tuple[int, ...]

    @property
    def classes(self) -> int:
        """The number of classes that the model tells apart."""
        return self.model.classifier.out_features

    @property
    def features(self) -> int:
        """The number of features that the extractor gives for a sample."""
        return self._widths[0]

    @property
    def stage_channels(self) -> list[int]:
        """The number of channels of each convolutional stage of the extractor."""
        return self._widths[1]

    @cached_property
    def _widths(self) -> tuple[int, list[int]]:
        return output_widths(self.model, self.input_shape)

    def tensor_names(self, part: Part) -> list[str]:
        """Return the names of the tensors of a part of the model that may travel."""
        return tensor_names(self.model, part, self.config.batch_norm)

    def tensors(self, part: Part) -> dict[str, TensorSpec]:
        """Return what the tensors of a part of the model look like."""
        return specs_of(self.model, self.tensor_names(part))

    def prototypes(self) -> dict[str, TensorSpec]:
        """Return ``prototype.<class>``, (features,), for every class, all optional."""
        return {name_of(c): TensorSpec((self.features,), optional=True) for c in range(self.classes)}


class Method:
    """The part of a strategy that its client half uses as well: class attributes and class methods, no state.

    Attributes:
        shares: the part of the model that travels; everything else is private to the client.
        head: where the model is cut while ``head-layers`` is 0: the head is the ``"last"`` layer, or all the
            ``"linear"`` layers at the end.
        Parameters: a frozen dataclass of the method's own keys, or None.
        protects: the values of ``privacy.unit`` that it can have: all that leaves a client has a mechanism.
    """

    shares: ClassVar[Part] = "model"
    head: ClassVar[Head] = "last"
    Parameters: ClassVar[type | None] = None
    protects: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check what a method says of itself: one that shares an unknown part would share what it should keep.

        Raises:
            FloretError: an attribute has a value that it cannot have.
        """
        super().__init_subclass__(**kwargs)
        where = f"{cls.__module__}.{cls.__qualname__}"
        for name, value, values in (("shares", cls.shares, get_args(Part)), ("head", cls.head, get_args(Head))):
            wrong = one_of(value, values)
            if wrong:
                raise FloretError(f"{where}: {name} = {value!r}: {wrong}")
        if not isinstance(cls.protects, frozenset) or not cls.protects <= _UNITS:
            raise FloretError(f"{where}: protects = {cls.protects!r}: must be a frozenset of {sorted(_UNITS)}")

    @classmethod
    def check_protects(cls, config: RunConfig) -> None:
        """Check that the method can protect what ``privacy.unit`` says.

        Raises:
            ConfigError: it sends what has no mechanism.
        """
        unit = config.privacy.unit
        if config.privacy.on and unit not in cls.protects:
            others = " or ".join(f"privacy.unit = {name!r}" for name in sorted(cls.protects)) or "no privacy.unit"
            raise ConfigError(
                f"privacy.unit = {unit!r}: {config.method} sends what has no mechanism for it; it can have {others}"
            )

    @classmethod
    def passes(cls, config: RunConfig, parameters: Any) -> int:
        """Return how often a round goes through the training data with what leaves a client; for ``protects``."""
        return config.local_epochs

    @classmethod
    def decays(cls, config: RunConfig, parameters: Any) -> dict[str, float]:
        """Return by keys which part of the weights, or of their distance to others, a client's step takes away.

        From 1 on an update is the gradients of the last or of the first batch alone, in which there may be one sample.
        """
        return {"lr times weight-decay": config.lr * config.weight_decay}

    @classmethod
    def mixtures(cls, config: RunConfig, parameters: Any) -> dict[str, float]:
        """Return by keys how far a client's step takes one model to another; above 2 their difference grows."""
        return {}

    @classmethod
    def networks(cls, setup: Setup) -> dict[str, Network]:
        """Return the networks beside the model; their tensors are called ``<name>.<tensor>``."""
        return {}

    @classmethod
    def values_beside(cls, setup: Setup) -> int:
        """Return how many values the networks beside the model have, and what is made with them, without making any.

        Raises:
            ConfigError: a network is larger than any computer can have.
        """
        with torch.device("meta"):
            try:
                networks = [network.bare() for network in cls.networks(setup).values()]
            except (RuntimeError, TypeError) as error:
                raise ConfigError(
                    f"method = {setup.config.method!r}: what it has beside the model cannot be made"
                ) from error
        sizes: list[int] = [tensor.numel() for network in networks for tensor in network.state_dict().values()]
        return sum(sizes) + cls.made_values(setup)

    @classmethod
    def made_values(cls, setup: Setup) -> int:
        """Return how many values a client has at once, at most, of what it makes with the networks; 0: next to none."""
        return 0

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return what a client sends after training: the shared part of the model and of the other networks."""
        return setup.tensors(cls.shares) | cls.shared_networks(setup)

    @classmethod
    def downlink(cls, setup: Setup) -> Specs:
        """Return what a client may receive, for training or evaluation: what it sends.

        ``<number>.<name>`` may come wherever ``<name>`` may: a peer's tensor.
        """
        return cls.uplink(setup)

    @classmethod
    def shared_networks(cls, setup: Setup) -> dict[str, TensorSpec]:
        """Return what the tensors of the shared networks look like."""
        specs: dict[str, TensorSpec] = {}
        for name, network in cls.networks(setup).items():
            if network.shared:
                module = network.bare()
                specs |= specs_of(module, tensor_names(module, "model", setup.config.batch_norm), f"{name}.")
        return specs

    @classmethod
    def read_parameters(cls, method: str, values: dict[str, Any]) -> Any:
        """Return the method's own parameters from a run config; None if it has none.

        Raises:
            ConfigError: a key is missing or has a value that cannot be used.
        """
        return read_keys(cls.Parameters, values, f"{method}.") if cls.Parameters else None


def specs_of(module: nn.Module, names: list[str], prefix: str = "") -> dict[str, TensorSpec]:
    """Return what tensors of a module look like, by ``prefix`` and name."""
    tensors = module.state_dict()
    return {
        prefix + name: TensorSpec(
            tuple(tensors[name].shape), _dtype(tensors[name]), negative=not name.endswith("running_var")
        )
        for name in names
    }


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
