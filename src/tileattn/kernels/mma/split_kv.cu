// Rung 1, split-KV: the warps of a block share the keys, as in FlashAttention-1.
//
// Each warp has all of the block's queries and its part of a tile's keys, so a row's scores are spread over the warps.
// In every tile the warps exchange maxima through shared memory, and wait for each other. At the end they add up their
// parts of l and O, again through shared memory.
#include "epilogue.cuh"
#include "exchange.cuh"
#include "pipeline.cuh"

// [shared memory]
constexpr int M = BLOCK_M / 16, N = HEAD_DIM / 8;
typedef Exchange<WARPS, BLOCK_M> Statistics;
constexpr int OUTPUT_BYTES = WARPS * BLOCK_M * HEAD_DIM * 4;  // takes the place of Q, K and V in the end
constexpr int SHARED_BYTES = Statistics::BYTES + larger(QueryTile::BYTES + OwnPlaces::BYTES, OUTPUT_BYTES);
// [/shared memory]

// Adds up the warps' parts of O, each warp of other columns, and stores them.
DEVICE void store_sum_of_parts(const Output& output, const Softmax<M>& softmax, const Sums (&o)[M][N], unsigned to) {
  int warp = warp_index(), lane = lane_index();
  // [parts]
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_shared(to + ((((warp * M + m) * N + n) * 4 + i) * 32 + lane) * 4, value(o[m][n], i / 2, i % 2));
  __syncthreads();
  // [/parts]
#pragma unroll
  for (int m = 0; m < M; ++m)
    for (int part = warp; part < 2 * N / 4; part += WARPS) {
      int row = part % 2, n = part / 2 * 4, query = m * 16 + row * 8 + lane / 4;
      float pairs[4][2], inverse = row ? softmax.inverse(m, 1) : softmax.inverse(m, 0);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float sum = 0;
          for (int w = 0; w < WARPS; ++w)
            sum += load_shared(to + ((((w * M + m) * N + n + i) * 4 + row * 2 + j) * 32 + lane) * 4);
          pairs[i][j] = sum * inverse;
        }
      store_columns(output.o + query * output.stride + n * 8, pairs, query < output.queries);
    }
}

DEVICE void attend(const Problem& problem) {
  constexpr int KEYS = BLOCK_N / WARPS;
  int warp = warp_index(), row = warp * KEYS;
  Statistics statistics{shared_memory()};
  unsigned rest = shared_memory() + Statistics::BYTES;
  QueryTile queries{rest};
  OwnPlaces keys(problem, rest + QueryTile::BYTES);
  copy_queries(problem, queries);
  await_queries(problem, queries);
  QueriesInShared<M, QueryTile> q(queries, 0);

  Softmax<M> softmax(problem.scale);
  Sums o[M][N];
  clear(o);
  keys.start();
  // [tile]
  problem.walk([&](int j, bool hidden) {
    Sums s[M][KEYS / 8];
    Probabilities<M, KEYS / 8> p;
    float best[M][2];
    clear(s);
    add_scores<HEAD_DIM>(s, q, 0, keys.k(), row);
    if (hidden) problem.hide<Softmax<M>>(s, 0, j * BLOCK_N + row);
    Softmax<M>::maxima(best, s);
    statistics.max(best, warp, 0);
    softmax.raise(best);
    softmax.rescale(o);
    softmax.probabilities(p, s);
    add_values<KEYS>(o, p, 0, keys.v(), row, 0);
  });
  // [/tile]

  softmax.finish();
  statistics.sum(softmax.sum, warp, 0);
  Output output(problem.arguments);
  store_sum_of_parts(output, softmax, o, rest);
  if (warp == 0) store_lse(output, softmax, 0);
}

#include "kernel.cuh"
