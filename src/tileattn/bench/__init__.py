"""Benchmarks of attention: what is measured, how, against whom, and how it is shown.

To be read in this order:

    variants      what a query may see and what is done to its score, by name ("causal+softcap50")
    cases         one measurement's shape; its FLOPs; the named suites
    problem       the tensors of a case
    oracle        float64 attention on those tensors, and the error of an output; gradient_oracle: of gradients
    baselines     the implementations to compare: tileattn and those beside it
    passes        what is called of them: the forward pass, the backward, or both
    runner        measures every implementation of every case, side by side
    results       the result file
    environment   device, versions and commit, as the result file records them
    compare       against each baseline, and against the best of each case
    cost          what a mask or modification costs beyond its visible tiles
    report, plot  a table and a picture of a result file; plot_memory draws peak bytes
    climb         the steps of the mma ladder and what each gains; plot_ladder draws them
    warmup        what a run compiles before it measures

Times and memory of a call are in `tileattn.measure`, the command line is in `tileattn.cli`.
"""
