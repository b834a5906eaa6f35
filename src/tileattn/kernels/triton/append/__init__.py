"""append_kv for GPUs on which the TileLang kernel does not run."""
