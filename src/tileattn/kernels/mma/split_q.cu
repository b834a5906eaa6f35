// Rung 2, split-Q: the warps of a block share the queries, as in FlashAttention-2.
//
// Each warp has rows of Q of its own and all keys of a tile. So a row's softmax stays within a warp, its four lanes
// even, and nothing but barriers passes between warps. Q lies in shared memory, and each product reads it again.
#include "epilogue.cuh"
#include "pipeline.cuh"

// [shared memory]
constexpr int SHARED_BYTES = QueryTile::BYTES + OwnPlaces::BYTES;
// [/shared memory]

DEVICE void attend(const Problem& problem) {
  // [queries]
  constexpr int M = BLOCK_M / WARPS / 16;
  int row = warp_index() * M * 16;
  QueryTile queries{shared_memory()};
  OwnPlaces keys(problem, shared_memory() + QueryTile::BYTES);
  copy_queries(problem, queries);
  await_queries(problem, queries);
  QueriesInShared<M, QueryTile> q(queries, row);
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
