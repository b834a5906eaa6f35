"""The ladder: CUDA C++ kernels with ``mma.sync``, one .cu file per rung (step), compiled at run time by NVRTC."""
