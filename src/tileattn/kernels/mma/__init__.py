"""The ladder of CUDA C++ kernels with ``mma.sync``: one .cu file per rung, compiled at run time by NVRTC."""
