"""Mixture-of-experts layer on comm_core: router, experts, and communication that overlaps through autograd."""

from __future__ import annotations

from mt_moe.aliases import fan_out
from mt_moe.config import MoEConfig
from mt_moe.data_path import DataPath
from mt_moe.ddp import local_names
from mt_moe.dispatcher import Dispatcher
from mt_moe.experts import expert_mlp
from mt_moe.functional import launch_combine, launch_dispatch, wait_combine, wait_dispatch
from mt_moe.layer import MoELayer
from mt_moe.overlap import OverlapStage
from mt_moe.overlap_layer import OverlapLayer

__all__ = [
    "DataPath",
    "Dispatcher",
    "MoEConfig",
    "MoELayer",
    "OverlapLayer",
    "OverlapStage",
    "expert_mlp",
    "fan_out",
    "launch_combine",
    "launch_dispatch",
    "local_names",
    "wait_combine",
    "wait_dispatch",
]
