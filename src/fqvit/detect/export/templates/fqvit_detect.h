/* The integer arithmetic between the networks of a detector: from the outputs of the networks to boxes, scores, labels
 * and masks. This file is the same in every export; detector.c has the constants, the memory and the calls of the
 * networks. docs/explanation/detection-arithmetic.md of fqvit has the formulas.
 *
 * C99 without floats, libc or allocation. Nothing overflows: fqvit proved that from the constants in detector.c.
 *
 * Units: boxes (x1, y1, x2, y2) are in 1/256 pixel, scores in 2^-24, logarithms in 2^-27, interpolation weights and
 * mask probabilities in 2^-15. A ratio stands for mult / 2^shift. */
#ifndef FQVIT_DETECT_H
#define FQVIT_DETECT_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    int32_t mult;
    uint8_t shift;
} fqvit_ratio;

/* The input of a head: codes of RoI features [side][side][channels]. ratios: from sums of RoIAlign, one per map */
typedef struct {
    uint32_t side;
    int32_t zero, last;
    const fqvit_ratio* ratios;
} fqvit_roi_input;

typedef struct {
    int64_t score;
    uint32_t index;
} fqvit_ranked;

/* A candidate box. group: boxes of different groups (levels or classes) do not suppress each other */
typedef struct {
    int64_t box[4];
    int64_t score;
    uint32_t group;
} fqvit_candidate;

typedef struct {
    int64_t box[4]; /* of the original image */
    int64_t score;
    uint32_t label;
} fqvit_detection;

/* Memory of a detection. detector.c has the sizes. */
typedef struct {
    uint8_t* padded;             /* [height][width][3] */
    uint8_t* const* maps;        /* per map: [rows][columns][channels] */
    int32_t* const* objectness;  /* per level: [rows][columns][anchors] */
    int32_t* const* deltas;      /* per level: [rows][columns][anchors][4] */
    fqvit_ranked* ranked;        /* one per anchor of the largest level, or per candidate */
    fqvit_candidate* candidates; /* proposals of all levels, or pairs of box and class */
    int64_t (*boxes)[4];         /* [proposals] */
    int64_t* logits;             /* [proposals][classes + 1], mean over the stages */
    int32_t* box_logits;         /* [classes + 1] */
    int32_t* box_deltas;         /* [proposals][delta_sets][4] */
    uint8_t* roi;                /* [side][side][channels] of the largest head */
    int64_t* sums;               /* [cells of the longest side of a map] */
    int32_t *rows, *columns;     /* [largest side of a RoI][cells of the longest side of a map] */
    int32_t* strip;              /* [columns of the largest map][channels] */
    int32_t* mask_logits;        /* [2 side][2 side][classes] */
} fqvit_detector_memory;

typedef struct {
    uint32_t height, width; /* of the input of the pyramid: resized and padded */
    uint8_t padding[3];
    uint32_t levels, maps, stages, anchors, classes, channels;
    uint32_t delta_sets;           /* 1, or one set of deltas per class */
    const uint32_t* strides;       /* [levels] */
    const uint32_t (*grids)[2];    /* [levels]: rows and columns */
    const int32_t (*halves)[2];    /* [levels][anchors]: half the width and half the height of an anchor */
    const int64_t* areas;          /* [maps - 1]: smallest area of a box on maps 1, 2, ... */
    const int32_t* map_zeros;      /* [maps] */
    const fqvit_ratio* objectness; /* [levels] */
    const fqvit_ratio* deltas;     /* [levels][4] */
    const fqvit_ratio* box_deltas; /* [stages][4] */
    const fqvit_ratio *class_logits, *mask_logits;   /* [stages] */
    const fqvit_roi_input *box_inputs, *mask_inputs; /* [stages] */
    const uint32_t* powers;                          /* [3][512]: 2^(i / 2^9), 2^(i / 2^18), 2^(i / 2^27), in 2^-30 */
    int64_t log_limit, proposal_iou, iou, score, mask;
    uint32_t proposals_a_level, proposals, detections;
    void (*run_pyramid)(const uint8_t* padded);
    void (*run_boxes)(uint32_t stage, const uint8_t* roi, int32_t* logits, int32_t* deltas);
    void (*run_masks)(uint32_t stage, const uint8_t* roi, int32_t* logits);
    fqvit_detector_memory memory;
} fqvit_detector;

/* Detect objects in pixels [height][width][3], resized but not padded, of an image whose original size is given.
 * Returns the number of detections, best first. found: [detections]   probabilities: [detections][2 side][2 side] of
 * the mask heads. Not reentrant: the memory belongs to the detector. */
uint32_t fqvit_detect(const fqvit_detector* d, const uint8_t* pixels, uint32_t height, uint32_t width,
                      uint32_t original_height, uint32_t original_width, fqvit_detection* found,
                      int32_t* probabilities);

/* Paste the mask of a detection into mask [height][width], the size of the original image: 1 inside, 0 outside. */
void fqvit_paste(const fqvit_detector* d, const int32_t* probabilities, const int64_t* box, uint32_t height,
                 uint32_t width, uint8_t* mask);

#endif
