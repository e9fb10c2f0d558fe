/* Runs all images from stdin with one arena, which is first filled with garbage: a model must not depend on the initial
 * contents of the arena. Prints one integer per line, all outputs of an image one after the other. */
#include <stdio.h>
#include <string.h>

#include "model.h"

static uint8_t pixels[FQVIT_PIXELS];
static uint8_t arena[FQVIT_ARENA_BYTES];

#define ARRAY(number, type, size, name) static type output_##number[size];
FQVIT_EACH_OUTPUT(ARRAY)
#define POINTER(number, type, size, name) , output_##number
#define PRINT(number, type, size, name) \
    for (long i = 0; i < size; ++i) printf("%ld\n", (long)output_##number[i]);

int main(void)
{
    memset(arena, 0xA5, sizeof arena);
    while (fread(pixels, 1, sizeof pixels, stdin) == sizeof pixels) {
        model_run(pixels, arena FQVIT_EACH_OUTPUT(POINTER));
        FQVIT_EACH_OUTPUT(PRINT)
    }
    return 0;
}
