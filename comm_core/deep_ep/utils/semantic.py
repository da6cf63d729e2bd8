"""Small helpers for optional values and cached methods."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def value_or(value: T | None, default: T) -> T:
    """`value`, or `default` where it is None."""
    return default if value is None else value


def weak_lru(maxsize: int | None = 128, typed: bool = False) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Caches a method's results by its arguments without keeping the object alive."""

    def decorate(method: Callable[..., T]) -> Callable[..., T]:
        @functools.lru_cache(maxsize, typed)
        def cached(owner: weakref.ref[Any], *args: Any, **options: Any) -> T:
            return method(owner(), *args, **options)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> T:
            return cached(weakref.ref(self), *args, **options)

        return call

    return decorate
