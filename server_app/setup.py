"""Build a run's strategy and model from its config, and check them: on the server, and by ``floret`` before a run."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

import data
from common.config import RunConfig
from common.errors import ConfigError
from common.privacy.calibration import check_first_round
from common.seeds import torch_generator
from models import batch_norm_names, build_model, count_values, head_layers
from results.rundir import check_writable, place_to_resume
from server_app.checkpoint import Checkpoints
from server_app.federation import LARGEST_MODEL
from server_app.settings import check_resumable, check_rounds_left
from strategies.core import FloretStrategy, Roster, Session, Setup, StrategySetting, aggregate_of


def build_strategy(
    config: RunConfig,
    kind: type[FloretStrategy],
    parameters: Any,
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    roster: Roster,
    session: Session,
    initialised: bool = True,
) -> FloretStrategy:
    """Return the method's server half with the initial model.

    Args:
        config, kind, parameters: as ``read_config`` returns them.
        input_shape: of one sample.
        num_classes: width of the model's last layer.
        roster, session: of the run.
        initialised: give the model its initial weights; a check needs none.

    Raises:
        ConfigError: there is one class, the model cannot take such inputs or be split so, or the method does not work
            with it.
    """
    if num_classes < 2:
        raise ConfigError(
            "num-classes = 1: all samples have label 0, and there is nothing to learn; at least 2 classes are needed"
        )
    cut = config.head_layers or head_layers(config.model, input_shape, kind.head)
    generator = torch_generator(config.seed, "model") if initialised else None
    model = build_model(config.model, input_shape, num_classes, cut, generator)
    setup = Setup(config, parameters, model, cut, input_shape)
    return kind(
        StrategySetting(
            setup, roster, session, aggregate=aggregate_of(config.aggregation, config.trim, session.run_directory)
        )
    )


def check_setup(config: RunConfig, kind: type[FloretStrategy], parameters: Any, clients: int | None) -> list[str]:
    """Check everything that needs no clients: data, partition, model, method, privacy, that there is a run to resume.

    Args:
        config, kind, parameters: as ``read_config`` returns them.
        clients: how many a simulation on this machine has; None for real nodes, whose data are not here.

    Returns:
        What may be meant and is probably a mistake, a line each.

    Raises:
        FloretError: one line that names the key or the file, and what would be right.
    """
    data.check(config, files=clients is not None)
    # Whoever starts a run of nodes that add the noise themselves need not have what computes its costs.
    if config.privacy.unit == "client" and find_spec("opacus"):
        check_first_round(config)
    if clients is None:
        config.check_classes_are_given()
        return []
    if config.resume:
        place_to_resume(config)
    for key, value in (("min-clients", config.min_clients), ("min-replies", config.min_replies)):
        if value > clients:
            raise ConfigError(f"{key} = {value}: must be at most {clients}, the number of clients")
    outline = data.outline(config, clients)
    shape, classes = outline.input_shape, outline.num_classes
    _check_size(config, kind, parameters, shape, classes)
    roster, session = Roster(), Session("")
    strategy = build_strategy(
        config, kind, parameters, shape, classes, roster=roster, session=session, initialised=False
    )
    return _doubts(config, strategy, outline)


def _doubts(config: RunConfig, strategy: FloretStrategy, outline: data.Outline) -> list[str]:
    """Return what of a simulation's data and model is probably a mistake, a line each."""
    doubts = []
    if config.data_dir and config.dataset == "digits":
        doubts.append(
            f"data-dir = {config.data_dir}: is not read, since dataset = 'digits' has no files of yours; for your own "
            "data set dataset to 'npz', 'npz-clients' or 'image-folder'"
        )
    if outline.absent:
        first, classes = outline.absent[0], outline.num_classes
        others = f" ({len(outline.absent)} such labels)" if len(outline.absent) > 1 else ""
        doubts.append(
            f"data-dir = {config.data_dir}: no training sample has label {first}{others}; labels are class numbers "
            f"from 0, with {classes - 1} the largest of {classes} classes; if so many are meant, set num-classes"
        )
    if strategy.shares == "model-without-batch-norm" and not batch_norm_names(strategy.model):
        doubts.append(
            f"method = {config.method!r}: model = {config.model!r} has no batch normalisation to keep, so that the "
            "whole model is shared, as with fedavg"
        )
    return doubts


def check_directory(config: RunConfig, values: Mapping[str, Any]) -> None:
    """Check that a simulation on this machine can write its directory, or go on from the one that it resumes.

    Raises:
        FloretError: it cannot.
    """
    if not config.resume:
        check_writable(config)
        return
    run = place_to_resume(config)
    check_resumable(run, values)
    check_rounds_left(run, config.rounds, Checkpoints(run / "checkpoints").newest())


def _check_size(
    config: RunConfig, kind: type[FloretStrategy], parameters: Any, shape: tuple[int, ...], classes: int
) -> None:
    """Refuse a model, and networks beside it, as large as no client may join with, before any of it is made."""
    values = count_values(config.model, shape, classes)
    if values <= LARGEST_MODEL:
        cut = config.head_layers or head_layers(config.model, shape, kind.head)
        with torch.device("meta"):
            model = build_model(config.model, shape, classes, cut, None)
        values += kind.values_beside(Setup(config, parameters, model, cut, shape))
    if values > LARGEST_MODEL:
        raise ConfigError(
            f"model = {config.model!r}, method = {config.method!r}: with inputs of {shape} and {classes} classes the "
            f"model and what the method has beside it have {values} values; at most {LARGEST_MODEL} are possible"
        )
