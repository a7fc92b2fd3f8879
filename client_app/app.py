"""The ClientApp, the only bridge between Flower's messages and a method's NumPyClient."""

import logging
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import save

from client_app.audit import Audit
from client_app.client import MEMORY, MODEL, FloretClient
from client_app.keeping import Quota
from client_app.node_config import names_partition, partition_of
from client_app.policy import Outgoing, Policy, PolicyError
from client_app.protection import Budget, account_on_node, pay_in_advance, within
from client_app.runtime import device_of, enter_app_folder, use_threads
from client_app.setting import ClientSetting, Resident
from client_app.state import ClientState, ContextStore, FileStore, RoundContext, Store, identity, own_seed
from common.accuracies import EXACT
from common.config import RunConfig, one_of, read_keys
from common.durable import write_whole
from common.errors import ConfigError, DataError, FloretError, one_line, printable
from common.filters import ClientFilters
from common.home import states_folder
from common.names import without_prefix
from common.privacy.calibration import drawn_in_secret
from common.privacy.ledger import Ledger, note_unprotected
from common.registry import load_class
from common.simulation import in_local_engine, in_simulation
from common.wire import find_record, pack, to_record
from data import ClientData, Cut, load_client, load_own
from models import check_inputs
from strategies import METHODS
from strategies.core import FloretStrategy, Method

enter_app_folder()
app = ClientApp()
log = logging.getLogger("flwr")

# What the server is told of an error that may tell of a client's own data.
_HIDDEN = "the client failed; its own log says why"
Handler = Callable[["Request"], RecordDict]
# What a process of the local engine keeps from client to client.
_resident = Resident()
# The run config that was read last, by what it was read from: in a simulation every message brings the same.
_read: dict[str, RunConfig] = {}


def _run_config(values: Mapping[str, Any]) -> RunConfig:
    said = repr(values)
    if said not in _read:
        config = read_keys(RunConfig, values)
        _read.clear()
        _read[said] = config
    return _read[said]


class Request:
    """A message to this node with what it takes to answer it; everything is made once, when it is first needed.

    Args:
        context: Flower's; the run config, the node config, and the state of a simulated client.
        message: None to use the node without a server.
    """

    def __init__(self, context: Context, message: Message | None = None) -> None:
        self.context = context
        self.message = message

    @property
    def name(self) -> str:
        """The client's name: ``client-name`` of the node config, or its partition id in simulation."""
        node = self.context.node_config
        return str(node.get("client-name", node.get("partition-id", "unnamed")))

    def hides(self, error: Exception) -> bool:
        """Return whether what went wrong stays on the node: it may quote a label or a path of the client's own data.

        The text of an error that nobody expects is that of PyTorch or NumPy, and may quote anything.
        """
        protected = str(self.context.run_config.get("privacy.unit", "none")) != "none"
        own = not in_simulation() and (protected or not names_partition(self.context.node_config))
        return own and (isinstance(error, DataError) or not isinstance(error, FloretError))

    @cached_property
    def config(self) -> RunConfig:
        """The run config as it holds on this node, whose own ``device`` and ``data-dir`` go before the run's.

        Raises:
            ConfigError: a key is not what it must be, or the method is none; before anything is made in its name.
        """
        config, node = _run_config(self.context.run_config), self.context.node_config
        wrong = one_of(config.method, METHODS)
        if wrong:
            raise ConfigError(f"method = {config.method!r:.60}: {wrong}")
        # Only in a simulation may a run config say what is read: there the machine is the user's own.
        named = config.data_dir if self.policy is None else ""
        return replace(config, device=str(node.get("device", config.device)), data_dir=str(node.get("data-dir", named)))

    @cached_property
    def method(self) -> type[Method]:
        """What the client half of the run's method shares with its server half."""
        return load_class("strategies", self.config.method, FloretStrategy)

    @cached_property
    def parameters(self) -> Any:
        """The method's own parameters.

        Raises:
            ConfigError: as of ``Method.read_parameters``.
        """
        return self.method.read_parameters(self.config.method, self.context.run_config)

    @cached_property
    def policy(self) -> Policy | None:
        """What this node permits; None in a simulation.

        Raises:
            ConfigError: the policy cannot be read; then nothing is permitted.
        """
        return None if in_simulation() else Policy.of(self.context.node_config)

    @cached_property
    def scalars(self) -> dict[str, Any]:
        """The scalars of the message; empty without one.

        Raises:
            FloretError: the message has none.
        """
        if self.message is None:
            return {}
        record = find_record(self.message.content, "config", ConfigRecord)
        if record is None:
            raise FloretError("the server's message has no config")
        return dict(record)

    @cached_property
    def data(self) -> ClientData:
        """This client's data: its partition of the run's dataset, or what is in its own ``data-dir``.

        Its own data are divided by the node's own seed and policy, never by what the run config says.

        Raises:
            FloretError: the node config names neither, or not the folder of the run's dataset.
        """
        node, config = self.context.node_config, self.config
        partition = partition_of(node)
        if partition:
            if self.policy and not config.data_dir and config.dataset != "digits":
                raise FloretError(
                    f"dataset = {config.dataset!r}: this node was started without --data-dir, the folder that has it; "
                    "it reads no other"
                )
            return load_client(config, *partition)
        if "data-dir" in node:
            cache, cut = self.state_dir / ".cache" / self.name, None
            if self.policy and self.own_seed is not None:
                # Which examples are left to train on must not depend on how many there are.
                part = 0.0 if self.protects else self.policy.validation_fraction
                cut = Cut(part, self.own_seed, self.name, self.policy.max_samples)
            folder = Path(config.data_dir).expanduser()
            own = load_own(folder, config, self.name, cache, cut, silent=self.protects)
            # Examples of other classes than the run has are passed over in silence.
            return within(own, config.num_classes) if self.protects else own
        raise FloretError("the node config names no data: it needs data-dir, or partition-id and num-partitions")

    @property
    def has_own_data(self) -> bool:
        """Whether this client's data are those of its ``data-dir``, not a partition of the run's dataset."""
        node = self.context.node_config
        return "data-dir" in node and not names_partition(node)

    @cached_property
    def own_seed(self) -> int | None:
        """The seed that divides and orders a node's own data; None for a partition of the run's, and in a simulation.

        Raises:
            FloretError: it cannot be kept.
        """
        partition = names_partition(self.context.node_config)
        return None if self.policy is None or partition else own_seed(self.state_dir)

    @property
    def state_dir(self) -> Path:
        """The directory in which this node keeps the states of clients."""
        return states_folder(str(self.context.node_config.get("state-dir", "")))

    @cached_property
    def store(self) -> Store:
        """Where this client's state is kept.

        In simulation that is the directory which the server names, in its run directory, or without one
        ``context.state``. A node goes by its own config alone.

        Raises:
            FloretError: the run directory is that of another machine of a Ray cluster.
        """
        directory = str(self.scalars.get("session.directory", ""))
        if not in_simulation():
            root, sync = self.state_dir, True
        elif directory:
            root, sync = Path(directory), False
            if not root.parent.is_dir():
                raise FloretError(
                    f"{root.parent} is not on {platform.node()}: several machines need output-dir on a disk that all "
                    "of them share, or checkpoint-every = 0"
                )
        else:
            return ContextStore(self.context.state)
        return FileStore.at(root, self.config.federation, self.config.method, self.name, sync=sync)

    @property
    def protects(self) -> bool:
        """Whether this node protects its data in this run; in a simulation they are the user's own."""
        return self.policy is not None and self.config.privacy.on

    @property
    def ledger(self) -> tuple[Ledger, Budget] | None:
        """What this client spends on privacy, and what its node permits; None if nothing is, and in a simulation."""
        return (Ledger.of(self.state_dir, self.name), self.policy.budget()) if self.policy and self.protects else None

    def filters(self) -> ClientFilters:
        """Return what the client's messages pass on this node, in both directions."""
        return ClientFilters(sends=(Outgoing(self.policy, self.data),)) if self.policy else ClientFilters()

    def check_policy(self, *, joins: bool = False) -> None:
        """Check that this node's policy permits the run, and a round of it unless the client only ``joins``.

        Raises:
            PolicyError: it does not; names the key.
        """
        policy = self.policy
        if policy is None:
            return
        policy.check_run(self.config, self.parameters)
        self.method.check_protects(self.config)
        self.config.check_classes_are_given()
        if self.has_own_data and not self.protects:
            # Also when it joins: it says how many examples it has. What is refused from here on tells of them, too.
            note_unprotected(self.state_dir, self.name)
        policy.check_disk(self.state_dir, self.config)
        shape = self.data.input_shape
        classes = self.data.num_classes if joins else self.scalars.get("num-classes")
        if type(classes) is not int:
            raise FloretError("the server's message has no num-classes, a whole number")
        found = policy.check_model(self.config, self.parameters, shape, classes)
        policy.check_data(self.config, self.data)
        policy.check_method(self.config.method, found.kinds)
        if not joins:
            said = self.scalars.get("head-layers")
            if self.protects:
                self._check_said(classes)
            elif classes < self.data.num_classes:
                raise FloretError(
                    f"the server's message has num-classes = {classes}, fewer than this client has classes"
                )
            if type(said) is not int or said != found.head_layers:
                raise FloretError(
                    f"the server's message has head-layers = {said!r:.40}; with this model and method it must be "
                    f"{found.head_layers}"
                )
            self._count_round()

    def pay_to_join(self) -> None:
        """Pay for a run whose server draws its clients in secret: of rounds without it a client does not hear, and
        that it was in none of them tells of it, too.

        Raises:
            FloretError: the message does not say of which run it is.
            BudgetError: it is more than this node permits.
        """
        if self.ledger and drawn_in_secret(self.config.privacy):
            RoundContext.of({**self.scalars, "round": 0}, self.config, over=True)  # refuses what is none of Floret's
            account = account_on_node(*self.ledger, self.config, self.scalars, 0)
            pay_in_advance(self.config, account, self._count_round)

    def _count_round(self) -> None:
        if self.policy:
            self.policy.check_day(Audit(self.state_dir, self.name).count_round())

    def _check_said(self, classes: int) -> None:
        """Check what a message to a protected client says against its run.

        Raises:
            FloretError: the model would have another number of classes, or the round is none of the run's.
        """
        if classes != self.config.num_classes:
            raise FloretError(f"the server's message has num-classes = {classes}, the run {self.config.num_classes}")
        at = RoundContext.of(self.scalars, self.config, over=False)
        first = (at.resumed[-1] if at.resumed else 0) + 1
        if not first <= at.round <= self.config.rounds:
            raise FloretError(
                f"the server's message has round = {at.round}; it must be from {first} to {self.config.rounds}"
            )

    def client(self) -> FloretClient:
        """Return the method's client with this node's data, and its state as of the message (newest without one)."""
        config = self.config
        use_threads(config)
        at = None
        if self.message is not None:
            over = self.message.metadata.message_type == MessageType.EVALUATE
            at = RoundContext.of(self.scalars, config, over=over)
        setting = ClientSetting(
            name=self.name,
            config=config,
            method=self.method,
            parameters=self.parameters,
            data=self.data,
            state=ClientState(self.store, at, None if in_simulation() else Quota.of(self.context.node_config)),
            device=device_of(config.device),
            filters=self.filters(),
            seed=self.own_seed,
            resident=_resident if in_local_engine() else None,
            ledger=self.ledger,
            **(self.policy.of_setting() if self.policy else {}),
        )
        return load_class("client_app.methods", config.method, FloretClient)(setting)

    def arguments(self, client: FloretClient) -> tuple[list[Any], dict[str, Any]]:
        """Bring ``client`` to where the message finds it, and return the message as NumPyClient takes it.

        Returns:
            The arrays, and a config with their ``names``.
        """
        assert self.message is not None
        client.begin(self.scalars)
        record = find_record(self.message.content, "arrays", ArrayRecord) or ArrayRecord()
        if self.policy:
            self.policy.check_received(record)
        arrays = client.unpacked(record)
        # Of the message there are only views, which nothing may write to.
        return [array.copy() for array in arrays.values()], {**self.scalars, "names": list(arrays)}

    @contextmanager
    def claimed_client(self) -> Iterator[FloretClient]:
        """Give the client, while no other process can have its state."""
        with self.store.claim() if isinstance(self.store, FileStore) else nullcontext():
            client = self.client()
            yield client
            for note in client.setting.state.notes:
                log.warning("Client %s: %s", self.name, note)


def answer(handler: Handler) -> Callable[[Message, Context], Message]:
    """Turn what ``handler`` returns or raises into the reply; an error goes to the server as one line."""

    def handle(message: Message, context: Context) -> Message:
        request = Request(context, message)
        try:
            content = handler(request)
        except FloretError as error:
            said = printable(str(error))
            log.error("Client %s: %s", request.name, said)
            content = _refusal(_HIDDEN if request.hides(error) else said)
        except Exception as error:  # whatever fails here must reach the server as a reason, not as silence
            log.exception("Client %s failed", request.name)
            content = _refusal(_HIDDEN if request.hides(error) else f"{type(error).__name__}: {one_line(error)}")
        return Message(_noted(request, content), reply_to=message)

    return handle


def _noted(request: Request, content: RecordDict) -> RecordDict:
    """Return what leaves, after a node has written it into its audit file; a refusal if it cannot."""
    if in_simulation():
        return content
    assert request.message is not None
    _without_paths(content, request)
    config = request.context.run_config
    about = {"client": request.name, "federation": config.get("federation"), "method": config.get("method")}
    try:
        Audit(request.state_dir, request.name).write(request.message, content, about)
    except FloretError as error:
        log.error("Client %s: %s", request.name, error)
        return _without_paths(_refusal(str(error)), request)
    return content


def _without_paths(content: RecordDict, request: Request) -> RecordDict:
    """Name what a node's command line names by its option where a text for the server would say where it is."""
    node = request.context.node_config
    named = {option: Path(str(node[option])).expanduser() for option in ("data-dir", "policy") if option in node}
    paths = {str(path): option for option, path in {**named, "state-dir": request.state_dir}.items()}
    for record, key in (("error", "reason"), ("notes", "lines")):
        if record in content:
            texts = content[record]
            assert isinstance(texts, ConfigRecord)
            said = texts[key]
            lines = [said] if isinstance(said, str) else [str(line) for line in cast(list[str], said)]
            for path in sorted(paths, key=len, reverse=True):
                # A relative one says nothing of where it is, nor does "/".
                if path.startswith("/") and path != "/":
                    lines = [line.replace(path, f"<{paths[path]}>") for line in lines]
            texts[key] = lines[0] if isinstance(said, str) else lines
    return content


def _refusal(reason: str) -> RecordDict:
    # A path in it may have bytes that are no text: as such they could not travel.
    reason = reason.encode("utf-8", "backslashreplace").decode("utf-8")
    return RecordDict({"error": ConfigRecord({"reason": reason})})


def notes_of(client: FloretClient) -> dict[str, ConfigRecord]:
    """Return the record that tells the server what was found damaged, if anything was."""
    notes = client.setting.state.notes
    return {"notes": ConfigRecord({"lines": notes})} if notes else {}


@app.train()
@answer
def train(request: Request) -> RecordDict:
    """Run one round of local training."""
    request.check_policy()
    with request.claimed_client() as client:
        arrays, samples, metrics = client.fit(*request.arguments(client))
        names = metrics.pop("names")
        packed = pack(dict(zip(names, arrays, strict=True)), client.uplink(), client.config.wire)
    return RecordDict(
        {"arrays": packed, "metrics": MetricRecord(metrics | {"num-examples": samples}), **notes_of(client)}
    )


@app.evaluate()
@answer
def evaluate(request: Request) -> RecordDict:
    """Measure the personal model as it is."""
    request.check_policy()
    with request.claimed_client() as client:
        _, samples, metrics = client.evaluate(*request.arguments(client))
    return RecordDict({"metrics": MetricRecord(metrics | {"num-examples": samples}), **notes_of(client)})


@app.query("plan")
@answer
def plan(request: Request) -> RecordDict:
    """Answer what the method's server half asks before a round."""
    request.check_policy()
    with request.claimed_client() as client:
        return RecordDict({"plan": ConfigRecord(client.answer(*request.arguments(client)))})


@app.query("describe")
@answer
def describe(request: Request) -> RecordDict:
    """Say who this client is and how much data it has; no label and no sample is in the answer.

    ``identity`` is a random text that stays with the node's state directory: it tells a client that was started again
    from another one that goes by the same name.
    """
    try:
        request.check_policy(joins=True)
    except PolicyError as error:
        raise PolicyError(f"client {request.name}: {error}") from error
    request.pay_to_join()
    data, policy = request.data, request.policy
    # A client that protects its data tells nothing of them: neither how many there are nor of which classes.
    tells = not request.protects
    if tells:
        for split in ("train", "validation", "test"):
            check_inputs(request.config.model, getattr(data, split).x, f"the {split} inputs of client {request.name}")
    return RecordDict(
        {
            "client": ConfigRecord(
                {
                    "name": request.name,
                    "identity": "" if in_simulation() else identity(request.state_dir),
                    "train": len(data.train) if tells else 1,
                    "validation": len(data.validation) if tells else 0,
                    "test": len(data.test) if tells else 1,
                    "num-classes": data.num_classes if tells else request.config.num_classes,
                    "input-shape": list(data.input_shape),
                    "input-type": str(data.test.x.dtype).removeprefix("torch."),
                    "class-names": list(data.class_names) if tells and (not policy or policy.class_names) else [],
                    "partitions": int(request.context.node_config.get("num-partitions", 0)),
                    "own-data": request.has_own_data,
                    "accuracies": policy.accuracies if policy else EXACT,
                }
            )
        }
    )


@app.query("export")
@answer
def export(request: Request) -> RecordDict:
    """Write the personal model to the run directory, in simulation only: there it is the user's own machine.

    The file holds the model's tensors under their own names, as safetensors, and what the method predicts with beside
    them. On another machine of a Ray cluster that does not have the run directory, the model travels back instead.
    """
    if not in_simulation():
        raise FloretError("a personal model is exported in simulation only; on a node it stays in the node's state")
    store = request.store
    # As of the last round: what a start made that the run has gone back behind may be newer.
    state = ClientState(store, RoundContext.of(request.scalars, request.config, over=True))
    # The run is over, so nothing earlier is asked for any more.
    store.keep([state.version] if state.version else [])
    kept = state.load()
    beside = load_class("client_app.methods", request.config.method, FloretClient).serves_with
    model = without_prefix(kept, MODEL)
    model |= {name: tensor for name, tensor in without_prefix(kept, MEMORY).items() if name.startswith(beside)}
    folder, name = Path(str(request.scalars["directory"])), f"{request.name}.safetensors"
    said = ConfigRecord({"file": name if model else ""})
    content = RecordDict({"client": said})
    if model and folder.is_dir():
        try:
            write_whole(folder / name, save(model), sync=False)
        except OSError as error:
            said["unwritten"] = f"{folder / name} cannot be written ({error.strerror})"
    elif model:
        content["model"] = to_record({name: tensor.numpy() for name, tensor in model.items()})
    return content
