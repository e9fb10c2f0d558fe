#include "fqvit_detect.h"

/* ---- fixed-point primitives ---- */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t clamp(int64_t x, int64_t low, int64_t high) { return smaller(larger(x, low), high); }

/* floor(x / 2^shift), without shifting a negative number */
static int64_t floor_shift(int64_t x, uint32_t shift) {
    return x >= 0 ? (int64_t)((uint64_t)x >> shift) : -1 - (int64_t)((uint64_t)(-1 - x) >> shift);
}

/* floor(x / 2^shift + 1/2), shift >= 1 */
static int64_t round_shift(int64_t x, uint32_t shift) { return floor_shift(x + ((int64_t)1 << (shift - 1)), shift); }

static int64_t floor_divide(int64_t a, int64_t b) { return a >= 0 ? a / b : -1 - (-1 - a) / b; }

/* floor(a / b + 1/2), b > 0 */
static int64_t round_divide(int64_t a, int64_t b) { return floor_divide(a + b / 2, b); }

static int64_t scaled(int64_t x, fqvit_ratio ratio) { return round_shift(x * ratio.mult, ratio.shift); }

/* 2^x = mantissa * 2^exponent, x in 2^-27, mantissa in 2^-30 */
static int64_t power_of_two(const uint32_t* powers, int64_t x, int64_t* exponent) {
    int64_t whole = floor_shift(x, 27), part = x - whole * ((int64_t)1 << 27), mantissa;
    mantissa = round_shift((int64_t)powers[part >> 18] * powers[512 + (part >> 9 & 511)], 30);
    mantissa = round_shift(mantissa * powers[1024 + (part & 511)], 30);
    *exponent = whole;
    return smaller(mantissa, ((int64_t)1 << 31) - 1);
}

/* 2^x in 2^-30, for x <= 0 in 2^-27 */
static int64_t power_below_one(const uint32_t* powers, int64_t x) {
    int64_t exponent, mantissa = power_of_two(powers, larger(x, -((int64_t)64 << 27)), &exponent);
    return round_shift(mantissa * 2, (uint32_t)smaller(1 - exponent, 62));
}

/* Probability in 2^-15 of a base-2 logit in 2^-27 */
static int64_t sigmoid(const uint32_t* powers, int64_t logit) {
    int64_t one = (int64_t)1 << 30, power = power_below_one(powers, logit < 0 ? logit : -logit);
    return round_divide((logit < 0 ? power : one) << 15, power + one);
}

/* ---- boxes ---- */

static int64_t area(const int64_t* box) { return larger(box[2] - box[0], 0) * larger(box[3] - box[1], 0); }

/* Apply deltas to a box and clip it to an image of height x width pixels. */
static void decode(const fqvit_detector* d, const int64_t* box, const int32_t* deltas, const fqvit_ratio* ratios,
                   uint32_t height, uint32_t width, int64_t* result) {
    int64_t limits[2] = {(int64_t)width << 8, (int64_t)height << 8}, edges[4];
    for (uint32_t i = 0; i < 2; ++i) {
        int64_t side = box[2 + i] - box[i], exponent;
        int64_t farthest = ((int64_t)1 << 61) / larger(side, 1);
        int64_t offset = clamp(scaled(deltas[i], ratios[i]), -farthest, farthest);
        int64_t log = clamp(scaled(deltas[2 + i], ratios[2 + i]), -d->log_limit, d->log_limit);
        int64_t mantissa = power_of_two(d->powers, log, &exponent);
        int64_t half = round_shift(side * mantissa, (uint32_t)(23 - exponent)); /* in 2^-16 pixel, as is the centre */
        int64_t centre = (box[i] + box[2 + i]) * 128 + round_shift(offset * side, 16);
        edges[i] = clamp(round_shift(centre - half, 8), 0, limits[i]);
        edges[2 + i] = clamp(round_shift(centre + half, 8), 0, limits[i]);
    }
    for (uint32_t i = 0; i < 4; ++i) result[i] = edges[i]; /* result may be box */
}

/* Whether a comes after b: a lower score or, if the scores are equal, a later index */
static int is_after(const fqvit_ranked* a, const fqvit_ranked* b) {
    return a->score != b->score ? a->score < b->score : a->index > b->index;
}

/* Heap sort: best first. The order is total, so the result does not depend on the algorithm. */
static void sort(fqvit_ranked* x, uint32_t count) {
    for (uint32_t built = count / 2, end = count; end > 1;) {
        uint32_t parent, child;
        fqvit_ranked value;
        if (built > 0) {
            value = x[--built];
        } else {
            value = x[--end];
            x[end] = x[0];
        }
        for (parent = built; (child = 2 * parent + 1) < end; parent = child) {
            if (child + 1 < end && is_after(&x[child + 1], &x[child])) ++child;
            if (!is_after(&x[child], &value)) break;
            x[parent] = x[child];
        }
        x[parent] = value;
    }
}

/* Non-maximum suppression within groups. Puts the indices of the kept candidates, best first, into memory.ranked, and
 * returns their number, at most `most`. iou: threshold in 2^-16 */
static uint32_t suppress(const fqvit_detector* d, uint32_t count, int64_t iou, uint32_t most) {
    fqvit_ranked* ranked = d->memory.ranked;
    const fqvit_candidate* all = d->memory.candidates;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; ++i) {
        ranked[i].score = all[i].score;
        ranked[i].index = i;
    }
    sort(ranked, count);
    for (uint32_t i = 0; i < count && kept < most; ++i) {
        const fqvit_candidate* own = &all[ranked[i].index];
        int drop = 0;
        for (uint32_t k = 0; k < kept && !drop; ++k) {
            const fqvit_candidate* better = &all[ranked[k].index];
            int64_t common, sides[2];
            if (better->group != own->group) continue;
            for (uint32_t axis = 0; axis < 2; ++axis) {
                int64_t low = larger(own->box[axis], better->box[axis]);
                sides[axis] = larger(smaller(own->box[2 + axis], better->box[2 + axis]) - low, 0);
            }
            common = sides[0] * sides[1];
            drop = common << 16 > iou * (area(own->box) + area(better->box) - common);
        }
        if (!drop) ranked[kept++] = ranked[i];
    }
    return kept;
}

/* Proposals of an image, in memory.boxes, best first; returns their number. */
static uint32_t propose(const fqvit_detector* d, uint32_t height, uint32_t width) {
    const fqvit_detector_memory* m = &d->memory;
    uint32_t count = 0, kept;
    for (uint32_t level = 0; level < d->levels; ++level) {
        uint32_t columns = d->grids[level][1], total = d->grids[level][0] * columns * d->anchors;
        for (uint32_t i = 0; i < total; ++i) {
            m->ranked[i].score = scaled(m->objectness[level][i], d->objectness[level]);
            m->ranked[i].index = i;
        }
        sort(m->ranked, total);
        for (uint32_t i = 0; i < total && i < d->proposals_a_level; ++i) {
            uint32_t index = m->ranked[i].index, cell = index / d->anchors;
            const int32_t* half = d->halves[level * d->anchors + index % d->anchors];
            int64_t step = (int64_t)d->strides[level] << 8, x = cell % columns * step, y = cell / columns * step;
            int64_t anchor[4] = {x - half[0], y - half[1], x + half[0], y + half[1]};
            fqvit_candidate* own = &m->candidates[count];
            decode(d, anchor, &m->deltas[level][(size_t)index * 4], &d->deltas[level * 4], height, width, own->box);
            own->score = m->ranked[i].score;
            own->group = level;
            count += own->box[2] > own->box[0] && own->box[3] > own->box[1]; /* clipping may leave no area */
        }
    }
    kept = suppress(d, count, d->proposal_iou, d->proposals);
    for (uint32_t n = 0; n < kept; ++n)
        for (uint32_t i = 0; i < 4; ++i) m->boxes[n][i] = m->candidates[m->ranked[n].index].box[i];
    return kept;
}

/* ---- RoIAlign ---- */

/* The weight of each of `size` cells in each bin of low..high, in 2^-15: weights [bins][size]. cell: cell length.
 * The cells first .. last - 1 have weights other than 0. */
static void axis_weights(const fqvit_detector* d, int64_t low, int64_t high, int64_t cell, uint32_t bins, uint32_t size,
                         int32_t* weights, uint32_t* first, uint32_t* last) {
    int64_t* sums = d->memory.sums;
    int64_t samples = (high - low + bins * cell - 1) / (bins * cell), parts = 2 * samples * bins, whole = cell * parts;
    *first = size;
    *last = 0;
    for (uint32_t bin = 0; bin < bins; ++bin) {
        for (uint32_t i = 0; i < size; ++i) sums[i] = 0;
        for (int64_t k = bin * samples; k < (bin + 1) * samples; ++k) {
            int64_t position = (low - cell / 2) * parts + (2 * k + 1) * (high - low), before, toward;
            if (position < -whole || position > size * whole) continue;
            position = clamp(position, 0, (size - 1) * whole);
            before = position / whole;
            toward = position - before * whole;
            sums[before] += whole - toward;
            sums[smaller(before + 1, (int64_t)size - 1)] += toward;
        }
        for (uint32_t i = 0; i < size; ++i) {
            int64_t weight = samples == 0 ? 0 : round_divide(sums[i] * 32768, whole * samples);
            weights[(size_t)bin * size + i] = (int32_t)weight;
            if (weight == 0) continue;
            if (i < *first) *first = i;
            if (i >= *last) *last = i + 1;
        }
    }
}

/* RoI features of a box, in memory.roi: codes [side][side][channels] from the map for its area */
static void roi_align(const fqvit_detector* d, const int64_t* box, const fqvit_roi_input* input) {
    const fqvit_detector_memory* m = &d->memory;
    uint32_t side = input->side, channels = d->channels, map = 0, top, bottom, left, right, rows, columns;
    int64_t cell;
    while (map + 1 < d->maps && area(box) >= d->areas[map]) ++map;
    cell = (int64_t)d->strides[map] << 8;
    rows = d->grids[map][0];
    columns = d->grids[map][1];
    axis_weights(d, box[1], box[3], cell, side, rows, m->rows, &top, &bottom);
    axis_weights(d, box[0], box[2], cell, side, columns, m->columns, &left, &right);
    for (uint32_t a = 0; a < side; ++a) {
        for (uint32_t x = left; x < right; ++x) {
            for (uint32_t c = 0; c < channels; ++c) {
                int64_t sum = 0;
                for (uint32_t y = top; y < bottom; ++y) {
                    int32_t code = m->maps[map][((size_t)y * columns + x) * channels + c];
                    sum += (int64_t)m->rows[(size_t)a * rows + y] * (code - d->map_zeros[map]);
                }
                m->strip[(size_t)x * channels + c] = (int32_t)round_shift(sum, 8);
            }
        }
        for (uint32_t b = 0; b < side; ++b) {
            for (uint32_t c = 0; c < channels; ++c) {
                int64_t sum = 0;
                for (uint32_t x = left; x < right; ++x)
                    sum += (int64_t)m->columns[(size_t)b * columns + x] * m->strip[(size_t)x * channels + c];
                sum = clamp(scaled(sum, input->ratios[map]) + input->zero, 0, input->last);
                m->roi[((size_t)a * side + b) * channels + c] = (uint8_t)sum;
            }
        }
    }
}

/* ---- stages ---- */

/* The most probable class, not counting background */
static uint32_t best_class(const int32_t* logits, uint32_t classes) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < classes; ++i)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* Run the box heads on the boxes in memory. The boxes become those of the last stage. */
static void classify(const fqvit_detector* d, uint32_t count, uint32_t height, uint32_t width) {
    const fqvit_detector_memory* m = &d->memory;
    uint32_t logits = d->classes + 1, deltas = 4 * d->delta_sets;
    for (size_t i = 0; i < (size_t)count * logits; ++i) m->logits[i] = 0;
    for (uint32_t stage = 0; stage < d->stages; ++stage) {
        for (uint32_t n = 0; n < count; ++n) {
            int32_t* moves = &m->box_deltas[(size_t)n * deltas];
            roi_align(d, m->boxes[n], &d->box_inputs[stage]);
            d->run_boxes(stage, m->roi, m->box_logits, moves);
            for (uint32_t i = 0; i < logits; ++i)
                m->logits[(size_t)n * logits + i] += scaled(m->box_logits[i], d->class_logits[stage]);
            if (stage + 1 < d->stages) {
                uint32_t label = d->delta_sets > 1 ? best_class(m->box_logits, d->classes) : 0;
                decode(d, m->boxes[n], &moves[4 * label], &d->box_deltas[stage * 4], height, width, m->boxes[n]);
            }
        }
    }
}

/* Candidates are all pairs of box and class with a score above the threshold. Returns the number of detections, which
 * memory.ranked refers to. */
static uint32_t select_detections(const fqvit_detector* d, uint32_t boxes, uint32_t height, uint32_t width) {
    const fqvit_detector_memory* m = &d->memory;
    uint32_t logits = d->classes + 1, count = 0;
    for (uint32_t n = 0; n < boxes; ++n) {
        int64_t *own = &m->logits[(size_t)n * logits], top = own[0], sum = 0;
        for (uint32_t i = 1; i < logits; ++i) top = larger(top, own[i]);
        for (uint32_t i = 0; i < logits; ++i) {
            own[i] = power_below_one(d->powers, own[i] - top);
            sum += own[i];
        }
        for (uint32_t label = 0; label < d->classes; ++label) {
            int64_t score = round_divide(own[label] * 16777216, sum);
            uint32_t set = d->delta_sets > 1 ? label : 0;
            if (score <= d->score) continue;
            decode(d, m->boxes[n], &m->box_deltas[((size_t)n * d->delta_sets + set) * 4],
                   &d->box_deltas[(d->stages - 1) * 4], height, width, m->candidates[count].box);
            m->candidates[count].score = score;
            m->candidates[count++].group = label;
        }
    }
    return suppress(d, count, d->iou, d->detections);
}

uint32_t fqvit_detect(const fqvit_detector* d, const uint8_t* pixels, uint32_t height, uint32_t width,
                      uint32_t original_height, uint32_t original_width, fqvit_detection* found,
                      int32_t* probabilities) {
    const fqvit_detector_memory* m = &d->memory;
    uint32_t count, side = 2 * d->mask_inputs[0].side, area_of_mask = side * side;
    for (uint32_t y = 0; y < d->height; ++y)
        for (uint32_t x = 0; x < d->width; ++x)
            for (uint32_t c = 0; c < 3; ++c) {
                int inside = y < height && x < width;
                m->padded[((size_t)y * d->width + x) * 3 + c] =
                    inside ? pixels[((size_t)y * width + x) * 3 + c] : d->padding[c];
            }
    d->run_pyramid(m->padded);
    count = propose(d, height, width);
    classify(d, count, height, width);
    count = select_detections(d, count, height, width);
    for (uint32_t n = 0; n < count; ++n) {
        const fqvit_candidate* own = &m->candidates[m->ranked[n].index];
        int32_t* mask = &probabilities[(size_t)n * area_of_mask];
        for (uint32_t i = 0; i < area_of_mask; ++i) mask[i] = 0;
        for (uint32_t stage = 0; stage < d->stages; ++stage) {
            roi_align(d, own->box, &d->mask_inputs[stage]);
            d->run_masks(stage, m->roi, m->mask_logits);
            for (uint32_t i = 0; i < area_of_mask; ++i) {
                int64_t logit = scaled(m->mask_logits[(size_t)i * d->classes + own->group], d->mask_logits[stage]);
                mask[i] += (int32_t)sigmoid(d->powers, logit);
            }
        }
        for (uint32_t i = 0; i < area_of_mask; ++i) mask[i] = (int32_t)round_divide(mask[i], d->stages);
        for (uint32_t i = 0; i < 2; ++i) {
            int64_t numerator = i == 0 ? original_width : original_height, denominator = i == 0 ? width : height;
            found[n].box[i] = round_divide(own->box[i] * numerator, denominator);
            found[n].box[2 + i] = round_divide(own->box[2 + i] * numerator, denominator);
        }
        found[n].score = own->score;
        found[n].label = own->group;
    }
    return count;
}

/* ---- masks ---- */

/* Locate a pixel in a mask with a border of zeros: the cell before it; *share: the weight of the next cell, in 2^-15 */
static uint32_t locate(int64_t low, int64_t high, uint32_t pixel, uint32_t side, int64_t* share) {
    int64_t one = 32768, position = ((int64_t)side - 1) * (one / 2), before;
    if (high > low) position = round_divide((((int64_t)pixel << 8) + 128 - low) * (side * one), high - low) - one / 2;
    position = clamp(position, -one, side * one) + one;
    before = smaller(position / one, side);
    *share = position - before * one;
    return (uint32_t)before;
}

/* The probability at a cell of the mask with its border */
static int64_t bordered(const int32_t* mask, uint32_t side, uint32_t row, uint32_t column) {
    return row == 0 || column == 0 || row > side || column > side ? 0 : mask[(row - 1) * side + column - 1];
}

void fqvit_paste(const fqvit_detector* d, const int32_t* probabilities, const int64_t* box, uint32_t height,
                 uint32_t width, uint8_t* mask) {
    uint32_t side = 2 * d->mask_inputs[0].side;
    int64_t left = larger(floor_shift(box[0], 8) - 1, 0), right = smaller(-floor_shift(-box[2], 8) + 1, width);
    int64_t top = larger(floor_shift(box[1], 8) - 1, 0), bottom = smaller(-floor_shift(-box[3], 8) + 1, height);
    for (size_t i = 0; i < (size_t)height * width; ++i) mask[i] = 0;
    for (int64_t y = top; y < bottom; ++y) {
        int64_t down, across;
        uint32_t row = locate(box[1], box[3], (uint32_t)y, side, &down);
        for (int64_t x = left; x < right; ++x) {
            uint32_t column = locate(box[0], box[2], (uint32_t)x, side, &across);
            int64_t strips[2];
            for (uint32_t i = 0; i < 2; ++i)
                strips[i] = round_shift(bordered(probabilities, side, row, column + i) * (32768 - down) +
                                            bordered(probabilities, side, row + 1, column + i) * down,
                                        15);
            mask[(size_t)y * width + x] = strips[0] * (32768 - across) + strips[1] * across >= d->mask;
        }
    }
}
