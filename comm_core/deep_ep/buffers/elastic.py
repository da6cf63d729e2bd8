"""V2: ElasticBuffer and its handle."""

from comm_core.elastic import ElasticBuffer
from comm_core.handle import EPHandle

__all__ = ["EPHandle", "ElasticBuffer"]
