"""Local: every client trains alone; the baseline that a federation has to beat."""

from common.config import RunConfig
from common.errors import ConfigError
from strategies.core import FloretStrategy


class Local(FloretStrategy):
    """Sends and receives nothing but the round's number."""

    shares = "nothing"

    @classmethod
    def check_protects(cls, config: RunConfig) -> None:
        """Refuse ``privacy.unit``: nothing leaves that it could protect.

        Raises:
            ConfigError: there is.
        """
        if config.privacy.on:
            raise ConfigError(
                f"privacy.unit = {config.privacy.unit!r}: {config.method} sends nothing of the data; leave it out"
            )
