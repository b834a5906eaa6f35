// Runs CUDA kernels that TileLang generates for sm_80 on a CPU (see emulator.py).
//
// Every CUDA thread of a block is a fiber; blocks follow each other. A barrier, and an instruction of a whole warp (a
// matrix product, a shuffle), lets the others run until all have come. Asynchronous copies are done at once, so that a
// wait that is missing does not show; neither do races.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

using std::max;
using std::min;

#define __global__
#define __restrict__
#define __launch_bounds__(...)
#define CUDART_INF_F INFINITY

typedef unsigned char uchar;
typedef unsigned int uint;

constexpr int MAX_THREADS = 1024, LANES = 32, STACK_BYTES = 1 << 17, SHARED_BYTES = 1 << 18;
alignas(1024) static uchar shared_memory[SHARED_BYTES];

// --- Threads ---

struct Index {
  int x, y, z;
};
static Index blockIdx, gridDim, threads[MAX_THREADS];
typedef Index dim3;
static int current, thread_count;
#define threadIdx (threads[current])

static ucontext_t scheduler, fibers[MAX_THREADS];
static char* stacks[MAX_THREADS];
static bool finished[MAX_THREADS];
static const std::function<void()>* kernel_body;

static void run_fiber() {
  (*kernel_body)();
  finished[current] = true;
  swapcontext(&fibers[current], &scheduler);
}

static inline void let_others_run() { swapcontext(&fibers[current], &scheduler); }

// Where `count` threads meet; the last to come does what is to be done for all.
struct Meeting {
  unsigned turn = 0;
  int come = 0;
  template <class Action>
  void join(int count, Action&& action) {
    unsigned mine = turn;
    if (++come == count) {
      action();
      come = 0;
      ++turn;
    } else {
      while (turn == mine) let_others_run();
    }
  }
};

static Meeting block_meeting, warp_meetings[MAX_THREADS / LANES];

static inline int lane() { return threadIdx.x % LANES; }
static inline int warp() { return threadIdx.x / LANES; }
static inline void __syncthreads() {
  block_meeting.join(thread_count, [] {});
}
template <class Action>
static inline void with_warp(Action&& action) {
  warp_meetings[warp()].join(LANES, action);
}

// What the lane `source` of the warp gives.
template <class Value>
static inline Value from_lane(Value x, int source) {
  static Value given[MAX_THREADS / LANES][LANES];
  given[warp()][lane()] = x;
  with_warp([] {});
  Value found = given[warp()][source];
  with_warp([] {});
  return found;
}
static inline int __shfl_up_sync(unsigned, int x, int distance, int) {
  return from_lane(x, lane() < distance ? lane() : lane() - distance);
}
template <class Value>
static inline Value __shfl_xor_sync(unsigned, Value x, int mask, int) {
  return from_lane(x, lane() ^ mask);
}
template <class Value>
static inline Value __shfl_sync(unsigned, Value x, int source, int width) {
  return from_lane(x, lane() / width * width + source % width);
}
static inline int __syncthreads_or(int x) {
  static int any;
  any = 0;
  __syncthreads();
  any |= x != 0;
  __syncthreads();
  int found = any;
  __syncthreads();
  return found;
}

// Blocks follow each other: the last to arrive finds what all others have stored.
static inline int AtomicAddRet(int* target, int x, int) {
  int before = *target;
  *target += x;
  return before;
}

static void run_block(const std::function<void()>& body) {
  kernel_body = &body;
  memset(shared_memory, 0xff, sizeof shared_memory);  // NaN where nothing has been written
  for (int t = 0; t < thread_count; ++t) {
    if (!stacks[t]) stacks[t] = (char*)malloc(STACK_BYTES);
    threads[t] = {t, 0, 0};
    finished[t] = false;
    getcontext(&fibers[t]);
    fibers[t].uc_stack.ss_sp = stacks[t];
    fibers[t].uc_stack.ss_size = STACK_BYTES;
    makecontext(&fibers[t], run_fiber, 0);
  }
  for (long round = 0, left = thread_count; left; ++round) {
    left = 0;
    for (int i = 0; i < thread_count; ++i) {
      current = round % 2 ? thread_count - 1 - i : i;  // no order may matter
      if (finished[current]) continue;
      swapcontext(&scheduler, &fibers[current]);
      left += !finished[current];
    }
    if (round > 100000000) {
      fprintf(stderr, "emulator: the threads of a block wait for each other\n");
      abort();
    }
  }
}

// --- Numbers ---

struct half_t {
  uint16_t bits;
  half_t() = default;
  explicit half_t(float x) {
    _Float16 half = (_Float16)x;
    memcpy(&bits, &half, 2);
  }
  operator float() const {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (float)half;
  }
};

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float x) {
    uint32_t word;
    memcpy(&word, &x, 4);
    bits = x != x ? 0x7fff : (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  }
  operator float() const {
    uint32_t word = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &word, 4);
    return x;
  }
};

struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct uint1 { uint x; };
struct uint2 { uint x, y; };
struct uint4 { uint x, y, z, w; };
struct ushort2 { ushort x, y; };
struct ushort4 { ushort x, y, z, w; };
struct longlong2 { long long x, y; };
struct longlong4 { long long x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct __nv_bfloat162 { bfloat16_t x, y; };
struct __half2 { half_t x, y; };
typedef __half2 half2;
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint1 make_uint1(uint x) { return {x}; }
static inline uint2 make_uint2(uint x, uint y) { return {x, y}; }
static inline uint4 make_uint4(uint x, uint y, uint z, uint w) { return {x, y, z, w}; }
static inline longlong2 make_longlong2(long long x, long long y) { return {x, y}; }
static inline longlong4 make_longlong4(long long x, long long y, long long z, long long w) { return {x, y, z, w}; }
static inline ushort2 make_ushort2(ushort x, ushort y) { return {x, y}; }
static inline ushort4 make_ushort4(ushort x, ushort y, ushort z, ushort w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
static inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
static inline __half2 __float22half2_rn(float2 v) { return {half_t(v.x), half_t(v.y)}; }
static inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
static inline uint __pack_nv_bfloat162(bfloat16_t x, bfloat16_t y) { return x.bits | (uint)y.bits << 16; }
static inline uint __pack_half2(half_t x, half_t y) { return x.bits | (uint)y.bits << 16; }
static inline void AtomicAdd(float* address, float x) { *address += x; }

// --- TileLang's templates ---

namespace tl {

// Blocks renumbered (T.use_swizzle): `panel` rows of the grid at a time, column by column, every other time backwards.
template <int panel>
static inline dim3 rasterization2DRow() {
  int number = blockIdx.x + blockIdx.y * gridDim.x, first = number / (panel * gridDim.x) * panel;
  int rows = min(panel, gridDim.y - first), within = number - first * gridDim.x, column = within / rows;
  return {first / panel % 2 ? gridDim.x - 1 - column : column, first + within % rows, blockIdx.z};
}

template <int bytes>
static inline void cp_async_gs_conditional(void* target, const void* source, bool within) {
  within ? memcpy(target, source, bytes) : memset(target, 0, bytes);
}
template <int bytes>
static inline void cp_async_gs(void* target, const void* source) {
  memcpy(target, source, bytes);
}
static inline void cp_async_commit() {}
template <int pending>
static inline void cp_async_wait() {}

struct SumOp {
  float operator()(float x, float y) const { return x + y; }
};
struct MaxOp {
  float operator()(float x, float y) const { return std::max(x, y); }
};
struct SyncThreadsBarrier {};
template <int>
struct NamedBarrier {};

static float exchanged[MAX_THREADS / LANES][LANES];

static inline float of_lane(float x, int other) {
  exchanged[warp()][lane()] = x;
  with_warp([] {});
  float found = exchanged[warp()][other];
  with_warp([] {});
  return found;
}

template <class Op, int width, int scale, int offset = 0, class Barrier = SyncThreadsBarrier, int batch = 1, int gap = 0>
struct AllReduce {
  static float run(float x, float* workspace = nullptr) {
    for (int distance = width / 2; distance >= scale; distance /= 2) {
      if (distance < LANES) {
        x = Op()(x, of_lane(x, lane() ^ distance));
      } else {
        __syncthreads();
        workspace[threadIdx.x - offset] = x;
        __syncthreads();
        x = Op()(x, workspace[(threadIdx.x - offset) ^ distance]);
      }
    }
    return x;
  }
};

// The result of an operation on integers of a whole warp, in all of its lanes.
template <class Op>
static inline int reduced_in_warp(int x, Op&& op) {
  static int given[MAX_THREADS / LANES][LANES];
  int w = warp();
  given[w][lane()] = x;
  with_warp([] {});
  int found = given[w][0];
  for (int l = 1; l < LANES; ++l) found = op(found, given[w][l]);
  with_warp([] {});
  return found;
}
static inline int warp_reduce_sum(int x) {
  return reduced_in_warp(x, [](int y, int z) { return y + z; });
}
static inline int warp_reduce_min(int x) {
  return reduced_in_warp(x, [](int y, int z) { return min(y, z); });
}

static const void* rows[MAX_THREADS / LANES][LANES];
static void* results[MAX_THREADS / LANES][LANES];

// Each lane gives the address of a row of 8 elements, and gets two elements of each of `count` matrices (PTX: ldmatrix).
template <int count, bool transposed>
static inline void load_matrices(const void* row, void* result) {
  int w = warp();
  rows[w][lane()] = row;
  results[w][lane()] = result;
  with_warp([w] {
    for (int matrix = 0; matrix < count; ++matrix)
      for (int l = 0; l < LANES; ++l)
        for (int e = 0; e < 2; ++e) {
          int i = l / 4, j = l % 4 * 2 + e;
          if (transposed) std::swap(i, j);
          ((uint16_t*)results[w][l])[2 * matrix + e] = ((const uint16_t*)rows[w][matrix * 8 + i])[j];
        }
  });
}
static inline void ptx_ldmatrix_x1(const void* row, void* result) { load_matrices<1, false>(row, result); }
static inline void ptx_ldmatrix_x2(const void* row, void* result) { load_matrices<2, false>(row, result); }
static inline void ptx_ldmatrix_x4(const void* row, void* result) { load_matrices<4, false>(row, result); }
static inline void ptx_ldmatrix_x1_trans(const void* row, void* result) { load_matrices<1, true>(row, result); }
static inline void ptx_ldmatrix_x2_trans(const void* row, void* result) { load_matrices<2, true>(row, result); }
static inline void ptx_ldmatrix_x4_trans(const void* row, void* result) { load_matrices<4, true>(row, result); }

enum class DataType { kBFloat16, kFloat16, kFloat32 };
template <DataType>
struct Element {
  typedef half_t type;
};
template <>
struct Element<DataType::kBFloat16> {
  typedef bfloat16_t type;
};

struct Operands {
  float* c;
  const void *a, *b;
};
static Operands operands[MAX_THREADS / LANES][LANES];

// c (16, 8) += a (16, 16) b (16, 8), as PTX's mma.m16n8k16 spreads them over a warp.
template <DataType type, DataType type_b, DataType sum, int m, int n, int k, bool transposed_a, bool transposed_b>
static inline void mma_sync(float* c, const unsigned* a, const unsigned* b) {
  static_assert(m == 16 && n == 8 && k == 16 && type == type_b && !transposed_a && transposed_b, "another instruction");
  typedef typename Element<type>::type T;
  int w = warp();
  operands[w][lane()] = {c, a, b};
  with_warp([w] {
    float full_a[16][16], full_b[16][8];
    for (int l = 0; l < LANES; ++l) {
      for (int e = 0; e < 8; ++e)
        full_a[l / 4 + e / 2 % 2 * 8][l % 4 * 2 + e % 2 + e / 4 * 8] = ((const T*)operands[w][l].a)[e];
      for (int e = 0; e < 4; ++e) full_b[l % 4 * 2 + e % 2 + e / 2 * 8][l / 4] = ((const T*)operands[w][l].b)[e];
    }
    for (int l = 0; l < LANES; ++l)
      for (int e = 0; e < 4; ++e)
        for (int i = 0; i < 16; ++i)
          operands[w][l].c[e] += full_a[l / 4 + e / 2 * 8][i] * full_b[i][l % 4 * 2 + e % 2];
  });
}

}  // namespace tl
