/* Runs all images from stdin with one arena, which is first filled with garbage: a model must not depend on its initial
 * contents. Prints one output per line. */
#include <stdio.h>
#include <string.h>

#include "model.h"

static uint8_t pixels[FQVIT_PIXELS];
static uint8_t arena[FQVIT_ARENA_BYTES];
static int32_t output[FQVIT_OUTPUTS];

int main(void)
{
    memset(arena, 0xA5, sizeof arena);
    while (fread(pixels, 1, sizeof pixels, stdin) == sizeof pixels) {
        model_run(pixels, arena, output);
        for (int i = 0; i < FQVIT_OUTPUTS; ++i) printf("%ld\n", (long)output[i]);
    }
    return 0;
}
