/* The integer ops of an fqvit program: one function per kind of op, which computes one row of the output per call. This
 * file is the same in every export; model.c has the calls. docs/reference/format.md of fqvit has the formulas.
 *
 * C99 without floats, libc or allocation. The code needs 8-bit bytes and the exact-width types of <stdint.h>. It does
 * not shift negative numbers, cannot overflow (fqvit proved every bound for any image), and does not depend on
 * alignment or byte order. Buffers are bytes and hold little-endian values; constants are plain arrays.
 *
 * Letters: T tokens, C channels, H heads, D head width, K reduction, M x N the shape of a product. `row` counts over
 * all leading axes of the output. In every struct, a field named after a buffer (x, y, a, b, v) is its element type,
 * `last` is the largest code of y, and `alpha` has one shift per channel or is NULL. */
#ifndef FQVIT_OPS_H
#define FQVIT_OPS_H

#include <stddef.h>
#include <stdint.h>

enum { FQVIT_U8, FQVIT_U16, FQVIT_I16, FQVIT_I32 }; /* element type of a buffer or constant */
typedef uint8_t fqvit_type;

int32_t fqvit_load(const uint8_t *x, fqvit_type type, uint32_t i);
void fqvit_store(uint8_t *y, fqvit_type type, uint32_t i, int32_t value);

/* Zero points: one per tensor, or one per group of `group` channels. */
typedef struct {
    uint16_t one;
    const uint16_t *many; /* [C / group], or NULL: use `one` */
    uint32_t group;
} fqvit_zero;

/* y = table[x]; with alpha: clamp(round(table[x] / 2^(alpha[c] + 1)) + y_zero[alpha[c]]) */
typedef struct {
    fqvit_type x, y;
    uint32_t channels;
    const void *table;
    fqvit_type entry; /* element type of the table */
    const uint8_t *alpha;
    const uint16_t *y_zero; /* one per value of alpha */
    int32_t last;
} fqvit_lookup_op;
void fqvit_lookup(const fqvit_lookup_op *op, const uint8_t *x, uint8_t *y);

/* acc = (sum_k x[k] * w[o][k]) + bias[o], requantize(acc) = round(acc * mult[o] / 2^shift[o])
 * FQVIT_CODES: y = clamp(requantize(acc) + y_zero), FQVIT_ACC: y = acc, FQVIT_INTEGERS: y = requantize(acc) */
enum { FQVIT_CODES, FQVIT_ACC, FQVIT_INTEGERS };
typedef struct {
    fqvit_type x, y;
    uint8_t out;
    uint32_t inputs, outputs;
    const int8_t *w;       /* [outputs][inputs], or NULL: use `packed` */
    const uint8_t *packed; /* codes of `width` bits, low bits first; each row starts at a byte */
    uint32_t width;
    const uint8_t *choice; /* 4 bits per group, two groups per byte; NULL: weight = code, in two's complement */
    const int8_t *levels;  /* [codebooks][2^width]: weight = levels[choice][code] */
    uint32_t group;        /* weights per group */
    const int32_t *bias, *mult;
    const uint8_t *shift;
    fqvit_zero y_zero;
    int32_t last;
} fqvit_linear_op;
void fqvit_linear(const fqvit_linear_op *op, const uint8_t *x, uint8_t *y);

/* Integer LayerNorm with an integer square root. affine: [2][C], the rows g and b. uncentered: RMS normalization */
typedef struct {
    fqvit_type x, y;
    uint32_t channels;
    int64_t epsilon;
    uint8_t shift, b_shift, fraction;
    fqvit_zero zero;
    const uint8_t *alpha;
    const int32_t *affine;
    int32_t last;
    uint8_t uncentered;
} fqvit_layernorm_op;
void fqvit_layernorm(const fqvit_layernorm_op *op, const uint8_t *x, uint8_t *y);

/* y = clamp(round((sum of both terms) / 2^(shift + y_alpha[c])) + y_zero),
 * where term = (x - zero) * 2^alpha[c] * mult[c] */
typedef struct {
    fqvit_type type;
    const void *constant; /* [rows][C], or NULL: the term is a buffer */
    uint32_t rows;        /* rows of the constant; row r of y uses row r % rows */
    int32_t mult;
    const int32_t *mults; /* [C], or NULL: use `mult` */
    fqvit_zero zero;
    const uint8_t *alpha;
} fqvit_term;
typedef struct {
    fqvit_type y;
    uint32_t channels;
    fqvit_term terms[2];
    uint8_t shift;
    const uint8_t *y_alpha;
    fqvit_zero y_zero;
    int32_t last;
} fqvit_add_op;
void fqvit_add(const fqvit_add_op *op, const uint8_t *x0, const uint8_t *x1, uint8_t *y, uint32_t row);

/* Mean over rows skip .. rows - 1, requantized. x has all rows. */
typedef struct {
    fqvit_type x, y;
    uint32_t rows, skip, channels;
    int32_t mult;
    uint8_t shift;
    fqvit_zero zero;
    const uint8_t *alpha;
    int32_t y_zero, last;
} fqvit_mean_op;
void fqvit_mean(const fqvit_mean_op *op, const uint8_t *x, uint8_t *y);

/* The largest code of each channel. x has all rows. */
typedef struct {
    fqvit_type x;
    uint32_t rows, channels;
} fqvit_max_op;
void fqvit_max(const fqvit_max_op *op, const uint8_t *x, uint8_t *y);

/* y = clamp(requantize((a - a_zero) * (b - b_zero)) + y_zero) */
typedef struct {
    fqvit_type a, b, y;
    uint32_t channels;
    int32_t a_zero, b_zero, mult;
    uint8_t shift;
    int32_t y_zero, last;
} fqvit_multiply_op;
void fqvit_multiply(const fqvit_multiply_op *op, const uint8_t *a, const uint8_t *b, uint8_t *y);

/* y[c] = clamp(requantize((x[c] - zero) * table[0][t][p] + (x[c - p + partner[p]] - zero) * table[1][t][p]) + y_zero),
 * where p = c % period and t = row % tokens */
typedef struct {
    fqvit_type x, y;
    uint32_t channels, tokens, period;
    const int16_t *table;   /* [2][tokens][period] */
    const int32_t *partner; /* [period] */
    int32_t zero, mult;
    uint8_t shift;
    int32_t y_zero, last;
} fqvit_rotary_op;
void fqvit_rotary(const fqvit_rotary_op *op, const uint8_t *x, uint8_t *y, uint32_t row);

/* y[c] = clamp(requantize((sum_k x[index[row][k]][c] * w[k][c]) + bias[c]) + y_zero). Index -1 stands for `fill`.
 * x is the whole buffer. */
typedef struct {
    fqvit_type x, y;
    uint32_t channels, taps;
    const int32_t *index; /* [rows][taps] */
    fqvit_zero fill;
    const int8_t *w; /* [taps][C] */
    const int32_t *bias, *mult;
    const uint8_t *shift;
    fqvit_zero y_zero;
    int32_t last;
} fqvit_depthwise_op;
void fqvit_depthwise(const fqvit_depthwise_op *op, const uint8_t *x, uint8_t *y, uint32_t row);

/* y = row index[row] of x, or fill for index -1. x is the whole buffer. */
typedef struct {
    fqvit_type x;
    uint32_t channels;
    const int32_t *index;
    fqvit_zero fill;
} fqvit_take_op;
void fqvit_take(const fqvit_take_op *op, const uint8_t *x, uint8_t *y, uint32_t row);

/* Transpose axes: write `count` values of the result, beginning with value `first`. x is the whole buffer. */
typedef struct {
    uint32_t bytes; /* per value */
    uint32_t axes, offset, size[8], stride[8];
} fqvit_permute_op;
void fqvit_permute(const fqvit_permute_op *op, const uint8_t *x, uint8_t *y, uint32_t first, uint32_t count);

/* Write one part of a concat: a constant, or bytes of a buffer. */
void fqvit_copy_constant(const void *x, fqvit_type type, uint32_t count, uint8_t *y);
void fqvit_copy(const uint8_t *x, uint32_t bytes, uint8_t *y);

/* y[n] = clamp(requantize((sum_k (a[k] - a_zero) * (b - b_zero)) + bias[index[m][n]][h]) + y_zero) */
typedef struct {
    fqvit_type a, b, y;
    uint32_t rows, columns, inner, heads; /* M per head, N, K, H */
    uint8_t b_rows;                       /* 1: b is [K][N]; 0: b is [N][K] */
    int32_t a_zero, b_zero, mult;
    const int32_t *mults; /* one multiplier per head, or NULL: use `mult` */
    uint8_t shift;
    const int32_t *bias;       /* relative position bias [entries][H], or NULL */
    const uint16_t *index;     /* [M][N], used with bias */
    const int32_t *wide_index; /* the same for more than 65536 entries, or NULL: use `index` */
    int32_t y_zero, last;
} fqvit_matmul_op;
void fqvit_matmul(const fqvit_matmul_op *op, const uint8_t *a, const uint8_t *b, uint8_t *y, uint32_t row);

/* The three softmaxes look up the distance of each score from the largest one of its row. Tokens of other regions are
 * masked. */
typedef struct {
    fqvit_type x, y;
    uint32_t tokens;
    const void *table;     /* int32_t exponentials; uint8_t codes for row_codes */
    uint32_t length;       /* entries of the table; larger distances use the last one */
    const uint8_t *region; /* [windows][T] or NULL */
    uint32_t window_rows;  /* rows per window, H * T */
    int64_t mult;
    uint8_t shift;
    int32_t last;
} fqvit_softmax_op;
void fqvit_log_softmax(const fqvit_softmax_op *op, const uint8_t *x, uint8_t *y, uint32_t row);
void fqvit_softmax(const fqvit_softmax_op *op, const uint8_t *x, uint8_t *y, uint32_t row);
void fqvit_row_codes(const fqvit_softmax_op *op, const uint8_t *x, uint8_t *y, uint32_t row);

/* y[d] = clamp(round((sum_t levels[a[t]] * (v[t][d] - v_zero)) * M / 2^shift) + y_zero): M = mult for shift_matmul,
 * M = round(mult * largest / sum_t levels[a[t]]) for attend. v is V of the head of this row. */
typedef struct {
    fqvit_type v, y;
    uint32_t tokens, width;
    const uint16_t *levels; /* one weight per code */
    int32_t largest;        /* largest level */
    int32_t v_zero, mult;
    uint8_t shift;
    int32_t y_zero, last;
} fqvit_context_op;
void fqvit_shift_matmul(const fqvit_context_op *op, const uint8_t *a, const uint8_t *v, uint8_t *y);
void fqvit_attend(const fqvit_context_op *op, const uint8_t *a, const uint8_t *v, uint8_t *y);

#endif
