"""The rules of the house as functions from source text to findings; test_rules.py applies them and tries to break them.

Each checker takes the text of one file and its path from the root of the repository, and returns findings
("path:line what"). They read the syntax tree, so that comments and docstrings may name what code may not.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("comm_core", "mt_moe", "dualpipe", "megatron_patch")
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_VARIABLES = 400, 60, 10

DEVICE_FILES = (
    "comm_core/runtime/device.py",
    "comm_core/backends/gpu.py",
    "comm_core/kernels/",
    "megatron_patch/platform.py",
)
ENVIRONMENT_FILE = "comm_core/runtime/env.py"
REQUIRED = frozenset({"torch", "numpy", "einops", "packaging", *PACKAGES})


def sources(*folders: str) -> list[Path]:
    """Every Python file under the given folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """The path from the root of the repository, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


def device_names(text: str, name: str) -> list[str]:
    """`torch.cuda`, `torch.musa` and the strings that name them, outside the files that may."""
    if name.startswith(DEVICE_FILES):
        return []
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda" | "musa"):
                found.append(f"{name}:{node.lineno} torch.{node.attr}")
            case ast.Constant(value=str(value)) if value.partition(":")[0] in ("cuda", "musa"):
                found.append(f"{name}:{node.lineno} the string {value!r}")
    for line, module in _imports(ast.parse(text)):
        if module.startswith(("torch.cuda", "torch.musa")):
            found.append(f"{name}:{line} import of {module}")
    return found


def environment(text: str, name: str) -> list[str]:
    """Readers and writers of the process environment outside the one file."""
    if name == ENVIRONMENT_FILE:
        return []
    words = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Name(id="os" | "posix"), attr=attr) if attr in words:
                found.append(f"{name}:{node.lineno} os.{attr}")
            case ast.ImportFrom(module="os" | "posix", names=names):
                found += [f"{name}:{node.lineno} os.{alias.name}" for alias in names if alias.name in words]
    return found


def variables(text: str) -> set[str]:
    """Names of the environment variables that a file reads: `X` in os.environ.get("X"), os.environ["X"], "X" in ..."""

    def is_environ(node: ast.expr) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "environ"

    found = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr=attr), args=[ast.Constant(value=str(key)), *_]) if (
                is_environ(owner) or attr == "getenv"
            ):
                found.add(key)
            case ast.Subscript(value=owner, slice=ast.Constant(value=str(key))) if is_environ(owner):
                found.add(key)
            case ast.Compare(left=ast.Constant(value=str(key)), comparators=[owner]) if is_environ(owner):
                found.add(key)
    return found


def megatron_imports(text: str, name: str) -> list[str]:
    """Imports of megatron, also by importlib.import_module("megatron..."), outside megatron_patch."""
    if name.startswith("megatron_patch/"):
        return []
    tree = ast.parse(text)
    found = [f"{name}:{line} import of {module}" for line, module in _imports(tree) if _root(module) == "megatron"]
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
                match node.args:
                    case [ast.Constant(value=str(module)), *_] if _root(module) == "megatron":
                        found.append(f"{name}:{node.lineno} import of {module}")
    return found


def optional_imports(text: str, name: str) -> list[str]:
    """Imports that run when the file is imported and need a package that setup.py does not require.

    Files inside megatron_patch (not its `__init__`) may import megatron, files of Triton kernels triton: they are
    imported at use, so no other file may import kernels at its top.
    """
    allowed = REQUIRED | {"megatron"} if is_megatron_side(name) else REQUIRED
    if is_triton_side(name):
        allowed |= {"triton"}
    tree = ast.parse(text)
    found = []
    for line, module in _imports(tree, top_level_only=True):
        kernels = "triton" in "".join(module.split(".")[1:2]) and not is_triton_side(name)
        if kernels or _root(module) not in allowed | sys.stdlib_module_names:
            found.append(f"{name}:{line} top-level import of {module}")
    return found


def kernel_annotations(text: str, name: str) -> list[str]:
    """Arguments of Triton kernels annotated with names not of its language: the compiler reads them as code."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "triton.jit" for d in node.decorator_list):
            for arg in node.args.args:
                said = "" if arg.annotation is None else ast.unparse(arg.annotation)
                if said and not said.startswith("tl."):
                    found.append(f"{name}:{node.lineno} {arg.arg}: {said} in the kernel {node.name}")
    return found


def is_triton_side(name: str) -> bool:
    """Files of kernels, which are imported only where Triton is found."""
    return name.startswith("mt_moe/") and "triton" in name.rpartition("/")[2]


def is_megatron_side(name: str) -> bool:
    """Files that are imported only once Megatron is wanted."""
    return name.startswith("megatron_patch/") and name != "megatron_patch/__init__.py"


def runtime_imports(text: str, name: str) -> list[str]:
    """Imports of comm_core.runtime that are neither the standard library, nor torch, nor comm_core.runtime."""
    if not name.startswith("comm_core/runtime/"):
        return []
    return [
        f"{name}:{line} import of {module}"
        for line, module in _imports(ast.parse(text))
        if _root(module) not in sys.stdlib_module_names | {"torch", "torch_musa"}
        and not module.startswith("comm_core.runtime")
    ]


def private_imports(text: str, name: str) -> list[str]:
    """Imports that reach past the public names of comm_core: allowed are `comm_core` itself and comm_core.runtime."""
    if name.startswith("comm_core/"):
        return []
    modules = {path.stem for path in (ROOT / "comm_core").iterdir()} - {"__init__", "runtime"}
    return [
        f"{name}:{line} import of {module}"
        for line, module in _imports(ast.parse(text))
        if _root(module) == "comm_core" and module.split(".")[1:2] and module.split(".")[1] in modules
    ]


def sizes(text: str, name: str) -> list[str]:
    """Files and functions that are too long; a function counts from `def` to its last line, docstring included."""
    lines = len(text.splitlines())
    found = [f"{name}:1 {lines} lines in a file"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{name}:{node.lineno} {length} lines in {node.name}")
    return found


def _root(module: str) -> str:
    return module.partition(".")[0]


def _imports(tree: ast.Module, *, top_level_only: bool = False) -> Iterator[tuple[int, str]]:
    """Line and full name of every absolute import; those under `if TYPE_CHECKING` never run and do not count."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(level=0, module=str(module), names=names):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                pending += node.orelse
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() if top_level_only:
                continue
        pending += ast.iter_child_nodes(node)
