"""The cache of compiled kernels on disk: its files (`store`), who may write them (`trust`), its keys (`sources`)."""
