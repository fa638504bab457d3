// Binds log to the version that old C libraries have, too: a library compiled here also runs on an older system.
#pragma once

#include <cmath>

#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver log, log@GLIBC_2.2.5");
#elif defined(__aarch64__) && defined(__GLIBC__)
__asm__(".symver log, log@GLIBC_2.17");
#endif
