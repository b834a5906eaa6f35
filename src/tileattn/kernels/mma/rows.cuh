// What the rungs that split the queries share: a warp has rows of Q of its own, and all keys of a tile.
//
// They differ in where Q is read from and in how K and V take turns, which is what a rung's own file says.
#pragma once
#include "epilogue.cuh"
#include "pipeline.cuh"

constexpr int ROW_TILES = BLOCK_M / WARPS / 16;  // of 16 queries each, that a warp has

DEVICE int first_row() { return warp_index() * ROW_TILES * 16; }

// From the first tile of keys to the store of O. `keys` is one of the pipelines; its first copies begin here.
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
