// The loop of the rungs that split the queries among warps: a warp has its own rows of Q, and all keys of a tile.
//
// A rung's own file chooses where Q is read from and how K and V share memory.
#pragma once
#include "epilogue.cuh"
#include "pipeline.cuh"

constexpr int ROW_TILES = BLOCK_M / WARPS / 16;  // of 16 queries each, that a warp has

DEVICE int first_row() { return warp_index() * ROW_TILES * 16; }

// Computes and stores O and lse of a warp's rows. `keys` is one of the pipelines; its first copies begin here.
template <class QUERIES, class KEYS>
DEVICE void attend_rows(const Problem& problem, const QUERIES& q, KEYS& keys) {
  constexpr int M = ROW_TILES;
  int row = first_row();
  Softmax<M> softmax(problem.scale);
  Sums o[M][HEAD_DIM / 8];
  clear(o);
  keys.start();
  // [tile]
  problem.walk([&](int j, bool hidden) {
    Sums s[M][BLOCK_N / 8];
    Probabilities<M, BLOCK_N / 8> p;
    clear(s);
    add_scores<HEAD_DIM>(s, q, 0, keys.k(), 0);
    if (hidden) problem.hide<Softmax<M>>(s, row, j * BLOCK_N);
    softmax.step(p, s, o);
    add_values<BLOCK_N>(o, p, 0, keys.v(), 0, 0);
  });
  // [/tile]
  softmax.finish();
  store_results(problem, softmax, o, row);
}
