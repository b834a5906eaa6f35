// Tiles of 16-bit elements in shared memory: their layout, their copies from global memory, and their reads by warps.
//
// ldmatrix reads 8 rows of 16 bytes at a time. If rows are a multiple of 128 bytes apart, all 8 rows are in the same
// four banks and are read one after another: a bank conflict. SWIZZLE chooses one of two remedies:
//   0  padded:   each row is 16 bytes longer, so that the next row begins four banks further;
//   1  swizzled: 16-byte chunk c of row r is stored where chunk c ^ r would be, with enough bits for a row's chunks.
// Swizzling needs no extra memory, and rows stay aligned to their own size.
#pragma once
#include "ptx.cuh"

constexpr int THREADS = WARPS * 32;

DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

template <int ROWS_, int COLUMNS>
struct Tile {
  static constexpr int ROWS = ROWS_;
  static constexpr int CHUNKS = COLUMNS / 8;                                     // 16 bytes each
  static constexpr int PERIOD = (CHUNKS & -CHUNKS) < 8 ? (CHUNKS & -CHUNKS) : 8;  // chunks that change places
  static constexpr int STRIDE = COLUMNS * 2 + (SWIZZLE ? 0 : 16);                // bytes from row to row
  static constexpr int BYTES = ROWS * STRIDE;

  unsigned address;

  // Which chunks of a row change places: rows that lie in the same banks differ in it.
  static DEVICE int turn(int row) { return SWIZZLE ? row / (8 / PERIOD) % PERIOD : 0; }

  DEVICE unsigned at(int row, int chunk) const { return address + row * STRIDE + (chunk ^ turn(row)) * 16; }

  // Copies are shared among all threads: each has the same columns in rows that are a multiple of 8 apart, so that its
  // addresses differ by constants. This is where a thread begins, in a matrix whose rows are `stride` elements apart.
  static DEVICE const Element* source(const Element* matrix, long long stride) {
    return matrix + threadIdx.x / PERIOD * stride + threadIdx.x % PERIOD * 8;
  }

  // Begins to copy rows 0 .. there - 1 from this thread's source; the others become zero.
  DEVICE void copy(const Element* from, long long stride, int there) const {
    constexpr int COPYING = THREADS / 64 * 64, STEP = COPYING / PERIOD;
    int thread = static_cast<int>(unknown(threadIdx.x)), row = thread / PERIOD;
    if (COPYING < THREADS && row >= STEP) return;
    unsigned to = at(row, thread % PERIOD);
#pragma unroll
    for (int i = 0; i < (ROWS + STEP - 1) / STEP; ++i) {
#pragma unroll
      for (int j = 0; j < CHUNKS; j += PERIOD)
        if (ROWS % STEP == 0 || row + i * STEP < ROWS)
          cp_async_16(to + i * STEP * STRIDE + j * 16, from + j * 8, row + i * STEP < there);
      from += STEP * stride;
    }
  }
};

// The order of the four 8 x 8 matrices in a 16 x 16 block, by which lanes give addresses to ldmatrix.
//   DOWN_FIRST:   rows 0-7, rows 8-15, then columns 8-15 the same: A of a product; V, transposed, as B.
//   ACROSS_FIRST: columns 0-7, columns 8-15, then rows 8-15: K as B, whose "columns" are its rows.
enum Order { DOWN_FIRST, ACROSS_FIRST };

// Where this lane finds its row of 8 elements in the 16 x 16 blocks of a tile.
template <class TILE, Order order>
struct Blocks {
  unsigned first;  // in the block at (0, 0)

  DEVICE explicit Blocks(const TILE& tile) {
    int lane = lane_index();
    int row = order == DOWN_FIRST ? lane % 16 : lane % 8 + lane / 16 * 8;
    int chunk = order == DOWN_FIRST ? lane / 16 : lane / 8 % 2;
    first = unknown(tile.at(row, chunk));  // else the sums below are kept for each column, in as many registers
  }

  // Of the block at (row, column), both multiples of 16. A tile begins where the bits that swizzling changes are 0.
  DEVICE unsigned at(int row, int column) const {
    constexpr int LOW = SWIZZLE ? TILE::PERIOD * 16 - 1 : 0;
    int bytes = column * 2;
    return (first ^ (bytes & LOW)) + (bytes & ~LOW) + row * TILE::STRIDE;
  }
};

// Changes the sign of a tile's elements: a negative scale becomes a positive one. All threads, between barriers.
template <class TILE>
DEVICE void negate(const TILE& tile) {
  for (int i = threadIdx.x; i < TILE::BYTES / 4; i += THREADS)
    store_shared(tile.address + 4 * i, load_shared_word(tile.address + 4 * i) ^ 0x80008000u);
}
