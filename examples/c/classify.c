/*
 * Classify a binary PPM image with a .fqvit file, in C99.
 *
 *   cc examples/c/classify.c $(pkg-config --cflags --libs fqvit) -o classify
 *   ./classify deit.fqvit photo.ppm
 */
#include <fqvit.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fail(const char* problem) {
    fprintf(stderr, "classify: %s\n", problem);
    exit(2);
}

static void check(fqvit_status status) {
    if (status != FQVIT_OK) fail(fqvit_last_error());
}

static fqvit_image read_ppm(const char* path) {
    fqvit_image image = {NULL, 0, 0, 3, 0};
    FILE* file = fopen(path, "rb");
    if (file == NULL) fail("the image cannot be opened.");
    unsigned maximum;
    if (fscanf(file, "P6 %u %u %u%*1c", &image.width, &image.height, &maximum) != 3 || maximum != 255 ||
        image.width - 1 > 16383 || image.height - 1 > 16383) {
        fail("the image is not a binary PPM with 8 bits per value and at most 16384 x 16384 pixels.");
    }
    const size_t bytes = (size_t)image.width * image.height * 3;
    uint8_t* pixels = malloc(bytes);
    if (pixels == NULL) fail("not enough memory.");
    if (fread(pixels, 1, bytes, file) != bytes) fail("the image is truncated.");
    fclose(file);
    image.pixels = pixels;
    return image;
}

int main(int count, char** arguments) {
    if (count != 3) fail("expected a model and an image.");
    fqvit_model* model;
    check(fqvit_model_load(arguments[1], NULL, &model));
    fqvit_tensor in, out;
    check(fqvit_model_input(model, &in, sizeof in));
    check(fqvit_model_output(model, 0, &out, sizeof out));
    if (strcmp(out.kind, "logits") != 0) fail("the model is not a classifier.");

    const fqvit_image image = read_ppm(arguments[2]);
    uint8_t* input = malloc((size_t)in.bytes);
    int32_t* logits = malloc((size_t)out.bytes);
    if (input == NULL || logits == NULL) fail("not enough memory.");
    check(fqvit_model_preprocess(model, &image, input, (size_t)in.bytes));
    check(fqvit_model_run(model, input, 1, logits, (size_t)out.bytes));

    for (int rank = 0; rank < 3 && rank < out.shape[0]; ++rank) {
        uint32_t best = 0;
        for (uint32_t i = 1; i < out.shape[0]; ++i) {
            if (logits[i] > logits[best]) best = i;
        }
        const char* name = fqvit_model_class_name(model, best);
        printf("%8.3f  %u  %s\n", logits[best] * out.scale, (unsigned)best, name == NULL ? "" : name);
        logits[best] = INT32_MIN;
    }
    free((void*)image.pixels);
    free(input);
    free(logits);
    fqvit_model_free(model);
    return 0;
}
