"""A sketch of an inner loop, client half: several steps on each batch, then the shared weights follow."""

from strategies.sketch_inner import InnerParameters  # type: ignore[import-not-found]
from torch import Tensor

from client_app.batches import Batch
from client_app.client import FloretClient
from client_app.methods.fedprox import proximal_term


class Inner(FloretClient):
    """Its personal model is the one of the inner loop; what it sends is the one that follows."""

    parameters: InnerParameters

    def train(self) -> float:
        """Go through the batches."""
        own = self.parameters
        parameters = list(self.model.parameters())
        followers = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        anchor = list(followers.values())
        optimizer = self.optimizer(parameters, lr=own.inner_lr, momentum=0.0)

        def step(batch: Batch) -> Tensor:
            for _ in range(own.steps):
                optimizer.zero_grad()
                loss = self.loss(batch) + proximal_term(parameters, anchor, own.lambda_)
                loss.backward()
                optimizer.step()
            for follower, parameter in zip(anchor, parameters, strict=True):
                follower -= self.message["lr"] * own.lambda_ * (follower - parameter.detach())
            return loss

        self._followers = followers
        return self.run_steps(self.config.local_epochs, step)

    def upload(self) -> dict[str, Tensor]:
        """Return the extractor that followed, and prototypes."""
        extractor = {name: t for name, t in self._followers.items() if name.startswith("extractor.")}
        return {**extractor, **self.local_prototypes()}
