// The online softmax of the rows that a warp holds, in base 2.
//
//   m' = max(m, max_j s_j)        p_j = 2^(c s_j - c m')        f = 2^(c m - c m')        c = scale * log2(e)
//   l' = f l + sum_j p_j          o' = f o + sum_j p_j v_j
//
// A thread has two rows of each 16, and a quarter of their columns. The four lanes of a row exchange maxima in every
// step, sums only at the end. The product c m is stored instead of m. A row without keys has m = -inf, and 0 is
// subtracted instead; so it is for m = +inf, which gives l = inf and o = NaN. Maxima ignore NaN, but sums become NaN.
#pragma once
#include "products.cuh"

// `best` over the four lanes that share a row.
DEVICE float max_of_row(float best) {
  best = fmaxf(best, shuffle_xor(best, 1));
  return fmaxf(best, shuffle_xor(best, 2));
}
DEVICE float sum_of_row(float sum) {
  sum += shuffle_xor(sum, 1);
  return sum + shuffle_xor(sum, 2);
}

template <int M>
struct Softmax {
  // A scale of 0 is taken for a very small one, as 0 times the -inf of hidden scores would be NaN.
  static constexpr float SMALLEST = ACC_FP16 ? 1e-7f : 1e-30f;

  float c;             // |scale| * log2(e); where the scale is negative, q has been negated
  float top[M][2];     // c m; m itself is not needed
  float sum[M][2];     // this thread's part of l; with float16 sums, all of it
  float factor[M][2];  // f of the last step

  DEVICE explicit Softmax(float scale) : c(fmaxf(fabsf(scale) * 1.44269504088896f, SMALLEST)) {
#if ACC_FP16
    c = low_half(pack_half(c, c));  // as the multiplication sees it
#endif
#pragma unroll
    for (int m = 0; m < M; ++m) top[m][0] = top[m][1] = -infinity(), sum[m][0] = sum[m][1] = 0;
  }

  // -inf where a row does not see a key: `key` is the first of the tile, `limit` the last key that row 0 may see, and
  // `last` the last one there is; with `causal` each row sees one more than the one before.
  template <int N>
  DEVICE static void hide(Sums (&s)[M][N], int key, int limit, int last, bool causal) {
    int lane = lane_index();
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        int own = causal ? min(limit + m * 16 + lane / 4 + row * 8, last) : last;
#pragma unroll
        for (int n = 0; n < N; ++n) {
          int column = key + n * 8 + lane % 4 * 2;
#if ACC_FP16
          s[m][n][row] = (column > own ? 0xfc00u : s[m][n][row] & 0xffffu) |
                         (column + 1 > own ? 0xfc000000u : s[m][n][row] & 0xffff0000u);
#else
          if (column > own) s[m][n][2 * row] = -infinity();
          if (column + 1 > own) s[m][n][2 * row + 1] = -infinity();
#endif
        }
      }
  }

  // The largest score of each row in these columns.
  template <int N>
  DEVICE static void maxima(float (&best)[M][2], const Sums (&s)[M][N]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#if ACC_FP16
        unsigned pair = s[m][0][row];
#pragma unroll
        for (int n = 1; n < N; ++n) pair = max_half(pair, s[m][n][row]);
        best[m][row] = max_of_row(fmaxf(low_half(pair), high_half(pair)));
#else
        float own = fmaxf(s[m][0][2 * row], s[m][0][2 * row + 1]);
#pragma unroll
        for (int n = 1; n < N; ++n) own = fmaxf(own, fmaxf(s[m][n][2 * row], s[m][n][2 * row + 1]));
        best[m][row] = max_of_row(own);
#endif
      }
  }

  // Takes the rows' new maxima; afterwards `factor` is what sums so far are to be multiplied by.
  DEVICE void raise(const float (&best)[M][2]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float before = top[m][row], now = best[m][row] == -infinity() ? -infinity() : best[m][row] * c;
#if ACC_FP16
        now = low_half(pack_half(now, now));  // as the subtraction sees it
#endif
        now = fmaxf(before, now);
        top[m][row] = now;
        // It exceeds 1 only where `before` is +inf: a thread's sum of 0 would become 0 * inf = NaN.
        factor[m][row] = fminf(exp2_fast(before - finite(now)), 1.0f);
#if ACC_FP16
        factor[m][row] = low_half(pack_half(factor[m][row], 0));
#endif
        sum[m][row] *= factor[m][row];
      }
  }

  DEVICE static float finite(float x) { return fabsf(x) == infinity() ? 0.0f : x; }

  // p from the scores; sums grow by what the product with V will see, p rounded or not alike.
  template <int N>
  DEVICE void probabilities(Probabilities<M, N>& p, const Sums (&s)[M][N]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float shift = finite(top[m][row]);
#if ACC_FP16
        unsigned factor_pair = pack_half(c, c), shift_pair = pack_half(-shift, -shift);
#pragma unroll
        for (int n = 0; n < N; ++n) p.p[m][n][row] = exp2_half(fma_half(s[m][n][row], factor_pair, shift_pair));
#else
#pragma unroll
        for (int n = 0; n < N; ++n) {
          float low = exp2_fast(s[m][n][2 * row] * c - shift), high = exp2_fast(s[m][n][2 * row + 1] * c - shift);
          sum[m][row] += low + high;
          p.p[m][n][row] = pack(low, high);
        }
#endif
      }
#if ACC_FP16
    add_by_product(p);
#endif
  }

#if ACC_FP16
  // The sums of p, as a product with ones: fewer instructions than adding up pairs, and the four lanes' together.
  template <int N>
  DEVICE void add_by_product(const Probabilities<M, N>& p) {
    constexpr unsigned ONES = 0x3c003c00u;
    Sums total[M];
#pragma unroll
    for (int m = 0; m < M; ++m) clear(total[m]);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      unsigned a[M][4];
      p.read(a, n * 8);
#pragma unroll
      for (int m = 0; m < M; ++m) mma(total[m], a[m], ONES, ONES);
    }
#pragma unroll
    for (int m = 0; m < M; ++m) sum[m][0] += value(total[m], 0, 0), sum[m][1] += value(total[m], 1, 0);
  }
#endif

  // One step but for the product with V: s becomes p, and o is multiplied by f.
  template <int N, int COLUMNS>
  DEVICE void step(Probabilities<M, N>& p, const Sums (&s)[M][N], Sums (&o)[M][COLUMNS]) {
    begin(s, o);
    probabilities(p, s);
  }

  // Its first half, with the last branch.
  template <int N, int COLUMNS>
  DEVICE void begin(const Sums (&s)[M][N], Sums (&o)[M][COLUMNS]) {
    float best[M][2];
    maxima(best, s);
    raise(best);
    rescale(o);
  }

  template <int N>
  DEVICE void rescale(Sums (&o)[M][N]) const {
    // Maxima are found early: most steps raise none of a warp's rows, and every factor is 1.
    bool raised = false;
#pragma unroll
    for (int m = 0; m < M; ++m) raised |= factor[m][0] != 1.0f || factor[m][1] != 1.0f;
    if (!any_lane(raised)) return;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#if ACC_FP16
        unsigned pair = pack_half(factor[m][row], factor[m][row]);
#pragma unroll
        for (int n = 0; n < N; ++n) o[m][n][row] = multiply_half(o[m][n][row], pair);
#else
#pragma unroll
        for (int n = 0; n < N; ++n) o[m][n][2 * row] *= factor[m][row], o[m][n][2 * row + 1] *= factor[m][row];
#endif
      }
  }

  // l of the four lanes together, when all keys have been seen.
  DEVICE void finish() {
#if !ACC_FP16
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int row = 0; row < 2; ++row) sum[m][row] = sum_of_row(sum[m][row]);
#endif
  }

  // 1 / l; 0 for a row without keys.
  DEVICE float inverse(int m, int row) const { return sum[m][row] == 0.0f ? 0.0f : 1.0f / sum[m][row]; }

  // In natural logarithms; -inf for a row without keys.
  DEVICE float lse(int m, int row) const {
    return sum[m][row] == 0.0f ? -infinity() : (top[m][row] + log2_fast(sum[m][row])) * 0.693147180559945f;
  }
};
