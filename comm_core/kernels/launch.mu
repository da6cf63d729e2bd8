// The library for MUSA: the same source.
#define MT_MOE_MUSA 1
#include "launchers.cuh"
