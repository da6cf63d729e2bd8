"""Stages of small layers, and what a microbatch forward beside one backward gives: in a pair, and by plain autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comm_core import ElasticBuffer
from comm_core.runtime import trace
from mt_moe import DataPath, MoEConfig, MoELayer, OverlapLayer, OverlapStage

HIDDEN = 32
PLAIN = MoEConfig(hidden=HIDDEN, ffn=16, num_experts=4, num_topk=2, shared_ffn=16, init_std=0.2)
RICH = replace(
    PLAIN, latent=16, shared_gate=True, expert_alignment=4, experts="grouped", aux_loss_coefficient=0.1,
    data_path=DataPath(save_dispatched="redispatch"),
)  # fmt: skip
BOUND = replace(PLAIN, shared_ffn=0, experts="grouped", data_path=DataPath(max_tokens_per_rank=24))
CONFIGS = {"plain": PLAIN, "rich": RICH, "bound": BOUND}
# "m" a layer with experts, "d" a dense one: of the stage that runs forward, and of the one that runs backward.
STAGES = [("mm", "mm"), ("mmm", "m"), ("m", "dmm"), ("dm", "md"), ("d", "mm"), ("d", "d")]


class Attention(nn.Module):
    """Mixes tokens; has dropout, a bias, a weight that is no linear map's, and may compute its forward twice."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.again = again

    def _mix(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / HIDDEN**0.5, dim=-1) @ v
        return x + nn.functional.dropout(self.out(mixed), 0.2, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._mix, x, use_reentrant=False) if self.again else self._mix(x)


def stage(kinds: str, buffer: ElasticBuffer, config: MoEConfig, first: int, again: bool = False) -> OverlapStage:
    """A stage with a layer for each letter; its weights follow from torch's seed and the number of its first layer."""
    layers = []
    for number, kind in enumerate(kinds, first):
        dense = nn.Sequential(nn.Linear(HIDDEN, 48), nn.SiLU(), nn.Linear(48, HIDDEN))
        mlp = MoELayer(config, buffer=buffer, layer_number=number) if kind == "m" else dense
        layers.append(OverlapLayer(Attention(again), mlp, norm=nn.LayerNorm(HIDDEN)))
    return OverlapStage(layers)


@dataclass
class Pair:
    """Two stages and their data: `ahead` runs forward while `behind` runs backward."""

    ahead: OverlapStage
    behind: OverlapStage
    inputs: tuple[Tensor, Tensor]
    grads: tuple[Tensor, Tensor]
    seed: int

    @classmethod
    def make(cls, buffer: ElasticBuffer, kinds: tuple[str, str], config: MoEConfig, seed: int) -> Pair:
        torch.manual_seed(seed)  # attention and dense layers are the same on all ranks
        stages = stage(kinds[0], buffer, config, 0), stage(kinds[1], buffer, config, 10, again=True)
        torch.manual_seed(seed + 1 + buffer.rank)
        x0, x1, g0, g1 = torch.randn(4, 2, 6 + 5 * (buffer.rank % 2), HIDDEN)
        return cls(*stages, (x0.requires_grad_(), x1.requires_grad_()), (g0, g1), seed)

    def _results(self, *outputs: Tensor) -> dict[str, Tensor]:
        found = {f"output {i}": y.detach().clone() for i, y in enumerate(outputs)}
        for i, (module, x) in enumerate(zip((self.ahead, self.behind), self.inputs, strict=True)):
            assert x.grad is not None
            found[f"input {i}"], x.grad = x.grad, None
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None, name
                found[f"{i} {name}"] = parameter.grad
            module.zero_grad()
        return found

    def serial(self) -> dict[str, Tensor]:
        """Each layer in one piece, by autograd alone; the router's losses are added to the loss."""
        losses: list[Tensor] = []
        torch.manual_seed(self.seed)
        results = []
        for module, x in ((self.behind, self.inputs[1]), (self.ahead, self.inputs[0])):
            for layer in module.layers:
                x = layer(x, aux_losses=losses)
            results.append(x)
        behind, ahead = results
        (sum((y * g).sum() for y, g in zip((ahead, behind), self.grads, strict=True)) + sum(losses)).backward()
        return self._results(ahead, behind)

    def overlapped(self) -> dict[str, Tensor]:
        """The same with a pair in the middle."""
        torch.manual_seed(self.seed)
        behind = self.behind(self.inputs[1])
        (ahead,), loss = self.ahead.overlapped_forward_backward(
            self.ahead, [self.inputs[0]], None, [], self.behind, None, [behind], [self.grads[1]]
        )
        assert loss is None
        ahead.backward(self.grads[0])
        return self._results(ahead, behind)


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of results that are not equal to the bit."""
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


def recorded(pair: Pair) -> list[str]:
    """The parts of an overlapped pair in the order in which they ran, each with the number of its layer."""
    behind = pair.behind(pair.inputs[1])
    recorder = trace.Recorder(rank=0)
    with trace.recording(recorder):
        pair.ahead.overlapped_forward_backward(
            pair.ahead, [pair.inputs[0]], None, [], pair.behind, None, [behind], [pair.grads[1]]
        )
    return [f"{span.name} {span.args['layer']}" for span in recorder.spans() if span.category == "overlap"]


@contextlib.contextmanager
def buffer_of(backend: str, group: Any = None) -> Iterator[ElasticBuffer]:
    with ElasticBuffer(dist.group.WORLD if group is None else group, backend=backend) as buffer:
        yield buffer
