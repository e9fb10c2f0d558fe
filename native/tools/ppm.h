/* Reads binary PPM (P6, RGB) and PGM (P5, gray) images with 8 bits per sample. */
#ifndef FQVIT_TOOLS_PPM_H
#define FQVIT_TOOLS_PPM_H

#include <stddef.h>

#include "fqvit.h"

/* Returns 0 and an image whose pixels the caller frees. Otherwise returns 1 and a description of the problem, without
 * the file name. */
int read_ppm(const char* path, fqvit_image* image, char* problem, size_t problem_size);

#endif
