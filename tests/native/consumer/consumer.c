/* Prints the name of the model, the version of libfqvit and the first logit of a black image. */
#include <fqvit.h>
#include <stdio.h>
#include <stdlib.h>

int main(int count, char** arguments) {
    fqvit_model* model = NULL;
    if (count != 2 || fqvit_model_load(arguments[1], NULL, &model) != FQVIT_OK) {
        fprintf(stderr, "%s\n", fqvit_last_error());
        return 1;
    }
    fqvit_description about;
    fqvit_tensor in, out;
    fqvit_model_describe(model, &about, sizeof about);
    fqvit_model_input(model, &in, sizeof in);
    fqvit_model_output(model, 0, &out, sizeof out);
    uint8_t* image = calloc(1, (size_t)in.bytes);
    int32_t* logits = malloc((size_t)out.bytes);
    const fqvit_status status = fqvit_model_run(model, image, 1, logits, (size_t)out.bytes);
    if (status == FQVIT_OK) printf("%s %s %ld\n", about.model, fqvit_version(), (long)logits[0]);
    free(image);
    free(logits);
    fqvit_model_free(model);
    return (int)status;
}
