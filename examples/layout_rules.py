"""What no single setting can tell: whether layers, experts, microbatches and processes fit together.

Each rule is data (does it hold, what was given, what is allowed, what to do), so that every one of them can be read,
tested and reported the same way, before any process group exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from examples.config import Config, ModelConfig

Rule = tuple[bool, str, str, str]
"""holds, given, allowed, fix"""


def all_rules(config: Config, world_size: int) -> Iterator[Rule]:
    """Every rule for a configuration on `world_size` processes, evaluated one after the other."""
    return chain(_model_rules(config.model), _parallel_rules(config, world_size))


def _model_rules(m: ModelConfig) -> Iterator[Rule]:
    yield (
        m.num_dense_layers <= m.num_layers,
        f"model.num_dense_layers={m.num_dense_layers} with model.num_layers={m.num_layers}",
        f"0 to {m.num_layers} dense layers",
        "lower model.num_dense_layers",
    )
    yield m.hidden % 8 == 0, f"model.hidden={m.hidden}", "a multiple of 8", f"use {-(-m.hidden // 8) * 8}"
    yield (
        m.qk_pos_emb_head_dim % 2 == 0,
        f"model.qk_pos_emb_head_dim={m.qk_pos_emb_head_dim}",
        "an even number (rotary embedding turns pairs)",
        f"use {m.qk_pos_emb_head_dim + 1}",
    )
    yield (
        m.num_experts % m.num_groups == 0,
        f"model.num_experts={m.num_experts} with model.num_groups={m.num_groups}",
        f"a number of groups that divides {m.num_experts}",
        f"set model.num_groups to one of {_divisors(m.num_experts)}",
    )
    yield (
        m.group_topk <= m.num_groups,
        f"model.group_topk={m.group_topk} with model.num_groups={m.num_groups}",
        f"1 to {m.num_groups} selected groups",
        "lower model.group_topk",
    )
    yield (
        m.num_topk % m.group_topk == 0,
        f"model.num_topk={m.num_topk} with model.group_topk={m.group_topk}",
        "a multiple of group_topk (a group is scored by its best num_topk / group_topk experts)",
        f"set model.group_topk to one of {_divisors(m.num_topk)} or change model.num_topk",
    )
    group_size = m.num_experts // m.num_groups
    selectable = m.group_topk * group_size
    yield (
        m.num_topk <= selectable,
        f"model.num_topk={m.num_topk} with model.group_topk={m.group_topk} of groups of {group_size}",
        f"1 to {selectable} experts a token",
        "lower model.num_topk or raise model.group_topk",
    )


def _parallel_rules(config: Config, world_size: int) -> Iterator[Rule]:
    m, p, t = config.model, config.parallel, config.train
    yield (
        m.num_experts % p.ep_size == 0,
        f"model.num_experts={m.num_experts} with parallel.ep_size={p.ep_size}",
        f"an ep_size that divides {m.num_experts}",
        f"set parallel.ep_size to one of {_divisors(m.num_experts)}",
    )
    yield (
        p.schedule != "dualpipev" or p.pp_size >= 2,
        f"parallel.schedule=dualpipev with parallel.pp_size={p.pp_size}",
        "pp_size of 2 or more (Megatron has no chunks without a pipeline)",
        "set parallel.schedule=1f1b or raise parallel.pp_size",
    )
    per_rank = "2 a pipeline rank for dualpipev" if p.schedule == "dualpipev" else "1 a pipeline rank for 1f1b"
    yield (
        m.num_layers % p.num_stages == 0,
        f"model.num_layers={m.num_layers} with parallel.pp_size={p.pp_size}, which makes {p.num_stages} stages"
        f" ({per_rank})",
        f"a multiple of {p.num_stages} layers",
        f"set model.num_layers={-(-m.num_layers // p.num_stages) * p.num_stages} or change parallel.pp_size",
    )
    yield (
        t.num_microbatches >= p.min_microbatches,
        f"train.num_microbatches={t.num_microbatches} with schedule {p.schedule} on pp_size={p.pp_size}",
        f"at least 2P-1 = {p.min_microbatches} microbatches",
        f"set train.num_microbatches={p.min_microbatches} or more",
    )
    yield (
        world_size >= 1 and world_size % (p.pp_size * p.ep_size) == 0,
        f"{world_size} processes with parallel.pp_size={p.pp_size} and parallel.ep_size={p.ep_size}",
        f"a multiple of pp_size * ep_size = {p.pp_size * p.ep_size} processes",
        f"start torchrun with --nproc-per-node {p.pp_size * p.ep_size} or change the sizes",
    )
    yield (
        t.min_lr <= t.lr,
        f"train.min_lr={t.min_lr} with train.lr={t.lr}",
        f"0 to {t.lr}",
        "lower train.min_lr",
    )


def _divisors(number: int) -> str:
    """The divisors of a number as text for a message."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
