// Bodies of launch.h: choose a kernel by width and type and launch it. In parts that take about as long to compile, so that
// a build compiles them side by side: MT_MOE_UNIT says which one this is, without it all are. UNITS of compiler.py counts them.
#pragma once

#if !defined(MT_MOE_UNIT)
#define MT_MOE_UNIT 0
#endif

#if MT_MOE_UNIT == 0 || MT_MOE_UNIT == 1
#include "launch_blocks.cuh"
#include "launch_layout.cuh"
#endif
#if MT_MOE_UNIT == 0 || MT_MOE_UNIT == 2
#include "launch_combine.cuh"
#endif
#if MT_MOE_UNIT == 0 || MT_MOE_UNIT == 3
#include "launch_dispatch.cuh"
#include "launch_host.cuh"
#endif
