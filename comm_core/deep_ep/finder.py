"""install() and uninstall(): a finder that answers for `deep_ep` and everything below it with the modules here.

The modules are the same objects under both names, so that classes are the same too.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from comm_core.runtime.errors import UsageError

NAME, OURS = "deep_ep", "comm_core.deep_ep"
# Modules that take names from deep_ep when they are imported, and the name they keep.
_BINDERS = {"megatron.core.transformer.moe.fused_a2a": "Buffer"}


def install() -> None:
    """Makes `import deep_ep`, `deep_ep.utils.*` and `deep_ep.buffers.*` mean this package, in this process. Idempotent.

    Raises:
        UsageError: another deep_ep is imported already, or Megatron is and has looked for deep_ep before.
    """
    present = sys.modules.get(NAME)
    if present is not None and present is not sys.modules.get(OURS):
        raise UsageError(
            f"deep_ep is imported already, from {getattr(present, '__file__', 'an unknown place')}",
            allowed="install() before anything imports deep_ep",
            fix="call comm_core.deep_ep.install() first, at the top of the program",
        )
    for name, attribute in _BINDERS.items():
        binder = sys.modules.get(name)
        if binder is not None and getattr(binder, attribute, None) is not _buffer():
            raise UsageError(
                f"{name} was imported before install() and has bound what it found: {_bound(binder, attribute)}",
                allowed="install() before Megatron's MoE modules are imported",
                fix="call comm_core.deep_ep.install() first, or run python -m comm_core.deep_ep SCRIPT",
            )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def uninstall() -> None:
    """Undoes `install()` for later imports; names that were imported stay."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
        if sys.modules[name] is sys.modules.get(_own_name(name)):
            del sys.modules[name]


def _buffer() -> object:
    return importlib.import_module(OURS).Buffer


def _bound(binder: ModuleType, attribute: str) -> str:
    found = getattr(binder, attribute, None)
    return "no deep_ep" if found is None else f"{attribute} of {getattr(found, '__module__', 'another package')}"


def _own_name(name: str) -> str:
    return OURS + name.removeprefix(NAME)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec whose loader hands out our module of that name."""
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        own = importlib.util.find_spec(_own_name(fullname))
        return (
            None
            if own is None
            else ModuleSpec(fullname, _Loader(), is_package=own.submodule_search_locations is not None)
        )


class _Loader(Loader):
    """Returns a module that is loaded under its own name; import must leave its attributes as they are."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_own_name(spec.name))
        self._kept = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._kept
