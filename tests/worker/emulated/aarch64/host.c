// A library with the names of the kernels that has each call done by the process of another machine's kernels (guest.c).
#define _GNU_SOURCE
#include <pthread.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "arena.h"

extern int arena_descriptor(void) __attribute__((weak));
extern char** environ;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int to_guest = -1, from_guest = -1;

static void give_up(const char* why) {
  fprintf(stderr, "kernels of another machine: %s\n", why);
  abort();
}

static void start(void) {
  if (arena_descriptor == NULL) give_up("the arena is not preloaded");
  int calls[2], results[2];
  if (pipe2(calls, 02000000) || pipe2(results, 02000000)) give_up("no pipe");  // O_CLOEXEC
  char arena[64];
  snprintf(arena, sizeof arena, "/proc/%d/fd/%d", (int)getpid(), arena_descriptor());
  char* arguments[] = {QEMU, "-cpu", CPU, "-L", ROOT, GUEST, LIBRARY, arena, NULL};
  char* environment[] = {NULL};
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, calls[0], 0);
  posix_spawn_file_actions_adddup2(&files, results[1], 1);
  pid_t pid;
  if (posix_spawn(&pid, QEMU, &files, NULL, arguments, environment)) give_up("cannot start " QEMU);
  posix_spawn_file_actions_destroy(&files);
  close(calls[0]), close(results[1]);
  to_guest = calls[1], from_guest = results[0];
}

union Result quire_call(const struct Call* call) {
  union Result result;
  pthread_mutex_lock(&lock);
  if (to_guest < 0) start();
  if (write(to_guest, call, sizeof *call) != sizeof *call) give_up("the process has ended");
  if (read(from_guest, &result, sizeof result) != sizeof result) give_up("the process died in a call");
  pthread_mutex_unlock(&lock);
  return result;
}
