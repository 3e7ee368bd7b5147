/* Shows one process another PCI bus than its container has.
 *
 * TorchTPU tells a TPU's generation by reading /sys/bus/pci/devices. A container has one tree
 * mounted there, and nothing in it may mount a second. Preloaded (LD_PRELOAD), this library gives
 * the tree that TPUFORGE_PCI_DEVICES names to whoever opens that folder or something below it; no
 * other path is touched, and without the variable nothing is.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define BUS "/sys/bus/pci/devices"

#define SEEN __attribute__((visibility("default")))
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static const char* seen(const char* path, char* buffer) {
  size_t length = sizeof(BUS) - 1;
  if (path == NULL || strncmp(path, BUS, length) != 0) return path;
  if (path[length] != '\0' && path[length] != '/') return path;
  const char* tree = getenv("TPUFORGE_PCI_DEVICES");
  if (tree == NULL || *tree == '\0') return path;
  int fits = snprintf(buffer, PATH_MAX, "%s%s", tree, path + length);
  return fits > 0 && fits < PATH_MAX ? buffer : path;
}

static mode_t mode_of(int flags, va_list rest) {
  /* only a call that creates a file has a mode */
  return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;
}

#define OPEN(name)                                                            \
  SEEN int name(const char* path, int flags, ...) {                           \
    char buffer[PATH_MAX];                                                    \
    va_list rest;                                                             \
    va_start(rest, flags);                                                    \
    mode_t mode = mode_of(flags, rest);                                       \
    va_end(rest);                                                             \
    return NEXT(name)(seen(path, buffer), flags, mode);                       \
  }

#define OPENAT(name)                                                          \
  SEEN int name(int folder, const char* path, int flags, ...) {               \
    char buffer[PATH_MAX];                                                    \
    va_list rest;                                                             \
    va_start(rest, flags);                                                    \
    mode_t mode = mode_of(flags, rest);                                       \
    va_end(rest);                                                             \
    return NEXT(name)(folder, seen(path, buffer), flags, mode);               \
  }

#define FOPEN(name)                                                           \
  SEEN FILE* name(const char* path, const char* mode) {                       \
    char buffer[PATH_MAX];                                                    \
    return NEXT(name)(seen(path, buffer), mode);                              \
  }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FOPEN(fopen)
FOPEN(fopen64)

SEEN DIR* opendir(const char* path) {
  char buffer[PATH_MAX];
  return NEXT(opendir)(seen(path, buffer));
}

SEEN ssize_t readlink(const char* path, char* target, size_t size) {
  char buffer[PATH_MAX];
  return NEXT(readlink)(seen(path, buffer), target, size);
}
