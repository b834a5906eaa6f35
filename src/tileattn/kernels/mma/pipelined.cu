// Rung 5, pipelined: the scores of the next tile are multiplied while this one's exponentials are computed.
//
// In the other rungs the softmax of a step waits for S, and the product with V for the softmax: matrix units and those
// for exponentials take turns, unless another warp happens to be elsewhere. Here each step has the next tile's S, too,
// which depends on nothing in it, so that the compiler mixes its instructions with the exponentials. (The idea is
// FlashAttention-3's, whose products run beside the softmax by themselves.) K and V have places of their own, because K
// is a tile ahead; Q is in registers.
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
    add_scores<HEAD_DIM>(s, q, 0, keys.k(), 0);  // after the last tile of one that is not there, which nobody reads
    add_values<BLOCK_N>(o, p, 0, keys.v(), 0, 0);
  });
  // [/tile]

  softmax.finish();
  store_results(problem, softmax, o, row);
}

#include "kernel.cuh"
