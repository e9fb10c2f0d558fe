/* UTF-8 text on every operating system: arguments, file names and output. */
#ifndef FQVIT_TOOLS_TEXT_H
#define FQVIT_TOOLS_TEXT_H

#include <stdio.h>

/* Returns the arguments of main() in UTF-8, which stay allocated until the process ends; NULL if memory runs out. */
char** utf8_arguments(int count, char** arguments);

/* fopen() for a path in UTF-8. */
FILE* open_utf8(const char* path, const char* mode);

/* Prints a JSON string. Bytes that are not UTF-8 become U+FFFD. */
void print_json_text(const char* text);

/* Prints text without control characters, which could change the state of a terminal. */
void print_plain_text(FILE* file, const char* text);

#endif
