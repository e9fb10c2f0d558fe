/* A Linux program for RISC-V under QEMU, without floats or libc. Reads pixels from stdin and prints outputs as text. */
#include "model.h"

static uint8_t pixels[FQVIT_PIXELS];
static uint8_t arena[FQVIT_ARENA_BYTES];
static int32_t output[FQVIT_OUTPUTS];

static long call(long number, long a, const void *b, long c)
{
    register long a0 __asm__("a0") = a;
    register const void *a1 __asm__("a1") = b;
    register long a2 __asm__("a2") = c;
    register long a7 __asm__("a7") = number;
    __asm__ volatile("ecall" : "+r"(a0) : "r"(a1), "r"(a2), "r"(a7) : "memory");
    return a0;
}

static void print(int32_t value)
{
    char text[12];
    char *at = text + 12;
    uint32_t size = value < 0 ? 0u - (uint32_t)value : (uint32_t)value;
    *--at = '\n';
    do {
        *--at = (char)('0' + size % 10);
        size /= 10;
    } while (size > 0);
    if (value < 0) *--at = '-';
    call(64, 1, at, text + 12 - at); /* write */
}

void _start(void)
{
    long done = 0;
    while (done < FQVIT_PIXELS) {
        const long more = call(63, 0, pixels + done, FQVIT_PIXELS - done); /* read */
        if (more <= 0) break;
        done += more;
    }
    model_run(pixels, arena, output);
    for (uint32_t i = 0; i < FQVIT_OUTPUTS; ++i) print(output[i]);
    call(93, 0, 0, 0); /* exit */
    for (;;) {}
}
