// One block's share of the work: a tile of queries of one head, and the tiles of keys that it sees.
#pragma once
#include "tile.cuh"

DEVICE long long ceil_div(long long a, long long b) { return (a + b - 1) / b; }

struct Problem {
  const Element *q, *k, *v;  // this head's; q from the first of this block's queries on
  Element* o;                // likewise
  float* lse;                // likewise; null if nobody asks for it
  long long q_stride, k_stride, v_stride, o_stride;  // elements from row to row
  int queries;               // there are from q on
  int keys;                  // there are
  int limit;                 // the last key that the first query sees; each next one sees one more. Only if causal.
  int tiles, full;           // tiles of keys that any query sees; those of them in which nothing is hidden come first
  bool causal;
  float scale;

  // Hides what the mask hides, of scores whose first row is the block's query `row`, first column the key `key`.
  template <class SOFTMAX, class SCORES>
  DEVICE void hide(SCORES& s, int row, int key) const {
    SOFTMAX::hide(s, key, limit + row, keys - 1, causal);
  }
};
