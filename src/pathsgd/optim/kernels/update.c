/* One linear layer of Path-SGD, some of its rows, in one pass over the memory: what layer.py says.

   Plain C without threads: the caller hands each thread its rows. Four rows are walked at a time, so that what
   belongs to the columns is loaded and stored a quarter as often: else arithmetic and caches, not the memory,
   would set the pace. `omp simd` lets the compiler keep the row sums in vector registers; it needs no OpenMP at
   run time. */

#include <stdint.h>

struct numbers {
    float lr, decay, sign;
    float momentum, take_h, take_b; /* the step is take_h h + take_b b, with b = momentum b + h */
};

struct layer {
    float *w;
    const float *g;
    float *m;
    const float *inverse_out, *inverse_into; /* gamma^(-1/p) of rows and columns */
    const float *next_into, *next_out;       /* next gamma of columns and rows */
    float *row_sums, *column_sums;           /* written, and added to */
    int64_t columns, w_stride, g_stride;
};

/* What is done to a weight: nothing, w -= step, the same after a decay, the same by momentum. */
enum { SUMS, MOVE, DECAY, MOMENTUM };

#define INLINE static inline __attribute__((always_inline))

INLINE float power(float w, int p) {
    float square = w * w;
    return p == 1 ? __builtin_fabsf(w) : p == 2 ? square : square * square;
}

/* One row's numbers. */
struct row {
    float *w;
    const float *g;
    float *m;
    float head, step, out;
};

INLINE struct row row_of(const struct layer *a, const struct numbers *n, int64_t r) {
    struct row row = {a->w + r * a->w_stride, a->g + r * a->g_stride, a->m + r * a->columns,
                      a->inverse_out[r], 0.0f, a->next_out[r]};
    row.step = n->lr * n->sign * row.head * row.head;
    return row;
}

/* Moves one weight and returns |w|^p. `tail` is gamma_in^(-1/p) of its column. */
INLINE float one(struct row row, int64_t j, float tail, const struct numbers *n, int kind, int p) {
    float value = row.w[j];
    if (kind == MOVE) value -= row.step * (tail * tail * row.g[j]);
    if (kind == DECAY) value = n->decay * value - row.step * (tail * tail * row.g[j]);
    if (kind == MOMENTUM) {
        float scale = row.head * tail;
        float h = n->sign * row.g[j] * scale;
        float b = n->momentum * row.m[j] + h;
        row.m[j] = b;
        value = n->decay * value - n->lr * ((n->take_h * h + n->take_b * b) * scale);
    }
    if (kind != SUMS) row.w[j] = value;
    return power(value, p);
}

INLINE void four_rows(const struct layer *a, const struct numbers *numbers, int64_t r, int kind, int p) {
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
        float e0 = one(r0, j, tail, &n, kind, p), e1 = one(r1, j, tail, &n, kind, p);
        float e2 = one(r2, j, tail, &n, kind, p), e3 = one(r3, j, tail, &n, kind, p);
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

INLINE void one_row(const struct layer *a, const struct numbers *numbers, int64_t r, int kind, int p) {
    struct numbers n = *numbers;
    struct row r0 = row_of(a, &n, r);
    const float *tails = a->inverse_into, *next = a->next_into;
    float *sums = a->column_sums, sum = 0;
    int64_t columns = a->columns;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < columns; j++) {
        float edge = one(r0, j, tails[j], &n, kind, p);
        sum += edge * next[j];
        sums[j] += edge * r0.out;
    }
    a->row_sums[r] = sum;
}

INLINE void rows(const struct layer *a, const struct numbers *n, int64_t first, int64_t last, int kind, int p) {
    int64_t r = first;
    for (; r + 4 <= last; r += 4) four_rows(a, n, r, kind, p);
    for (; r < last; r++) one_row(a, n, r, kind, p);
}

#define EACH_P(KIND)                                      \
    do {                                                  \
        if (p == 1) rows(a, n, first, last, KIND, 1);     \
        else if (p == 2) rows(a, n, first, last, KIND, 2); \
        else rows(a, n, first, last, KIND, 4);            \
    } while (0)

/* Every case is compiled for itself, so that no loop asks what it has to do. */
void pathsgd_rows(const struct layer *a, const struct numbers *n, int64_t first, int64_t last, int32_t kind,
                  int32_t p) {
    if (kind == SUMS) EACH_P(SUMS);
    else if (kind == MOVE) EACH_P(MOVE);
    else if (kind == DECAY) EACH_P(DECAY);
    else EACH_P(MOMENTUM);
}
