/* Load and run a .fqvit file once; print the loading time and memory sizes as JSON. For Linux only. See load.py. */
#include <fqvit.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static unsigned long long peak_bytes(void) {
    unsigned long long kilobytes = 0;
    char line[256];
    FILE* file = fopen("/proc/self/status", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "VmHWM: %llu kB", &kilobytes) == 1) break;
    }
    if (file != NULL) fclose(file);
    return kilobytes * 1024;
}

static double cpu_ms(void) { return 1e3 * (double)clock() / CLOCKS_PER_SEC; }

int main(int count, char** arguments) {
    fqvit_model* model = NULL;
    fqvit_description about;
    fqvit_tensor in, out;
    const double start = cpu_ms();
    if (count != 2) {
        fprintf(stderr, "load: expected one argument, a .fqvit file.\n");
        return 2;
    }
    if (fqvit_model_load(arguments[1], NULL, &model) != FQVIT_OK) {
        fprintf(stderr, "load: %s\n", fqvit_last_error());
        return 2;
    }
    const double loaded = cpu_ms();
    fqvit_model_describe(model, &about, sizeof about);
    fqvit_model_input(model, &in, sizeof in);
    fqvit_model_output(model, 0, &out, sizeof out);
    uint8_t* image = calloc(1, (size_t)in.bytes);
    void* y = malloc((size_t)out.bytes);
    if (image == NULL || y == NULL || fqvit_model_run(model, image, 1, y, (size_t)out.bytes) != FQVIT_OK) return 2;
    printf("{\"load_ms\": %.3f, \"peak_bytes\": %llu, \"weight_bytes\": %llu, \"run_bytes\": %llu}\n", loaded - start,
           peak_bytes(), (unsigned long long)about.weight_bytes, (unsigned long long)about.run_bytes);
    free(image);
    free(y);
    fqvit_model_free(model);
    return 0;
}
