"""Who holds and who computes which rows: layouts, the keys that masks reach, assignments."""
