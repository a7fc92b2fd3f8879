"""The ClientApp, the only bridge between Flower's messages and a method's NumPyClient."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import save_file

from client_app.client import MODEL, ClientSetting, FloretClient
from client_app.runtime import device_of, enter_app_folder, in_simulation, use_threads
from client_app.state import ClientState
from common.config import RunConfig, read_keys
from common.errors import FloretError, one_line
from common.registry import load_class
from common.wire import from_record, to_record
from data import ClientData, load_client

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


def client_data(context: Context, config: RunConfig) -> ClientData:
    """Return the data of this client's partition.

    Raises:
        FloretError: the node config names no partition.
    """
    node = context.node_config
    if "partition-id" not in node or "num-partitions" not in node:
        raise FloretError("the node config names no data: it needs partition-id and num-partitions")
    return load_client(config, int(node["partition-id"]), int(node["num-partitions"]))


def build_client(context: Context) -> FloretClient:
    """Return the method's client with this node's data and state."""
    config = read_keys(RunConfig, context.run_config)
    use_threads(config)
    setting = ClientSetting(
        name=client_name(context),
        config=config,
        data=client_data(context, config),
        state=ClientState(context.state),
        device=device_of(config),
    )
    return load_class("client_app.methods", config.method, FloretClient)(setting)


def arguments(message: Message) -> tuple[list[Any], dict[str, Any]]:
    """Return the message as NumPyClient takes it: a list of arrays, and a config with their ``names``."""
    arrays = from_record(message.content.array_records["arrays"])
    return list(arrays.values()), dict(message.content.config_records["config"]) | {"names": list(arrays)}


@app.train()
@answer
def train(message: Message, context: Context) -> RecordDict:
    """Run one round of local training."""
    arrays, samples, metrics = build_client(context).fit(*arguments(message))
    names = metrics.pop("names")
    return RecordDict(
        {
            "arrays": to_record(dict(zip(names, arrays, strict=True))),
            "metrics": MetricRecord(metrics | {"num-examples": samples}),
        }
    )


@app.evaluate()
@answer
def evaluate(message: Message, context: Context) -> RecordDict:
    """Measure the personal model as it is."""
    loss, samples, metrics = build_client(context).evaluate(*arguments(message))
    return RecordDict({"metrics": MetricRecord(metrics | {"loss": loss, "num-examples": samples})})


@app.query("plan")
@answer
def plan(message: Message, context: Context) -> RecordDict:
    """Answer what the method's server half asks before a round."""
    return RecordDict({"plan": ConfigRecord(build_client(context).plan(*arguments(message)))})


@app.query("describe")
@answer
def describe(message: Message, context: Context) -> RecordDict:
    """Say who this client is and how much data it has; no label and no sample is in the answer."""
    data = client_data(context, read_keys(RunConfig, context.run_config))
    return RecordDict(
        {
            "client": ConfigRecord(
                {
                    "name": client_name(context),
                    "train": len(data.train),
                    "validation": len(data.validation),
                    "test": len(data.test),
                    "num-classes": data.num_classes,
                    "input-shape": list(data.input_shape),
                    "partitions": int(context.node_config.get("num-partitions", 0)),
                }
            )
        }
    )


@app.query("export")
@answer
def export(message: Message, context: Context) -> RecordDict:
    """Write the personal model to the run directory, in simulation only: there it is the user's own machine.

    The file holds the model's tensors under their own names, as safetensors; nothing travels back but its name.
    """
    if not in_simulation():
        raise FloretError("a personal model is exported in simulation only; on a node it stays in the node's state")
    tensors = ClientState(context.state).load()
    model = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    name = f"{client_name(context)}.safetensors"
    if model:
        save_file(model, Path(str(message.content.config_records["config"]["directory"])) / name)
    return RecordDict({"client": ConfigRecord({"file": name if model else ""})})
