// Rung 4, shared QKV: Q is loaded through the same place of shared memory as K and V, and stays in registers.
//
// All products use the same fragments of Q. Reading them once saves Q's place in shared memory, and leaves its
// bandwidth to K and V.
#include "rows.cuh"

// [shared memory]
constexpr int SHARED_BYTES = larger(QueryTile::BYTES, SharedPlaces::BYTES);
// [/shared memory]

DEVICE void attend(const Problem& problem) {
  // [queries]
  QueryTile queries{shared_memory()};
  SharedPlaces keys(problem, shared_memory());
  copy_queries(problem, queries);
  await_queries(problem, queries);
  QueriesInRegisters<ROW_TILES, HEAD_DIM> q(queries, first_row());
  __syncthreads();  // all have read: K may take the place
  // [/queries]
  attend_rows(problem, q, keys);
}

#include "kernel.cuh"
