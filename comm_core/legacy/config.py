"""Config: tuning numbers of V1's kernels, kept for callers that pass them around and ask them for buffer sizes.

The backends here choose their own chunks, so the numbers change no result. The hints are upper bounds of what a
chunked transport with these numbers would stage; a Buffer of any size works.
"""

from __future__ import annotations

from dataclasses import dataclass

from comm_core.runtime.errors import UsageError
from comm_core.validate import MAX_TOPK, whole

DOMAIN_RANKS = 8  # ranks of one scale-up domain, as V1 counts them
_SIZE_UNIT = 128  # V1 callers check that sizes are multiples of it
_SCALE_COLUMNS = 128  # most scale factors a row carries
# Bytes beside a row: expert id and weight a lane, scales, source token.
_ROW_EXTRA = MAX_TOPK * (8 + 4) + _SCALE_COLUMNS * 4 + 8


@dataclass(frozen=True)
class Config:
    """Chunk sizes of dispatch or combine.

    Args:
        num_sms: processors to use, even; two make a channel.
        num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens: chunk sent and queue held in a scale-up
            domain; the chunk is smaller than the queue.
        num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens: the same between domains.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        even_sms(self.num_sms)
        for kind in ("nvl", "rdma"):
            names = [f"num_max_{kind}_chunked_{way}_tokens" for way in ("send", "recv")]
            send, recv = (whole(name, getattr(self, name)) for name in names)
            if send >= recv:
                raise UsageError(
                    f"{names[0]}={send}, {names[1]}={recv}",
                    allowed="a chunk smaller than the queue",
                    fix="lower the first or raise the second",
                )

    @property
    def num_channels(self) -> int:
        """Parts the tokens of a rank are cut into."""
        return self.num_sms // 2

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the queues inside a scale-up domain for rows of `hidden_bytes`."""
        peers = min(whole("num_ranks", num_ranks), DOMAIN_RANKS)
        row = whole("hidden_bytes", hidden_bytes, least=0) + _ROW_EXTRA
        return rounded(self.num_channels * peers * self.num_max_nvl_chunked_recv_tokens * row)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the queues between scale-up domains (both ways); 0 where there is one domain."""
        domains = -(-whole("num_ranks", num_ranks) // DOMAIN_RANKS)
        row = whole("hidden_bytes", hidden_bytes, least=0) + _ROW_EXTRA
        if domains == 1:
            return 0
        return rounded(2 * self.num_channels * domains * self.num_max_rdma_chunked_recv_tokens * row)


def even_sms(num_sms: int) -> int:
    """A number of processors that makes whole channels."""
    if whole("num_sms", num_sms, least=2) % 2:
        raise UsageError(f"num_sms={num_sms}", allowed="an even number", fix="two processors make a channel")
    return num_sms


def rounded(num_bytes: int) -> int:
    """The next multiple of the unit of V1's sizes."""
    return -(-num_bytes // _SIZE_UNIT) * _SIZE_UNIT


def dispatch_config(num_sms: int, num_ranks: int) -> Config:
    """Defaults of dispatch for any number of ranks."""
    return Config(num_sms, 24 if whole("num_ranks", num_ranks) <= 2 else 6)


def combine_config(num_sms: int, num_ranks: int) -> Config:
    """Defaults of combine for any number of ranks."""
    small = whole("num_ranks", num_ranks) <= 4
    return Config(num_sms, (10 if num_ranks <= 2 else 9) if small else 4)


def low_latency_size(num_max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of two alternating sets of blocks, each for every expert: bf16 rows (wider than FP8 with its scales)."""
    if whole("num_experts", num_experts) % whole("num_ranks", num_ranks):
        raise UsageError(
            f"num_experts={num_experts} on {num_ranks} ranks",
            allowed=f"a multiple of {num_ranks}",
            fix="choose an expert-parallel size that divides the experts",
        )
    tokens = whole("num_max_dispatch_tokens_per_rank", num_max_tokens)
    row = 2 * whole("hidden", hidden) + 16
    return rounded(2 * 2 * num_experts * tokens * row)
