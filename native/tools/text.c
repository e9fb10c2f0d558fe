#include "text.h"

#include <stdlib.h>

#if defined(_WIN32)

#include <windows.h>
/* must be included after windows.h */
#include <shellapi.h>

/* main() gets its arguments in the code page of the system, which cannot express every name. */
char** utf8_arguments(int count, char** arguments) {
    (void)arguments;
    int wide_count = 0;
    wchar_t** wide = CommandLineToArgvW(GetCommandLineW(), &wide_count);
    char** out = calloc((size_t)count + 1, sizeof(char*));
    if (wide == NULL || out == NULL || wide_count < count) return NULL;
    SetConsoleOutputCP(CP_UTF8);
    for (int i = 0; i < count; ++i) {
        const int size = WideCharToMultiByte(CP_UTF8, 0, wide[i], -1, NULL, 0, NULL, NULL);
        out[i] = malloc((size_t)size + 1);
        if (out[i] == NULL) return NULL;
        WideCharToMultiByte(CP_UTF8, 0, wide[i], -1, out[i], size, NULL, NULL);
    }
    LocalFree(wide);
    return out;
}

FILE* open_utf8(const char* path, const char* mode) {
    wchar_t wide_path[4096], wide_mode[8];
    if (MultiByteToWideChar(CP_UTF8, 0, path, -1, wide_path, 4096) == 0) return NULL;
    if (MultiByteToWideChar(CP_UTF8, 0, mode, -1, wide_mode, 8) == 0) return NULL;
    return _wfopen(wide_path, wide_mode);
}

#else

char** utf8_arguments(int count, char** arguments) {
    (void)count;
    return arguments;
}

FILE* open_utf8(const char* path, const char* mode) { return fopen(path, mode); }

#endif

/* Returns the number of bytes of the character that the text begins with, or 0 if it is not valid UTF-8. */
static int utf8_length(const unsigned char* text) {
    if (text[0] < 0x80) return 1;
    const int length = text[0] < 0xC2 ? 0 : text[0] < 0xE0 ? 2 : text[0] < 0xF0 ? 3 : text[0] < 0xF5 ? 4 : 0;
    for (int i = 1; i < length; ++i) {
        if ((text[i] & 0xC0) != 0x80) return 0; /* stops at the final zero byte */
    }
    /* Overlong encodings, surrogates and code points above U+10FFFF are not valid. */
    const int is_long = (text[0] == 0xE0 && text[1] < 0xA0) || (text[0] == 0xF0 && text[1] < 0x90);
    const int is_outside = (text[0] == 0xED && text[1] > 0x9F) || (text[0] == 0xF4 && text[1] > 0x8F);
    return is_long || is_outside ? 0 : length;
}

void print_json_text(const char* text) {
    putchar('"');
    for (const unsigned char* at = (const unsigned char*)text; *at != '\0';) {
        const int length = utf8_length(at);
        if (length == 0) {
            fputs("\\ufffd", stdout);
        } else if (*at == '"' || *at == '\\') {
            printf("\\%c", *at);
        } else if (*at < 0x20) {
            printf("\\u%04x", (unsigned)*at);
        } else {
            fwrite(at, 1, (size_t)length, stdout);
        }
        at += length == 0 ? 1 : length;
    }
    putchar('"');
}

void print_plain_text(FILE* file, const char* text) {
    for (const unsigned char* at = (const unsigned char*)text; *at != '\0'; ++at) {
        const int is_c1 = at[0] == 0xC2 && at[1] >= 0x80 && at[1] < 0xA0; /* U+0080 to U+009F */
        putc(*at < 0x20 || *at == 0x7F || is_c1 ? ' ' : *at, file);
        at += is_c1;
    }
}
