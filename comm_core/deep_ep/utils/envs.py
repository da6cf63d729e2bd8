"""Start-up of test programs: process group, seeds, printing; and bandwidths, where they are known."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from comm_core.deep_ep.utils.comm import get_logical_domain_size, get_physical_domain_size
from comm_core.runtime import device as devices
from comm_core.runtime import env

__all__ = [
    "check_nvlink_connections",
    "check_torch_deterministic",
    "dist_print",
    "get_global_seed",
    "get_local_seed",
    "get_logical_domain_size",
    "get_nvlink_gbs",
    "get_physical_domain_size",
    "get_rdma_gbs",
    "init_dist",
    "init_seed",
]

_DEFAULT_ADDRESS = "tcp://127.0.0.1:8361"
_state = {"local_rank": 0, "global_seed": 0, "local_seed": 0}


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Joins the process group of a test program, one process a device, and sets its defaults.

    The device is the accelerator where there is one a process, else the CPU. MASTER_ADDR and MASTER_PORT say where to
    meet, WORLD_SIZE and RANK count nodes. Default dtype becomes bf16, default device that of this process.

    Args:
        local_rank: this process on its node.
        num_local_ranks: processes of a node.
        seed: see `init_seed`.

    Returns:
        rank, number of ranks, a group of all.
    """
    kind = devices.choose("auto", num_local_ranks=num_local_ranks)
    device = devices.of(kind, local_rank)
    _state["local_rank"] = local_rank
    rank, size = env.rank() * num_local_ranks + local_rank, env.world_size() * num_local_ranks
    backend = devices.collective_backend(kind)
    try:
        dist.init_process_group(backend, init_method="env://", rank=rank, world_size=size)
    except ValueError:  # no address in the environment
        dist.init_process_group(backend, init_method=_DEFAULT_ADDRESS, rank=rank, world_size=size)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device(device)
    init_seed(seed)
    group = dist.new_group(list(range(size)))
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return rank, size, group


def init_seed(global_seed: int) -> None:
    """Seeds torch and random with global_seed + rank."""
    _state["global_seed"], _state["local_seed"] = global_seed, global_seed + dist.get_rank()
    torch.manual_seed(_state["local_seed"])
    random.seed(_state["local_seed"])


def get_global_seed() -> int:
    """The seed given last."""
    return _state["global_seed"]


def get_local_seed() -> int:
    """That seed plus the rank."""
    return _state["local_seed"]


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Prints on every rank, or on the first of each node, then waits for all."""
    if not once_in_node or _state["local_rank"] == 0:
        print(s, flush=True)
    dist.barrier()


def get_nvlink_gbs(factor: float = 0.9) -> float:
    """Bandwidth inside a node in GB/s: 0, as no program is started to ask for it."""
    return 0.0


def check_nvlink_connections(group: dist.ProcessGroup) -> None:
    """Nothing to check: how devices are connected decides which backend can be used (`python -m comm_core doctor`)."""


def check_torch_deterministic() -> None:
    """Nothing to check: outputs are written behind what filled them."""


def get_rdma_gbs(nic_name: str = "mlx5_0") -> float:
    """Bandwidth between nodes in GB/s: 0, as no network card is asked."""
    return 0.0
