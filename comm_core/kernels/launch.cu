// The library for CUDA.
#include "launchers.cuh"
