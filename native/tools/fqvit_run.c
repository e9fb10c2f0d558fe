/*
 * fqvit-run: classify images with a .fqvit file, without Python.
 *
 *   fqvit-run MODEL.fqvit IMAGE.ppm... [--top N] [--threads N] [--isa NAME] [--repeat N] [-o FILE] [--json]
 *
 * Exits with 0, or with 2 and one line on the standard error.
 */
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fqvit.h"
#include "ppm.h"

static const char USAGE[] =
    "usage: fqvit-run MODEL.fqvit IMAGE.ppm... [options]\n"
    "\n"
    "Classify binary PPM or PGM images with a quantized model, using integers only.\n"
    "\n"
    "  --top N        show the N best classes (default: 5)\n"
    "  --threads N    threads of a run, 1 to 256 (default: 1)\n"
    "  --isa NAME     instruction set (default: the fastest); --isa list shows those of this CPU\n"
    "  --repeat N     run N times and report the fastest time (default: 1)\n"
    "  -o FILE        write output 0 of all images to FILE: integers in the byte order of this machine\n"
    "  --json         print one JSON object per image\n"
    "  --version      print the version\n"
    "  --help         print this text\n";

struct options {
    const char *model, *isa, *output;
    const char** images;
    int image_count, top, repeat, json;
    uint32_t threads;
};

static int fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("fqvit-run: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    return 2;
}

static double now_ms(void) {
    struct timespec time;
    if (timespec_get(&time, TIME_UTC) == 0) return 0;
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

static void print_json_text(const char* text) {
    putchar('"');
    for (; *text != '\0'; ++text) {
        if (*text == '"' || *text == '\\') {
            printf("\\%c", *text);
        } else if ((unsigned char)*text < 0x20) {
            printf("\\u%04x", (unsigned)*text);
        } else {
            putchar(*text);
        }
    }
    putchar('"');
}

/* Returns the value of an option as a number from 1 to most, or 0. */
static long number_of(const char* text, long most) {
    char* end = NULL;
    errno = 0;
    const long number = strtol(text, &end, 10);
    return *text != '\0' && *end == '\0' && errno == 0 && number >= 1 && number <= most ? number : 0;
}

static int parse(int count, char** arguments, struct options* options) {
    for (int i = 1; i < count; ++i) {
        const char* name = arguments[i];
        if (name[0] != '-' || name[1] == '\0') {
            if (options->model == NULL) {
                options->model = name;
            } else {
                options->images[options->image_count++] = name;
            }
            continue;
        }
        if (strcmp(name, "--json") == 0) {
            options->json = 1;
            continue;
        }
        const int is_number =
            strcmp(name, "--top") == 0 || strcmp(name, "--threads") == 0 || strcmp(name, "--repeat") == 0;
        if (!is_number && strcmp(name, "--isa") != 0 && strcmp(name, "-o") != 0) {
            return fail("%s: unknown option. fqvit-run --help lists the options.", name);
        }
        if (i + 1 == count) return fail("%s: no value. fqvit-run --help lists the options.", name);
        const char* value = arguments[++i];
        if (strcmp(name, "--isa") == 0) options->isa = value;
        if (strcmp(name, "-o") == 0) options->output = value;
        if (!is_number) continue;
        const long most = strcmp(name, "--threads") == 0 ? 256 : 1000000, number = number_of(value, most);
        if (number == 0) return fail("%s: %s, expected a number from 1 to %ld.", name, value, most);
        if (strcmp(name, "--top") == 0) options->top = (int)number;
        if (strcmp(name, "--threads") == 0) options->threads = (uint32_t)number;
        if (strcmp(name, "--repeat") == 0) options->repeat = (int)number;
    }
    if (options->model == NULL || options->image_count == 0) {
        return fail("expected a model and at least one image. fqvit-run --help shows how.");
    }
    return 0;
}

/* Returns the best class that is worse than (score, index) of the one before; ties: the lower index first. */
static int64_t next_best(const int32_t* logits, int64_t count, int64_t before) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i) {
        const int after = before < 0 || logits[i] < logits[before] || (logits[i] == logits[before] && i > before);
        if (after && (best < 0 || logits[i] > logits[best])) best = i;
    }
    return best;
}

struct times {
    double load, preprocess, run;
};

static void report_classes(const fqvit_model* model, const fqvit_tensor* output, const int32_t* logits,
                           const struct options* options) {
    int64_t best = -1;
    for (int rank = 0; rank < options->top && rank < output->shape[0]; ++rank) {
        best = next_best(logits, output->shape[0], best);
        const char* name = fqvit_model_class_name(model, (uint32_t)best);
        const double value = logits[best] * output->scale;
        if (options->json) {
            printf("%s{\"class\": %lld, \"name\": ", rank == 0 ? "" : ", ", (long long)best);
            if (name == NULL) {
                printf("null");
            } else {
                print_json_text(name);
            }
            printf(", \"logit\": %ld, \"value\": %.6g}", (long)logits[best], value);
        } else {
            printf("  %8.3f  %5lld  %s\n", value, (long long)best, name == NULL ? "" : name);
        }
    }
}

static void report(const fqvit_model* model, const fqvit_description* about, const fqvit_tensor* output, const void* y,
                   const char* image, const struct times* times, const struct options* options) {
    const int is_classifier = strcmp(output->kind, "logits") == 0;
    if (options->json) {
        printf("{\"image\": ");
        print_json_text(image);
        printf(", \"model\": ");
        print_json_text(about->model);
        printf(", \"fingerprint\": \"%s\", \"output\": \"%s\", \"shape\": [", about->fingerprint, output->kind);
        for (uint32_t i = 0; i < output->axes; ++i) printf("%s%lld", i == 0 ? "" : ", ", (long long)output->shape[i]);
        printf("], \"top\": [");
        if (is_classifier) report_classes(model, output, y, options);
        printf("], \"isa\": \"%s\", \"threads\": %u, ", about->instruction_set, (unsigned)about->threads);
        printf("\"load_ms\": %.3f, \"preprocess_ms\": %.3f, \"run_ms\": %.3f}\n", times->load, times->preprocess,
               times->run);
        return;
    }
    printf("%s: %s, %.1f ms (preprocessing %.1f ms, loading %.1f ms)\n", image, about->model, times->run,
           times->preprocess, times->load);
    if (is_classifier) {
        report_classes(model, output, y, options);
    } else {
        printf("  %s, %llu bytes%s\n", output->kind, (unsigned long long)output->bytes,
               options->output == NULL ? "; write them with -o FILE" : "");
    }
}

/* Prepares and runs one image. Returns 0, or 2 after a message. */
static int run_image(fqvit_model* model, const char* path, uint8_t* input, const fqvit_tensor* in, void* y,
                     const fqvit_tensor* out, struct times* times, const struct options* options) {
    fqvit_image image = {NULL, 0, 0, 0, 0};
    char problem[256];
    if (read_ppm(path, &image, problem, sizeof problem) != 0) return fail("%s: %s.", path, problem);
    double start = now_ms();
    const fqvit_status prepared = fqvit_model_preprocess(model, &image, input, (size_t)in->bytes);
    times->preprocess = now_ms() - start;
    free((void*)image.pixels);
    if (prepared != FQVIT_OK) return fail("%s: %s", path, fqvit_last_error());
    for (int round = 0; round < options->repeat; ++round) {
        start = now_ms();
        if (fqvit_model_run(model, input, 1, y, (size_t)out->bytes) != FQVIT_OK) {
            return fail("%s: %s", path, fqvit_last_error());
        }
        const double taken = now_ms() - start;
        if (round == 0 || taken < times->run) times->run = taken;
    }
    return 0;
}

static int run_images(fqvit_model* model, struct times* times, const struct options* options) {
    fqvit_description about;
    fqvit_tensor in, out;
    if (fqvit_model_describe(model, &about, sizeof about) != FQVIT_OK ||
        fqvit_model_input(model, &in, sizeof in) != FQVIT_OK ||
        fqvit_model_output(model, 0, &out, sizeof out) != FQVIT_OK) {
        return fail("%s", fqvit_last_error());
    }
    FILE* file = NULL;
    if (options->output != NULL && (file = fopen(options->output, "wb")) == NULL) {
        return fail("%s: cannot be written (%s).", options->output, strerror(errno));
    }
    uint8_t* input = malloc((size_t)in.bytes);
    void* y = malloc((size_t)out.bytes);
    int result = input == NULL || y == NULL ? fail("not enough memory.") : 0;
    for (int i = 0; result == 0 && i < options->image_count; ++i) {
        result = run_image(model, options->images[i], input, &in, y, &out, times, options);
        if (result != 0) break;
        if (file != NULL && fwrite(y, 1, (size_t)out.bytes, file) != out.bytes) {
            result = fail("%s: cannot be written (%s).", options->output, strerror(errno));
            break;
        }
        report(model, &about, &out, y, options->images[i], times, options);
    }
    free(input), free(y);
    if (file != NULL && fclose(file) != 0 && result == 0) {
        result = fail("%s: cannot be written (%s).", options->output, strerror(errno));
    }
    if (file != NULL && result != 0) remove(options->output);
    return result;
}

int main(int count, char** arguments) {
    for (int i = 1; i < count; ++i) {
        if (strcmp(arguments[i], "--help") == 0) return fputs(USAGE, stdout) < 0 ? 2 : 0;
        if (strcmp(arguments[i], "--version") == 0) return printf("fqvit-run %s\n", fqvit_version()) < 0 ? 2 : 0;
    }
    struct options options = {NULL, NULL, NULL, NULL, 0, 5, 1, 0, 1};
    options.images = malloc(sizeof(char*) * (size_t)(count + 1));
    if (options.images == NULL) return fail("not enough memory.");
    int result = 0;
    for (int i = 1; i + 1 < count; ++i) {
        if (strcmp(arguments[i], "--isa") != 0 || strcmp(arguments[i + 1], "list") != 0) continue;
        for (size_t k = 0; fqvit_instruction_set(k) != NULL; ++k) puts(fqvit_instruction_set(k));
        free(options.images);
        return 0;
    }
    result = parse(count, arguments, &options);
    if (result == 0) {
        fqvit_options load = FQVIT_OPTIONS_INIT;
        load.threads = options.threads;
        load.instruction_set = options.isa;
        fqvit_model* model = NULL;
        struct times times = {0, 0, 0};
        const double start = now_ms();
        if (fqvit_model_load(options.model, &load, &model) != FQVIT_OK) {
            result = fail("%s", fqvit_last_error());
        } else {
            times.load = now_ms() - start;
            result = run_images(model, &times, &options);
            fqvit_model_free(model);
        }
    }
    free(options.images);
    if (fflush(stdout) != 0 && result == 0) result = fail("standard output: cannot be written (%s).", strerror(errno));
    return result;
}
