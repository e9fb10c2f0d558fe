/* Checks that count passes and failures, for test programs in C99. */
#ifndef FQVIT_TEST_CHECK_H
#define FQVIT_TEST_CHECK_H

#include <stdio.h>
#include <string.h>

#include "fqvit.h"

static int passed, failed;

static void check(int condition, const char* what, int line) {
    condition ? ++passed : ++failed;
    if (!condition) printf("line %d: %s (last error: %s)\n", line, what, fqvit_last_error());
}

/* A call that fails must return the expected status and set a one-line error that contains `text` and ends with a
 * period. */
static void check_error(fqvit_status found, fqvit_status expected, const char* text, const char* what, int line) {
    const char* error = fqvit_last_error();
    check(found == expected, what, line);
    check(strstr(error, text) != NULL, what, line);
    check(strchr(error, '\n') == NULL && strlen(error) > 1 && error[strlen(error) - 1] == '.', what, line);
}

#define CHECK(condition) check((condition), #condition, __LINE__)
#define CHECK_OK(call) check((call) == FQVIT_OK, #call, __LINE__)
#define CHECK_ERROR(status, text, call) check_error((call), FQVIT_ERROR_##status, (text), #call, __LINE__)

#endif
