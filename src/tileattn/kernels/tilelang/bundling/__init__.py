"""Makes bundles of kernels: `content` fills a folder, `wheel` packs it, `lock` writes the digests of sources.

`kernels/bundles` finds and loads them.
"""
