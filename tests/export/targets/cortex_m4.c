/* Bare-metal firmware for QEMU's mps2-an386 board, without libc. QEMU's -device loader writes the pixels to
 * IMAGE; semihosting prints the outputs. */
#include "model.h"

#define IMAGE ((const uint8_t *)0x21000000)

static uint8_t arena[FQVIT_ARENA_BYTES];
static int32_t output[FQVIT_OUTPUTS];

static void semihost(uint32_t operation, const void *argument)
{
    register uint32_t r0 __asm__("r0") = operation;
    register const void *r1 __asm__("r1") = argument;
    __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
}

static void print(int32_t value)
{
    char text[13];
    char *at = text + 12;
    uint32_t size = value < 0 ? 0u - (uint32_t)value : (uint32_t)value;
    *at = 0;
    *--at = '\n';
    do {
        *--at = (char)('0' + size % 10);
        size /= 10;
    } while (size > 0);
    if (value < 0) *--at = '-';
    semihost(0x04, at); /* SYS_WRITE0 */
}

void reset(void)
{
    model_run(IMAGE, arena, output);
    for (uint32_t i = 0; i < FQVIT_OUTPUTS; ++i) print(output[i]);
    semihost(0x18, (const void *)0x20026); /* SYS_EXIT, ADP_Stopped_ApplicationExit */
    for (;;) {}
}

extern uint8_t stack_top[];

__attribute__((section(".vectors"), used)) static const void *const vectors[] = {stack_top, (const void *)reset};
