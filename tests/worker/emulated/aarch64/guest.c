// Runs a library of kernels under qemu: argv[1] is the library, argv[2] the file of the memory. Calls come from stdin.
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "arena.h"

union Result quire_dispatch(void* library, const struct Call* call);

int main(int count, char** arguments) {
  if (count != 3) return 2;
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (library == NULL) return fprintf(stderr, "%s\n", dlerror()), 3;
  const int file = open(arguments[2], O_RDWR);
  if (file < 0) return perror(arguments[2]), 4;
  void* at = mmap((void*)ARENA_AT, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, file, 0);
  if (at != (void*)ARENA_AT) return perror("mmap"), 5;
  for (struct Call call; read(0, &call, sizeof call) == sizeof call;) {
    const union Result result = quire_dispatch(library, &call);
    if (write(1, &result, sizeof result) != sizeof result) return 6;
  }
  return 0;
}
