"""How a client trains on its own data: batches, steps, optimizers, teachers, and the same by noised gradients."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch program gives it
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from client_app.batches import Batch, batch_of, epoch, passes, take
from client_app.protection import Protection
from client_app.runtime import training_type
from client_app.setting import ClientSetting
from common.prototypes import class_means, stack
from common.seeds import torch_generator
from common.sgd import Sgd
from data import Split
from models import SplitModel, Stack
from strategies.core import Setup

# How much of a teacher's answers a client keeps in memory during a round.
TEACHER_BYTES = 256 * 2**20

Loss = Callable[[Batch], Tensor]
# From a batch to the loss of each of its samples, (batch,).
Losses = Callable[[Batch], Tensor]
Step = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Phase:
    """What one optimizer does on every batch: a step of ``parameters`` along the gradient of ``loss``.

    Attributes:
        parameters: what is trained; everything else is frozen meanwhile.
        loss: from a batch to a scalar; not asked where examples are protected, but ``losses``.
        lr, momentum, weight_decay: of this optimizer; None for those of the round.
        after_step: called after each step, for a mask or a projection of the weights.
    """

    parameters: Sequence[nn.Parameter]
    loss: Loss
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    after_step: Callable[[], None] | None = None


class LocalTraining:
    """What a client trains during one message, and how.

    Attributes:
        config: of the run.
        device: where it computes.
        data: the client's splits, on ``device``.
        setup: what the server half knows, too.
        model: the client's model, on ``device``.
        networks: those beside the model, by name, on ``device``.
        message: the scalars of this round's message.
        order: draws the order of the batches.
        protection: what is private about the message; None if nothing is protected.
    """

    setup: Setup
    model: SplitModel
    order: torch.Generator

    def __init__(self, setting: ClientSetting) -> None:
        self.setting = setting
        self.config = setting.config
        self.device = setting.device
        self._type = training_type(setting.config.precision, setting.device)
        self.networks: dict[str, nn.Module] = {}
        self.message: dict[str, Any] = {}
        self.protection: Protection | None = None
        data = setting.data
        self.data = replace(
            data, train=self._placed(data.train), validation=self._placed(data.validation), test=self._placed(data.test)
        )

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of one training batch: cross entropy."""
        return F.cross_entropy(self.model.head(self.stages(batch)[0]), batch.y)

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each sample of a batch, (batch,), of which ``loss`` without ``penalty`` is the mean.

        Only a method that can protect examples needs it: each loss depends on that sample alone.
        """
        return F.cross_entropy(self.model.head(self.stages(batch)[0]), batch.y, reduction="none")

    def penalty(self) -> Tensor | None:
        """Return what ``loss`` adds to the mean of ``losses`` whatever the batch: a function of the weights alone."""
        return None

    def run_epochs(
        self,
        epochs: int,
        parameters: Iterable[nn.Parameter],
        loss: Loss | None = None,
        *,
        losses: Losses | None = None,
        leaves: bool = True,
    ) -> float:
        """Go ``epochs`` times through the training data with a fresh SGD over ``parameters``; the rest stays frozen.

        Args:
            epochs: passes through the training split.
            parameters: what is trained.
            loss: from a batch to a scalar; ``self.loss`` by default.
            losses, leaves: as in ``run_alternating``.

        Returns:
            The mean of the loss over all steps.
        """
        phases = [Phase(list(parameters), loss or self.loss)]
        return self.run_alternating(epochs, phases, losses=losses, leaves=leaves)

    def run_alternating(
        self, epochs: int, phases: Sequence[Phase], *, losses: Losses | None = None, leaves: bool = True
    ) -> float:
        """Go ``epochs`` times through the training data; on each batch take one step of every phase, in order.

        Each phase has its own SGD over its own parameters, and while it steps, everything else is frozen. The extractor
        may be trained in the last phase only: it is asked once about a batch, and all phases get its answer.

        Args:
            epochs: passes through the training split.
            phases: what is done on each batch.
            losses: as the method of this name, by default that; for where examples are protected.
            leaves: what is trained leaves this client, or what does is trained with it. Without, it is trained as ever
                where examples are protected.

        Returns:
            The mean of the last phase's loss over all batches.
        """
        optimizers = [
            self.optimizer(phase.parameters, lr=phase.lr, momentum=phase.momentum, weight_decay=phase.weight_decay)
            for phase in phases
        ]
        trained = {parameter for phase in phases for parameter in phase.parameters}
        everything = trained.union(*(module.parameters() for module in (self.model, *self.networks.values())))
        thaws = [partial(_thaw, phase.parameters, everything.difference(phase.parameters)) for phase in phases]
        if leaves and self.trains_examples:
            return self._run_protected(epochs, phases, optimizers, thaws, losses or self.losses)
        thaws[-1]()

        def step(batch: Batch) -> Tensor:
            parts = self._parts(batch, len(phases))
            for thaw, part, phase, optimizer in zip(thaws, parts, phases, optimizers, strict=True):
                if len(phases) > 1:
                    thaw()
                optimizer.zero_grad()
                with self.autocast():
                    value = phase.loss(part)
                value.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if phase.after_step:
                    phase.after_step()
            return value

        return self.run_steps(epochs, step)

    def run_steps(self, epochs: int, step: Step) -> float:
        """Go ``epochs`` times through the training data and call ``step`` with each batch, which trains on it.

        Returns:
            The mean over all batches of the scalar that ``step`` returns; 0 without any.
        """
        for module in (self.model, *self.networks.values()):
            module.train()
        # Summed on the device, so that no step waits for the host.
        total, batches = torch.zeros((), device=self.device), 0
        for _ in range(epochs):
            for batch in self.training_batches():
                total += step(batch).detach()
                batches += 1
        return float(total) / max(batches, 1)

    def optimizer(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
    ) -> Sgd:
        """Return a fresh SGD over ``parameters``, with the round's rates where none are given."""
        return Sgd(
            list(parameters),
            lr=self.lr if lr is None else lr,
            momentum=self.config.momentum if momentum is None else momentum,
            weight_decay=self.config.weight_decay if weight_decay is None else weight_decay,
        )

    @property
    def lr(self) -> float:
        """The learning rate of this round."""
        return self.config.decayed(self.config.lr, self.message["round"])

    def autocast(self) -> torch.autocast:
        """Return a context in which networks compute as ``precision`` says; their outputs and all losses are float32.

        For training only, not for what is measured or served; weights must not change while it lasts.
        """
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._type == torch.bfloat16)

    def stages(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return the extractor's output for a batch, and the feature maps of its stages."""
        return batch.stages or self.model.extractor.stages(batch.x)

    def generator(self, purpose: str) -> torch.Generator:
        """Return a generator of this client, round and ``purpose``; what is drawn from it leaves the batches' order.

        By a node's own seed it is one of the run and of what divides samples, too: with the same order twice, batches
        that differ in one sample would show it.
        """
        of = (purpose, self.setting.name, self.message["round"])
        if self.setting.seed is None:
            return torch_generator(self.config.seed, *of)
        division = (self.message.get("session.lineage", ""), self.config.batch_size, repr(self.setting.parameters))
        return torch_generator(self.setting.seed, *of, *division)

    @contextmanager
    def still_statistics(self) -> Iterator[None]:
        """While it lasts, batch normalisation takes each batch's statistics and leaves the running ones as they are.

        For what a method computes beside the steps of its training, such as a gradient elsewhere.
        """
        layers = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
        for layer in layers:
            layer.track_running_stats = False
        try:
            yield
        finally:
            for layer in layers:
                layer.track_running_stats = True

    def on_batches(self) -> tuple[nn.Module, ...]:
        """Return the networks that are asked about training batches: with batch normalisation, none of one sample."""
        return (self.model, *self.networks.values())

    def training_batches(self) -> Iterable[Batch]:
        """Return the batches of one epoch, in the next order of this client and round."""
        trained = (module for network in self.on_batches() for module in network.modules())
        # Batch normalisation cannot learn from one sample.
        least = max(self.fewest, 2 if any(isinstance(module, _BatchNorm) for module in trained) else 1)
        return epoch(self.data.train, self.config.batch_size, self.order, least=least)

    @property
    def fewest(self) -> int:
        """How many samples a batch has at least, if there are so many: a step could be all of an update.

        One in a run whose noise the node adds, as with ``rare``.
        """
        covered = self.config.privacy.on and not self.config.privacy.by_server
        return 1 if covered else self.setting.min_batch_size

    def frozen_extractor(self) -> Stack:
        """Return a copy of the extractor as it is now, in evaluation mode and without gradients."""
        frozen = copy.deepcopy(self.model.extractor).eval()
        return frozen.requires_grad_(False)

    def training_features(self, extractor: nn.Module) -> Tensor:
        """Return the outputs of ``extractor`` for the training data in order, (samples, d), without gradients."""
        extractor.eval()
        with torch.no_grad(), self.autocast():
            return torch.cat([extractor(batch.x).flatten(1) for batch in passes(self.data.train)])

    def cached_teacher(
        self, teacher: Callable[[Tensor], list[Tensor]], *, leaves: bool = True
    ) -> Callable[[Batch], list[Tensor]]:
        """Return a function from a training batch to what a frozen ``teacher`` answers for it, without gradients.

        Training data do not change during a round, so with several epochs the teacher is asked once about all of them
        if its answers fit into ``TEACHER_BYTES``; else about every batch.

        Where examples are protected it is asked about every batch, as the student is: an answer from another batch may
        differ in its last bits, by how many examples there are, and a server may make much of the difference.

        Args:
            teacher: from normalised inputs to tensors, the samples along the first dimension of each.
            leaves: what is trained on the answers leaves the client.
        """
        train = self.data.train
        once = self.config.local_epochs > 1 and not (leaves and self.trains_examples)
        with torch.no_grad(), self.autocast():
            answers = (teacher(batch.x) for batch in passes(train)) if once else iter(())
            first = next(answers, None)
            if first and len(train) and sum(part.nbytes / len(part) for part in first) * len(train) <= TEACHER_BYTES:
                cached = [torch.cat(parts) for parts in zip(first, *answers, strict=True)]
                return lambda batch: [take(tensor, batch.index) for tensor in cached]
        return torch.no_grad()(lambda batch: teacher(batch.x))

    def local_prototypes(self) -> dict[str, Tensor]:
        """Return the mean feature of each class of the training data under the extractor as it is, by name."""
        return class_means(self.training_features(self.model.extractor), self.data.train.y)

    def known_prototypes(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the prototypes among ``tensors`` as in ``prototypes.stack``, for this model's classes and features."""
        return stack(tensors, self.setup.classes, self.setup.features, self.device)

    def targets(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the known prototypes that a loss may draw features to; the server may have made them up.

        Those of ``rare`` classes are left out: a term with a large weight would be all of the update, and tell of them.
        """
        prototypes, known = self.known_prototypes(tensors)
        return prototypes, known & ~self.rare()

    def rare(self) -> Tensor:
        """Return which classes, (classes,), have training samples, but fewer than the node's policy demands of one.

        None in a protected run: noise covers them, and what others' gradients are must not depend on an example.
        """
        counts = self.data.train.y.bincount(minlength=self.setup.classes)
        least = 1 if self.config.privacy.on else self.setting.min_class_samples
        return (counts > 0) & (counts < least)

    @property
    def trains_examples(self) -> bool:
        """Whether single examples are protected: what leaves is trained on clipped and noised gradients."""
        return self.protection is not None and self.config.privacy.unit == "example"

    def _run_protected(
        self,
        epochs: int,
        phases: Sequence[Phase],
        optimizers: Sequence[Sgd],
        thaws: Sequence[Callable[[], None]],
        losses: Losses,
    ) -> float:
        """Do what ``run_alternating`` does by clipped and noised gradients; each phase is a release of its own."""
        from client_app.clipping import clipping

        assert self.protection is not None
        for module in (self.model, *self.networks.values()):
            module.train()
        total, samples = 0.0, 0
        for _ in range(epochs):
            batches = zip(*(self.protection.batches(len(self.data.train)) for _ in phases), strict=True)
            for drawn in batches:
                for index, phase, optimizer, thaw in zip(drawn, phases, optimizers, thaws, strict=True):
                    thaw()
                    optimizer.zero_grad()
                    batch = batch_of(self.data.train, torch.from_numpy(index).to(self.device))
                    exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
                    with exact, clipping(self.model, self.config.privacy.clip) as clipper:
                        value = clipper.sum_gradients(phase.parameters, losses, batch)
                    self._add_noise(phase.parameters)
                    optimizer.step()
                    if phase.after_step:
                        phase.after_step()
                total, samples = total + value, samples + len(index)
        return total / max(samples, 1)

    def _add_noise(self, parameters: Sequence[nn.Parameter]) -> None:
        """Turn sums of clipped gradients into noised means, and add the gradient of the penalty."""
        assert self.protection is not None
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad = self.protection.noised(parameter.grad)
        penalty = self.penalty()
        if penalty is not None:
            for parameter, gradient in zip(parameters, torch.autograd.grad(penalty, list(parameters)), strict=True):
                assert parameter.grad is not None
                parameter.grad += gradient

    def _placed(self, split: Split) -> Split:
        layout = torch.channels_last if split.x.dim() == 4 else torch.preserve_format
        return Split(split.x.to(self.device, memory_format=layout), split.y.to(self.device))

    def _parts(self, batch: Batch, phases: int) -> list[Batch]:
        """Return the batch as each phase gets it: with the extractor's answer, whose graph only the last phase gets."""
        if phases == 1:
            return [batch]
        with self.autocast():
            output, maps = self.model.extractor.stages(batch.x)
        detached = replace(batch, stages=(output.detach(), [m.detach() for m in maps]))
        return [*[detached] * (phases - 1), replace(batch, stages=(output, maps))]


def _thaw(parameters: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> None:
    for frozen in others:
        frozen.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
