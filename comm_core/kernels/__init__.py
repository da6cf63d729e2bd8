"""The kernels, one source for CUDA and MUSA, and the builder that turns them into a library with a C interface."""
