// The PTX instructions of sm_80 and later that the ladder uses, one function each. No other file contains assembly.
//
// 16-bit values are in pairs, as 32-bit words; BF16 tells bfloat16 from float16. Addresses in shared memory are 32-bit
// numbers. tests/tools/mma/emulator.h has the same functions for a CPU.
#ifndef TILEATTN_PTX
#define TILEATTN_PTX

#define DEVICE __device__ __forceinline__

typedef unsigned short Element;  // a float16 or bfloat16

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

DEVICE unsigned shared_memory() { return static_cast<unsigned>(__cvta_generic_to_shared(dynamic_shared)); }

// --- Copies ---

// Copies 16 bytes from global to shared memory asynchronously, bypassing L1 (.cg); writes zeros if not `there`.
DEVICE void cp_async_16(unsigned to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// Ends a group: the copies since the last one.
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's latest groups are on their way.
template <int pending>
DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

DEVICE float load_shared(unsigned from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}
DEVICE unsigned load_shared_word(unsigned from) {
  unsigned x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
DEVICE void store_shared(unsigned to, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory"); }
DEVICE void store_shared(unsigned to, unsigned x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }
DEVICE void store_global_16(void* to, const unsigned (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// --- Matrices ---

// Four 8x8 matrices; lane l gives the address of row l % 8 of matrix l / 8, and gets of each matrix the elements
// (l / 4, 2 * (l % 4)) and the next: what mma wants of A, and of a B whose columns lie in memory as rows.
DEVICE void ldmatrix_x4(unsigned (&r)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
// The same of the transposed matrices: for a B whose rows lie in memory as rows.
DEVICE void ldmatrix_x4_transposed(unsigned (&r)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

#if BF16
#define MMA_INPUTS "bf16.bf16"
#else
#define MMA_INPUTS "f16.f16"
#endif

// c (16, 8) += a (16, 16) b (16, 8). Lane l holds of c the rows l / 4 and l / 4 + 8, columns 2 * (l % 4) and the next.
DEVICE void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_INPUTS ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#if !BF16
// The same with float16 sums: two registers instead of four.
DEVICE void mma(unsigned (&c)[2], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
               : "+r"(c[0]), "+r"(c[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// --- Numbers ---

DEVICE float infinity() { return __int_as_float(0x7f800000); }

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Rounded to the inputs' kind; `low` has the smaller address.
DEVICE unsigned pack(float low, float high) {
  unsigned x;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#endif
  return x;
}

// Pairs of float16.
DEVICE unsigned pack_half(float low, float high) {
  unsigned x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
DEVICE float low_half(unsigned x) {
  float y;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(y) : "r"(x));
  return y;
}
DEVICE float high_half(unsigned x) {
  float y;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(y) : "r"(x));
  return y;
}
DEVICE unsigned max_half(unsigned x, unsigned y) {
  unsigned z;
  asm("max.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
DEVICE unsigned multiply_half(unsigned x, unsigned y) {
  unsigned z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
// x * y + z, rounded once.
DEVICE unsigned fma_half(unsigned x, unsigned y, unsigned z) {
  unsigned w;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(w) : "r"(x), "r"(y), "r"(z));
  return w;
}
DEVICE unsigned exp2_half(unsigned x) {
  unsigned y;
  asm("ex2.approx.f16x2 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// --- Lanes ---

DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE unsigned shuffle_xor(unsigned x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

// The same number, of which the compiler does not know where it comes from: what follows from it is computed where it is
// used, and not kept in registers.
DEVICE unsigned unknown(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}
DEVICE unsigned block_index() { return unknown(blockIdx.x); }

DEVICE int lane_index() { return threadIdx.x % 32; }
// The same in all lanes, which a shuffle tells the compiler.
DEVICE int warp_index() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0); }

#endif
