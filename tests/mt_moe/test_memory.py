"""The table of memory against what autograd really keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mt_moe import DataPath, MoEConfig, MoELayer
from mt_moe.data_path import RECOMPUTE, SAVE_DISPATCHED
from mt_moe.memory import choices, kept
from mt_moe.recipes import emulated

CONFIG = MoEConfig(hidden=64, ffn=96, num_experts=4, num_topk=2, experts="grouped")


@pytest.mark.parametrize("save", SAVE_DISPATCHED)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_bytes_of_rows(save: str, recompute: str) -> None:
    """Tensors kept that have a row for each dispatched one, by their width."""
    config = replace(CONFIG, data_path=DataPath(save_dispatched=save, recompute=recompute))
    num_tokens, num_rows = 30, 60
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor
        return tensor

    with MoELayer(config) as layer, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(num_tokens, config.hidden, requires_grad=True))
    found = {tuple(t.shape): t.nbytes for t in saved.values() if t.dim() == 2 and t.shape[0] == num_rows}
    want = kept(config, num_tokens, num_rows, torch.float32)
    widths = {"dispatched": config.hidden, "hidden": 2 * config.ffn, "activation": config.ffn}
    assert found == {(num_rows, w): getattr(want, name) for name, w in widths.items() if getattr(want, name)}
    assert want.total == sum(found.values()) + want.tokens + want.routing


def test_report() -> None:
    with MoELayer(CONFIG) as layer:
        text = layer.memory_report(1 << 14, microbatches=2).splitlines()
    assert len(text) == 8 and text[1].endswith("<- this layer") and text[1].split()[:2] == ["keep", "activation"]
    rows = choices(CONFIG, 1 << 14, 1 << 15, torch.float32)
    assert float(text[1].split()[3]) == round(2 * rows[0].dispatched / 2**20, 1)
    assert min(rows, key=lambda row: row.total).save_dispatched == "redispatch"


@pytest.mark.parametrize(("name", "alignment"), [("blockwise", 128), ("rowwise", 128)])
@pytest.mark.parametrize("keep", ["fp8", "bf16"])
@pytest.mark.parametrize("dispatch", ["fp8", "bf16"])
def test_a_recipe_keeps_what_it_says(name: str, alignment: int, keep: str, dispatch: str) -> None:
    """Bytes of rows and their scales; the report has one line, as no other choice goes with a recipe."""
    recipe = replace(emulated(name), keep=keep, dispatch=dispatch)
    config = MoEConfig(hidden=256, ffn=384, num_experts=2, num_topk=2, expert_alignment=alignment, recipe=recipe)
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor
        return tensor

    with MoELayer(config, dtype=torch.bfloat16) as layer:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(torch.randn(128, config.hidden, dtype=torch.bfloat16, requires_grad=True))
        report = layer.memory_report(128).splitlines()
    num_rows = 256  # each expert has every token, a whole block
    of_rows = [t for t in saved.values() if t.shape == (num_rows, config.hidden)]
    # Scales of a row have the shape of its weights, which autograd keeps once here.
    scales = [t for t in saved.values() if t.dtype == torch.float32 and t.dim() == 1]
    assert len(report) == 2 and report[1].endswith("<- this layer")
    found = sum(t.nbytes for t in of_rows) + sum(t.nbytes for t in scales) - num_rows * 4
    assert found == kept(config, 128, num_rows).dispatched
