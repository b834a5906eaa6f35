// Rung 5, pipelined: the scores of the next tile are computed together with the exponentials of this tile.
//
// In the other rungs the softmax of a step waits for S, and the product with V waits for the softmax. Matrix units and
// exponential units then take turns, unless another warp is at another step. Here each step also computes the next
// tile's S, which depends on nothing else in the step, so the compiler interleaves its instructions with the
// exponentials. The idea is FlashAttention-3's, where the products run asynchronously. K and V have separate places,
// because K is one tile ahead. Q is in registers.
#include "rows.cuh"

// [shared memory]
constexpr int SHARED_BYTES = larger(QueryTile::BYTES, PlacesAhead::BYTES);
// [/shared memory]

DEVICE void attend(const Problem& problem) {
  // [queries]
  constexpr int M = ROW_TILES;
  int row = first_row();
  QueryTile queries{shared_memory()};
  PlacesAhead keys(problem, shared_memory());
  copy_queries(problem, queries);
  await_queries(problem, queries);
  QueriesInRegisters<M, HEAD_DIM> q(queries, row);
  __syncthreads();  // all have read: K may take the place
  // [/queries]

  Softmax<M> softmax(problem.scale);
  Sums o[M][HEAD_DIM / 8], s[M][BLOCK_N / 8];
  clear(o);
  // [tile]
  keys.start();
  clear(s);
  add_scores<HEAD_DIM>(s, q, 0, keys.k(), 0);
  problem.walk([&](int j, bool hidden) {
    if (hidden) problem.hide<Softmax<M>>(s, row, j * BLOCK_N);
    softmax.begin(s, o);
    keys.next();
    Probabilities<M, BLOCK_N / 8> p;
    softmax.probabilities(p, s);
    clear(s);
    add_scores<HEAD_DIM>(s, q, 0, keys.k(), 0);  // after the last tile there is no next one; this result is not read
    add_values<BLOCK_N>(o, p, 0, keys.v(), 0, 0);
  });
  // [/tile]

  softmax.finish();
  store_results(problem, softmax, o, row);
}

#include "kernel.cuh"
