"""What the kernel source may not hold, as functions from text to findings; test_kernel_sources.py applies them.

One source serves CUDA and MUSA, and only the first can be run here. Each rule names something that MUSA lacks, does
otherwise, or breaks on, so that it stays out of every file but platform.h. The rules read text without its comments and
strings; what needs types (arithmetic of bf16, 64-bit atomics, shuffles of other types, names that MUSA has not) is left
to the compilation against musa_shim/names.h.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PLATFORM_FILE = "platform.h"
# Defines which platform it is for, so it alone may say so.
MUSA_FILE = "launch.mu"


@dataclass(frozen=True)
class Rule:
    """A pattern that may not appear, and why."""

    name: str
    pattern: str
    why: str
    in_strings: bool = False


_VECTOR = r"(?:u?(?:char|short|int|long|longlong)|float|double|half)[1-4]"
RULES = (
    Rule("asm", r"\b(?:asm|__asm|__asm__)\b", "MUSA does not assemble PTX"),
    Rule(
        "vendor names",
        r"\b(?:cuda|nv_|__nv_|__mt_bf|__mt_fp|mt_bfloat16|musa(?=[A-Z_])|cu(?=[A-Z])|mu(?=[A-Z]))\w*"
        r"|\b__(?:CUDA|NVCC|MUSA|MCC)\w*\b|\bMT_MOE_(?:MUSA|PORTABLE)\b",
        "platform.h alone knows the vendors",
    ),
    Rule("vendor headers", r"#\s*include\s*[<\"](?:cuda|musa|nv|cub|cutlass|cute)", "platform.h includes them", True),
    Rule(
        "torch headers",
        r"#\s*include\s*[<\"](?:torch|ATen|c10|pybind11|Python\.h)",
        "mcc can not parse them",
        True,
    ),
    Rule("scoped atomics", r"\batomic\w+_(?:system|block)\b", "mcc of SDK 4.3 does not end on them"),
    Rule("exchange", r"\batomicExch\b", "seen in no public MUSA code; atomicCAS was"),
    Rule(
        "fences",
        r"\b__threadfence\w*",
        "only system fences order memory on MUSA: use fence_system() of platform.h",
    ),
    Rule(
        "acquire and release",
        r"\b__nv_atomic\w*|\b(?:cuda|musa|std)::(?:atomic|memory_order|thread_scope)\w*|\b__atomic_\w+",
        "flags are volatile words between system fences",
    ),
    Rule(
        "named barriers",
        r"\bbar(?:rier)?\.(?:sync|arrive|red)\b|\b__barrier_sync\w*|\bmbarrier\w*|\bnamed_barrier\w*|\b__mbarrier\w*",
        "MUSA has block barriers alone",
        True,
    ),
    Rule(
        "grid barriers",
        r"\bcooperative_groups\b|\bcg::|\bthis_grid\b|\bgrid\.sync\b|\w*LaunchCooperative\w*",
        "a grid can not be synchronised on MUSA: launch twice",
    ),
    Rule(
        "warp size",
        r"\bwarpSize\b|[%/*]\s*32\b(?!\.)|(?<![\w.])32\s*\*|&\s*(?:31\b|0x1[fF]\b)|(?<![\w.])31\s*&"
        r"|\b(?:threadIdx\.x|\w*(?:lane|warp|tid|thread)\w*(?:\(\))?)\s*(?:>>|<<)\s*5\b"
        r"|\b0x[fF]{8}u?\b",
        "warps have 128 lanes on older MUSA: use WARP, lane_id(), warp_id() and ALL_LANES of platform.h",
    ),
    Rule("shuffles without mask", r"\b__(?:shfl|shfl_up|shfl_down|shfl_xor|any|all|ballot)\s*\(", "only _sync forms"),
    Rule("partial masks", r"\b__activemask\b|\b__match_(?:any|all)_sync\b", "masks are ALL_LANES"),
    Rule(
        "volatile vectors",
        rf"\bvolatile\s+(?:const\s+)?{_VECTOR}\b|\b{_VECTOR}\s+(?:const\s+)?volatile\b",
        "mcc refuses them: go by 32-bit words",
    ),
    Rule(
        "cache hints",
        r"\b__ld(?:g|cg|cs|ca|lu|cv)\b|\b__st(?:cg|cs|wb|wt)\b|\b__builtin_nontemporal\w*|\bL[12]::|\bevict_\w+"
        r"|\b__prefetch\w*",
        "MUSA has none; plain loads and stores",
        True,
    ),
    Rule(
        "hardware of one vendor",
        r"\b(?:cp_async|cp\.async|tensormap|CUtensorMap|wgmma|tcgen05|griddepcontrol|multimem|memcpy_async)\w*"
        r"|\b__cluster\w*|\bcluster_(?:dims|group)\w*|\b__pipeline_\w+|\b__grid_constant__\b|\b__musa_\w+|\b__nanosleep\b",
        "TMA, clusters, tensor cores and PDL differ on MUSA",
        True,
    ),
    Rule(
        "lambdas",
        r"\[\s*(?:[=&][^\]]*)?\]\s*(?:__\w+__\s*)*\([^)]*\)\s*(?:mutable\s*)?(?:->[^{]+)?\{",
        "mcc has no flag for them",
    ),
    Rule("trap", r"\b__trap\b|\bassert\s*\(", "a kernel that holds a trap fails on MUSA SDK 4.3: set the fault word"),
    Rule("bits of bytes", r"\b__byte_perm\b", "Mooncake had to replace it on MUSA"),
    Rule("128-bit numbers", r"\b__u?int128(?:_t)?\b", "mcc crashes on them"),
)


def without_comments(text: str, *, strings: bool = True) -> str:
    """The text with its comments blanked, and unless `strings` what stands in quotes too; lines stay where they are."""

    def blank(match: re.Match[str]) -> str:
        if match[0].startswith("/") or not strings:
            return re.sub(r"[^\n]", " ", match[0])
        return match[0]

    # A quote opens a string only outside a comment, and the other way round, so all are found in one pass.
    tokens = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'"
    return re.sub(tokens, blank, text, flags=re.S)


def findings(text: str, name: str) -> list[str]:
    """What of a file breaks a rule, as "name:line rule: text (why)"; platform.h may hold all."""
    if Path(name).name == PLATFORM_FILE:
        return []
    code, with_strings = without_comments(text, strings=False), without_comments(text)
    found = []
    for rule in RULES:
        for match in re.finditer(rule.pattern, with_strings if rule.in_strings else code):
            if Path(name).name == MUSA_FILE and match[0] == "MT_MOE_MUSA":
                continue
            line = code.count("\n", 0, match.start()) + 1
            found.append(f"{name}:{line} {rule.name}: {match[0].strip()} ({rule.why})")
    return found
