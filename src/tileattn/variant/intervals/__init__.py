"""Interval analysis of masks: of each tile of scores, whether a mask hides all of it, none of it, or a part.

The traced expression of a mask is evaluated on intervals, `q` in q_lo..q_hi and `k` in k_lo..k_hi, for all tiles at
once. The cost is that of a few tensors with one element for each tile; no pairs of positions are looked at.

    values       bounds of integers, floats and conditions
    linear       linear forms, which keep what two subexpressions have in common
    integers     integer operations, bits: `&` and `|` of integers, floats: float operations
    comparisons  where a comparison holds everywhere in a tile, or nowhere
    tables       least and greatest element of a tensor over ranges of indices
    evaluator    walks the expression
    tiles        kinds of tiles; tiles that stay mixed are cut and asked again
"""
