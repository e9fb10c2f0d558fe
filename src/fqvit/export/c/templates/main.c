/* ./classify IMAGE.rgb prints one integer per line: the outputs of the model, one after the other. For a classifier,
 * that is the score of every class, class 0 first. ./classify --sizes prints the sizes in model.h. Only this file uses
 * libc. */
#include <stdio.h>
#include <string.h>

#include "model.h"

static uint8_t pixels[FQVIT_PIXELS + 1]; /* one extra byte, to detect files that are too long */
static uint8_t arena[FQVIT_ARENA_BYTES];

#define ARRAY(number, type, size, name) static type output_##number[size];
FQVIT_EACH_OUTPUT(ARRAY)
#define POINTER(number, type, size, name) , output_##number
#define PRINT(number, type, size, name) \
    for (long i = 0; i < size; ++i) printf("%ld\n", (long)output_##number[i]);
#define PRINT_SIZE(number, type, size, name) printf("FQVIT_OUTPUT_" #number "_SIZE %ld\n", (long)size);

static void print_sizes(void)
{
    printf("FQVIT_PIXELS %ld\n", (long)FQVIT_PIXELS);
#if FQVIT_OUTPUT_COUNT == 1
    printf("FQVIT_OUTPUTS %ld\n", (long)FQVIT_OUTPUTS);
#else
    FQVIT_EACH_OUTPUT(PRINT_SIZE)
#endif
    printf("FQVIT_ARENA_BYTES %ld\n", (long)FQVIT_ARENA_BYTES);
    printf("FQVIT_CONSTANT_BYTES %ld\n", (long)FQVIT_CONSTANT_BYTES);
}

int main(int argc, char **argv)
{
    FILE *file;
    size_t size;
    if (argc != 2) {
        fprintf(stderr, "usage: %s IMAGE.rgb | --sizes\n", argc > 0 ? argv[0] : "classify");
        return 2;
    }
    if (strcmp(argv[1], "--sizes") == 0) {
        print_sizes();
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
    model_run(pixels, arena FQVIT_EACH_OUTPUT(POINTER));
    FQVIT_EACH_OUTPUT(PRINT)
    return 0;
}
