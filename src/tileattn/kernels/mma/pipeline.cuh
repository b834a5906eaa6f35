// Pipelines that copy tiles of K and V into shared memory.
//
// All pipelines visit the tiles of keys from the last to the first, so tiles that the mask cuts through come first.
// A pipeline has start(), then for each tile k() and v(), which wait for the tile and return its address (in the last
// pipeline next() waits).
#pragma once
#include "problem.cuh"

typedef Tile<BLOCK_N, HEAD_DIM> KeyTile;

// Rows of K or of V, BLOCK_N at a time, from the last to the first.
struct Rows {
  const Element* next;  // this thread's source in the next tile
  int tile;             // its index

  DEVICE Rows(const Element* all, long long stride, const Problem& problem)
      : next(KeyTile::source(all + (problem.tiles - 1) * BLOCK_N * stride, stride)), tile(problem.tiles - 1) {}

  // Begins to copy the next tile, if there is one; the group that ends may be empty.
  DEVICE void copy(unsigned to, long long stride, int keys) {
    if (tile >= 0) KeyTile{to}.copy(next, stride, keys - tile * BLOCK_N);
    cp_async_commit();
    next -= BLOCK_N * stride;
    --tile;
  }
};

struct Pipeline {
  const Arguments& arguments;
  unsigned address;
  Rows keys, values;

  DEVICE Pipeline(const Problem& problem, unsigned address)
      : arguments(problem.arguments),
        address(address),
        keys(problem.k, problem.arguments.k_row, problem),
        values(problem.v, problem.arguments.v_row, problem) {}
  DEVICE void copy_k(unsigned to) { keys.copy(to, arguments.k_row, static_cast<int>(arguments.seqlen_k)); }
  DEVICE void copy_v(unsigned to) { values.copy(to, arguments.v_row, static_cast<int>(arguments.seqlen_k)); }
  DEVICE KeyTile place(int index) const { return {address + index * KeyTile::BYTES}; }
};

// K and V have separate places in shared memory, STAGES of each.
//   1 stage:  a tile is copied after the previous tile has been used; V arrives while K is multiplied.
//   2 stages: the next tile is copied while this one is multiplied; one barrier per tile is enough.
struct OwnPlaces : Pipeline {
  static constexpr int BYTES = 2 * STAGES * KeyTile::BYTES;
  int stage = 0;

  using Pipeline::Pipeline;
  DEVICE void start() {
    if (STAGES == 2) copy(stage);
  }
  DEVICE KeyTile k() {
    if (STAGES == 2) cp_async_wait<0>();
    __syncthreads();  // all are done with the tile before, and all have their part of this one, if it has been copied
    copy((stage + 1) % STAGES);
    if (STAGES == 1) {
      cp_async_wait<1>();
      __syncthreads();
    }
    return place(2 * stage);
  }
  DEVICE KeyTile v() {
    if (STAGES == 1) {
      cp_async_wait<0>();
      __syncthreads();
    }
    KeyTile tile = place(2 * stage + 1);
    stage = (stage + 1) % STAGES;
    return tile;
  }

 private:
  DEVICE void copy(int stage) {
    copy_k(place(2 * stage).address);
    copy_v(place(2 * stage + 1).address);
  }
};

// [shared places]
// K and V take turns in STAGES places.
//   1 stage:  each is copied when the other has been used up, and waited for.
//   2 stages: V arrives while K is multiplied, the next K while V is: as in FlashAttention-2, in half the memory of
//             two stages with places of their own.
struct SharedPlaces : Pipeline {
  static constexpr int BYTES = STAGES * KeyTile::BYTES;

  using Pipeline::Pipeline;
  DEVICE void start() {
    if (STAGES == 2) copy_k(place(0).address);
  }
  DEVICE KeyTile k() {
    if (STAGES == 2) cp_async_wait<0>();
    __syncthreads();  // all are done with V before; with 2 stages all have their part of K
    if (STAGES == 2) {
      copy_v(place(1).address);
    } else {
      copy_k(place(0).address);
      cp_async_wait<0>();
      __syncthreads();
    }
    return place(0);
  }
  DEVICE KeyTile v() {
    if (STAGES == 2) cp_async_wait<0>();
    __syncthreads();  // all are done with K
    if (STAGES == 2) {
      copy_k(place(0).address);
    } else {
      copy_v(place(0).address);
      cp_async_wait<0>();
      __syncthreads();
    }
    return place(STAGES - 1);
  }
};
// [/shared places]

// [places ahead]
// K and V have places of their own, STAGES of each, and K is a tile ahead: next() waits until V of this tile and K of
// the next one are there.
//   1 stage:  both are copied when they are needed, and waited for.
//   2 stages: the tiles behind them are copied meanwhile.
struct PlacesAhead : Pipeline {
  static constexpr int BYTES = 2 * STAGES * KeyTile::BYTES;
  int stage = 0;  // of K

  using Pipeline::Pipeline;
  DEVICE void start() {
    copy_k(k().address);
    cp_async_wait<0>();
    __syncthreads();
    if (STAGES == 2) copy();
  }
  DEVICE void next() {
    if (STAGES == 2) cp_async_wait<0>();
    __syncthreads();  // all are done with this tile's K and with V before; with 2 stages all have what comes next
    stage = (stage + 1) % STAGES;
    copy();
    if (STAGES == 1) {
      cp_async_wait<0>();
      __syncthreads();
    }
  }
  DEVICE KeyTile k() const { return place(stage); }
  DEVICE KeyTile v() const { return place(STAGES + (stage + 1) % STAGES); }

 private:
  // The K after the next one, and the next V; with 1 stage the next K and this V.
  DEVICE void copy() {
    copy_k(place((stage + 1) % STAGES).address);
    copy_v(place(STAGES + stage).address);
  }
};
// [/places ahead]

typedef Tile<BLOCK_M, HEAD_DIM> QueryTile;

// Begins to copy the block's queries.
DEVICE void copy_queries(const Problem& problem, const QueryTile& tile) {
  long long stride = problem.arguments.q_row;
  tile.copy(QueryTile::source(problem.q, stride), stride, problem.queries);
  cp_async_commit();
}

// Waits for the queries, and for all that was copied before.
DEVICE void await_queries(const Problem& problem, const QueryTile& tile) {
  cp_async_wait<0>();
  __syncthreads();
  if (problem.scale < 0) {
    negate(tile);
    __syncthreads();
  }
}
