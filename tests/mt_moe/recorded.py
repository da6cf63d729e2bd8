"""A buffer that writes down what is launched and waited for, and an autograd node that writes down when it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _RecordedEvent:
    def __init__(self, event: Any, name: str, log: list[str]) -> None:
        self._event, self._name, self._log = event, name, log

    def current_stream_wait(self) -> None:
        self._log.append(f"wait {self._name}")
        self._event.current_stream_wait()


class RecordedBuffer:
    """Passes everything on to an ElasticBuffer."""

    def __init__(self, buffer: Any, log: list[str]) -> None:
        self._buffer, self._log = buffer, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._log.append(f"launch {name}")
        *results, event = getattr(self._buffer, name)(*args, **kwargs)
        return (*results, _RecordedEvent(event, name, self._log))

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("dispatch", *args, **kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("combine", *args, **kwargs)


class Mark(torch.autograd.Function):
    """The identity; notes its forward and its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, log: list[str]) -> Tensor:
        ctx.name, ctx.log = name, log
        log.append(name)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append(f"{ctx.name} backward")
        return grad, None, None
