/* One linear layer of Path-SGD, some of its rows, in one pass over the memory: what layer.py and rule.py say.

   Compiled once for each case that is asked for (KIND, P, and whether it is COUPLED, LIVE, NESTEROV), so that no
   loop asks what it has to do. No threads: the caller hands each thread its rows. Without state four rows are
   walked at a time, so that what belongs to the columns is loaded and stored a quarter as often: else arithmetic
   and caches, not the memory, would set the pace. With state that takes more registers than there are. `omp simd`
   lets the compiler keep the row sums in vector registers; it needs no OpenMP at run time. */

#include <math.h>
#include <stdint.h>

/* What is done to a weight: nothing, w -= step, the same after a decay, by momentum, by Adagrad, by Adam. */
#define SUMS 0
#define MOVE 1
#define DECAY 2
#define MOMENTUM 3
#define ADAGRAD 4
#define ADAM 5

struct numbers {
    float rate, sign;
    float shrink;  /* what a weight is multiplied by; if LIVE only one that is on a path */
    float coupled; /* decay that is part of h, if COUPLED */
    float momentum;
    float first, rest_first, second, rest_second; /* beta and 1 - beta */
    float correction, eps;
};

struct layer {
    float *w;
    const float *g;
    float *m, *v;                            /* state: momentum; Adagrad's sum; Adam's two */
    const float *inverse_out, *inverse_into; /* gamma^(-1/p) of rows and columns */
    const float *next_into, *next_out;       /* next gamma of columns and rows */
    float *row_sums, *column_sums;           /* written, and added to */
    int64_t columns, w_stride, g_stride;
};

#define INLINE static inline __attribute__((always_inline))

INLINE float power(float w) {
    float square = w * w;
    return P == 1 ? fabsf(w) : P == 2 ? square : square * square;
}

/* One row's numbers. */
struct row {
    float *w;
    const float *g;
    float *m, *v;
    float head, h, step, out; /* what a row gives to the scale of g, of h, of the step */
};

INLINE struct row row_of(const struct layer *a, const struct numbers *n, int64_t r) {
    struct row row = {a->w + r * a->w_stride, a->g + r * a->g_stride, a->m + r * a->columns,
                      a->v + r * a->columns, a->inverse_out[r], 0.0f, 0.0f, a->next_out[r]};
    row.h = n->sign * row.head;
    row.step = KIND >= MOMENTUM ? n->rate * row.head : n->rate * row.head * row.h;
    return row;
}

/* The step in invariant coordinates, and the new state. */
INLINE float direction(struct row row, int64_t j, float h, const struct numbers *n) {
    if (KIND == MOMENTUM) {
        float b = n->momentum * row.m[j] + h;
        row.m[j] = b;
        return NESTEROV ? h + n->momentum * b : b;
    }
    if (KIND == ADAGRAD) {
        float v = row.m[j] + h * h;
        row.m[j] = v;
        return h / (sqrtf(v) + n->eps);
    }
    float m = n->first * row.m[j] + n->rest_first * h;
    float v = n->second * row.v[j] + n->rest_second * (h * h);
    row.m[j] = m;
    row.v[j] = v;
    return m / (sqrtf(v) * n->correction + n->eps);
}

/* Moves one weight and returns |w|^p. `tail` is gamma_in^(-1/p) of its column. */
INLINE float one(struct row row, int64_t j, float tail, const struct numbers *n) {
    float value = row.w[j];
    float scale = row.head * tail;
    float shrink = LIVE && !(scale > 0) ? 1.0f : n->shrink;
    if (KIND == MOVE) value -= row.step * (tail * tail * row.g[j]);
    if (KIND == DECAY) value = shrink * value - row.step * (tail * tail * row.g[j]);
    if (KIND >= MOMENTUM) {
        float h = row.h * tail * row.g[j];
        if (COUPLED) {
            float z = value / scale;
            h += n->coupled * (scale > 0 ? z : 0.0f);
        }
        value = shrink * value - row.step * tail * direction(row, j, h, n);
    }
    if (KIND != SUMS) row.w[j] = value;
    return power(value);
}

INLINE void four_rows(const struct layer *a, const struct numbers *numbers, int64_t r) {
    struct numbers n = *numbers;
    struct row r0 = row_of(a, &n, r), r1 = row_of(a, &n, r + 1), r2 = row_of(a, &n, r + 2),
               r3 = row_of(a, &n, r + 3);
    const float *tails = a->inverse_into, *next = a->next_into;
    float *sums = a->column_sums;
    float sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
    int64_t columns = a->columns;
#pragma omp simd reduction(+ : sum0, sum1, sum2, sum3)
    for (int64_t j = 0; j < columns; j++) {
        float tail = tails[j], into = next[j];
        float e0 = one(r0, j, tail, &n), e1 = one(r1, j, tail, &n);
        float e2 = one(r2, j, tail, &n), e3 = one(r3, j, tail, &n);
        sum0 += e0 * into;
        sum1 += e1 * into;
        sum2 += e2 * into;
        sum3 += e3 * into;
        sums[j] += (e0 * r0.out + e1 * r1.out) + (e2 * r2.out + e3 * r3.out);
    }
    a->row_sums[r] = sum0;
    a->row_sums[r + 1] = sum1;
    a->row_sums[r + 2] = sum2;
    a->row_sums[r + 3] = sum3;
}

INLINE void one_row(const struct layer *a, const struct numbers *numbers, int64_t r) {
    struct numbers n = *numbers;
    struct row r0 = row_of(a, &n, r);
    const float *tails = a->inverse_into, *next = a->next_into;
    float *sums = a->column_sums, sum = 0;
    int64_t columns = a->columns;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < columns; j++) {
        float edge = one(r0, j, tails[j], &n);
        sum += edge * next[j];
        sums[j] += edge * r0.out;
    }
    a->row_sums[r] = sum;
}

void pathsgd_rows(const struct layer *a, const struct numbers *n, int64_t first, int64_t last) {
    int64_t r = first;
    if (KIND < MOMENTUM)
        for (; r + 4 <= last; r += 4) four_rows(a, n, r);
    for (; r < last; r++) one_row(a, n, r);
}
