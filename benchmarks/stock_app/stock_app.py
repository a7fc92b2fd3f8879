"""A plain Flower app: FedAvg of a small MLP on digits, one step of training and one evaluation a client and round."""

import time

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

client = ClientApp()
server = ServerApp()


def model() -> nn.Module:
    """Return the network of Floret's ``mlp`` on digits."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def load(message: Message) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the model as it came, and digits."""
    from sklearn.datasets import load_digits

    torch.set_num_threads(1)
    network = model()
    network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    digits = load_digits()
    return network, torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)


@client.train()
def train(message: Message, context: Context) -> Message:
    """Take one step."""
    network, x, y = load(message)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    nn.functional.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    arrays, metrics = ArrayRecord(network.state_dict()), MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure accuracy."""
    network, x, y = load(message)
    right = float((network(x).argmax(1) == y).float().mean())
    return Message(RecordDict({"metrics": MetricRecord({"accuracy": right, "num-examples": len(y)})}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds and say how long one took."""
    rounds = int(context.run_config["rounds"])
    while len(list(grid.get_node_ids())) < 2:
        time.sleep(0.1)
    started = time.perf_counter()
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0, min_train_nodes=2, min_available_nodes=2)
    strategy.start(grid, ArrayRecord(model().state_dict()), num_rounds=rounds)
    print(f"seconds a round: {(time.perf_counter() - started) / rounds:.4f}", flush=True)
