// The kernel around a rung: which queries and keys a block has. A rung defines `void attend(const Problem&)` before.
//
// All sizes are 64 bits wide and the scale is a double, because that is how cuda-core passes Python's numbers.
#pragma once
#include "problem.cuh"

static_assert(SHARED_BYTES == SHARED_MEMORY, "rungs.py counts another size of shared memory");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) attention(
    const Element* q, const Element* k, const Element* v, Element* o, float* lse, long long causal, long long seqlen_q,
    long long seqlen_k, long long heads, long long group, long long q_batch, long long q_row, long long q_head,
    long long k_batch, long long k_row, long long k_head, long long v_batch, long long v_row, long long v_head,
    double scale) {
  unsigned query_tiles = static_cast<unsigned>(ceil_div(seqlen_q, BLOCK_M));
  unsigned pair = blockIdx.x / query_tiles, tile = blockIdx.x % query_tiles;
  if (causal) tile = query_tiles - 1 - tile;  // the longest first
  long long batch = pair / static_cast<unsigned>(heads), head = pair % static_cast<unsigned>(heads);
  long long first = static_cast<long long>(tile) * BLOCK_M, kv_head = head / group;

  Problem problem;
  problem.q = q + batch * q_batch + head * q_head + first * q_row;
  problem.k = k + batch * k_batch + kv_head * k_head;
  problem.v = v + batch * v_batch + kv_head * v_head;
  problem.o_stride = heads * HEAD_DIM;
  problem.o = o + ((batch * seqlen_q + first) * heads + head) * HEAD_DIM;
  problem.lse = lse == nullptr ? nullptr : lse + (batch * heads + head) * seqlen_q + first;
  problem.q_stride = q_row, problem.k_stride = k_row, problem.v_stride = v_row;
  problem.queries = static_cast<int>(seqlen_q - first);
  problem.keys = static_cast<int>(seqlen_k);
  problem.causal = causal;
  problem.limit = static_cast<int>(first + seqlen_k - seqlen_q);
  problem.scale = static_cast<float>(scale);

  // Keys that any of the queries sees, and keys that all of them see.
  int seen = problem.keys, seen_by_all = problem.keys;
  if (causal) {
    seen = min(seen, max(problem.limit + BLOCK_M, 0));
    seen_by_all = min(seen_by_all, max(problem.limit + 1, 0));
  }
  problem.tiles = (seen + BLOCK_N - 1) / BLOCK_N;
  problem.full = seen_by_all / BLOCK_N;
  attend(problem);
}
