// Rung 3, shared KV: split-Q, with K and V in one place of shared memory.
//
// K of a tile is not needed any more when its V is, so they can take turns in the same memory. With two places V
// arrives while K is multiplied, and the next K while V is. Half the memory leaves room for larger tiles, or for more
// blocks on a multiprocessor, which hide each other's waiting.
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
