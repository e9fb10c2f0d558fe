/*
 * fqvit-run: classify images, or compute their embeddings, with a .fqvit file, without Python.
 *
 *   fqvit-run MODEL.fqvit IMAGE.ppm... [--top N] [--output NAME] [--threads N] [--isa NAME] [--repeat N] [-o FILE]
 * [--json]
 *
 * Exits with 0, or with 2 and a one-line message on standard error.
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
#include "text.h"

static const char USAGE[] =
    "usage: fqvit-run MODEL.fqvit IMAGE.ppm... [options]\n"
    "\n"
    "Classify binary PPM or PGM images with a quantized model, or compute their embeddings, using integers only.\n"
    "\n"
    "  --top N        show the N best classes (default: 5)\n"
    "  --output NAME  the output to show and to write, such as embedding (default: the first)\n"
    "  --threads N    number of threads, 1 to 256 (default: 1)\n"
    "  --isa NAME     instruction set (default: the fastest); --isa list prints the available ones\n"
    "  --repeat N     run N times and report the fastest time (default: 1)\n"
    "  -o FILE        write the output for all images to FILE, one after the other: integers in the byte order\n"
    "                 of this machine\n"
    "  --json         print one JSON object per image, including all integers if the output is not logits\n"
    "  --version      print the version\n"
    "  --help         print this text\n"
    "  --             all arguments that follow are file names, even if they begin with -\n"
    "\n"
    "Exits with 0, or with 2 and a one-line message on standard error.\n";

struct options {
    const char *model, *isa, *output, *output_name;
    const char** images;
    int image_count, top, repeat, json;
    uint32_t threads;
};

/* Prints one line, at most 2,000 bytes long; returns the exit code. */
static int fail(const char* format, ...) {
    char text[2000];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fputs("fqvit-run: ", stderr);
    print_plain_text(stderr, text);
    fputc('\n', stderr);
    return 2;
}

static double now_ms(void) {
    struct timespec time;
    if (timespec_get(&time, TIME_UTC) == 0) return 0;
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

/* Returns the value of an option as a number from 1 to most, or 0. */
static long number_of(const char* text, long most) {
    char* end = NULL;
    errno = 0;
    const long number = strtol(text, &end, 10);
    return *text != '\0' && *end == '\0' && errno == 0 && number >= 1 && number <= most ? number : 0;
}

static int parse(int count, char** arguments, struct options* options) {
    int only_files = 0;
    for (int i = 1; i < count; ++i) {
        const char* name = arguments[i];
        if (!only_files && strcmp(name, "--") == 0) {
            only_files = 1;
            continue;
        }
        if (only_files || name[0] != '-' || name[1] == '\0') {
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
        const int is_text = strcmp(name, "--isa") == 0 || strcmp(name, "-o") == 0 || strcmp(name, "--output") == 0;
        if (!is_number && !is_text) {
            return fail("%s: unknown option. fqvit-run --help lists the options.", name);
        }
        if (i + 1 == count) return fail("%s: no value. fqvit-run --help lists the options.", name);
        const char* value = arguments[++i];
        if (strcmp(name, "--isa") == 0) options->isa = value;
        if (strcmp(name, "-o") == 0) options->output = value;
        if (strcmp(name, "--output") == 0) options->output_name = value;
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

/* Returns the best class that ranks below class `before`, or the best of all if `before` is negative.
 * Of equal logits, the lower index ranks higher. */
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
            printf("  %8.3f  %5lld", value, (long long)best);
            if (name != NULL) fputs("  ", stdout), print_plain_text(stdout, name);
            putchar('\n');
        }
    }
}

static const char* dtype_name(fqvit_dtype dtype) {
    return dtype == FQVIT_U8 ? "u8" : dtype == FQVIT_U16 ? "u16" : "i32";
}

static long integer_at(const fqvit_tensor* output, const void* y, uint64_t i) {
    if (output->dtype == FQVIT_U8) return ((const uint8_t*)y)[i];
    return output->dtype == FQVIT_U16 ? (long)((const uint16_t*)y)[i] : (long)((const int32_t*)y)[i];
}

static uint64_t integer_count(const fqvit_tensor* output) {
    uint64_t count = 1;
    for (uint32_t i = 0; i < output->axes; ++i) count *= (uint64_t)output->shape[i];
    return count;
}

static void print_shape(const fqvit_tensor* output) {
    for (uint32_t i = 0; i < output->axes; ++i) printf("%s%lld", i == 0 ? "" : ", ", (long long)output->shape[i]);
}

/* Prints the members of a JSON object that describe an embedding or other features: its integers and what they mean. */
static void report_integers(const fqvit_tensor* output, const void* y) {
    printf("\"dtype\": \"%s\", \"scale\": %.17g, \"zero_point\": %lld, ", dtype_name(output->dtype), output->scale,
           (long long)output->zero_point);
    if (output->alpha != NULL) {
        printf("\"alpha\": [");
        for (int64_t c = 0; c < output->shape[output->axes - 1]; ++c) {
            printf("%s%u", c == 0 ? "" : ", ", (unsigned)output->alpha[c]);
        }
        printf("], ");
    }
    printf("\"integers\": [");
    const uint64_t count = integer_count(output);
    for (uint64_t i = 0; i < count; ++i) printf("%s%ld", i == 0 ? "" : ", ", integer_at(output, y, i));
    printf("], ");
}

/* The outputs of a model. chosen: index of the output to report */
struct outputs {
    fqvit_tensor* tensors;
    void** ys;
    size_t* sizes;
    uint32_t count, chosen;
};

static void report_other_outputs(const struct outputs* outputs) {
    fputs("  other outputs: ", stdout);
    for (uint32_t i = 0, printed = 0; i < outputs->count; ++i) {
        if (i == outputs->chosen) continue;
        if (printed++ > 0) fputs(", ", stdout);
        print_plain_text(stdout, outputs->tensors[i].output_name);
    }
    puts(" (select one with --output NAME)");
}

static void report(const fqvit_model* model, const fqvit_description* about, const struct outputs* outputs,
                   const char* image, const struct times* times, const struct options* options) {
    const fqvit_tensor* output = &outputs->tensors[outputs->chosen];
    const void* y = outputs->ys[outputs->chosen];
    const int is_classifier = strcmp(output->kind, "logits") == 0;
    if (options->json) {
        printf("{\"image\": ");
        print_json_text(image);
        printf(", \"model\": ");
        print_json_text(about->model);
        printf(", \"fingerprint\": \"%s\", \"output\": ", about->fingerprint);
        print_json_text(output->output_name);
        printf(", \"kind\": \"%s\", \"shape\": [", output->kind);
        print_shape(output);
        printf("], ");
        if (is_classifier) {
            printf("\"top\": [");
            report_classes(model, output, y, options);
            printf("], ");
        } else {
            report_integers(output, y);
        }
        printf("\"isa\": \"%s\", \"threads\": %u, ", about->instruction_set, (unsigned)about->threads);
        printf("\"load_ms\": %.3f, \"preprocess_ms\": %.3f, \"run_ms\": %.3f}\n", times->load, times->preprocess,
               times->run);
        return;
    }
    print_plain_text(stdout, image);
    fputs(": ", stdout);
    print_plain_text(stdout, about->model);
    printf(", %.1f ms (preprocessing %.1f ms, loading %.1f ms)\n", times->run, times->preprocess, times->load);
    if (is_classifier) {
        report_classes(model, output, y, options);
    } else {
        fputs("  ", stdout);
        print_plain_text(stdout, output->output_name);
        printf(": %s [", dtype_name(output->dtype));
        print_shape(output);
        printf("]%s\n", options->output == NULL ? "; print it with --json or write it with -o FILE" : "");
    }
    if (outputs->count > 1 && options->output_name == NULL) report_other_outputs(outputs);
}

/* Prepares and runs one image. Returns 0, or 2 after printing an error. */
static int run_image(fqvit_model* model, const char* path, uint8_t* input, const fqvit_tensor* in,
                     const struct outputs* outputs, struct times* times, const struct options* options) {
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
        if (fqvit_model_run_all(model, input, 1, outputs->ys, outputs->sizes, outputs->count) != FQVIT_OK) {
            return fail("%s: %s", path, fqvit_last_error());
        }
        const double taken = now_ms() - start;
        if (round == 0 || taken < times->run) times->run = taken;
    }
    return 0;
}

static int write_file(const char* path, const void* data, size_t size) {
    FILE* file = open_utf8(path, "wb");
    int is_written = file != NULL && fwrite(data, 1, size, file) == size;
    if (file != NULL && fclose(file) != 0) is_written = 0;
    return is_written ? 0 : fail("%s: cannot be written (%s).", path, strerror(errno));
}

/* Describes and allocates all outputs and finds the chosen one. Returns 0, or 2 after printing an error. */
static int open_outputs(const fqvit_model* model, uint32_t count, const char* name, struct outputs* outputs) {
    outputs->tensors = calloc(count, sizeof(fqvit_tensor));
    outputs->ys = calloc(count, sizeof(void*));
    outputs->sizes = calloc(count, sizeof(size_t));
    if (outputs->tensors == NULL || outputs->ys == NULL || outputs->sizes == NULL) return fail("not enough memory.");
    outputs->count = count;
    int is_found = name == NULL;
    for (uint32_t i = 0; i < count; ++i) {
        if (fqvit_model_output(model, i, &outputs->tensors[i], sizeof(fqvit_tensor)) != FQVIT_OK) {
            return fail("%s", fqvit_last_error());
        }
        outputs->sizes[i] = (size_t)outputs->tensors[i].bytes;
        outputs->ys[i] = malloc(outputs->sizes[i]);
        if (outputs->ys[i] == NULL) return fail("not enough memory.");
        if (!is_found && strcmp(outputs->tensors[i].output_name, name) == 0) {
            outputs->chosen = i;
            is_found = 1;
        }
    }
    if (is_found) return 0;
    char known[1000] = "";
    for (uint32_t i = 0; i < count; ++i) {
        const size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i == 0 ? "" : ", ", outputs->tensors[i].output_name);
    }
    return fail("--output: %s: the model has no such output, expected one of %s.", name, known);
}

static void free_outputs(struct outputs* outputs) {
    for (uint32_t i = 0; i < outputs->count; ++i) free(outputs->ys[i]);
    free(outputs->tensors), free(outputs->ys), free(outputs->sizes);
}

static int run_images(fqvit_model* model, struct times* times, const struct options* options) {
    fqvit_description about;
    fqvit_tensor in;
    struct outputs outputs = {NULL, NULL, NULL, 0, 0};
    if (fqvit_model_describe(model, &about, sizeof about) != FQVIT_OK ||
        fqvit_model_input(model, &in, sizeof in) != FQVIT_OK) {
        return fail("%s", fqvit_last_error());
    }
    int result = open_outputs(model, about.outputs, options->output_name, &outputs);
    /* The output file is written at the end, so that a bad image leaves no partial file. */
    const size_t bytes = result == 0 ? outputs.sizes[outputs.chosen] : 1, images = (size_t)options->image_count;
    const size_t kept = options->output == NULL ? 1 : images;
    uint8_t* input = malloc((size_t)in.bytes);
    uint8_t* all = kept > SIZE_MAX / bytes ? NULL : malloc(kept * bytes);
    if (result == 0 && (input == NULL || all == NULL)) result = fail("not enough memory.");
    for (size_t i = 0; result == 0 && i < images; ++i) {
        result = run_image(model, options->images[i], input, &in, &outputs, times, options);
        if (result == 0) report(model, &about, &outputs, options->images[i], times, options);
        if (result == 0 && options->output != NULL) memcpy(all + i * bytes, outputs.ys[outputs.chosen], bytes);
    }
    if (result == 0 && options->output != NULL) result = write_file(options->output, all, images * bytes);
    free(input), free(all);
    free_outputs(&outputs);
    return result;
}

static void list_instruction_sets(void) {
    for (size_t i = 0; fqvit_instruction_set(i) != NULL; ++i) puts(fqvit_instruction_set(i));
}

static int load_and_run(const struct options* options) {
    fqvit_options load = FQVIT_OPTIONS_INIT;
    load.threads = options->threads;
    load.instruction_set = options->isa;
    fqvit_model* model = NULL;
    const double start = now_ms();
    if (fqvit_model_load(options->model, &load, &model) != FQVIT_OK) return fail("%s", fqvit_last_error());
    struct times times = {now_ms() - start, 0, 0};
    const int result = run_images(model, &times, options);
    fqvit_model_free(model);
    return result;
}

static int run_command(int count, char** arguments) {
    for (int i = 1; i < count && strcmp(arguments[i], "--") != 0; ++i) {
        const int is_list = i > 1 && strcmp(arguments[i - 1], "--isa") == 0 && strcmp(arguments[i], "list") == 0;
        if (strcmp(arguments[i], "--help") == 0) return fputs(USAGE, stdout), 0;
        if (strcmp(arguments[i], "--version") == 0) return printf("fqvit-run %s\n", fqvit_version()), 0;
        if (is_list) return list_instruction_sets(), 0;
    }
    struct options options = {NULL, NULL, NULL, NULL, NULL, 0, 5, 1, 0, 1};
    options.images = malloc(sizeof(char*) * (size_t)(count + 1));
    if (options.images == NULL) return fail("not enough memory.");
    int result = parse(count, arguments, &options);
    if (result == 0) result = load_and_run(&options);
    free(options.images);
    return result;
}

int main(int count, char** arguments) {
    char** utf8 = utf8_arguments(count, arguments);
    if (utf8 == NULL) return fail("not enough memory.");
    const int result = run_command(count, utf8);
    /* If an earlier flush failed, nothing is left to flush, but ferror() still reports the failure. */
    if ((ferror(stdout) != 0 || fflush(stdout) != 0) && result == 0) {
        return fail("standard output: cannot be written (%s).", strerror(errno));
    }
    return result;
}
