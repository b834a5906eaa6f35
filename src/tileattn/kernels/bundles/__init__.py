"""Bundles of ready-made kernels, installed as packages of their own; needs neither TileLang nor a compiler.

`manifest` says what a bundle holds, `installed` finds a kernel in the bundles of this environment, `lock` has the
digests of the sources that this version of tileattn generates, and `runtime` is what loads a kernel's library.
`kernels/tilelang/bundling` makes bundles.
"""
