/*
 * Print the cosine similarity of two binary PPM images, computed from their integer embeddings, in C99.
 *
 *   cc examples/c/similarity.c $(pkg-config --cflags --libs fqvit) -lm -o similarity
 *   ./similarity dinov2.fqvit one.ppm other.ppm
 *
 * The model must have been quantized with `--output embedding`, alone or with other outputs.
 */
#include <fqvit.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fail(const char* problem) {
    fprintf(stderr, "similarity: %s\n", problem);
    exit(2);
}

static void check(fqvit_status status) {
    if (status != FQVIT_OK) fail(fqvit_last_error());
}

static void* allocate(size_t bytes) {
    void* memory = malloc(bytes);
    if (memory == NULL) fail("not enough memory.");
    return memory;
}

static fqvit_image read_ppm(const char* path) {
    fqvit_image image = {NULL, 0, 0, 3, 0};
    FILE* file = fopen(path, "rb");
    if (file == NULL) fail("an image cannot be opened.");
    unsigned maximum;
    if (fscanf(file, "P6 %u %u %u%*1c", &image.width, &image.height, &maximum) != 3 || maximum != 255 ||
        image.width - 1 > 16383 || image.height - 1 > 16383) {
        fail("an image is not a binary PPM with 8 bits per value and at most 16384 x 16384 pixels.");
    }
    const size_t bytes = (size_t)image.width * image.height * 3;
    uint8_t* pixels = allocate(bytes);
    if (fread(pixels, 1, bytes, file) != bytes) fail("an image is truncated.");
    fclose(file);
    image.pixels = pixels;
    return image;
}

/* Returns (x[i] - zero point), whatever the type of the integers. */
static int64_t centered(const fqvit_tensor* of, const void* x, int64_t i) {
    if (of->dtype == FQVIT_U8) return ((const uint8_t*)x)[i] - of->zero_point;
    if (of->dtype == FQVIT_U16) return ((const uint16_t*)x)[i] - of->zero_point;
    return ((const int32_t*)x)[i];
}

int main(int count, char** arguments) {
    if (count != 4) fail("expected a model and two images.");
    fqvit_model* model;
    check(fqvit_model_load(arguments[1], NULL, &model));
    fqvit_description about;
    fqvit_tensor in, out, found;
    check(fqvit_model_describe(model, &about, sizeof about));
    check(fqvit_model_input(model, &in, sizeof in));

    /* A run returns all outputs. Allocate room for both images in each, and find the first embedding. */
    void** ys = allocate(about.outputs * sizeof *ys);
    size_t* sizes = allocate(about.outputs * sizeof *sizes);
    const void* embeddings = NULL;
    for (uint32_t i = 0; i < about.outputs; ++i) {
        check(fqvit_model_output(model, i, &out, sizeof out));
        sizes[i] = 2 * (size_t)out.bytes;
        ys[i] = allocate(sizes[i]);
        if (embeddings == NULL && strcmp(out.kind, "embedding") == 0) embeddings = ys[i], found = out;
    }
    if (embeddings == NULL) fail("the model has no embedding. Quantize it with --output embedding.");

    uint8_t* inputs = allocate(2 * (size_t)in.bytes);
    for (int i = 0; i < 2; ++i) {
        const fqvit_image image = read_ppm(arguments[2 + i]);
        check(fqvit_model_preprocess(model, &image, inputs + (size_t)i * in.bytes, (size_t)in.bytes));
        free((void*)image.pixels);
    }
    check(fqvit_model_run_all(model, inputs, 2, ys, sizes, about.outputs));

    /* The scale is the same for all channels, so it cancels. */
    const int64_t channels = found.shape[0];
    double dot = 0, first = 0, second = 0;
    for (int64_t i = 0; i < channels; ++i) {
        const double a = (double)centered(&found, embeddings, i);
        const double b = (double)centered(&found, embeddings, channels + i);
        dot += a * b, first += a * a, second += b * b;
    }
    printf("%s: %.6f\n", found.output_name, first * second > 0 ? dot / sqrt(first * second) : 0.0);

    for (uint32_t i = 0; i < about.outputs; ++i) free(ys[i]);
    free(ys);
    free(sizes);
    free(inputs);
    fqvit_model_free(model);
    return 0;
}
