// A plugin of qemu-user that prints how many instructions a program executed. The declarations are those of version 1
// of qemu's plugin interface (qemu 6.0 to 8.2).
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct qemu_plugin_tb;
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*translated)(uint64_t id, struct qemu_plugin_tb* block));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb* block, int add, void* to, uint64_t value);
void qemu_plugin_register_atexit_cb(uint64_t id, void (*ended)(uint64_t id, void* data), void* data);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb* block);

int qemu_plugin_version = 1;
static uint64_t count;

static void translated(uint64_t id, struct qemu_plugin_tb* block) {
  (void)id;
  qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &count, qemu_plugin_tb_n_insns(block));
}

static void ended(uint64_t id, void* data) {
  (void)id, (void)data;
  fprintf(stderr, "instructions: %llu\n", (unsigned long long)count);
}

int qemu_plugin_install(uint64_t id, const void* info, int argc, char** argv) {
  (void)info, (void)argc, (void)argv;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_atexit_cb(id, ended, NULL);
  return 0;
}
