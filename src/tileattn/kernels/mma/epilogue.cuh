// store_results(): writes O / l and lse to global memory.
#pragma once
#include "problem.cuh"
#include "softmax.cuh"

// Transposes 4 x 4 words among the four lanes of a row: lane i's word j becomes lane j's word i.
DEVICE void transpose_among_four(unsigned (&x)[4]) {
  int lane = lane_index();
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      unsigned received = shuffle_xor(upper ? x[i] : x[i | bit], bit);
      if (upper)
        x[i] = received;
      else
        x[i | bit] = received;
    }
  }
}

// Stores a row of 4 * 8 columns, of which this lane has two of each 8. Shuffles give each lane 16 bytes to store.
DEVICE void store_columns(Element* row, const float (&pairs)[4][2], bool there) {
  unsigned x[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) x[n] = pack(pairs[n][0], pairs[n][1]);
  transpose_among_four(x);
  if (there) store_global_16(row + lane_index() % 4 * 8, x);
}

// Stores a warp's rows of O, from the block's query `first` on, in columns from `column` on.
template <int M, int N>
DEVICE void store_output(const Output& output, const Softmax<M>& softmax, const Sums (&o)[M][N], int first, int column) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      int query = first + m * 16 + row * 8 + lane_index() / 4;
      float inverse = softmax.inverse(m, row);
      Element* to = output.o + query * output.stride + column;
#pragma unroll
      for (int n = 0; n < N; n += 4) {
        float pairs[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) pairs[i][j] = value(o[m][n + i], row, j) * inverse;
        store_columns(to + n * 8, pairs, query < output.queries);
      }
    }
}

template <int M>
DEVICE void store_lse(const Output& output, const Softmax<M>& softmax, int first) {
  if (output.lse == nullptr || lane_index() % 4 != 0) return;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      int query = first + m * 16 + row * 8 + lane_index() / 4;
      if (query < output.queries) output.lse[query] = softmax.lse(m, row);
    }
}

// Stores a warp's results after the last tile: O in the block's rows from `first` on and columns from `column` on. If
// several warps share rows, the warp with the first columns stores lse.
template <int M, int N>
DEVICE void store_results(const Problem& problem, const Softmax<M>& softmax, const Sums (&o)[M][N], int first,
                          int column = 0) {
  Output output(problem.arguments);
  store_output(output, softmax, o, first, column);
  if (column == 0) store_lse(output, softmax, first);
}
