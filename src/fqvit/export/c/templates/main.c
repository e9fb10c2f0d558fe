/* ./classify IMAGE.rgb prints one output per line; for a classifier, the score of every class, class 0 first.
 * ./classify --sizes prints the sizes in model.h. Only this file uses libc. */
#include <stdio.h>
#include <string.h>

#include "model.h"

static uint8_t pixels[FQVIT_PIXELS + 1]; /* one extra byte, to detect files that are too long */
static uint8_t arena[FQVIT_ARENA_BYTES];
static int32_t output[FQVIT_OUTPUTS];

int main(int argc, char **argv)
{
    FILE *file;
    size_t size;
    if (argc != 2) {
        fprintf(stderr, "usage: %s IMAGE.rgb | --sizes\n", argc > 0 ? argv[0] : "classify");
        return 2;
    }
    if (strcmp(argv[1], "--sizes") == 0) {
        printf("FQVIT_PIXELS %ld\n", (long)FQVIT_PIXELS);
        printf("FQVIT_OUTPUTS %ld\n", (long)FQVIT_OUTPUTS);
        printf("FQVIT_ARENA_BYTES %ld\n", (long)FQVIT_ARENA_BYTES);
        printf("FQVIT_CONSTANT_BYTES %ld\n", (long)FQVIT_CONSTANT_BYTES);
        return 0;
    }
    file = fopen(argv[1], "rb");
    if (!file) {
        fprintf(stderr, "%s: cannot be read. Check the path.\n", argv[1]);
        return 2;
    }
    size = fread(pixels, 1, sizeof pixels, file);
    fclose(file);
    if (size != FQVIT_PIXELS) {
        fprintf(stderr,
                "%s: found %s%ld bytes, expected %ld (%d rows of %d pixels of %d bytes). Resize the image first.\n",
                argv[1], size > FQVIT_PIXELS ? "at least " : "", (long)size, (long)FQVIT_PIXELS, FQVIT_HEIGHT,
                FQVIT_WIDTH, FQVIT_CHANNELS);
        return 2;
    }
    model_run(pixels, arena, output);
    for (int i = 0; i < FQVIT_OUTPUTS; ++i) printf("%ld\n", (long)output[i]);
    return 0;
}
