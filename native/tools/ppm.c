#include "ppm.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text.h"

#define MAX_SIDE 4194304u
#define CONVERT "Convert it, for example with `convert photo.jpg -auto-orient -depth 8 photo.ppm`"

/* Reads the next number of the header, after white space and comments; returns 0 if there is none or it is
 * above `most`. */
static unsigned read_number(FILE* file, unsigned most) {
    int letter = getc(file);
    while (letter == '#' || isspace(letter)) {
        if (letter == '#') {
            while (letter != '\n' && letter != EOF) letter = getc(file);
        } else {
            letter = getc(file);
        }
    }
    unsigned number = 0;
    for (; isdigit(letter); letter = getc(file)) {
        number = number * 10 + (unsigned)(letter - '0');
        if (number > most) return 0;
    }
    /* Exactly one white space character follows each number of the header. */
    return isspace(letter) ? number : 0;
}

static int fail(char* problem, size_t size, const char* text) {
    snprintf(problem, size, "%s", text);
    return 1;
}

static int read_open_file(FILE* file, fqvit_image* image, char* problem, size_t size) {
    const int p = getc(file), kind = getc(file);
    if (ferror(file)) { /* for example if the path is a folder */
        snprintf(problem, size, "cannot be read (%s). Check the path", strerror(errno));
        return 1;
    }
    if (p != 'P' || (kind != '5' && kind != '6')) {
        return fail(problem, size, "not a binary PPM or PGM image (P6 or P5). " CONVERT);
    }
    image->channels = kind == '6' ? 3 : 1;
    image->width = read_number(file, MAX_SIDE);
    image->height = read_number(file, MAX_SIDE);
    const unsigned white = read_number(file, 65535);
    if (image->width == 0 || image->height == 0)
        return fail(problem, size, "its header is damaged, expected width and height up to 4194304. " CONVERT);
    if (white != 255) return fail(problem, size, "its samples do not have 8 bits, expected a maximum of 255. " CONVERT);
    /* Read in pieces, so that a small file with a large size in its header allocates little. */
    const uint64_t bytes = (uint64_t)image->width * image->height * image->channels;
    uint64_t capacity = 0, filled = 0;
    uint8_t* pixels = NULL;
    while (filled < bytes) {
        if (filled == capacity) {
            capacity = capacity == 0 ? 1 << 20 : capacity * 2;
            if (capacity > bytes) capacity = bytes;
            uint8_t* larger = capacity > SIZE_MAX ? NULL : realloc(pixels, (size_t)capacity);
            if (larger == NULL) {
                free(pixels);
                return fail(problem, size, "not enough memory for its pixels");
            }
            pixels = larger;
        }
        const size_t count = fread(pixels + filled, 1, (size_t)(capacity - filled), file);
        if (count == 0) {
            free(pixels);
            return fail(problem, size, "it has fewer pixels than its header says. " CONVERT);
        }
        filled += count;
    }
    image->pixels = pixels;
    image->stride = 0;
    return 0;
}

int read_ppm(const char* path, fqvit_image* image, char* problem, size_t problem_size) {
    FILE* file = open_utf8(path, "rb");
    if (file == NULL) {
        snprintf(problem, problem_size, "cannot be opened (%s). Check the path", strerror(errno));
        return 1;
    }
    const int result = read_open_file(file, image, problem, problem_size);
    fclose(file);
    return result;
}
