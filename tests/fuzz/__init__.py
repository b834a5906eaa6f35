"""Random calls of tileattn's public functions, compared with an oracle that shares no code with the package.

`make fuzz` runs it on the CPU. The files, in the order in which a call passes through them:

1. :mod:`fuzz.spec`: a call as a value, which JSON holds.
2. :mod:`fuzz.draw`: random structures (what kernels are compiled for), then random sizes and values of a structure.
3. :mod:`fuzz.values`: the call's tensors.
4. :mod:`fuzz.adapters`: the call itself, by the function of tileattn that it names.
5. :mod:`fuzz.variants` and :mod:`fuzz.oracle`: the right outputs in float64, and the variance of their rounding error.
6. :mod:`fuzz.compare`: the verdict.
7. :mod:`fuzz.shrink`: the smallest call that still fails.

:mod:`fuzz.ahead` compiles kernels for a GPU, :mod:`fuzz.worker` runs calls in one process, :mod:`fuzz.__main__` is the
command line. It is a seeded script and not Hypothesis, because on a GPU a call's verdict is read hundreds of calls
later, structures are drawn long before their sizes, and both are drawn in processes that may die.
"""
