/*
 * A QEMU plugin that counts how often each translated block of guest code runs, for benchmarks/instructions.py.
 *
 * Writes one line per block when the program ends: first address (hexadecimal), instructions, runs. This file declares
 * the functions of qemu-plugin.h that it uses, because Debian has no package with this header. -DAPI=2 builds it for
 * QEMU 8.2 and later.
 */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef API
#define API 1
#endif
#define EXPORT __attribute__((visibility("default")))

typedef uint64_t plugin_id;
struct qemu_plugin_tb;
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id id, void (*translated)(plugin_id, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb* tb, void (*executed)(unsigned, void*), int flags,
                                          void* data);
void qemu_plugin_register_atexit_cb(plugin_id id, void (*end)(plugin_id, void*), void* data);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb* tb);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb* tb);

EXPORT int qemu_plugin_version = API;

struct block {
    uint64_t address, instructions, runs;
    struct block* next;
};
static struct block* blocks;
static const char* path;

static void executed(unsigned cpu, void* data) {
    (void)cpu;
    ++((struct block*)data)->runs;
}

static void translated(plugin_id id, struct qemu_plugin_tb* tb) {
    struct block* block = calloc(1, sizeof *block);
    (void)id;
    if (block == NULL) abort();
    block->address = qemu_plugin_tb_vaddr(tb), block->instructions = qemu_plugin_tb_n_insns(tb);
    block->next = blocks, blocks = block;
    qemu_plugin_register_vcpu_tb_exec_cb(tb, executed, 0, block);
}

static void end(plugin_id id, void* data) {
    FILE* file = fopen(path, "w");
    (void)id, (void)data;
    if (file == NULL) abort();
    for (const struct block* block = blocks; block != NULL; block = block->next) {
        fprintf(file, "%" PRIx64 " %" PRIu64 " %" PRIu64 "\n", block->address, block->instructions, block->runs);
    }
    fclose(file);
}

EXPORT int qemu_plugin_install(plugin_id id, const void* info, int count, char** arguments) {
    (void)info;
    if (count != 1 || strncmp(arguments[0], "to=", 3) != 0) return -1;
    path = strdup(arguments[0] + 3);
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, end, NULL);
    return 0;
}
