"""append_kv: new keys and values are rotated and written into a cache, in one launch."""
