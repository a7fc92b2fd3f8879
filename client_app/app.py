"""The ClientApp, the only bridge between Flower's messages and a method's NumPyClient."""

import logging
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import save_file

from client_app.client import MODEL, ClientSetting, FloretClient
from client_app.runtime import device_of, enter_app_folder, use_threads
from client_app.state import ClientState, ContextStore, FileStore, Moment, Store, identity
from common.config import RunConfig, read_keys
from common.errors import FloretError, one_line
from common.flower import in_simulation
from common.home import floret_home
from common.registry import load_class
from common.wire import from_record, to_record
from data import ClientData, load_client, load_own

enter_app_folder()
app = ClientApp()
log = logging.getLogger("flwr")

Handler = Callable[[Message, Context], RecordDict]


def answer(handler: Handler) -> Callable[[Message, Context], Message]:
    """Turn what ``handler`` returns or raises into the reply; an error goes to the server as one line."""

    def handle(message: Message, context: Context) -> Message:
        try:
            content = handler(message, context)
        except FloretError as error:
            log.error("Client %s: %s", client_name(context), error)
            content = RecordDict({"error": ConfigRecord({"reason": str(error)})})
        except Exception as error:  # whatever fails here must reach the server as a reason, not as silence
            log.exception("Client %s failed", client_name(context))
            content = RecordDict({"error": ConfigRecord({"reason": f"{type(error).__name__}: {one_line(error)}"})})
        return Message(content, reply_to=message)

    return handle


def client_name(context: Context) -> str:
    """Return the client's name: ``client-name`` of the node config, or its partition id in simulation."""
    return str(context.node_config.get("client-name", context.node_config.get("partition-id", "unnamed")))


def node_config(context: Context) -> RunConfig:
    """Return the run config as it holds on this node, whose own ``device`` and ``data-dir`` go first."""
    config, node = read_keys(RunConfig, context.run_config), context.node_config
    return replace(
        config,
        device=str(node.get("device", config.device)),
        data_dir=str(node.get("data-dir", config.data_dir)),
    )


def client_data(context: Context, config: RunConfig) -> ClientData:
    """Return this client's data: its partition of the run's dataset, or what is in its own ``data-dir``.

    Raises:
        FloretError: the node config names neither.
    """
    node = context.node_config
    if "partition-id" in node and "num-partitions" in node:
        return load_client(config, int(node["partition-id"]), int(node["num-partitions"]))
    if "data-dir" in node:
        cache = state_dir(context) / ".cache" / client_name(context)
        return load_own(Path(config.data_dir).expanduser(), config, client_name(context), cache)
    raise FloretError("the node config names no data: it needs data-dir, or partition-id and num-partitions")


def state_dir(context: Context) -> Path:
    """Return the directory in which this node keeps the states of clients."""
    return Path(str(context.node_config.get("state-dir", floret_home() / "state"))).expanduser()


def client_store(context: Context, config: RunConfig, directory: str = "") -> Store:
    """Return where this client's state is kept.

    In simulation that is the ``directory`` which the server names, in its run directory, or without one
    ``context.state``. A node goes by its own config alone.

    Raises:
        FloretError: the run directory is that of another machine of a Ray cluster.
    """
    if not in_simulation():
        root, sync = state_dir(context), True
    elif directory:
        root, sync = Path(directory), False
        if not root.parent.is_dir():
            raise FloretError(
                f"{root.parent} is not on {platform.node()}: several machines need output-dir on a disk that all "
                "of them share, or checkpoint-every = 0"
            )
    else:
        return ContextStore(context.state)
    return FileStore.at(root, config.federation, config.method, client_name(context), sync=sync)


def build_client(context: Context, message: Message | None = None) -> FloretClient:
    """Return the method's client with this node's data, and its state at the moment of ``message`` (newest without)."""
    config = node_config(context)
    use_threads(config)
    said: Mapping[str, Any] = message.content.config_records["config"] if message else {}
    over = message is not None and message.metadata.message_type == MessageType.EVALUATE
    store = client_store(context, config, str(said.get("session.directory", "")))
    setting = ClientSetting(
        name=client_name(context),
        config=config,
        data=client_data(context, config),
        state=ClientState(store, Moment.of(said, config, over=over) if message else None),
        device=device_of(config.device),
    )
    return load_class("client_app.methods", config.method, FloretClient)(setting)


@contextmanager
def claimed_client(message: Message, context: Context) -> Iterator[FloretClient]:
    """Give the client for one message, while no other process can have its state."""
    directory = str(message.content.config_records["config"]["session.directory"])
    store = client_store(context, node_config(context), directory)
    with store.claim() if isinstance(store, FileStore) else nullcontext():
        client = build_client(context, message)
        yield client
        for note in client.setting.state.notes:
            log.warning("Client %s: %s", client_name(context), note)


def notes_of(client: FloretClient) -> dict[str, ConfigRecord]:
    """Return the record that tells the server what was found damaged, if anything was."""
    notes = client.setting.state.notes
    return {"notes": ConfigRecord({"lines": notes})} if notes else {}


def arguments(message: Message) -> tuple[list[Any], dict[str, Any]]:
    """Return the message as NumPyClient takes it: a list of arrays, and a config with their ``names``."""
    arrays = from_record(message.content.array_records["arrays"])
    return list(arrays.values()), dict(message.content.config_records["config"]) | {"names": list(arrays)}


@app.train()
@answer
def train(message: Message, context: Context) -> RecordDict:
    """Run one round of local training."""
    with claimed_client(message, context) as client:
        arrays, samples, metrics = client.fit(*arguments(message))
    names = metrics.pop("names")
    return RecordDict(
        {
            "arrays": to_record(dict(zip(names, arrays, strict=True))),
            "metrics": MetricRecord(metrics | {"num-examples": samples}),
            **notes_of(client),
        }
    )


@app.evaluate()
@answer
def evaluate(message: Message, context: Context) -> RecordDict:
    """Measure the personal model as it is."""
    with claimed_client(message, context) as client:
        loss, samples, metrics = client.evaluate(*arguments(message))
    return RecordDict({"metrics": MetricRecord(metrics | {"loss": loss, "num-examples": samples}), **notes_of(client)})


@app.query("plan")
@answer
def plan(message: Message, context: Context) -> RecordDict:
    """Answer what the method's server half asks before a round."""
    with claimed_client(message, context) as client:
        return RecordDict({"plan": ConfigRecord(client.plan(*arguments(message)))})


@app.query("describe")
@answer
def describe(message: Message, context: Context) -> RecordDict:
    """Say who this client is and how much data it has; no label and no sample is in the answer.

    ``identity`` is a random text that stays with the node's state directory: it tells a client that was started again
    from another one that goes by the same name.
    """
    data = client_data(context, node_config(context))
    return RecordDict(
        {
            "client": ConfigRecord(
                {
                    "name": client_name(context),
                    "identity": "" if in_simulation() else identity(state_dir(context)),
                    "train": len(data.train),
                    "validation": len(data.validation),
                    "test": len(data.test),
                    "num-classes": data.num_classes,
                    "input-shape": list(data.input_shape),
                    "class-names": list(data.class_names),
                    "partitions": int(context.node_config.get("num-partitions", 0)),
                }
            )
        }
    )


@app.query("export")
@answer
def export(message: Message, context: Context) -> RecordDict:
    """Write the personal model to the run directory, in simulation only: there it is the user's own machine.

    The file holds the model's tensors under their own names, as safetensors. On another machine of a Ray cluster that
    does not have the run directory, the model travels back instead.
    """
    if not in_simulation():
        raise FloretError("a personal model is exported in simulation only; on a node it stays in the node's state")
    said = message.content.config_records["config"]
    store = client_store(context, node_config(context), str(said["session.directory"]))
    tensors = ClientState(store).load()
    # The run is over, so nothing earlier is asked for any more.
    store.keep(store.versions([])[:1])
    model = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    folder, name = Path(str(said["directory"])), f"{client_name(context)}.safetensors"
    content = RecordDict({"client": ConfigRecord({"file": name if model else ""})})
    if model and folder.is_dir():
        save_file(model, folder / name)
    elif model:
        content["model"] = to_record({name: tensor.numpy() for name, tensor in model.items()})
    return content
