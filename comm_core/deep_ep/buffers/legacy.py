"""V1: Buffer and Config."""

from comm_core.legacy import Buffer, Config

__all__ = ["Buffer", "Config"]
