// Maxima and sums of rows that are shared among several warps, reduced through shared memory.
#pragma once
#include "ptx.cuh"

// PARTS warps share ROWS rows; each has all of them, or a block of them that starts at `first`.
template <int PARTS, int ROWS>
struct Exchange {
  static constexpr int BYTES = PARTS * ROWS * 4;
  unsigned address;

  template <int M>
  DEVICE void max(float (&x)[M][2], int part, int first) const {
    put(x, part, first);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int row = 0; row < 2; ++row)
#pragma unroll
        for (int p = 0; p < PARTS; ++p) x[m][row] = fmaxf(x[m][row], load_shared(place(p, first + m * 16 + row * 8)));
  }
  template <int M>
  DEVICE void sum(float (&x)[M][2], int part, int first) const {
    put(x, part, first);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float sum = 0;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) sum += load_shared(place(p, first + m * 16 + row * 8));
        x[m][row] = sum;
      }
  }

 private:
  // The four lanes of a row hold the same number.
  template <int M>
  DEVICE void put(const float (&x)[M][2], int part, int first) const {
    __syncthreads();  // the last numbers have been read
    if (lane_index() % 4 == 0) {
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int row = 0; row < 2; ++row) store_shared(place(part, first + m * 16 + row * 8), x[m][row]);
    }
    __syncthreads();
  }
  DEVICE unsigned place(int part, int row) const { return address + (part * ROWS + row + lane_index() / 4) * 4; }
};
