// What both processes know: where the memory is, and what a call is.
#include <stdint.h>

#define ARENA_AT 0x100000000000ul
#define ARENA_BYTES (64ul << 30)  // of addresses; memory is taken as it is used

enum { kMostArguments = 32 };
struct Call {
  int32_t function, count;
  union { int64_t whole; float real; } arguments[kMostArguments];
};
union Result { int64_t whole; double real; };
