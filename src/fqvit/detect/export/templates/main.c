/* ./detect PIXELS.rgb HEIGHT WIDTH [ORIGINAL_HEIGHT ORIGINAL_WIDTH [MASKS]] prints one object per line, best first:
 * label, score in 2^-24, and x1 y1 x2 y2 in 1/256 pixel of the original image. PIXELS.rgb has HEIGHT rows of WIDTH
 * pixels of 3 bytes, resized but not padded. The masks, one byte per pixel of the original image, are written to the
 * file MASKS. Only this file uses libc. */
#include <stdio.h>
#include <stdlib.h>

#include "detector.h"

static uint8_t pixels[DETECTOR_HEIGHT * DETECTOR_WIDTH * 3];
static fqvit_detection found[DETECTOR_DETECTIONS];
static int32_t probabilities[DETECTOR_DETECTIONS * DETECTOR_MASK_SIDE * DETECTOR_MASK_SIDE];

static int write_masks(const char* path, uint32_t count, uint32_t height, uint32_t width) {
    FILE* file = fopen(path, "wb");
    uint8_t* mask = malloc((size_t)height * width);
    int failed = !file || !mask;
    for (uint32_t n = 0; n < count && !failed; ++n) {
        const int32_t* own = &probabilities[(size_t)n * DETECTOR_MASK_SIDE * DETECTOR_MASK_SIDE];
        fqvit_paste(&detector, own, found[n].box, height, width, mask);
        failed = fwrite(mask, 1, (size_t)height * width, file) != (size_t)height * width;
    }
    if (file && fclose(file) != 0) failed = 1;
    free(mask);
    if (failed) fprintf(stderr, "%s: cannot be written. Check the path and the free space.\n", path);
    return failed ? 2 : 0;
}

int main(int argc, char** argv) {
    FILE* file;
    long height, width, original_height, original_width;
    size_t size;
    uint32_t count;
    if (argc < 4 || argc == 5 || argc > 7) {
        fprintf(stderr, "usage: %s PIXELS.rgb HEIGHT WIDTH [ORIGINAL_HEIGHT ORIGINAL_WIDTH [MASKS]]\n",
                argc > 0 ? argv[0] : "detect");
        return 2;
    }
    height = strtol(argv[2], NULL, 10);
    width = strtol(argv[3], NULL, 10);
    original_height = argc > 5 ? strtol(argv[4], NULL, 10) : height;
    original_width = argc > 5 ? strtol(argv[5], NULL, 10) : width;
    if (height <= DETECTOR_HEIGHT - 32 || height > DETECTOR_HEIGHT || width <= DETECTOR_WIDTH - 32 ||
        width > DETECTOR_WIDTH) {
        fprintf(stderr, "%s x %s pixels: expected height %d to %d and width %d to %d. Export again with --size.\n",
                argv[2], argv[3], DETECTOR_HEIGHT - 31, DETECTOR_HEIGHT, DETECTOR_WIDTH - 31, DETECTOR_WIDTH);
        return 2;
    }
    if (original_height < 1 || original_width < 1 || original_height > 65535 || original_width > 65535) {
        fprintf(stderr, "original size: expected 1 to 65535 pixels per side.\n");
        return 2;
    }
    file = fopen(argv[1], "rb");
    if (!file) {
        fprintf(stderr, "%s: cannot be read. Check the path.\n", argv[1]);
        return 2;
    }
    size = fread(pixels, 1, sizeof pixels, file);
    size += fgetc(file) != EOF;
    fclose(file);
    if (size != (size_t)height * (size_t)width * 3) {
        fprintf(stderr, "%s: found %ld bytes, expected %ld (%ld rows of %ld pixels of 3 bytes).\n", argv[1], (long)size,
                3 * height * width, height, width);
        return 2;
    }
    count = fqvit_detect(&detector, pixels, (uint32_t)height, (uint32_t)width, (uint32_t)original_height,
                         (uint32_t)original_width, found, probabilities);
    for (uint32_t n = 0; n < count; ++n) {
        printf("%ld %ld", (long)found[n].label, (long)found[n].score);
        for (uint32_t i = 0; i < 4; ++i) printf(" %ld", (long)found[n].box[i]);
        printf("\n");
    }
    return argc == 7 ? write_masks(argv[6], count, (uint32_t)original_height, (uint32_t)original_width) : 0;
}
