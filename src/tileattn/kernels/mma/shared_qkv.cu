// Rung 4, shared QKV: Q comes through the same place of shared memory as K and V, and stays in registers.
//
// Q is needed in all products, but its fragments are always the same: read once, they need neither their place in
// shared memory nor its bandwidth, which is what K and V are read with.
#include "epilogue.cuh"
#include "pipeline.cuh"

// [shared memory]
constexpr int SHARED_BYTES = larger(QueryTile::BYTES, SharedPlaces::BYTES);
// [/shared memory]

DEVICE void attend(const Problem& problem) {
  // [queries]
  constexpr int M = BLOCK_M / WARPS / 16;
  int row = warp_index() * M * 16;
  QueryTile queries{shared_memory()};
  SharedPlaces keys(problem, shared_memory());
  copy_queries(problem, queries);
  await_queries(problem, queries);
  QueriesInRegisters<M, HEAD_DIM> q(queries, row);
  __syncthreads();  // all have read: K may take the place
  // [/queries]

  Softmax<M> softmax(problem.scale);
  Sums o[M][HEAD_DIM / 8];
  clear(o);
  keys.start();
  // [tile]
  auto tile = [&](int j, bool hidden) {
    Sums s[M][BLOCK_N / 8];
    Probabilities<M, BLOCK_N / 8> p;
    clear(s);
    add_scores<HEAD_DIM>(s, q, 0, keys.k(), 0);
    if (hidden) problem.hide<Softmax<M>>(s, row, j * BLOCK_N);
    softmax.step(p, s, o);
    add_values<BLOCK_N>(o, p, 0, keys.v(), 0, 0);
  };
  int j = problem.tiles - 1;
  for (; j >= problem.full; --j) tile(j, true);
  for (; j >= 0; --j) tile(j, false);
  // [/tile]

  softmax.finish();
  Output output(problem.arguments);
  store_output(output, softmax, o, row, 0);
  store_lse(output, softmax, row);
}

#include "kernel.cuh"
