/* Text in UTF-8 on every system: arguments, names of files and what a command prints. */
#ifndef FQVIT_TOOLS_TEXT_H
#define FQVIT_TOOLS_TEXT_H

#include <stdio.h>

/* Returns the arguments of main() in UTF-8, allocated until the end of the process; NULL if there is no memory. */
char** utf8_arguments(int count, char** arguments);

/* fopen() for a path in UTF-8. */
FILE* open_utf8(const char* path, const char* mode);

/* Prints a JSON string. Bytes that are not UTF-8 become U+FFFD. */
void print_json_text(const char* text);

/* Prints text without control characters, which could change the state of a terminal. */
void print_plain_text(FILE* file, const char* text);

#endif
