// Rung 3, shared KV: split-Q, with K and V in the same place of shared memory.
//
// A tile's K is used before its V, so both can use the same memory, one after the other. With two places, V arrives
// while K is multiplied, and the next K while V is multiplied. Half the memory allows larger tiles, or more blocks per
// multiprocessor, which hide each other's waiting.
#include "rows.cuh"

// [shared memory]
constexpr int SHARED_BYTES = QueryTile::BYTES + SharedPlaces::BYTES;
// [/shared memory]

DEVICE void attend(const Problem& problem) {
  // [queries]
  QueryTile queries{shared_memory()};
  SharedPlaces keys(problem, shared_memory() + QueryTile::BYTES);
  copy_queries(problem, queries);
  await_queries(problem, queries);
  QueriesInShared<ROW_TILES, QueryTile> q(queries, first_row());
  // [/queries]
  attend_rows(problem, q, keys);
}

#include "kernel.cuh"
