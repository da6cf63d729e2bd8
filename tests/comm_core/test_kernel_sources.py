"""The kernel source without a GPU: what it may not hold, that both platforms compile it, that its registers suffice.

MUSA is never there. Its source is checked against a list of names seen in public MUSA code (tests/musa_shim/names.h):
a plain C++ compiler that knows these declarations and no others reads the whole of it. That shows that no name is made
up, not that mcc takes it.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from comm_core.kernels import build, compiler, library, resources
from comm_core.runtime.errors import MissingPackageError
from tests import kernel_rules, rules

SHIM = rules.ROOT / "tests" / "musa_shim"
ARCHS = ("sm_100", "sm_80", "sm_90")
LIBRARY_ARCH = "sm_90"
# Kernels that move or add rows; what spills in one of them goes through memory with every row.
COPIES = (
    *("dispatch_impl", "combine_impl", "combine_reduce_impl"),
    *("dispatch_bulk_impl", "combine_bulk_impl", "combine_reduce_bulk_impl"),
)
# What holds these kernels and no others.
COPIES_SOURCE = '#include "launch_combine.cuh"\n#include "launch_dispatch.cuh"\n'

_PLANTED = {
    "asm": ['asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(x) : "l"(p));', "__asm__(\"exit;\");"],
    "vendor names": [
        "cudaStream_t stream;", "musaMalloc(&p, 4);", "#if __CUDA_ARCH__ >= 900", "__nv_bfloat16 x;",
        "#if defined(MT_MOE_MUSA)", "cuMemCreate(&h);", "mt_bfloat16 x;", "#ifdef __MUSA_ARCH__", "__mt_fp8_e4m3 q;",
    ],
    "vendor headers": ["#include <cuda_runtime.h>", '#include "musa_bf16.h"', "# include <cub/cub.cuh>"],
    "torch headers": ["#include <torch/extension.h>", "#include <ATen/ATen.h>", '#include "c10/util/Half.h"'],
    "scoped atomics": ["atomicAdd_system(p, 1);", "atomicCAS_block(p, 0, 1);"],
    "exchange": ["atomicExch(p, 1);"],
    "fences": ["__threadfence();", "__threadfence_block();", "__threadfence_system();"],
    "acquire and release": ["cuda::atomic_ref<int> x(y);", "std::atomic<int> x;", "__atomic_load_n(p, 2);"],
    "named barriers": ['text("bar.sync 1, 64;")', "__barrier_sync(1);", "mbarrier_wait(p);"],
    "grid barriers": [
        "namespace cg = cooperative_groups;", "cg::this_grid().sync();", "MT_RT(LaunchCooperativeKernel)(f);",
    ],
    "warp size": [
        "x = threadIdx.x % 32;", "x = threadIdx.x / 32;", "x = threadIdx.x & 31;", "x = lane & 0x1f;", "x = warp * 32;",
        "x = threadIdx.x >> 5;", "x = warp_id << 5;", "x = warpSize;", "__syncwarp(0xffffffff);", "x = 32 * warp;",
    ],
    "shuffles without mask": ["__shfl(x, 0);", "__shfl_xor (x, 1);", "__ballot(p);"],
    "partial masks": ["__activemask();", "__match_any_sync(ALL_LANES, x);"],
    "volatile vectors": [
        "volatile int4* p;", "volatile const uint2* p;", "float4 volatile x;", "const volatile double2 x;",
    ],
    "cache hints": [
        "__ldcg(p);", "__stcs(p, x);", "__ldg(p);", "__builtin_nontemporal_store(x, p);", 'x("L1::no_allocate")',
    ],
    "hardware of one vendor": [
        "cp_async_bulk(p);", "const CUtensorMap& m", "wgmma_fence();", "__cluster_dims__(2)", "__musa_memcpy_g2s(p);",
        "f(const __grid_constant__ A a)", "__nanosleep(20);",
    ],
    "lambdas": ["auto f = [&](int i) { return i; };", "go([=] __device__ (int i) { x[i] = 0; });", "g([]() { });"],
    "trap": ["__trap();", "assert(x > 0);"],
    "bits of bytes": ["__byte_perm(x, y, 3);"],
    "128-bit numbers": ["__uint128_t x;", "unsigned __int128 y;"],
}  # fmt: skip
# Near misses, and what the kernels do hold.
_FINE = (
    "words[1] = static_cast<uint32_t>(place.offset >> 32); x = y << 32;",
    "state ^= state << 5; constexpr int MT_MAX_TOPK = 32;  // one lane of a warp",
    "__syncthreads(); atomicAdd(&x, 1u); atomicCAS(&x, 0u, 1u); x = threadIdx.x % WARP; y = 1u << lane_id();",
    "volatile uint32_t* flag = p; const int4 value = q[0]; fence_system(); x = masm; cumulative = 3; multiple = 2;",
    "__shared__ int x[4]; y = x[i] (z); int w = __shfl_sync(ALL_LANES, y, 0); a[b] = {1};",
    "// cudaMalloc, warpSize, asm and __trap() in a comment\n/* __ldg(p)\n atomicExch(p) */",
    'const char* text = "cudaMalloc and asm in a message";',
    "static_assert(sizeof(x) == 64); x = 0.32f * y; z = y / 32.5;",
)


def _code(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("rule", kernel_rules.RULES, ids=lambda rule: rule.name)
def test_each_rule_finds_what_it_forbids(rule: kernel_rules.Rule) -> None:
    for snippet in _PLANTED[rule.name]:
        text = f"void f() {{\n  {snippet}\n}}\n"
        found = kernel_rules.findings(text, "planted.cuh")
        assert any(f"planted.cuh:2 {rule.name}: " in finding for finding in found), snippet
        assert kernel_rules.findings(text, "kernels/platform.h") == []


@pytest.mark.parametrize("text", _FINE)
def test_what_is_allowed_is_not_found(text: str) -> None:
    assert kernel_rules.findings(text, "planted.cuh") == []


def test_every_rule_is_planted() -> None:
    assert set(_PLANTED) == {rule.name for rule in kernel_rules.RULES}
    assert kernel_rules.findings("#define MT_MOE_MUSA 1\n", "launch.mu") == []
    assert kernel_rules.findings("#define MT_MOE_MUSA 1\n", "launch.cu") != []


def test_the_kernels_keep_the_rules() -> None:
    files = build.sources()
    assert {"platform.h", "launch.cu", "launch.mu"} < {path.name for path in files}
    found = [finding for path in files for finding in kernel_rules.findings(_code(path), path.name)]
    assert not found, "\n" + "\n".join(found)


def test_the_parts_of_the_build_hold_all_launchers() -> None:
    text = _code(build.FOLDER / "launchers.cuh")
    assert set(re.findall(r"MT_MOE_UNIT == (\d)", text)) == {str(unit) for unit in range(compiler.UNITS + 1)}
    included = re.findall(r'#include "(launch_\w+\.cuh)"', text)
    assert sorted(included) == sorted(path.name for path in build.FOLDER.glob("launch_*.cuh"))


def test_each_name_of_the_shim_is_declared_and_mapped() -> None:
    declared = set(re.findall(r"\bmusa[A-Z]\w+", kernel_rules.without_comments(_code(SHIM / "names.h"))))
    mapped = dict(re.findall(r"#define (musa\w+) (\w+)", _code(SHIM / "as_cuda.h")))
    assert declared == set(mapped) and len(declared) > 50
    assert all(cuda == name.replace("musa", "cuda", 1) for name, cuda in mapped.items())


def _plain(folder: Path) -> None:
    """Copies the sources without their launch configurations, the one thing that no plain C++ compiler can read."""
    for path in build.sources():
        (folder / path.name).write_text(re.sub(r"<<<.*?>>>(?=\()", "", _code(path), flags=re.S), encoding="utf-8")


def _check_musa(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("g++") is None:
        pytest.skip("no g++ on PATH to check the names of the MUSA source with")
    line = ["g++", "-x", "c++", "-std=c++17", "-w", f"-I{SHIM}", *options, "launch.mu"]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("defines", [(), ("-DMT_MOE_CHAOS=7",)], ids=["plain", "chaos"])
def test_the_musa_source_uses_names_that_musa_has(tmp_path: Path, defines: tuple[str, ...]) -> None:
    _plain(tmp_path)
    done = _check_musa(tmp_path, "-fsyntax-only", *defines)
    assert done.returncode == 0, done.stderr


def test_names_that_musa_has_not_do_not_compile(tmp_path: Path) -> None:
    _plain(tmp_path)
    wrong = [
        "int a() { return musaMallocEverywhere(nullptr, 1); }",
        "int b() { void* p; return cudaMalloc(&p, 1); }",
        "__device__ void c() { __nanosleep(20); }",
        "__device__ void d() { __threadfence(); }",
        "__device__ void e(unsigned long long* p) { atomicAdd(p, 1ull); }",
        "__device__ unsigned f(unsigned x) { return __shfl_sync(mt::ALL_LANES, x, 0); }",
        "__device__ mt_bf16 g(mt_bf16 x) { return x + x; }",
        "__device__ int4 h(volatile int4* p) { return *p; }",
        "__device__ int i(const int* p) { return __ldcg(p); }",
        "__nv_bfloat16 j;",
    ]
    right = "__device__ float z(mt_bf16 x) { return mt::widen(x) + __shfl_sync(mt::ALL_LANES, 1, 0); }"
    (tmp_path / "launch.mu").write_text("\n".join([_code(tmp_path / "launch.mu"), right, *wrong]))
    first = len(_code(tmp_path / "launch.mu").splitlines()) - len(wrong) + 1
    done = _check_musa(tmp_path, "-fsyntax-only", "-fmax-errors=0")
    lines = {int(line) for line in re.findall(r"^launch\.mu:(\d+):\d+: error:", done.stderr, re.M)}
    assert lines == set(range(first, first + len(wrong))), done.stderr


def _ours(preprocessed: str, names: Iterable[str]) -> str:
    """Lines of a preprocessed file that come from the given files."""
    known, kept, ours = set(names), [], False
    for line in preprocessed.splitlines():
        if match := re.match(r'# \d+ "([^"]*)"', line):
            ours = Path(match[1]).name in known
        elif ours:
            kept.append(line)
    return "\n".join(kept)


def test_what_musa_sees_of_the_platform_file_keeps_the_rules(tmp_path: Path) -> None:
    # platform.h may hold anything for CUDA, behind its #if; what is left for MUSA may name MUSA and its fence only.
    allowed = ("vendor names:", "fences:", "warp size:")

    def seen() -> list[str]:
        done = _check_musa(tmp_path, "-E")
        assert done.returncode == 0, done.stderr
        text = _ours(done.stdout, (path.name for path in build.sources()))
        assert "fence_system" in text and "layout_impl" in text
        found = kernel_rules.findings(text, "expanded")
        return [finding for finding in found if not finding.partition(" ")[2].startswith(allowed)]

    _plain(tmp_path)
    assert seen() == []
    platform = tmp_path / "platform.h"
    platform.write_text(_code(platform) + 'inline void f() { asm volatile("exit;"); }\n')
    assert len(seen()) == 1


@pytest.fixture(scope="module")
def nvcc() -> compiler.Compiler:
    try:
        return compiler.find("cuda")
    except MissingPackageError as error:
        pytest.skip(f"nothing is compiled for CUDA here: {error}")


@pytest.fixture(scope="module")
def built(nvcc: compiler.Compiler, tmp_path_factory: pytest.TempPathFactory) -> build.Library:
    """The library for one architecture, compiled once for this file; compiling is most of what this file costs."""
    return _build(tmp_path_factory.mktemp("cache"), (LIBRARY_ARCH,))


def _copies(nvcc: compiler.Compiler, folder: Path, arch: str) -> list[resources.Resources]:
    """The kernels that move rows for an architecture, compiled as the library compiles them."""
    source = folder / f"{arch}.cu"
    source.write_text(COPIES_SOURCE, encoding="utf-8")
    line = [word for word in compiler.commands(nvcc, (arch,), (), folder / "unused.so").units[0] if "UNIT" not in word]
    at = line.index("-c")
    line[at:] = ["-cubin", f"-I{build.FOLDER}", str(source), "-o", str(source.with_suffix(".cubin"))]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500)
    assert done.returncode == 0, done.stdout
    return resources.parse(done.stdout)


def _build(cache: Path, archs: tuple[str, ...], *defines: str) -> build.Library:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MT_MOE_LIBRARY", raising=False)
        patch.setenv("EP_JIT_CACHE_DIR", str(cache))
        return build.build("cuda", archs, defines)


def _misfits(kernels: list[resources.Resources]) -> list[resources.Resources]:
    """Kernels that move rows and do not fit into their registers."""
    return [
        kernel
        for kernel in kernels
        if any(name in kernel.kernel for name in COPIES) and (kernel.stack or kernel.spill_stores or kernel.spill_loads)
    ]


def _names(kernels: list[resources.Resources], arch: str) -> set[str]:
    """Names of the kernels of one architecture that move rows."""
    return {k.kernel for k in kernels if k.arch == arch and any(name in k.kernel for name in COPIES)}


@pytest.mark.timeout(600)
def test_no_copy_loop_spills(built: build.Library, nvcc: compiler.Compiler, tmp_path: Path) -> None:
    others = [arch for arch in ARCHS if arch != LIBRARY_ARCH]
    with ThreadPoolExecutor() as cores:
        found = list(cores.map(lambda arch: _copies(nvcc, tmp_path, arch), others))
    kernels = [*resources.parse(built.log), *(kernel for some in found for kernel in some)]
    wanted = _names(kernels, LIBRARY_ARCH)
    for name in COPIES:
        assert any(name in kernel for kernel in wanted), name
    for arch in others:
        assert _names(kernels, arch) == wanted, arch
    assert not _misfits(kernels), "\n".join(map(str, _misfits(kernels)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_library_compiles_for_all_architectures_at_once(nvcc: compiler.Compiler, tmp_path: Path) -> None:
    made = _build(tmp_path, ARCHS)
    library.Library(made.path)
    kernels = resources.parse(made.log)
    by_arch = [{kernel.kernel for kernel in kernels if kernel.arch == arch} for arch in ARCHS]
    assert by_arch[0] == by_arch[1] == by_arch[2] and len(by_arch[0]) > 10
    assert not _misfits(kernels), "\n" + resources.table(made.log)


def test_a_spill_or_a_stack_frame_in_a_copy_loop_is_found() -> None:
    fine = resources.Resources("_ZN2mt12combine_implIfLi4EE", "sm_90", 64, 0, 0, 0, 0)
    assert _misfits([fine]) == []
    for change in ({"stack": 8}, {"spill_stores": 4}, {"spill_loads": 4}):
        assert len(_misfits([fine, replace(fine, **change)])) == 1
    assert _misfits([replace(fine, kernel="layout_impl", stack=8)]) == []


def test_the_library_loads_without_a_gpu_and_has_every_function(built: build.Library) -> None:
    library.Library(built.path)  # compares the sizes of all structs
    header = kernel_rules.without_comments(_code(build.FOLDER / "launch.h"))
    names = set(re.findall(r"\b(mt_\w+)\(", header))
    assert len(names) > 10
    loaded = ctypes.CDLL(str(built.path))
    assert [name for name in names if not hasattr(loaded, name)] == []
    assert [name for name in ("mt_nothing",) if not hasattr(loaded, name)] == ["mt_nothing"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("define", ["MT_MOE_CHAOS=7", "MT_MOE_PORTABLE"])
def test_the_other_builds_compile(nvcc: compiler.Compiler, tmp_path: Path, define: str) -> None:
    made = _build(tmp_path, ("sm_90",), define)
    library.Library(made.path)
    assert made.compiled and made.commands and all(f"-D{define}" in line for line in made.commands.units)
    if define == "MT_MOE_PORTABLE":
        assert not _misfits(resources.parse(made.log)), "\n" + resources.table(made.log)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_musa_source_compiles_to_device_code(nvcc: compiler.Compiler, tmp_path: Path) -> None:
    line = [str(nvcc.path), "-x", "cu", "-std=c++17", "-O3", "-fmad=false", "-arch=sm_90", "-Xptxas", "-v", f"-I{SHIM}"]
    done = subprocess.run(
        [*line, "-cubin", "-o", str(tmp_path / "x.cubin"), str(build.FOLDER / "launch.mu")],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    kernels = resources.parse(done.stderr)
    assert not _misfits(kernels) and any("dispatch_impl" in kernel.kernel for kernel in kernels), resources.table(
        done.stderr
    )
