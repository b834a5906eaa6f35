// Rung 2, split-Q: the warps of a block share the queries, as in FlashAttention-2.
//
// Each warp has its own rows of Q and all keys of a tile. A row's softmax stays within four lanes of one warp, and
// warps share only barriers. Q is in shared memory, and each product reads it again.
#include "rows.cuh"

// [shared memory]
constexpr int SHARED_BYTES = QueryTile::BYTES + OwnPlaces::BYTES;
// [/shared memory]

DEVICE void attend(const Problem& problem) {
  // [queries]
  QueryTile queries{shared_memory()};
  OwnPlaces keys(problem, shared_memory() + QueryTile::BYTES);
  copy_queries(problem, queries);
  await_queries(problem, queries);
  QueriesInShared<ROW_TILES, QueryTile> q(queries, first_row());
  // [/queries]
  attend_rows(problem, q, keys);
}

#include "kernel.cuh"
