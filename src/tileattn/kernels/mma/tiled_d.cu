// Rung 6, tiled D: fine-grained tiles over the head dim, for head dims of 256 to 1024.
//
// At these head dims a tile of K does not fit into shared memory, and a warp's rows of O do not fit into registers. So
// K is loaded in slices of its columns and V in slices of its rows, through the same places of shared memory. A
// block's warps form a grid: WARPS_M parts of the queries by WARPS_D parts of O's columns. They share both products:
//   S = Q K^T  a warp computes its queries by one part of the keys, and sums over the slices of the head dim;
//   O += P V   a warp computes its queries by its columns of O, over all keys. It needs the P of its neighbours, so P
//              goes through shared memory, and so do maxima, as in split-KV.
#include "epilogue.cuh"
#include "exchange.cuh"
#include "pipeline.cuh"

// [shared memory]
constexpr int M = 2, COLUMNS = 128;  // a warp's part of O: 32 x 128, half of its registers
constexpr int WARPS_D = HEAD_DIM / COLUMNS, KEYS = BLOCK_N / WARPS_D, SLICE_KEYS = SLICE / 4;
typedef Tile<BLOCK_N, SLICE> KeySlice;
typedef Tile<SLICE_KEYS, HEAD_DIM> ValueSlice;
typedef Tile<BLOCK_M, BLOCK_N> ProbabilityTile;
typedef Exchange<WARPS_D, BLOCK_M> Statistics;
constexpr int PLACE = larger(KeySlice::BYTES, ValueSlice::BYTES);
constexpr int SHARED_BYTES = QueryTile::BYTES + ProbabilityTile::BYTES + Statistics::BYTES + STAGES * PLACE;
// [/shared memory]
static_assert(BLOCK_M * WARPS_D == WARPS * M * 16 && KEYS * WARPS_D == BLOCK_N && KEYS % 16 == 0 && BLOCK_N % SLICE_KEYS == 0,
              "sizes that do not divide");

// [slices]
// Copies the slices of all tiles in the order of their use: those of K, then those of V.
struct Slices {
  static constexpr int OF_K = HEAD_DIM / SLICE, OF_V = BLOCK_N / SLICE_KEYS;
  const Problem& problem;
  unsigned address;
  int tile, slice = 0, place = 0;  // of the next copy

  DEVICE Slices(const Problem& problem, unsigned address)
      : problem(problem), address(address), tile(problem.tiles - 1) {}

  DEVICE void start() {
    if (STAGES == 2) copy();
  }
  // Waits for the next slice and returns its address.
  DEVICE unsigned next() {
    if (STAGES == 2) cp_async_wait<0>();
    __syncthreads();
    unsigned slice_address = address + (STAGES == 2 ? place ^ 1 : 0) * PLACE;
    copy();
    if (STAGES == 1) {
      cp_async_wait<0>();
      __syncthreads();
    }
    return slice_address;
  }

 private:
  DEVICE void copy() {
    const Arguments& arguments = problem.arguments;
    unsigned to = address + place * PLACE;
    int key = tile * BLOCK_N;
    if (tile >= 0 && slice < OF_K) {
      const Element* k = problem.k + key * arguments.k_row + slice * SLICE;
      KeySlice{to}.copy(KeySlice::source(k, arguments.k_row), arguments.k_row, problem.keys - key);
    } else if (tile >= 0) {
      key += (slice - OF_K) * SLICE_KEYS;
      const Element* v = problem.v + key * arguments.v_row;
      ValueSlice{to}.copy(ValueSlice::source(v, arguments.v_row), arguments.v_row, problem.keys - key);
    }
    cp_async_commit();
    place = (place + 1) % STAGES;
    if (++slice == OF_K + OF_V) slice = 0, --tile;
  }
};
// [/slices]

// P of a warp to where all of its neighbours find it.
DEVICE void share(const ProbabilityTile& tile, const Probabilities<M, KEYS / 8>& p, int row, int key) {
  int lane = lane_index();
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
        store_shared(tile.at(row + m * 16 + i * 8 + lane / 4, key / 8 + n) + lane % 4 * 4, p.p[m][n][i]);
}

DEVICE void attend(const Problem& problem) {
  int part = warp_index() % WARPS_D, row = warp_index() / WARPS_D * M * 16;
  QueryTile queries{shared_memory()};
  ProbabilityTile probabilities{queries.address + QueryTile::BYTES};
  Slices slices(problem, probabilities.address + ProbabilityTile::BYTES);
  Statistics statistics{slices.address + STAGES * PLACE};
  copy_queries(problem, queries);
  await_queries(problem, queries);
  QueriesInShared<M, QueryTile> q(queries, row);
  QueriesInShared<M, ProbabilityTile> p(probabilities, row);

  Softmax<M> softmax(problem.scale);
  Sums o[M][COLUMNS / 8];
  clear(o);
  slices.start();
  // [tile]
  problem.walk([&](int j, bool hidden) {
    Sums s[M][KEYS / 8];
    clear(s);
#pragma unroll 1
    for (int i = 0; i < Slices::OF_K; ++i) add_scores<SLICE>(s, q, i * SLICE, KeySlice{slices.next()}, part * KEYS);
    if (hidden) problem.hide<Softmax<M>>(s, row, j * BLOCK_N + part * KEYS);

    float best[M][2];
    Probabilities<M, KEYS / 8> own;
    Softmax<M>::maxima(best, s);
    statistics.max(best, part, row);
    softmax.raise(best);
    softmax.rescale(o);
    softmax.probabilities(own, s);
    share(probabilities, own, row, part * KEYS);
#pragma unroll 1
    for (int i = 0; i < Slices::OF_V; ++i)
      add_values<SLICE_KEYS>(o, p, i * SLICE_KEYS, ValueSlice{slices.next()}, 0, part * COLUMNS);
  });
  // [/tile]

  softmax.finish();
  statistics.sum(softmax.sum, part, row);
  store_results(problem, softmax, o, row, part * COLUMNS);
}

#include "kernel.cuh"
