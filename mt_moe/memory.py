"""What a layer keeps for backward, by its choices: a table from shapes, in bytes.

For N rows on a rank, each of width H and with an inner width F (2F of fc1's output where gated), in elements of s
bytes, and T tokens of K lanes:

    tokens          T * H * s       the layer's input, which router and dispatch share
    dispatched      N * H * s       with "keep" and "copy"; 0 with "redispatch"; FP8 and scales by recipe
    fc1's output    N * 2F * s      with recompute "activation" and "nothing"
    activation      N * F * s       with recompute "nothing"
    routing         N * 4 + T * K * 12, weights of rows, ids and weights of tokens; the layout of the handle beside it

Weights, their gradients and what lives only for a moment (the output of fc2, gradients of rows) are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mt_moe.config import MoEConfig
from mt_moe.data_path import RECOMPUTE, SAVE_DISPATCHED
from mt_moe.recipes import BLOCK, recipe_of


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that one microbatch keeps on one rank under one choice.

    Attributes:
        save_dispatched: of `DataPath`.
        recompute: of `DataPath`.
        tokens: the layer's input.
        dispatched: dispatched rows.
        hidden: fc1's output.
        activation: fc2's input.
        routing: ids and weights.
    """

    save_dispatched: str
    recompute: str
    tokens: int
    dispatched: int
    hidden: int
    activation: int
    routing: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.tokens + self.dispatched + self.hidden + self.activation + self.routing


def kept(config: MoEConfig, num_tokens: int, num_rows: int, dtype: torch.dtype = torch.bfloat16) -> Kept:
    """What the choices of `config.data_path` keep.

    Args:
        config: of the layer.
        num_tokens: of this rank.
        num_rows: dispatched to this rank's experts, padding included; num_tokens * num_topk where load is even.
        dtype: of tokens and weights.
    """
    path, size = config.data_path, dtype.itemsize
    width, recipe = config.latent or config.hidden, recipe_of(config.recipe)
    row = width * size
    if recipe is not None and (recipe.dispatch == "fp8" or (recipe.fc1_forward == "fp8" and recipe.keep == "fp8")):
        row = width + 4 * (width // BLOCK if recipe.scaling == "block" else 1)
    inner = (2 if config.gated else 1) * config.ffn
    return Kept(
        save_dispatched=path.save_dispatched,
        recompute=path.recompute,
        tokens=num_tokens * config.hidden * size,
        dispatched=0 if path.save_dispatched == "redispatch" else num_rows * row,
        hidden=0 if path.recompute == "fc1" else num_rows * inner * size,
        activation=num_rows * config.ffn * size if path.recompute == "nothing" else 0,
        routing=num_rows * 4 + num_tokens * config.num_topk * 12,
    )


def choices(config: MoEConfig, num_tokens: int, num_rows: int, dtype: torch.dtype = torch.bfloat16) -> list[Kept]:
    """`kept` for every choice, the one of `config` first. "copy" is left out: it is the same as "keep".

    An FP8 recipe follows no other choice than its own.
    """
    path = config.data_path
    own = kept(config, num_tokens, num_rows, dtype)
    found = [own]
    if recipe_of(config.recipe) is not None:
        return found
    for save in (name for name in SAVE_DISPATCHED if name != "copy"):
        for recompute in RECOMPUTE:
            other = replace(config, data_path=replace(path, save_dispatched=save, recompute=recompute))
            found.append(kept(other, num_tokens, num_rows, dtype))
    return found


def table(rows: Sequence[Kept], microbatches: int = 1) -> str:
    """A text table in MiB, for so many microbatches in flight; the first row is what the layer does."""
    names = ("tokens", "dispatched", "hidden", "activation", "routing", "total")
    lines = [f"{'save_dispatched':<16}{'recompute':<12}" + "".join(f"{name:>12}" for name in names) + "  (MiB)"]
    for index, row in enumerate(rows):
        numbers = "".join(f"{microbatches * getattr(row, name) / 2**20:12.1f}" for name in names)
        lines.append(
            f"{row.save_dispatched:<16}{row.recompute:<12}{numbers}" + ("  <- this layer" if index == 0 else "")
        )
    return "\n".join(lines)
