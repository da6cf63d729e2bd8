// Stands in for the header of the MUSA SDK in tests. It is ours, not Moore Threads'.
//
// Under nvcc every name is another one for CUDA's, so that the MUSA source compiles to real code. Under a plain C++
// compiler the names are declared and nothing else is: what is not listed does not compile. The list is names.h.
#pragma once

#if defined(__CUDACC__)
#include "as_cuda.h"
#else
#include "names.h"
#endif
