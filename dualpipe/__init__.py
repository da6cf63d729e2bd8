"""Bidirectional pipeline schedules: build, validate, simulate, draw, execute. Knows no MoE and no Megatron.

Names are loaded at first use, so that looking at a schedule needs neither torch.distributed nor a device. The functions
`validate.validate`, `simulate.simulate`, `compare.compare` and `plan.plan` are imported from their modules, whose names
they share. `WeightGradStore` is that of the upstream package (`compat`); a pipeline's own is
`weight_grad.WeightGradStore`.
"""

# ruff: noqa: F401 - the imports under TYPE_CHECKING tell type checkers what __getattr__ returns
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualpipe.actions import Action, Kind, Payload, StageKey
    from dualpipe.blocks import Block, blocks_from_events
    from dualpipe.compare import Report, report
    from dualpipe.compat import DualPipe, DualPipeV, WeightGradStore, set_p2p_tensor_dtype, set_p2p_tensor_shapes
    from dualpipe.costs import Durations, of_stages
    from dualpipe.edges import Edge
    from dualpipe.executor import Executor, PipelineStateError, RunStats
    from dualpipe.module_stages import ModuleStages
    from dualpipe.pipeline import Pipeline, stages_of_rank
    from dualpipe.plan import Plan, Workload
    from dualpipe.programs import BackwardJob, ForwardJob, StagePrograms
    from dualpipe.render import chrome_trace, svg, text_grid
    from dualpipe.replicas import add_mirrored_gradients
    from dualpipe.schedule import (
        Schedule,
        build,
        dualpipe,
        dualpipev,
        forward_only,
        from_csv,
        interleaved,
        interleaved_pairs,
        merge_backward,
        merge_cooldown,
        one_f_one_b,
        with_communication,
        zb1p,
        zbh2,
        zbv,
    )
    from dualpipe.simulate import Simulation
    from dualpipe.split_functions import split_grouped_mm, split_linear
    from dualpipe.split_modules import SplitWeightGrads, split_weight_grads
    from dualpipe.validate import ScheduleError

_HOMES = {
    "actions": ("Action", "Kind", "Payload", "StageKey"),
    "blocks": ("Block", "blocks_from_events"),
    "compare": ("Report", "report"),
    "compat": ("DualPipe", "DualPipeV", "WeightGradStore", "set_p2p_tensor_dtype", "set_p2p_tensor_shapes"),
    "costs": ("Durations", "of_stages"),
    "edges": ("Edge",),
    "executor": ("Executor", "PipelineStateError", "RunStats"),
    "module_stages": ("ModuleStages",),
    "pipeline": ("Pipeline", "stages_of_rank"),
    "plan": ("Plan", "Workload"),
    "programs": ("BackwardJob", "ForwardJob", "StagePrograms"),
    "replicas": ("add_mirrored_gradients",),
    "render": ("chrome_trace", "svg", "text_grid"),
    "schedule": (
        "Schedule",
        "build",
        "dualpipe",
        "dualpipev",
        "forward_only",
        "from_csv",
        "interleaved",
        "interleaved_pairs",
        "merge_backward",
        "merge_cooldown",
        "one_f_one_b",
        "with_communication",
        "zb1p",
        "zbh2",
        "zbv",
    ),
    "simulate": ("Simulation",),
    "split_functions": ("split_grouped_mm", "split_linear"),
    "split_modules": ("SplitWeightGrads", "split_weight_grads"),
    "validate": ("ScheduleError",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'dualpipe' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dualpipe.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
