"""Benchmarks of attention: cases, measurement, comparison with baselines, and presentation.

The modules, in reading order:

    variants      masks and score modifications by name ("causal+softcap50")
    cases         the shape of a measurement and its FLOPs; the named suites
    problem       the tensors of a case
    oracle        float64 attention on those tensors, and the error of an output and of gradients
    baselines     the implementations to compare: tileattn and its baselines
    passes        the timed call: the forward pass, the backward, or both
    runner        measures every implementation on every case
    results       the result file
    environment   device, versions and commit, as the result file records them
    compare       speed relative to each baseline, and to the best of each case
    cost          the time of a mask or modification beyond that of its visible tiles
    report, plot  a table and a picture of a result file; plot_memory draws peak bytes
    ladder        the steps of the mma ladder, the gain of each, and their picture
    parallel      several GPUs: the suite that torchrun starts
    warmup        the kernels that a run compiles before it measures

`tileattn.measure` has time and memory of a call, `tileattn.cli` the command line.
"""
