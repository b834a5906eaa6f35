// How tiles of K and V come into shared memory.
//
// Both pipelines walk over the tiles of keys from the last to the first, where nothing is hidden any more. Each has
// start(), then for each tile k() and v(), which wait until the tile is there and say where.
#pragma once
#include "problem.cuh"

typedef Tile<BLOCK_N, HEAD_DIM> KeyTile;

DEVICE void copy_keys(const Problem& problem, unsigned to, int tile) {
  int first = tile * BLOCK_N;
  KeyTile{to}.copy(problem.k + first * problem.arguments.k_row, problem.arguments.k_row, problem.keys - first);
  cp_async_commit();
}
DEVICE void copy_values(const Problem& problem, unsigned to, int tile) {
  int first = tile * BLOCK_N;
  KeyTile{to}.copy(problem.v + first * problem.arguments.v_row, problem.arguments.v_row, problem.keys - first);
  cp_async_commit();
}

// K and V each have places of their own, STAGES of each.
//   1 stage:  a tile is copied when the one before has been used up; V arrives while K is multiplied.
//   2 stages: the next tile is copied while this one is multiplied, and one barrier per tile is enough.
struct OwnPlaces {
  static constexpr int BYTES = 2 * STAGES * KeyTile::BYTES;
  const Problem& problem;
  unsigned address;
  int next, stage = 0;

  DEVICE OwnPlaces(const Problem& problem, unsigned address) : problem(problem), address(address), next(problem.tiles - 1) {}

  DEVICE void start() {
    if (STAGES == 2) copy();
  }
  DEVICE KeyTile k() {
    if (STAGES == 2) cp_async_wait<0>();
    __syncthreads();
    copy();
    if (STAGES == 1) {
      cp_async_wait<1>();
      __syncthreads();
    }
    return {address + stage * 2 * KeyTile::BYTES};
  }
  DEVICE KeyTile v() {
    if (STAGES == 1) {
      cp_async_wait<0>();
      __syncthreads();
    }
    KeyTile tile{address + (stage * 2 + 1) * KeyTile::BYTES};
    stage ^= STAGES - 1;
    return tile;
  }

 private:
  // Into the place that is not being read.
  DEVICE void copy() {
    if (next < 0) return;
    unsigned to = address + (STAGES == 2 ? (problem.tiles - 1 - next) % 2 : 0) * 2 * KeyTile::BYTES;
    copy_keys(problem, to, next);
    copy_values(problem, to + KeyTile::BYTES, next);
    --next;
  }
};

// K and V take turns in STAGES places: K, V, K, V, ... of successive tiles.
//   1 stage:  each is copied when the other has been used up, and waited for.
//   2 stages: V arrives while K is multiplied, the next K while V is: as in FlashAttention-2, in half the memory of
//             two stages with places of their own.
struct SharedPlaces {
  static constexpr int BYTES = STAGES * KeyTile::BYTES;
  const Problem& problem;
  unsigned address;
  int next, stage = 0, free = 0;  // `next` counts halves of tiles, down: 2 * tile + 1 is K, 2 * tile is V

  DEVICE SharedPlaces(const Problem& problem, unsigned address) : problem(problem), address(address), next(2 * problem.tiles - 1) {}

  DEVICE void start() {
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) copy();
  }
  DEVICE KeyTile k() { return arrived(); }
  DEVICE KeyTile v() { return arrived(); }

 private:
  DEVICE KeyTile arrived() {
    if (STAGES > 1) cp_async_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
    __syncthreads();  // everybody's copies are there; and everybody is done with the place that is copied to now
    copy();
    if (STAGES == 1) {
      cp_async_wait<0>();
      __syncthreads();
    }
    KeyTile tile{address + stage * KeyTile::BYTES};
    stage = after(stage);
    return tile;
  }
  DEVICE void copy() {
    unsigned to = address + free * KeyTile::BYTES;
    if (next < 0)
      cp_async_commit();  // waits count groups
    else if (next % 2)
      copy_keys(problem, to, next / 2);
    else
      copy_values(problem, to, next / 2);
    --next;
    free = after(free);
  }
  static DEVICE int after(int place) { return place + 1 == STAGES ? 0 : place + 1; }
};

typedef Tile<BLOCK_M, HEAD_DIM> QueryTile;

// Begins to copy the block's queries.
DEVICE void copy_queries(const Problem& problem, const QueryTile& tile) {
  tile.copy(problem.q, problem.arguments.q_row, problem.queries);
  cp_async_commit();
}

// Waits for the queries, which were the last to be copied or are followed by `later` groups.
template <int later>
DEVICE void await_queries(const Problem& problem, const QueryTile& tile) {
  cp_async_wait<later>();
  __syncthreads();
  if (problem.scale < 0) {
    negate(tile);
    __syncthreads();
  }
}
