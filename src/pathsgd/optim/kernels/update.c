/* One linear layer of Path-SGD, some of its rows, in one pass over the memory: what layer.py says.

   Plain C and no threads of its own: the caller hands each thread its rows. Sums run in LANES lanes, so
   that a compiler can keep them in vector registers without being allowed to reorder anything. */

#include <stddef.h>
#include <stdint.h>

#define LANES 16

struct numbers {
    float lr, decay, momentum, sign;
    int32_t nesterov, p, move;
};

static inline __attribute__((always_inline)) float power(float w, int p) {
    float square = w * w;
    return p == 1 ? (w < 0 ? -w : w) : p == 2 ? square : square * square;
}

static inline __attribute__((always_inline)) float one(
    float *w, const float *g, float *m, float scale, struct numbers n, int p, int move, int has_momentum) {
    float value = *w;
    if (move) {
        float h = n.sign * *g * scale;
        if (has_momentum) {
            float b = n.momentum * *m + h;
            *m = b;
            h = n.nesterov ? h + n.momentum * b : b;
        }
        value = value * n.decay - n.lr * (h * scale);
        *w = value;
    }
    return power(value, p);
}

static inline __attribute__((always_inline)) void rows(
    float *restrict w, const float *restrict g, float *restrict m, const float *restrict inverse_out,
    const float *restrict inverse_into, const float *restrict next_into, const float *restrict next_out,
    float *restrict row_sums, float *restrict column_sums, int64_t first, int64_t last, int64_t columns,
    int64_t w_stride, int64_t g_stride, struct numbers n, int p, int move, int has_momentum, int into, int out) {
    for (int64_t r = first; r < last; r++) {
        float *wr = w + r * w_stride;
        const float *gr = move ? g + r * g_stride : NULL;
        float *mr = has_momentum ? m + r * columns : NULL;
        float so = move ? inverse_out[r] : 0.0f, no = out ? next_out[r] : 0.0f;
        float lane[LANES] = {0};
        int64_t c = 0;
        for (; c + LANES <= columns; c += LANES) {
            for (int l = 0; l < LANES; l++) {
                int64_t j = c + l;
                float scale = move ? so * inverse_into[j] : 0.0f;
                float a = one(wr + j, gr + j, mr + j, scale, n, p, move, has_momentum);
                if (into) lane[l] += a * next_into[j];
                if (out) column_sums[j] += a * no;
            }
        }
        for (; c < columns; c++) {
            float scale = move ? so * inverse_into[c] : 0.0f;
            float a = one(wr + c, gr + c, mr + c, scale, n, p, move, has_momentum);
            if (into) lane[0] += a * next_into[c];
            if (out) column_sums[c] += a * no;
        }
        if (into) {
            float sum = 0;
            for (int l = 0; l < LANES; l++) sum += lane[l];
            row_sums[r] = sum;
        }
    }
}

#define CALL(P, MOVE, MOMENTUM, INTO, OUT)                                                              \
    rows(w, g, m, inverse_out, inverse_into, next_into, next_out, row_sums, column_sums, first, last,    \
         columns, w_stride, g_stride, n, P, MOVE, MOMENTUM, INTO, OUT)
#define BY_SUMS(P, MOVE, MOMENTUM)                        \
    do {                                                  \
        if (row_sums && column_sums) CALL(P, MOVE, MOMENTUM, 1, 1); \
        else if (row_sums) CALL(P, MOVE, MOMENTUM, 1, 0); \
        else if (column_sums) CALL(P, MOVE, MOMENTUM, 0, 1); \
        else CALL(P, MOVE, MOMENTUM, 0, 0);               \
    } while (0)
#define BY_MOVE(P)                            \
    do {                                      \
        if (!n.move) BY_SUMS(P, 0, 0);        \
        else if (m) BY_SUMS(P, 1, 1);         \
        else BY_SUMS(P, 1, 0);                \
    } while (0)

/* Every combination is compiled for itself, so that no loop asks what it has to do. */
void pathsgd_rows(float *w, const float *g, float *m, const float *inverse_out, const float *inverse_into,
                  const float *next_into, const float *next_out, float *row_sums, float *column_sums,
                  int64_t first, int64_t last, int64_t columns, int64_t w_stride, int64_t g_stride,
                  const struct numbers *numbers) {
    struct numbers n = *numbers;
    if (n.p == 1) BY_MOVE(1);
    else if (n.p == 2) BY_MOVE(2);
    else BY_MOVE(4);
}
