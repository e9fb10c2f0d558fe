/*
 * Tests the C API as a C99 program would use it.
 *
 *   capi_test FOLDER NAME...
 *
 * FOLDER has NAME.fqvit, NAME.images (its input, several images) and NAME.output (output 0 for these images,
 * little-endian).
 * The first model must be a classifier with pixels as input. tests/native/golden.py writes the files.
 */
#include <stdlib.h>

#include "check.h"

#if !defined(_WIN32)
#include <pthread.h>
#endif

struct bytes {
    uint8_t* data;
    size_t size;
};

struct golden {
    char path[1024];
    struct bytes file, images, output;
};

static struct bytes read_bytes(const char* path) {
    struct bytes out = {NULL, 0};
    FILE* file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        printf("%s: cannot be read\n", path);
        exit(2);
    }
    out.size = (size_t)ftell(file);
    rewind(file);
    out.data = malloc(out.size + 1);
    if (out.data == NULL || fread(out.data, 1, out.size, file) != out.size) exit(2);
    fclose(file);
    return out;
}

static struct golden read_golden(const char* folder, const char* name) {
    struct golden g;
    snprintf(g.path, sizeof g.path, "%s/%s.images", folder, name);
    g.images = read_bytes(g.path);
    snprintf(g.path, sizeof g.path, "%s/%s.output", folder, name);
    g.output = read_bytes(g.path);
    snprintf(g.path, sizeof g.path, "%s/%s.fqvit", folder, name);
    g.file = read_bytes(g.path);
    return g;
}

static void free_golden(struct golden* g) { free(g->file.data), free(g->images.data), free(g->output.data); }

static size_t element_size(fqvit_dtype dtype) { return dtype == FQVIT_U8 ? 1 : dtype == FQVIT_U16 ? 2 : 4; }

/* Converts an output to little-endian, the byte order of the expected outputs. */
static void to_little_endian(uint8_t* data, size_t size, size_t element) {
    const uint16_t one = 1;
    if (*(const uint8_t*)&one == 1) return;
    for (size_t i = 0; i < size; i += element) {
        for (size_t k = 0; k < element / 2; ++k) {
            const uint8_t low = data[i + k];
            data[i + k] = data[i + element - 1 - k];
            data[i + element - 1 - k] = low;
        }
    }
}

/* Runs `batch` images at a time and compares all outputs. */
static void check_bits(fqvit_model* model, const struct golden* g, size_t batch) {
    fqvit_tensor in, out;
    CHECK_OK(fqvit_model_input(model, &in, sizeof in));
    CHECK_OK(fqvit_model_output(model, 0, &out, sizeof out));
    const size_t count = g->images.size / (size_t)in.bytes, bytes = (size_t)out.bytes;
    CHECK(count >= 4 && count * bytes == g->output.size);
    uint8_t* y = calloc(count, bytes);
    for (size_t i = 0; i < count; i += batch) {
        const size_t n = count - i < batch ? count - i : batch;
        CHECK_OK(fqvit_model_run(model, g->images.data + i * in.bytes, n, y + i * bytes, n * bytes));
    }
    to_little_endian(y, g->output.size, element_size(out.dtype));
    CHECK(memcmp(y, g->output.data, g->output.size) == 0);
    memset(y, 0xAB, count * bytes);
    void* ys[] = {y};
    const size_t sizes[] = {count * bytes};
    CHECK_OK(fqvit_model_run_all(model, g->images.data, count, ys, sizes, 1));
    to_little_endian(y, g->output.size, element_size(out.dtype));
    CHECK(memcmp(y, g->output.data, g->output.size) == 0);
    free(y);
}

/* Loads a copy of the file from memory that is overwritten and freed before the first run. */
static fqvit_model* load_copy(const struct golden* g, const fqvit_options* options) {
    fqvit_model* model = NULL;
    uint8_t* copy = malloc(g->file.size);
    memcpy(copy, g->file.data, g->file.size);
    CHECK_OK(fqvit_model_load_memory(copy, g->file.size, options, &model));
    memset(copy, 0xFF, g->file.size);
    free(copy);
    return model;
}

static void check_every_setting(const struct golden* g) {
    for (size_t i = 0; fqvit_instruction_set(i) != NULL; ++i) {
        for (uint32_t threads = 1; threads <= 3; threads += 2) {
            fqvit_options options = FQVIT_OPTIONS_INIT;
            options.threads = threads;
            options.instruction_set = fqvit_instruction_set(i);
            fqvit_model *from_file = NULL, *from_memory = load_copy(g, &options);
            CHECK_OK(fqvit_model_load(g->path, &options, &from_file));
            fqvit_description about;
            CHECK_OK(fqvit_model_describe(from_file, &about, sizeof about));
            CHECK(about.threads == threads && strcmp(about.instruction_set, options.instruction_set) == 0);
            CHECK(about.outputs == 1 && strlen(about.fingerprint) == 64);
            check_bits(from_file, g, 100);
            check_bits(from_memory, g, 1);
            check_bits(from_memory, g, 4);
            fqvit_model_free(from_file);
            fqvit_model_free(from_memory);
        }
    }
}

static void check_bad_handles(const struct golden* g) {
    fqvit_model* model = load_copy(g, NULL);
    fqvit_model_free(model);
    fqvit_model_free(model);
    fqvit_model_free(NULL);
    int local = 0;
    fqvit_model* bad[] = {NULL, model, (fqvit_model*)(void*)&local, (fqvit_model*)(uintptr_t)0x1234};
    for (int i = 0; i < 4; ++i) {
        const char* text = i == 0 ? "handle: null" : "handle: unknown";
        fqvit_tensor tensor;
        fqvit_description about;
        uint8_t pixel = 0;
        int32_t y[1000];
        void* ys[] = {y};
        const size_t size = sizeof y;
        const fqvit_image image = {&pixel, 1, 1, 1, 0};
        CHECK_ERROR(ARGUMENT, text, fqvit_model_describe(bad[i], &about, sizeof about));
        CHECK_ERROR(ARGUMENT, text, fqvit_model_input(bad[i], &tensor, sizeof tensor));
        CHECK_ERROR(ARGUMENT, text, fqvit_model_output(bad[i], 0, &tensor, sizeof tensor));
        CHECK_ERROR(ARGUMENT, text, fqvit_model_preprocess(bad[i], &image, &pixel, 1));
        CHECK_ERROR(ARGUMENT, text, fqvit_model_run(bad[i], &pixel, 1, y, sizeof y));
        CHECK_ERROR(ARGUMENT, text, fqvit_model_run_all(bad[i], &pixel, 1, ys, &size, 1));
        CHECK(fqvit_model_class_name(bad[i], 0) == NULL);
        if (i > 0) fqvit_model_free(bad[i]);
    }
}

/* Every load that fails must write NULL to the handle. */
static void check_bad_loads(const char* folder, const struct golden* g) {
    fqvit_model* const garbage = (fqvit_model*)(uintptr_t)0x1234;
    fqvit_model* model = garbage;
#define CHECK_LOAD(status, text, call)   \
    do {                                 \
        model = garbage;                 \
        CHECK_ERROR(status, text, call); \
        CHECK(model == NULL);            \
    } while (0)
    CHECK_ERROR(ARGUMENT, "model: null", fqvit_model_load(g->path, NULL, NULL));
    CHECK_ERROR(ARGUMENT, "model: null", fqvit_model_load_memory(g->file.data, g->file.size, NULL, NULL));
    CHECK_LOAD(ARGUMENT, "path: null", fqvit_model_load(NULL, NULL, &model));
    CHECK_LOAD(ARGUMENT, "data: null", fqvit_model_load_memory(NULL, 10, NULL, &model));
    CHECK_LOAD(FILE, "no such file", fqvit_model_load("", NULL, &model));
    CHECK_LOAD(FILE, "absent.fqvit: no such file", fqvit_model_load("absent.fqvit", NULL, &model));
    CHECK_LOAD(FILE, "not a regular file", fqvit_model_load(folder, NULL, &model));
    CHECK_LOAD(PROGRAM, "not a .fqvit file", fqvit_model_load_memory("", 0, NULL, &model));
    for (size_t size = 0; size < g->file.size; size += 1 + g->file.size / 40) {
        CHECK_LOAD(PROGRAM, "", fqvit_model_load_memory(g->file.data, size, NULL, &model));
    }
    for (size_t i = 0; i < g->file.size; i += 1 + g->file.size / 40) {
        g->file.data[i] ^= 0x10;
        CHECK_LOAD(PROGRAM, "", fqvit_model_load_memory(g->file.data, g->file.size, NULL, &model));
        g->file.data[i] ^= 0x10;
    }

    /* A caller that was compiled for a later version, whose struct has one more member. */
    struct {
        fqvit_options known;
        uint64_t added;
    } newer = {FQVIT_OPTIONS_INIT, 0};
    newer.known.struct_size = sizeof newer;
    CHECK_OK(fqvit_model_load(g->path, &newer.known, &model));
    fqvit_model_free(model);
    newer.added = 1;
    CHECK_LOAD(ARGUMENT, "does not have", fqvit_model_load(g->path, &newer.known, &model));
    fqvit_options options = FQVIT_OPTIONS_INIT;
    options.struct_size = 2 * sizeof(size_t); /* an older caller, without instruction_set */
    options.instruction_set = (const char*)(uintptr_t)1;
    CHECK_OK(fqvit_model_load(g->path, &options, &model));
    fqvit_model_free(model);
    const size_t wrong[] = {0, 1, sizeof options - 1, 4104, SIZE_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
        options.struct_size = wrong[i];
        CHECK_LOAD(ARGUMENT, "options: struct_size is", fqvit_model_load(g->path, &options, &model));
    }
    const fqvit_options many = {sizeof many, 257, NULL, 0}, unknown = {sizeof unknown, 1, "sse9", 0};
    const fqvit_options little = {sizeof little, 1, NULL, 1}, empty = {sizeof empty, 256, "", UINT64_MAX};
    CHECK_LOAD(ARGUMENT, "threads: 257, expected 1 to 256", fqvit_model_load(g->path, &many, &model));
    CHECK_LOAD(ARGUMENT, "instruction set sse9", fqvit_model_load(g->path, &unknown, &model));
    CHECK_LOAD(PROGRAM, "are allowed", fqvit_model_load(g->path, &little, &model));
    CHECK_OK(fqvit_model_load(g->path, &empty, &model));
    fqvit_model_free(model);

    /* The error for a long path still contains the end of the path and the problem. */
    char path[5000];
    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = '\0';
    memcpy(path + sizeof path - 8, ".fqvit", 7);
    CHECK_LOAD(FILE, ".fqvit: ", fqvit_model_load(path, NULL, &model));
    CHECK(strlen(fqvit_last_error()) < 1024);
#undef CHECK_LOAD
}

static void check_bad_structs(fqvit_model* model) {
    struct {
        fqvit_tensor known;
        uint64_t added;
    } tensor;
    struct {
        fqvit_description known;
        uint64_t added;
    } about;
    CHECK_ERROR(ARGUMENT, "description: null", fqvit_model_describe(model, NULL, sizeof about.known));
    CHECK_ERROR(ARGUMENT, "description: null", fqvit_model_input(model, NULL, sizeof tensor.known));
    CHECK_ERROR(ARGUMENT, "description: null", fqvit_model_output(model, 0, NULL, sizeof tensor.known));
    CHECK_ERROR(ARGUMENT, "output: index 1", fqvit_model_output(model, 1, &tensor.known, sizeof tensor.known));
    const size_t wrong[] = {0, 1, sizeof tensor.known + 1, 4104, SIZE_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
        CHECK_ERROR(ARGUMENT, "size: ", fqvit_model_describe(model, &about.known, wrong[i]));
        CHECK_ERROR(ARGUMENT, "size: ", fqvit_model_input(model, &tensor.known, wrong[i]));
        CHECK_ERROR(ARGUMENT, "size: ", fqvit_model_output(model, 0, &tensor.known, wrong[i]));
    }
    tensor.added = about.added = 7;
    CHECK_OK(fqvit_model_describe(model, &about.known, sizeof about));
    CHECK_OK(fqvit_model_input(model, &tensor.known, sizeof tensor));
    CHECK(about.added == 0 && tensor.added == 0 && strcmp(tensor.known.name, "pixels") == 0);
    memset(&tensor, 1, sizeof tensor);
    CHECK_OK(fqvit_model_input(model, &tensor.known, sizeof(char*) * 2)); /* an older caller */
    CHECK(strcmp(tensor.known.kind, "pixels") == 0 && tensor.known.axes == 0x01010101u);
    CHECK(fqvit_model_class_name(model, UINT32_MAX) == NULL &&
          fqvit_model_class_name(model, about.known.classes) == NULL);
}

static void check_bad_arrays(fqvit_model* model, const struct golden* g) {
    fqvit_tensor in, out;
    CHECK_OK(fqvit_model_input(model, &in, sizeof in));
    CHECK_OK(fqvit_model_output(model, 0, &out, sizeof out));
    const size_t bytes = (size_t)out.bytes, pixels = (size_t)in.bytes;
    const uint8_t* images = g->images.data;
    int32_t* y = calloc(2, bytes + 8);
    void* ys[] = {y};
    CHECK_OK(fqvit_model_run(model, images, 0, y, 0));
    CHECK_OK(fqvit_model_run(model, NULL, 0, NULL, 0));
    CHECK_ERROR(ARGUMENT, "output: 4 bytes", fqvit_model_run(model, images, 0, y, 4));
    CHECK_ERROR(ARGUMENT, "images: null", fqvit_model_run(model, NULL, 1, y, bytes));
    CHECK_ERROR(ARGUMENT, "output: null", fqvit_model_run(model, images, 1, NULL, bytes));
    CHECK_ERROR(ARGUMENT, "bytes, expected", fqvit_model_run(model, images, 1, y, bytes - 1));
    CHECK_ERROR(ARGUMENT, "bytes, expected", fqvit_model_run(model, images, 1, y, bytes + 4));
    CHECK_ERROR(ARGUMENT, "bytes, expected", fqvit_model_run(model, images, 2, y, bytes));
    CHECK_ERROR(ARGUMENT, "count", fqvit_model_run(model, images, SIZE_MAX, y, bytes));
    CHECK_ERROR(ARGUMENT, "bytes, expected", fqvit_model_run(model, images, SIZE_MAX / bytes + 2, y, bytes));
    CHECK_ERROR(ARGUMENT, "not aligned", fqvit_model_run(model, images, 1, (char*)y + 1, bytes));
    CHECK_ERROR(ARGUMENT, "outputs: 0, expected 1", fqvit_model_run_all(model, images, 1, ys, &bytes, 0));
    CHECK_ERROR(ARGUMENT, "outputs: 2, expected 1", fqvit_model_run_all(model, images, 1, ys, &bytes, 2));
    CHECK_ERROR(ARGUMENT, "outputs: null", fqvit_model_run_all(model, images, 1, NULL, &bytes, 1));
    CHECK_ERROR(ARGUMENT, "outputs: null", fqvit_model_run_all(model, images, 1, ys, NULL, 1));

    uint8_t input[4096];
    const uint8_t* some = images;
    const fqvit_image image = {some, 2, 2, 3, 0}, none = {NULL, 2, 2, 3, 0};
    CHECK(pixels <= sizeof input);
    CHECK_OK(fqvit_model_preprocess(model, &image, input, pixels));
    CHECK_ERROR(ARGUMENT, "image: null", fqvit_model_preprocess(model, NULL, input, pixels));
    CHECK_ERROR(ARGUMENT, "image: null", fqvit_model_preprocess(model, &none, input, pixels));
    CHECK_ERROR(ARGUMENT, "input: null", fqvit_model_preprocess(model, &image, NULL, pixels));
    CHECK_ERROR(ARGUMENT, "bytes, expected", fqvit_model_preprocess(model, &image, input, pixels - 1));
    const fqvit_image wrong[] = {{some, 0, 2, 3, 0},          {some, 2, 0, 3, 0},      {some, 2, 2, 2, 0},
                                 {some, 2, 2, 5, 0},          {some, 2, 2, 0, 0},      {some, 2, 2, 3, 5},
                                 {some, 2, 2, 3, UINT64_MAX}, {some, 4194305, 1, 1, 0}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
        CHECK_ERROR(ARGUMENT, "", fqvit_model_preprocess(model, &wrong[i], input, pixels));
    }
    check_bits(model, g, 2); /* nothing above changed the model */
    free(y);
}

#if !defined(_WIN32)

struct job {
    fqvit_model* model;
    const struct golden* g;
    uint8_t y[4096];
    int wrong;
};

static void* run_often(void* argument) {
    struct job* job = argument;
    job->wrong += strcmp(fqvit_last_error(), "") != 0; /* no error in this new thread yet */
    for (int i = 0; i < 50; ++i) {
        memset(job->y, 0, job->g->output.size);
        fqvit_tensor in;
        job->wrong += fqvit_model_input(job->model, &in, sizeof in) != FQVIT_OK;
        const size_t count = job->g->images.size / (size_t)in.bytes;
        job->wrong += fqvit_model_run(job->model, job->g->images.data, count, job->y, job->g->output.size) != FQVIT_OK;
        to_little_endian(job->y, job->g->output.size, 4);
        job->wrong += memcmp(job->y, job->g->output.data, job->g->output.size) != 0;
    }
    job->wrong += fqvit_model_run(NULL, NULL, 0, NULL, 0) != FQVIT_ERROR_ARGUMENT;
    job->wrong += strstr(fqvit_last_error(), "handle: null") == NULL;
    return NULL;
}

static void check_threads(const struct golden* g) {
    fqvit_options options = FQVIT_OPTIONS_INIT;
    options.threads = 2;
    static struct job jobs[3];
    fqvit_model *shared = load_copy(g, &options), *own = load_copy(g, NULL), *none = NULL;
    CHECK_ERROR(FILE, "absent", fqvit_model_load("absent.fqvit", NULL, &none));
    pthread_t threads[3];
    for (int i = 0; i < 3; ++i) {
        jobs[i].model = i < 2 ? shared : own;
        jobs[i].g = g;
        CHECK(g->output.size <= sizeof jobs[i].y);
        CHECK(pthread_create(&threads[i], NULL, run_often, &jobs[i]) == 0);
    }
    for (int i = 0; i < 3; ++i) pthread_join(threads[i], NULL);
    CHECK(jobs[0].wrong == 0 && jobs[1].wrong == 0 && jobs[2].wrong == 0);
    CHECK(strstr(fqvit_last_error(), "absent") != NULL); /* other threads do not change the error of this one */
    fqvit_model_free(shared);
    fqvit_model_free(own);
}

#else

static void check_threads(const struct golden* g) { (void)g; } /* C99 has no threads */

#endif

int main(int count, char** arguments) {
    if (count < 3) return 2;
    CHECK(strcmp(fqvit_last_error(), "") == 0);
    CHECK(fqvit_abi_version() == FQVIT_ABI_VERSION && strchr(fqvit_version(), '.') != NULL);
    size_t sets = 0;
    while (fqvit_instruction_set(sets) != NULL) ++sets;
    CHECK(sets >= 1 && strcmp(fqvit_instruction_set(sets - 1), "scalar") == 0);
    CHECK(fqvit_instruction_set(sets + 1) == NULL && fqvit_instruction_set(SIZE_MAX) == NULL);
    for (int i = 2; i < count; ++i) {
        struct golden g = read_golden(arguments[1], arguments[i]);
        check_every_setting(&g);
        if (i == 2) {
            fqvit_model* model = load_copy(&g, NULL);
            check_bad_handles(&g);
            check_bad_loads(arguments[1], &g);
            check_bad_structs(model);
            check_bad_arrays(model, &g);
            fqvit_model_free(model);
            check_threads(&g);
        }
        free_golden(&g);
    }
    for (size_t i = 0; i < sets; ++i) printf("%s\n", fqvit_instruction_set(i));
    printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}
