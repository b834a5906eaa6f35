"""The decode phase of the TileLang backend: few queries per sequence, and a contiguous or paged cache."""
