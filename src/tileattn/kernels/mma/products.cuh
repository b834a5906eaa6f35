// The two matrix products of attention, computed by a warp with M * 16 rows of queries.
#pragma once
#include "tile.cuh"

// 16 x 8 sums of a product, in the registers of a warp: rows l / 4 and l / 4 + 8, columns 2 * (l % 4) and the next.
#if ACC_FP16
typedef unsigned Sums[2];
DEVICE void clear(Sums& x) { x[0] = x[1] = 0; }
DEVICE float value(const Sums& x, int row, int column) { return column ? high_half(x[row]) : low_half(x[row]); }
#else
typedef float Sums[4];
DEVICE void clear(Sums& x) { x[0] = x[1] = x[2] = x[3] = 0; }
DEVICE float value(const Sums& x, int row, int column) { return x[2 * row + column]; }
#endif

template <int M, int N>
DEVICE void clear(Sums (&x)[M][N]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n) clear(x[m][n]);
}

// Rows of Q that a warp multiplies, in shared memory: read anew in each product.
template <int M, class TILE>
struct QueriesInShared {
  TILE rows;
  DEVICE QueriesInShared(TILE tile, int row) : rows{tile.address + row * TILE::STRIDE} {}
  DEVICE void read(unsigned (&a)[M][4], int column) const {
    Blocks<TILE, DOWN_FIRST> blocks(rows);
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4(a[m], blocks.at(m * 16, column));
  }
};

// ... in registers: read once.
template <int M, int COLUMNS>
struct QueriesInRegisters {
  unsigned a[COLUMNS / 16][M][4];
  template <class TILE>
  DEVICE QueriesInRegisters(TILE tile, int row) {
    QueriesInShared<M, TILE> shared(tile, row);
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; ++i) shared.read(a[i], i * 16);
  }
  DEVICE void read(unsigned (&to)[M][4], int column) const {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int r = 0; r < 4; ++r) to[m][r] = a[column / 16][m][r];
  }
};

// S += Q K^T over COLUMNS of the head dim: K's rows from `row` on, N * 8 of them; Q's columns from `column` on.
template <int COLUMNS, int M, int N, class QUERIES, class TILE>
DEVICE void add_scores(Sums (&s)[M][N], const QUERIES& q, int column, const TILE& k, int row) {
  Blocks<TILE, ACROSS_FIRST> blocks(TILE{k.address + row * TILE::STRIDE});
#pragma unroll
  for (int i = 0; i < COLUMNS; i += 16) {
    unsigned a[M][4];
    q.read(a, column + i);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      unsigned b[4];
      ldmatrix_x4(b, blocks.at(n * 8, i));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma(s[m][n], a[m], b[0], b[1]);
        mma(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Probabilities in registers. The sums of S lie there as mma wants its first operand: two 16 x 8 make a 16 x 16.
template <int M, int N>
struct Probabilities {
  unsigned p[M][N][2];
  DEVICE void read(unsigned (&a)[M][4], int key) const {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int r = 0; r < 4; ++r) a[m][r] = p[m][key / 8 + r / 2][r % 2];
  }
};

// O += P V over KEYS keys: P's from `key` on, V's rows from `row` on; V's columns from `column` on, N * 8 of them.
template <int KEYS, int M, int N, class PROBABILITIES, class TILE>
DEVICE void add_values(Sums (&o)[M][N], const PROBABILITIES& p, int key, const TILE& v, int row, int column) {
  Blocks<TILE, DOWN_FIRST> blocks(TILE{v.address + row * TILE::STRIDE});
#pragma unroll
  for (int i = 0; i < KEYS; i += 16) {
    unsigned a[M][4];
    p.read(a, key + i);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      unsigned b[4];
      ldmatrix_x4_transposed(b, blocks.at(i, column + n * 8));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma(o[m][n], a[m], b[0], b[1]);
        mma(o[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}
