/* The ops of fqvit_ops.h as plain loops. fqvit proved all bounds for any image, so nothing is checked here. */
#include "fqvit_ops.h"

/* ---- fixed-point arithmetic ---- */

/* floor(x / 2^shift). In C99, >> of a negative number is implementation-defined, so ~x is shifted instead. */
static int64_t floor_shift(int64_t x, unsigned shift) { return x >= 0 ? x >> shift : ~(~x >> shift); }

/* floor(x / 2^shift + 1/2), shift 1..62 */
static int64_t round_shift(int64_t x, unsigned shift) { return floor_shift(x + ((int64_t)1 << (shift - 1)), shift); }

/* floor(acc * mult / 2^shift + 1/2) */
static int64_t requantize(int32_t acc, int32_t mult, unsigned shift) { return round_shift((int64_t)acc * mult, shift); }

static int32_t clamp(int64_t value, int32_t last) { return value < 0 ? 0 : value > last ? last : (int32_t)value; }

/* floor(a / b + 1/2), b > 0. Division truncates in C99. */
static int64_t round_divide(int64_t a, int64_t b)
{
    const int64_t sum = a + b / 2, quotient = sum / b;
    return quotient - (sum % b < 0 ? 1 : 0);
}

/* index of the highest set bit, x >= 1 */
static unsigned ilog2(uint64_t x)
{
    unsigned index = 0;
    for (unsigned step = 32; step > 0; step /= 2) {
        if (x >> step) {
            index += step;
            x >>= step;
        }
    }
    return index;
}

/* log2(x) rounded by the bit below the highest set bit, x >= 1 */
static unsigned ilog2_round(uint64_t x)
{
    const unsigned top = ilog2(x);
    return top + (top > 0 ? (unsigned)(x >> (top - 1) & 1) : 0);
}

/* floor(sqrt(x)), 0 <= x < 2^62, bit by bit */
static int64_t isqrt(int64_t x)
{
    int64_t root = 0;
    for (int64_t bit = (int64_t)1 << 30; bit > 0; bit /= 2) {
        if ((root + bit) * (root + bit) <= x) root += bit;
    }
    return root;
}

/* ---- values ---- */

static int32_t load_u16(const uint8_t *x, uint32_t i)
{
    x += (size_t)i * 2;
    return (int32_t)(x[0] | (uint32_t)x[1] << 8);
}

int32_t fqvit_load(const uint8_t *x, fqvit_type type, uint32_t i)
{
    uint32_t bits;
    if (type == FQVIT_U8) return x[i];
    if (type == FQVIT_U16) return load_u16(x, i);
    x += (size_t)i * 4;
    bits = x[0] | (uint32_t)x[1] << 8 | (uint32_t)x[2] << 16 | (uint32_t)x[3] << 24;
    return bits <= INT32_MAX ? (int32_t)bits : -1 - (int32_t)~bits;
}

void fqvit_store(uint8_t *y, fqvit_type type, uint32_t i, int32_t value)
{
    const uint32_t bits = (uint32_t)value;
    if (type == FQVIT_U8) {
        y[i] = (uint8_t)bits;
    } else if (type == FQVIT_U16) {
        y += (size_t)i * 2;
        y[0] = (uint8_t)(bits & 255);
        y[1] = (uint8_t)(bits >> 8 & 255);
    } else {
        y += (size_t)i * 4;
        y[0] = (uint8_t)(bits & 255);
        y[1] = (uint8_t)(bits >> 8 & 255);
        y[2] = (uint8_t)(bits >> 16 & 255);
        y[3] = (uint8_t)(bits >> 24);
    }
}

static int32_t constant(const void *x, fqvit_type type, uint32_t i)
{
    switch (type) {
    case FQVIT_U8: return ((const uint8_t *)x)[i];
    case FQVIT_U16: return ((const uint16_t *)x)[i];
    case FQVIT_I16: return ((const int16_t *)x)[i];
    default: return ((const int32_t *)x)[i];
    }
}

static int32_t zero_of(const fqvit_zero *zero, uint32_t c)
{
    return zero->many ? zero->many[c / zero->group] : zero->one;
}

/* (x - zero) * 2^alpha, which has the same scale in all channels */
static int64_t lifted(int32_t x, const fqvit_zero *zero, const uint8_t *alpha, uint32_t c)
{
    const int64_t value = (int64_t)x - zero_of(zero, c);
    return alpha ? value * ((int64_t)1 << alpha[c]) : value;
}

/* ---- ops ---- */

void fqvit_lookup(const fqvit_lookup_op *op, const uint8_t *x, uint8_t *y)
{
    for (uint32_t c = 0; c < op->channels; ++c) {
        int32_t code = constant(op->table, op->entry, (uint32_t)fqvit_load(x, op->x, c));
        if (op->alpha) code = clamp(round_shift(code, op->alpha[c] + 1u) + op->y_zero[op->alpha[c]], op->last);
        fqvit_store(y, op->y, c, code);
    }
}

static int32_t dot(const int8_t *w, const uint8_t *x, fqvit_type type, uint32_t inputs)
{
    int32_t acc = 0;
    if (type == FQVIT_U8) {
        for (uint32_t k = 0; k < inputs; ++k) acc += (int32_t)x[k] * w[k];
    } else {
        for (uint32_t k = 0; k < inputs; ++k) acc += load_u16(x, k) * w[k];
    }
    return acc;
}

/* value of a two's complement code of `width` bits */
static int32_t signed_code(uint32_t code, uint32_t width)
{
    const int32_t half = (int32_t)1 << (width - 1);
    return ((int32_t)(code & (((uint32_t)1 << width) - 1)) ^ half) - half;
}

/* code k of a row in the lowest `width` bits of the result; the first code is in the lowest bits of byte 0 */
static uint32_t packed_code(const uint8_t *row, uint32_t k, uint32_t width)
{
    const uint32_t byte = k * width / 8, bit = k * width % 8;
    return (row[byte] | (bit + width > 8 ? (uint32_t)row[byte + 1] << 8 : 0)) >> bit;
}

/* sum of products of u8 inputs with 4-bit weights, one byte (two weights) per iteration */
static int32_t dot_pairs(const uint8_t *codes, const uint8_t *x, uint32_t pairs)
{
    int32_t sum = 0;
    for (uint32_t i = 0; i < pairs; ++i, x += 2) {
        sum += x[0] * signed_code(codes[i], 4) + x[1] * signed_code(codes[i] >> 4, 4);
    }
    return sum;
}

/* sum of products of u8 inputs with 6-bit weights, three bytes (four weights) per iteration */
static int32_t dot_quads(const uint8_t *codes, const uint8_t *x, uint32_t quads)
{
    int32_t sum = 0;
    for (uint32_t i = 0; i < quads; ++i, codes += 3, x += 4) {
        const uint32_t bits = codes[0] | (uint32_t)codes[1] << 8 | (uint32_t)codes[2] << 16;
        sum += x[0] * signed_code(bits, 6) + x[1] * signed_code(bits >> 6, 6);
        sum += x[2] * signed_code(bits >> 12, 6) + x[3] * signed_code(bits >> 18, 6);
    }
    return sum;
}

/* sum of products with packed weights that are codes in two's complement */
static int32_t dot_codes(const fqvit_linear_op *op, const uint8_t *codes, const uint8_t *x)
{
    int32_t sum = 0;
    uint32_t k = 0;
    if (op->x == FQVIT_U8 && op->width == 4) {
        sum = dot_pairs(codes, x, op->inputs / 2);
        k = op->inputs / 2 * 2;
    } else if (op->x == FQVIT_U8 && op->width == 6) {
        sum = dot_quads(codes, x, op->inputs / 4);
        k = op->inputs / 4 * 4;
    }
    for (; k < op->inputs; ++k) {
        sum += fqvit_load(x, op->x, k) * signed_code(packed_code(codes, k, op->width), op->width);
    }
    return sum;
}

/* sum of products of inputs k..end - 1 with weights that are levels of one codebook */
static int32_t dot_levels(const fqvit_linear_op *op, const uint8_t *codes, const int8_t *levels, const uint8_t *x,
                          uint32_t k, uint32_t end)
{
    const uint32_t mask = ((uint32_t)1 << op->width) - 1;
    int32_t sum = 0;
    if (op->x == FQVIT_U8 && op->width == 4 && k % 2 == 0) {
        for (; k + 2 <= end; k += 2) {
            sum += x[k] * levels[codes[k / 2] & 15] + x[k + 1] * levels[codes[k / 2] >> 4];
        }
    }
    for (; k < end; ++k) sum += fqvit_load(x, op->x, k) * levels[packed_code(codes, k, op->width) & mask];
    return sum;
}

static int32_t dot_packed(const fqvit_linear_op *op, const uint8_t *x, uint32_t o)
{
    const uint8_t *codes = op->packed + (size_t)o * ((op->inputs * op->width + 7) / 8), *choice;
    uint32_t groups;
    int32_t acc = 0;
    if (!op->choice) return dot_codes(op, codes, x);
    groups = (op->inputs + op->group - 1) / op->group; /* the last group may be shorter */
    choice = op->choice + (size_t)o * ((groups + 1) / 2);
    for (uint32_t g = 0; g < groups; ++g) {
        const uint32_t k = g * op->group, end = op->inputs - k < op->group ? op->inputs : k + op->group;
        const uint32_t codebook = choice[g / 2] >> (g % 2 * 4) & 15;
        acc += dot_levels(op, codes, op->levels + ((size_t)codebook << op->width), x, k, end);
    }
    return acc;
}

void fqvit_linear(const fqvit_linear_op *op, const uint8_t *x, uint8_t *y)
{
    for (uint32_t o = 0; o < op->outputs; ++o) {
        const int32_t acc =
            op->bias[o] + (op->w ? dot(op->w + (size_t)o * op->inputs, x, op->x, op->inputs) : dot_packed(op, x, o));
        int64_t value;
        if (op->out == FQVIT_ACC) {
            fqvit_store(y, FQVIT_I32, o, acc);
            continue;
        }
        value = requantize(acc, op->mult[o], op->shift[o]);
        fqvit_store(y, op->y, o,
                    op->out == FQVIT_CODES ? clamp(value + zero_of(&op->y_zero, o), op->last) : (int32_t)value);
    }
}

void fqvit_layernorm(const fqvit_layernorm_op *op, const uint8_t *x, uint8_t *y)
{
    const int64_t channels = op->channels;
    int64_t m1 = 0, m2 = 0, d, root, unit;
    unsigned j;
    for (uint32_t c = 0; c < op->channels; ++c) {
        const int64_t v = lifted(fqvit_load(x, op->x, c), &op->zero, op->alpha, c);
        if (!op->uncentered) m1 += v;
        m2 += v * v;
    }
    d = channels * m2 - m1 * m1 + op->epsilon;
    j = (61 - ilog2((uint64_t)d)) / 2;
    root = isqrt(d * ((int64_t)1 << 2 * j));
    unit = (int64_t)1 << (op->fraction + j);
    for (uint32_t c = 0; c < op->channels; ++c) {
        const int64_t v = lifted(fqvit_load(x, op->x, c), &op->zero, op->alpha, c);
        const int64_t t = round_divide((channels * v - m1) * unit, root);
        const int64_t b = op->affine[op->channels + c] * ((int64_t)1 << op->b_shift);
        fqvit_store(y, op->y, c, clamp(round_shift(t * op->affine[c] + b, op->shift), op->last));
    }
}

static int64_t term(const fqvit_term *op, const uint8_t *x, uint32_t row, uint32_t c, uint32_t channels)
{
    const int32_t value =
        op->constant ? constant(op->constant, op->type, row % op->rows * channels + c) : fqvit_load(x, op->type, c);
    return lifted(value, &op->zero, op->alpha, c) * (op->mults ? op->mults[c] : op->mult);
}

void fqvit_add(const fqvit_add_op *op, const uint8_t *x0, const uint8_t *x1, uint8_t *y, uint32_t row)
{
    for (uint32_t c = 0; c < op->channels; ++c) {
        const int64_t sum =
            term(&op->terms[0], x0, row, c, op->channels) + term(&op->terms[1], x1, row, c, op->channels);
        const unsigned shift = op->shift + (op->y_alpha ? (unsigned)op->y_alpha[c] : 0u);
        fqvit_store(y, op->y, c, clamp(round_shift(sum, shift) + zero_of(&op->y_zero, c), op->last));
    }
}

void fqvit_mean(const fqvit_mean_op *op, const uint8_t *x, uint8_t *y)
{
    for (uint32_t c = 0; c < op->channels; ++c) {
        int64_t acc = 0;
        for (uint32_t t = op->skip; t < op->rows; ++t) {
            acc += lifted(fqvit_load(x, op->x, t * op->channels + c), &op->zero, op->alpha, c);
        }
        fqvit_store(y, op->y, c, clamp(requantize((int32_t)acc, op->mult, op->shift) + op->y_zero, op->last));
    }
}

void fqvit_max(const fqvit_max_op *op, const uint8_t *x, uint8_t *y)
{
    for (uint32_t c = 0; c < op->channels; ++c) {
        int32_t most = 0;
        for (uint32_t t = 0; t < op->rows; ++t) {
            const int32_t code = fqvit_load(x, op->x, t * op->channels + c);
            if (code > most) most = code;
        }
        fqvit_store(y, op->x, c, most);
    }
}

void fqvit_multiply(const fqvit_multiply_op *op, const uint8_t *a, const uint8_t *b, uint8_t *y)
{
    for (uint32_t c = 0; c < op->channels; ++c) {
        const int32_t acc = (fqvit_load(a, op->a, c) - op->a_zero) * (fqvit_load(b, op->b, c) - op->b_zero);
        fqvit_store(y, op->y, c, clamp(requantize(acc, op->mult, op->shift) + op->y_zero, op->last));
    }
}

void fqvit_rotary(const fqvit_rotary_op *op, const uint8_t *x, uint8_t *y, uint32_t row)
{
    const int16_t *cosine = op->table + (size_t)(row % op->tokens) * op->period;
    const int16_t *sine = cosine + (size_t)op->tokens * op->period;
    for (uint32_t first = 0; first < op->channels; first += op->period) {
        for (uint32_t p = 0; p < op->period; ++p) {
            const int32_t own = fqvit_load(x, op->x, first + p) - op->zero;
            const int32_t other = fqvit_load(x, op->x, first + (uint32_t)op->partner[p]) - op->zero;
            const int32_t acc = own * cosine[p] + other * sine[p];
            fqvit_store(y, op->y, first + p, clamp(requantize(acc, op->mult, op->shift) + op->y_zero, op->last));
        }
    }
}

void fqvit_depthwise(const fqvit_depthwise_op *op, const uint8_t *x, uint8_t *y, uint32_t row)
{
    const int32_t *index = op->index + (size_t)row * op->taps;
    for (uint32_t c = 0; c < op->channels; ++c) {
        int32_t acc = op->bias[c];
        for (uint32_t k = 0; k < op->taps; ++k) {
            const int32_t code =
                index[k] < 0 ? zero_of(&op->fill, c) : fqvit_load(x, op->x, (uint32_t)index[k] * op->channels + c);
            acc += code * op->w[(size_t)k * op->channels + c];
        }
        fqvit_store(y, op->y, c, clamp(requantize(acc, op->mult[c], op->shift[c]) + zero_of(&op->y_zero, c), op->last));
    }
}

void fqvit_take(const fqvit_take_op *op, const uint8_t *x, uint8_t *y, uint32_t row)
{
    const int32_t from = op->index[row];
    for (uint32_t c = 0; c < op->channels; ++c) {
        const int32_t value =
            from < 0 ? zero_of(&op->fill, c) : fqvit_load(x, op->x, (uint32_t)from * op->channels + c);
        fqvit_store(y, op->x, c, value);
    }
}

void fqvit_permute(const fqvit_permute_op *op, const uint8_t *x, uint8_t *y, uint32_t first, uint32_t count)
{
    uint32_t at[8], from = op->offset;
    for (uint32_t axis = op->axes; axis-- > 0; first /= op->size[axis]) {
        at[axis] = first % op->size[axis];
        from += at[axis] * op->stride[axis];
    }
    for (uint32_t i = 0; i < count; ++i) {
        for (uint32_t b = 0; b < op->bytes; ++b) *y++ = x[(size_t)from * op->bytes + b];
        for (uint32_t axis = op->axes; axis-- > 0;) { /* advance the index, last axis first */
            from += op->stride[axis];
            if (++at[axis] < op->size[axis]) break;
            from -= op->size[axis] * op->stride[axis];
            at[axis] = 0;
        }
    }
}

void fqvit_copy_constant(const void *x, fqvit_type type, uint32_t count, uint8_t *y)
{
    for (uint32_t i = 0; i < count; ++i) fqvit_store(y, type, i, constant(x, type, i));
}

void fqvit_copy(const uint8_t *x, uint32_t bytes, uint8_t *y)
{
    for (uint32_t i = 0; i < bytes; ++i) y[i] = x[i];
}

/* ---- attention ---- */

void fqvit_matmul(const fqvit_matmul_op *op, const uint8_t *a, const uint8_t *b, uint8_t *y, uint32_t row)
{
    const uint32_t m = row % op->rows, head = op->heads ? row / op->rows % op->heads : 0;
    const int32_t mult = op->mults ? op->mults[head] : op->mult;
    for (uint32_t n = 0; n < op->columns; ++n) {
        int32_t acc = 0;
        if (op->a == FQVIT_U8 && op->b == FQVIT_U8 && !op->b_rows) {
            const uint8_t *column = b + (size_t)n * op->inner;
            for (uint32_t k = 0; k < op->inner; ++k)
                acc += ((int32_t)a[k] - op->a_zero) * ((int32_t)column[k] - op->b_zero);
        } else {
            for (uint32_t k = 0; k < op->inner; ++k) {
                const uint32_t i = op->b_rows ? k * op->columns + n : n * op->inner + k;
                acc += (fqvit_load(a, op->a, k) - op->a_zero) * (fqvit_load(b, op->b, i) - op->b_zero);
            }
        }
        if (op->bias) {
            const uint32_t i = m * op->columns + n;
            const size_t entry = op->wide_index ? (size_t)op->wide_index[i] : op->index[i];
            acc += op->bias[entry * op->heads + head];
        }
        fqvit_store(y, op->y, n, clamp(requantize(acc, mult, op->shift) + op->y_zero, op->last));
    }
}

/* The regions of the tokens in the window of this row, or NULL. */
static const uint8_t *regions(const fqvit_softmax_op *op, uint32_t row)
{
    return op->region ? op->region + (size_t)(row / op->window_rows) * op->tokens : NULL;
}

/* The largest x among the tokens in the region of token `own`. */
static int32_t largest(const fqvit_softmax_op *op, const uint8_t *x, const uint8_t *region, uint32_t own)
{
    int32_t top = 0;
    for (uint32_t t = 0; t < op->tokens; ++t) {
        const int32_t value = fqvit_load(x, op->x, t);
        if (value > top && (!region || region[t] == region[own])) top = value;
    }
    return top;
}

/* The table index of token t: its distance from the largest x, at most the last index. */
static uint32_t table_index(const fqvit_softmax_op *op, const uint8_t *x, int32_t top, uint32_t t)
{
    const uint32_t distance = (uint32_t)(top - fqvit_load(x, op->x, t));
    return distance < op->length ? distance : op->length - 1;
}

/* The exponential of token t; 0 if it is in another region. */
static int32_t exponential(const fqvit_softmax_op *op, const uint8_t *x, const uint8_t *region, uint32_t own,
                           int32_t top, uint32_t t)
{
    if (region && region[t] != region[own]) return 0;
    return ((const int32_t *)op->table)[table_index(op, x, top, t)];
}

void fqvit_log_softmax(const fqvit_softmax_op *op, const uint8_t *x, uint8_t *y, uint32_t row)
{
    const uint32_t own = row % op->tokens;
    const uint8_t *region = regions(op, row);
    const int32_t top = largest(op, x, region, own);
    int32_t sum = 0;
    for (uint32_t t = 0; t < op->tokens; ++t) sum += exponential(op, x, region, own, top, t);
    for (uint32_t t = 0; t < op->tokens; ++t) {
        const int32_t e = exponential(op, x, region, own, top, t);
        y[t] = (uint8_t)(e == 0 ? op->last : clamp(ilog2_round((uint64_t)round_divide(sum, e)), op->last));
    }
}

void fqvit_softmax(const fqvit_softmax_op *op, const uint8_t *x, uint8_t *y, uint32_t row)
{
    const uint32_t own = row % op->tokens;
    const uint8_t *region = regions(op, row);
    const int32_t top = largest(op, x, region, own);
    int64_t sum = 0, r;
    for (uint32_t t = 0; t < op->tokens; ++t) sum += exponential(op, x, region, own, top, t);
    r = round_divide(op->mult, sum);
    for (uint32_t t = 0; t < op->tokens; ++t) {
        const int64_t e = exponential(op, x, region, own, top, t);
        fqvit_store(y, op->y, t, clamp(round_shift(e * r, op->shift), op->last));
    }
}

void fqvit_row_codes(const fqvit_softmax_op *op, const uint8_t *x, uint8_t *y, uint32_t row)
{
    const uint8_t *table = op->table, *region = regions(op, row);
    const uint32_t own = row % op->tokens;
    const int32_t top = largest(op, x, region, own);
    for (uint32_t t = 0; t < op->tokens; ++t) {
        y[t] = table[region && region[t] != region[own] ? op->length - 1 : table_index(op, x, top, t)];
    }
}

enum { COLUMNS = 8 }; /* columns of V per pass, which share each lookup of a weight */

static void context(const fqvit_context_op *op, const uint8_t *a, const uint8_t *v, uint8_t *y, int64_t mult)
{
    for (uint32_t d = 0; d < op->width; d += COLUMNS) {
        const uint32_t count = op->width - d < COLUMNS ? op->width - d : COLUMNS;
        int32_t acc[COLUMNS];
        for (uint32_t t = 0; t < op->tokens; ++t) {
            const int32_t weight = op->levels[a[t]];
            for (uint32_t i = 0; i < count; ++i) {
                const int32_t part = weight * (fqvit_load(v, op->v, t * op->width + d + i) - op->v_zero);
                acc[i] = t == 0 ? part : acc[i] + part; /* no `= {0}`: it can become a call to memset */
            }
        }
        for (uint32_t i = 0; i < count; ++i) {
            fqvit_store(y, op->y, d + i, clamp(round_shift(acc[i] * mult, op->shift) + op->y_zero, op->last));
        }
    }
}

void fqvit_shift_matmul(const fqvit_context_op *op, const uint8_t *a, const uint8_t *v, uint8_t *y)
{
    context(op, a, v, y, op->mult);
}

void fqvit_attend(const fqvit_context_op *op, const uint8_t *a, const uint8_t *v, uint8_t *y)
{
    int64_t sum = 0;
    for (uint32_t t = 0; t < op->tokens; ++t) sum += op->levels[a[t]];
    context(op, a, v, y, round_divide((int64_t)op->mult * op->largest, sum));
}
