"""Patches as data: what is replaced, in which versions, and why; reversible and listed.

A target is `module:attribute.path` or `module:mapping[key]`. `make(original)` builds the replacement; `original` is
`MISSING` where the target does not exist (some versions lack it).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from packaging.specifiers import SpecifierSet

from comm_core.runtime.errors import MTMoEError

MISSING: Final = object()
ANY: Final = ""
"""A `versions` value for patches of torch itself, which do not depend on Megatron's version."""


class PatchError(MTMoEError, RuntimeError):
    """A patch cannot be applied or reverted."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One replacement.

    Attributes:
        target: `module:attribute.path` or `module:mapping[key]`.
        make: builds the replacement from the original (or MISSING).
        versions: megatron-core versions it is for, as a version specifier; "" for all.
        reason: why it is needed, one line.
    """

    target: str
    make: Callable[[Any], Any]
    versions: str
    reason: str


@dataclass(slots=True)
class _Slot:
    """Where a target lives: an attribute of an object or a key of a mapping."""

    owner: Any
    key: str
    mapping: bool

    def get(self) -> Any:
        if self.mapping:
            return self.owner.get(self.key, MISSING)
        return getattr(self.owner, self.key, MISSING)

    def put(self, value: Any) -> None:
        if value is MISSING:
            if self.mapping:
                self.owner.pop(self.key, None)
            elif hasattr(self.owner, self.key):
                delattr(self.owner, self.key)
        elif self.mapping:
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)


def _locate(target: str) -> _Slot:
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise PatchError(f"patch target {target}: {module_name} cannot be imported ({error})") from error
    match = re.fullmatch(r"(?P<mapping>[\w.]+)\[(?P<key>[^\]]+)\]", path)
    names = (match["mapping"] if match else path).split(".")
    for name in names if match else names[:-1]:
        if not hasattr(owner, name):
            raise PatchError(f"patch target {target}: {name} does not exist; this Megatron version is not supported")
        owner = getattr(owner, name)
    return _Slot(owner, match["key"], True) if match else _Slot(owner, names[-1], False)


@dataclass(slots=True)
class _Applied:
    patch: Patch
    slot: _Slot
    original: Any
    replacement: Any


@dataclass(slots=True)
class PatchSet:
    """The patches in force in this process, newest last. One instance is used by `megatron_patch.apply`."""

    _applied: list[_Applied] = field(default_factory=list)

    def apply(self, patches: Iterable[Patch], version: str | None) -> None:
        """Applies the patches that are for `version` and not in force yet; all of them or none.

        Raises:
            PatchError: a target is missing; patches applied by this call are reverted first.
        """
        before = len(self._applied)
        known = {item.patch.target for item in self._applied}
        try:
            for patch in patches:
                if patch.target in known:
                    continue
                if patch.versions and (version is None or not _matches(patch.versions, version)):
                    continue
                slot = _locate(patch.target)
                original = slot.get()
                replacement = patch.make(original)
                if replacement is original:
                    continue
                slot.put(replacement)
                self._applied.append(_Applied(patch, slot, original, replacement))
        except BaseException:
            self._undo(before)
            raise

    def revert(self) -> None:
        """Puts every original back, newest first.

        Raises:
            PatchError: somebody else replaced a target since; the others are reverted all the same.
        """
        foreign = self._undo(0)
        if foreign:
            raise PatchError(
                f"not reverted, because they were replaced again after us: {', '.join(foreign)}; "
                "undo the later replacement first"
            )

    def _undo(self, keep: int) -> list[str]:
        foreign = []
        while len(self._applied) > keep:
            item = self._applied.pop()
            if item.slot.get() is not item.replacement:
                foreign.append(item.patch.target)
                continue
            item.slot.put(item.original)
        return foreign

    def report(self) -> list[Patch]:
        """The patches in force, in order of application."""
        return [item.patch for item in self._applied]


def _matches(versions: str, version: str) -> bool:
    return SpecifierSet(versions).contains(version, prereleases=True)
