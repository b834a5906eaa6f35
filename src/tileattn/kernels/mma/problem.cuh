// The work of one thread block: a tile of queries of one head, and the tiles of keys that these queries see.
#pragma once
#include "tile.cuh"

DEVICE constexpr long long ceil_div(long long a, long long b) { return (a + b - 1) / b; }

// The kernel's parameters; strides in elements. o and lse are contiguous, lse may be null.
struct Arguments {
  const Element *q, *k, *v;
  Element* o;
  float* lse;
  long long causal, seqlen_q, seqlen_k, heads, group;
  long long q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head;
  double scale;
};

// The batch element, head and tile of queries of this block.
struct Place {
  long long batch, head, first;  // first: of the tile's queries
  DEVICE explicit Place(const Arguments& arguments) {
    unsigned tiles = static_cast<unsigned>(ceil_div(arguments.seqlen_q, BLOCK_M)), index = block_index();
    unsigned pair = index / tiles, tile = index % tiles, heads = static_cast<unsigned>(arguments.heads);
    if (arguments.causal) tile = tiles - 1 - tile;  // the longest first
    batch = pair / heads, head = pair % heads, first = static_cast<long long>(tile) * BLOCK_M;
  }
};

// The addresses of a block's results. Constructed after the loop over the keys, so that it takes no registers before.
struct Output {
  Element* o;        // this head's, from the block's first query on
  float* lse;        // likewise, or null
  long long stride;  // of o, from row to row
  int queries;       // there are from the first on

  DEVICE explicit Output(const Arguments& arguments) {
    Place place(arguments);
    stride = arguments.heads * HEAD_DIM;
    o = arguments.o + ((place.batch * arguments.seqlen_q + place.first) * arguments.heads + place.head) * HEAD_DIM;
    lse = arguments.lse;
    if (lse != nullptr) lse += (place.batch * arguments.heads + place.head) * arguments.seqlen_q + place.first;
    queries = static_cast<int>(arguments.seqlen_q - place.first);
  }
};

struct Problem {
  const Arguments& arguments;
  const Element *q, *k, *v;  // this head's; q from the first of this block's queries on
  int queries;               // there are from there on
  int keys;                  // there are
  int limit;                 // the last key that the first query sees, if causal; each next one sees one more
  int tiles, full;           // tiles of keys that any query sees; those of them in which nothing is hidden come first
  float scale;

  DEVICE explicit Problem(const Arguments& arguments) : arguments(arguments) {
    Place place(arguments);
    long long kv_head = place.head / static_cast<unsigned>(arguments.group);
    q = arguments.q + place.batch * arguments.q_batch + place.head * arguments.q_head + place.first * arguments.q_row;
    k = arguments.k + place.batch * arguments.k_batch + kv_head * arguments.k_head;
    v = arguments.v + place.batch * arguments.v_batch + kv_head * arguments.v_head;
    queries = static_cast<int>(arguments.seqlen_q - place.first);
    keys = static_cast<int>(arguments.seqlen_k);
    limit = static_cast<int>(place.first + arguments.seqlen_k - arguments.seqlen_q);
    scale = static_cast<float>(arguments.scale);
    int seen = keys, seen_by_all = keys;
    if (arguments.causal) {
      seen = min(seen, max(limit + BLOCK_M, 0));
      seen_by_all = min(seen_by_all, max(limit + 1, 0));
    }
    tiles = (seen + BLOCK_N - 1) / BLOCK_N;
    full = seen_by_all / BLOCK_N;
  }

  // Calls tile(index, whether the mask cuts through the tile) for all tiles, from the last to the first.
  template <class TILE>
  DEVICE void walk(const TILE& tile) const {
    int j = tiles - 1;
    for (; j >= full; --j) tile(j, true);
    for (; j >= 0; --j) tile(j, false);
  }

  // Applies the mask to scores whose first row is the block's query `row` and whose first column is the key `key`.
  template <class SOFTMAX, class SCORES>
  DEVICE void hide(SCORES& s, int row, int key) const {
    SOFTMAX::hide(s, key, limit + row, keys - 1, arguments.causal);
  }
};
