// The functions of kernels/mma/ptx.cuh for a CPU, on the threads of tileattn.testing.emulator (see emulator.py).
//
// Here a copy is not done before its wait: reading a tile too early shows, and what a missing barrier allows others to
// read may show.
#define TILEATTN_PTX
#include <deque>
#include <vector>

#define shared_memory shared_memory_array  // the sources have these names, too
#define SHARED_BYTES ALL_SHARED_BYTES
#include "../../../src/tileattn/testing/emulator/emulator.h"
#undef shared_memory
#undef SHARED_BYTES

#define __device__
#define __forceinline__ inline
#define DEVICE inline

typedef unsigned short Element;

static inline unsigned shared_memory() { return 0; }
static inline uchar* at_shared(unsigned address, unsigned bytes) {
  if (address % bytes || address + bytes > SHARED_MEMORY) {
    fprintf(stderr, "emulator: shared memory at %u, of %d\n", address, (int)SHARED_MEMORY);
    abort();
  }
  return ::shared_memory_array + address;
}

// --- Copies ---

struct Copy {
  unsigned to;
  uchar bytes[16];
};
static std::vector<Copy> open_group[MAX_THREADS];
static std::deque<std::vector<Copy>> groups[MAX_THREADS];

static inline void cp_async_16(unsigned to, const void* from, bool there) {
  Copy copy{to, {}};
  if (there) memcpy(copy.bytes, from, 16);
  memset(at_shared(to, 16), 0xff, 16);  // NaN until it has been waited for
  open_group[current].push_back(copy);
}
static inline void cp_async_commit() {
  groups[current].push_back(open_group[current]);
  open_group[current].clear();
}
template <int pending>
static inline void cp_async_wait() {
  for (; (int)groups[current].size() > pending; groups[current].pop_front())
    for (const Copy& copy : groups[current].front()) memcpy(at_shared(copy.to, 16), copy.bytes, 16);
}

static inline float load_shared(unsigned from) {
  float x;
  memcpy(&x, at_shared(from, 4), 4);
  return x;
}
static inline unsigned load_shared_word(unsigned from) {
  unsigned x;
  memcpy(&x, at_shared(from, 4), 4);
  return x;
}
static inline void store_shared(unsigned to, float x) { memcpy(at_shared(to, 4), &x, 4); }
static inline void store_shared(unsigned to, unsigned x) { memcpy(at_shared(to, 4), &x, 4); }
static inline void store_global_16(void* to, const unsigned (&x)[4]) { memcpy(to, x, 16); }

// --- Matrices ---

static inline void ldmatrix_x4(unsigned (&r)[4], unsigned row) { tl::ptx_ldmatrix_x4(at_shared(row, 16), r); }
static inline void ldmatrix_x4_transposed(unsigned (&r)[4], unsigned row) {
  tl::ptx_ldmatrix_x4_trans(at_shared(row, 16), r);
}

static inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  unsigned b[2] = {b0, b1};
  constexpr tl::DataType type = BF16 ? tl::DataType::kBFloat16 : tl::DataType::kFloat16;
  tl::mma_sync<type, type, tl::DataType::kFloat32, 16, 8, 16, false, true>(c, a, b);
}

static inline float low_half(unsigned x) {
  half_t h;
  h.bits = x;
  return h;
}
static inline float high_half(unsigned x) { return low_half(x >> 16); }
static inline unsigned pack_half(float low, float high) { return half_t(low).bits | (unsigned)half_t(high).bits << 16; }

// Rounded once in each instruction.
static inline void mma(unsigned (&c)[2], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  float sums[4] = {low_half(c[0]), high_half(c[0]), low_half(c[1]), high_half(c[1])};
  mma(sums, a, b0, b1);
  c[0] = pack_half(sums[0], sums[1]);
  c[1] = pack_half(sums[2], sums[3]);
}

// --- Numbers ---

static inline float infinity() { return INFINITY; }

static inline float exp2_fast(float x) { return exp2f(x); }
static inline float log2_fast(float x) { return log2f(x); }
static inline unsigned pack(float low, float high) {
  return BF16 ? bfloat16_t(low).bits | (unsigned)bfloat16_t(high).bits << 16 : pack_half(low, high);
}
template <class Function>
static inline unsigned of_halves(Function&& function) {
  return pack_half(function(low_half), function(high_half));
}
static inline unsigned max_half(unsigned x, unsigned y) {
  return of_halves([=](auto half) { return fmaxf(half(x), half(y)); });
}
static inline unsigned multiply_half(unsigned x, unsigned y) {
  return of_halves([=](auto half) { return half(x) * half(y); });
}
static inline unsigned fma_half(unsigned x, unsigned y, unsigned z) {
  return of_halves([=](auto half) { return (float)((double)half(x) * half(y) + half(z)); });
}
// Rounded down, as a GPU's.
static inline unsigned exp2_half(unsigned x) {
  return of_halves([=](auto half) {
    float exact = exp2f(half(x));
    half_t rounded(exact);
    if ((float)rounded > exact) --rounded.bits;
    return (float)rounded;
  });
}

// --- Lanes ---

static inline float shuffle_xor(float x, int mask) { return tl::of_lane(x, lane() ^ mask); }
static inline unsigned shuffle_xor(unsigned x, int mask) {
  float word;
  memcpy(&word, &x, 4);
  word = shuffle_xor(word, mask);
  memcpy(&x, &word, 4);
  return x;
}
static bool votes[MAX_THREADS / LANES][LANES];
static inline bool any_lane(bool x) {
  votes[warp()][lane()] = x;
  with_warp([] {});
  bool any = std::any_of(votes[warp()], votes[warp()] + LANES, [](bool vote) { return vote; });
  with_warp([] {});
  return any;
}
static inline unsigned unknown(unsigned x) { return x; }
static inline unsigned block_index() { return blockIdx.x; }
static inline int lane_index() { return lane(); }
static inline int warp_index() { return warp(); }
