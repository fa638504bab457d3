// The memory of a process, preloaded in place of malloc: all of it lies in one file in memory at a fixed address, which
// the kernels' process (guest.c) maps at the same address. So both mean the same by a pointer.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "arena.h"

enum { kClasses = 4 * 48, kAlign = 64, kLarge = 1 << 20 };

// In front of each block
typedef struct Block {
  uint32_t class;   // of sizes
  uint32_t offset;  // from the block to its memory
} Block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char* next_block;
static void* free_blocks[kClasses];
static int arena_file = -1;

// Bytes of a class: four for each power of two.
static size_t size_of(unsigned class) { return (size_t)(4 + class % 4) << (class / 4 + 4); }

static unsigned class_of(size_t size) {
  unsigned class = 0;
  while (size_of(class) < size) class++;
  return class;
}

static void start(void) {
  arena_file = memfd_create("arena", MFD_CLOEXEC);
  void* at = MAP_FAILED;
  if (arena_file >= 0 && ftruncate(arena_file, ARENA_BYTES) == 0)
    at = (void*)syscall(SYS_mmap, ARENA_AT, ARENA_BYTES, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE, arena_file, 0L);
  if (at != (void*)ARENA_AT) _exit(121);
  next_block = at;
}

int arena_descriptor(void) { return arena_file; }

static void* take(size_t size, size_t align) {
  if (align < kAlign) align = kAlign;
  if (size > ARENA_BYTES / 2) return errno = ENOMEM, NULL;
  const unsigned class = class_of(size + align + kAlign);
  pthread_mutex_lock(&lock);
  if (arena_file < 0) start();
  char* block = free_blocks[class];
  if (block != NULL) {
    memcpy(&free_blocks[class], block, sizeof(void*));
  } else if (next_block + size_of(class) <= (char*)ARENA_AT + ARENA_BYTES) {
    block = next_block, next_block += size_of(class);
  }
  pthread_mutex_unlock(&lock);
  if (block == NULL) return errno = ENOMEM, NULL;
  char* memory = (char*)(((uintptr_t)block + kAlign + align - 1) & ~(uintptr_t)(align - 1));
  const Block header = {class, (uint32_t)(memory - block)};
  memcpy(memory - sizeof header, &header, sizeof header);
  return memory;
}

static Block header_of(const void* memory) {
  Block header;
  memcpy(&header, (const char*)memory - sizeof header, sizeof header);
  return header;
}

size_t malloc_usable_size(void* memory) {
  if (memory == NULL) return 0;
  const Block header = header_of(memory);
  return size_of(header.class) - header.offset;
}

void free(void* memory) {
  if (memory == NULL) return;
  const Block header = header_of(memory);
  char* block = (char*)memory - header.offset;
  if (size_of(header.class) >= kLarge)
    madvise((char*)(((uintptr_t)block + 4095) & ~4095ul), size_of(header.class) - 8192, MADV_REMOVE);
  pthread_mutex_lock(&lock);
  memcpy(block, &free_blocks[header.class], sizeof(void*));
  free_blocks[header.class] = block;
  pthread_mutex_unlock(&lock);
}

void* malloc(size_t size) { return take(size, kAlign); }

void* calloc(size_t count, size_t size) {
  size_t bytes;
  if (__builtin_mul_overflow(count, size, &bytes)) return errno = ENOMEM, NULL;
  void* memory = take(bytes, kAlign);
  if (memory != NULL) memset(memory, 0, bytes);
  return memory;
}

void* realloc(void* memory, size_t size) {
  const size_t had = malloc_usable_size(memory);
  if (memory != NULL && size <= had) return memory;
  void* larger = take(size, kAlign);
  if (larger != NULL && memory != NULL) memcpy(larger, memory, had), free(memory);
  return larger;
}

int posix_memalign(void** memory, size_t align, size_t size) { return (*memory = take(size, align)) ? 0 : ENOMEM; }
void* aligned_alloc(size_t align, size_t size) { return take(size, align); }
void* memalign(size_t align, size_t size) { return take(size, align); }

// Memory and files that the process maps; the C library's own maps do not come here. Of a file it has a copy, unless
// others are to see what is written.
void* mmap(void* at, size_t size, int protection, int flags, int file, off_t offset) {
  const int private = (flags & MAP_PRIVATE) != 0, anonymous = (flags & MAP_ANONYMOUS) != 0;
  const int ours = at == NULL && !(protection & PROT_EXEC) && !(flags & (MAP_STACK | MAP_FIXED)) &&
                   (anonymous ? private && (protection & PROT_WRITE) && size >= kLarge
                              : private || !(protection & PROT_WRITE));
  if (!ours) return (void*)syscall(SYS_mmap, at, size, protection, flags, file, offset);
  const size_t whole = (size + 4095) & ~4095ul;
  char* memory = take(whole, 4096);
  if (memory == NULL) return MAP_FAILED;
  madvise(memory, whole, MADV_REMOVE);  // zeros
  for (size_t done = 0; !anonymous && done < size;) {
    const ssize_t count = pread(file, memory + done, size - done, offset + (off_t)done);
    if (count < 0) return free(memory), MAP_FAILED;
    if (count == 0) break;
    done += (size_t)count;
  }
  return memory;
}
void* mmap64(void* at, size_t size, int protection, int flags, int file, off_t offset) {
  return mmap(at, size, protection, flags, file, offset);
}
int munmap(void* at, size_t size) {
  if ((uintptr_t)at < ARENA_AT || (uintptr_t)at >= ARENA_AT + ARENA_BYTES) return (int)syscall(SYS_munmap, at, size);
  return free(at), 0;
}
