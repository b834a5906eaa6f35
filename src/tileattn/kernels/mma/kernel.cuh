// The kernel's entry point. A rung includes this file last, after it has defined `void attend(const Problem&)` and
// SHARED_BYTES.
//
// All sizes are 64 bits wide and the scale is a double, because cuda-core passes Python's numbers so.
#pragma once
#include "problem.cuh"

static_assert(SHARED_BYTES == SHARED_MEMORY, "rungs.py counts another size of shared memory");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) attention(
    const Element* q, const Element* k, const Element* v, Element* o, float* lse, long long causal, long long seqlen_q,
    long long seqlen_k, long long heads, long long group, long long q_batch, long long q_row, long long q_head,
    long long k_batch, long long k_row, long long k_head, long long v_batch, long long v_row, long long v_head,
    double scale) {
  Arguments arguments{q,       k,     v,      o,       lse,   causal, seqlen_q, seqlen_k, heads,  group,
                      q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch,  v_row,    v_head, scale};
  attend(Problem(arguments));
}
