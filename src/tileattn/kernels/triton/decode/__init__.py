"""The decode phase: few queries per sequence over caches of keys, which several programs share; then a merge."""
