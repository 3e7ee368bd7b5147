/* A PJRT plugin that lets the untouched torch_tpu wheel run on a CPU.
 *
 * TorchTPU loads the plugin that TPU_LIBRARY_PATH names and calls GetPjrtApi. This one loads a
 * real XLA CPU plugin, copies its function table and replaces six entries:
 *
 *   PJRT_Client_Create                 a CPU client does not know the options made for a TPU, and
 *                                      its number of devices is an option
 *   PJRT_Executable_OutputMemoryKinds  CPU plugins do not answer it, and torch.compile asks
 *   PJRT_Client_Compile                optionally keeps a copy of every program
 *   PJRT_LoadedExecutable_Execute      keeps a copy of the program that is run, however long ago
 *                                      it was compiled
 *   PJRT_LoadedExecutable_Destroy      forgets it
 *   PJRT_Plugin_Attributes             when programs are only lowered: speaks for another plugin
 *
 * It also gives the CPU plugin more threads than cores, see THREADS.
 *
 * Environment:
 *   PJRT_NPROC              threads of the CPU plugin, if not as many as THREADS
 *   TPUFORGE_PJRT_PLUGIN    the CPU plugin; "plugin.so" beside this file if not set
 *   TPUFORGE_PROGRAMS_DIR   a folder that gets every program as <hash>.mlir and its compile
 *                           options as <hash>.options, the hash being that of both; nothing is
 *                           written if not set. The folder may change while the process runs: each
 *                           gets what was compiled or run in its time. A framework keeps what it
 *                           compiled, so a program may be run in a folder's time that was compiled
 *                           in an earlier one's
 *   TPUFORGE_LOWER_FOR      a StableHLO version, such as 1.24.0: programs are written for it, as
 *                           for the plugin that speaks it, kept, and not compiled
 *
 * The header comes from the wheel of the CPU plugin, so both agree on the table's layout. TorchTPU
 * is built against a later minor version of the same major one: it reads struct_size before it
 * uses a newer entry, and finds those missing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pjrt_c_api.h"

#define MAX_OUTPUTS 8192
#define MAX_ATTRIBUTES 64
/* TorchTPU frees buffers in callbacks, on the plugin's own threads, and there a buffer waits for
 * those who still use it. With a thread for each of two cores, all of them wait in the end for work
 * that none is left to do: optimizers stood still in three of five runs. */
#define THREADS "32"

static const PJRT_Api* cpu;
static PJRT_Api* table;
static const char* output_kinds[MAX_OUTPUTS];
static size_t output_kind_sizes[MAX_OUTPUTS];

static void fail(const char* what, const char* detail) {
  fprintf(stderr, "tpuforge simulator: %s: %s\n", what, detail ? detail : "no detail");
}

/* One simulated device: TorchTPU's own distributed backend takes one per process. */
static PJRT_Error* client_create(PJRT_Client_Create_Args* args) {
  static const char name[] = "cpu_device_count";
  PJRT_NamedValue option = {.struct_size = PJRT_NamedValue_STRUCT_SIZE,
                            .name = name,
                            .name_size = sizeof(name) - 1,
                            .type = PJRT_NamedValue_kInt64,
                            .int64_value = 1,
                            .value_size = 1};
  const PJRT_NamedValue* given = args->create_options;
  size_t count = args->num_options;
  args->create_options = &option;
  args->num_options = 1;
  PJRT_Error* error = cpu->PJRT_Client_Create(args);
  args->create_options = given;
  args->num_options = count;
  return error;
}

static PJRT_Error* output_memory_kinds(PJRT_Executable_OutputMemoryKinds_Args* args) {
  PJRT_Executable_NumOutputs_Args asked = {.struct_size = PJRT_Executable_NumOutputs_Args_STRUCT_SIZE,
                                           .executable = args->executable};
  PJRT_Error* error = cpu->PJRT_Executable_NumOutputs(&asked);
  if (error != NULL) return error;
  if (asked.num_outputs > MAX_OUTPUTS) {
    fail("a program has more outputs than the simulator can describe", NULL);
    return cpu->PJRT_Executable_OutputMemoryKinds(args);
  }
  args->num_outputs = asked.num_outputs;
  args->memory_kinds = output_kinds;
  args->memory_kind_sizes = output_kind_sizes;
  return NULL;
}

/* Major, minor and patch of the StableHLO version to lower for; 0 when programs are to be run. */
static int lower_for(int64_t version[3]) {
  const char* given = getenv("TPUFORGE_LOWER_FOR");
  if (given == NULL || *given == '\0') return 0;
  long long parts[3];
  if (sscanf(given, "%lld.%lld.%lld", &parts[0], &parts[1], &parts[2]) != 3) {
    fail("TPUFORGE_LOWER_FOR is no version", given);
    return 0;
  }
  for (int i = 0; i < 3; i++) version[i] = parts[i];
  return 1;
}

/* A framework writes its programs for the StableHLO version that the plugin says it reads. */
static PJRT_Error* plugin_attributes(PJRT_Plugin_Attributes_Args* args) {
  static const char name[] = "stablehlo_current_version";
  static PJRT_NamedValue told[MAX_ATTRIBUTES];
  static int64_t version[3];
  PJRT_Error* error = cpu->PJRT_Plugin_Attributes(args);
  if (error != NULL || !lower_for(version)) return error;
  if (args->num_attributes > MAX_ATTRIBUTES) {
    fail("the CPU plugin has too many attributes", NULL);
    return NULL;
  }
  for (size_t i = 0; i < args->num_attributes; i++) {
    told[i] = args->attributes[i];
    if (told[i].type == PJRT_NamedValue_kInt64List && told[i].name_size == sizeof(name) - 1 &&
        memcmp(told[i].name, name, sizeof(name) - 1) == 0) {
      told[i].int64_array_value = version;
      told[i].value_size = 3;
    }
  }
  args->attributes = told;
  return NULL;
}

static void keep(const char* dir, unsigned long long hash, const char* ending, const char* data,
                 size_t size) {
  char path[PATH_MAX], temporary[PATH_MAX];
  int fits = snprintf(path, sizeof(path), "%s/%016llx.%s", dir, hash, ending);
  if (fits < 0 || (size_t)fits >= sizeof(path) || access(path, F_OK) == 0) return;
  fits = snprintf(temporary, sizeof(temporary), "%s/.%016llx.%ld.%s", dir, hash, (long)getpid(),
                  ending);
  if (fits < 0 || (size_t)fits >= sizeof(temporary)) return;
  FILE* file = fopen(temporary, "wb");
  if (file == NULL) {
    fail("a program could not be kept", temporary);
    return;
  }
  size_t written = fwrite(data, 1, size, file);
  if (fclose(file) != 0 || written != size || rename(temporary, path) != 0) {
    fail("a program could not be kept", temporary);
    unlink(temporary);
  }
}

/* FNV-1a: names must be stable, not secret */
static unsigned long long mix(unsigned long long hash, const char* data, size_t size) {
  for (size_t i = 0; i < size; i++) hash = (hash ^ (unsigned char)data[i]) * 0x100000001b3ULL;
  return hash;
}

/* A program that was compiled while programs were kept, for as long as its executable lives. */
struct program {
  const void* executable;
  unsigned long long hash;
  char* code;
  size_t code_size;
  char* options;
  size_t options_size;
  struct program* next;
};

static struct program* programs;
static pthread_mutex_t programs_lock = PTHREAD_MUTEX_INITIALIZER;

static const char* programs_dir(void) {
  const char* dir = getenv("TPUFORGE_PROGRAMS_DIR");
  return dir != NULL && *dir != '\0' ? dir : NULL;
}

static void keep_program(const char* dir, const struct program* program) {
  keep(dir, program->hash, "mlir", program->code, program->code_size);
  keep(dir, program->hash, "options", program->options, program->options_size);
}

static void drop(struct program* program) {
  if (program == NULL) return;
  free(program->code);
  free(program->options);
  free(program);
}

static struct program* copied(const PJRT_Client_Compile_Args* args) {
  struct program* made = calloc(1, sizeof(*made));
  if (made == NULL) return NULL;
  made->code_size = args->program->code_size;
  made->options_size = args->compile_options_size;
  made->code = malloc(made->code_size + 1);
  made->options = malloc(made->options_size + 1);
  if (made->code == NULL || made->options == NULL) {
    drop(made);
    return NULL;
  }
  memcpy(made->code, args->program->code, made->code_size);
  if (made->options_size > 0) memcpy(made->options, args->compile_options, made->options_size);
  made->hash = mix(0xcbf29ce484222325ULL, made->code, made->code_size);
  made->hash = mix(made->hash, made->options, made->options_size);
  return made;
}

/* Takes a program over; it is found by its executable from now on. */
static void remember(struct program* program, const void* executable) {
  program->executable = executable;
  pthread_mutex_lock(&programs_lock);
  program->next = programs;
  programs = program;
  pthread_mutex_unlock(&programs_lock);
}

static PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* args) {
  const char* dir = programs_dir();
  if (dir != NULL) {
    pthread_mutex_lock(&programs_lock);
    const struct program* one = programs;
    while (one != NULL && one->executable != args->executable) one = one->next;
    if (one != NULL) keep_program(dir, one);
    pthread_mutex_unlock(&programs_lock);
  }
  return cpu->PJRT_LoadedExecutable_Execute(args);
}

/* The next executable may have the address of this one. */
static PJRT_Error* destroy(PJRT_LoadedExecutable_Destroy_Args* args) {
  pthread_mutex_lock(&programs_lock);
  struct program** link = &programs;
  while (*link != NULL && (*link)->executable != args->executable) link = &(*link)->next;
  struct program* gone = *link;
  if (gone != NULL) *link = gone->next;
  pthread_mutex_unlock(&programs_lock);
  drop(gone);
  return cpu->PJRT_LoadedExecutable_Destroy(args);
}

static PJRT_Error* compile_nothing(PJRT_Client_Compile_Args* args) {
  /* an error is the CPU plugin's to make, and it makes one of an empty program */
  static char nothing[] = "";
  PJRT_Program program = *args->program;
  program.code = nothing;
  program.code_size = 0;
  const PJRT_Program* given = args->program;
  args->program = &program;
  PJRT_Error* error = cpu->PJRT_Client_Compile(args);
  args->program = given;
  return error;
}

static PJRT_Error* client_compile(PJRT_Client_Compile_Args* args) {
  const char* dir = programs_dir();
  struct program* program = NULL;
  if (dir != NULL) {
    program = copied(args);
    if (program == NULL) {
      fail("a program could not be kept", "no memory");
    } else {
      /* before it is compiled: a program that ends the process is kept as well */
      keep_program(dir, program);
    }
  }
  int64_t version[3];
  int lower_only = lower_for(version);
  PJRT_Error* error = lower_only ? compile_nothing(args) : cpu->PJRT_Client_Compile(args);
  if (error == NULL && program != NULL) {
    remember(program, args->executable);
  } else {
    drop(program);
  }
  return error;
}

static int plugin_path(char* path, size_t size) {
  const char* given = getenv("TPUFORGE_PJRT_PLUGIN");
  if (given != NULL && *given != '\0') {
    int fits = snprintf(path, size, "%s", given);
    return fits > 0 && (size_t)fits < size;
  }
  Dl_info self;
  if (dladdr((void*)&plugin_path, &self) == 0 || self.dli_fname == NULL) return 0;
  const char* slash = strrchr(self.dli_fname, '/');
  int length = slash == NULL ? 0 : (int)(slash - self.dli_fname) + 1;
  int fits = snprintf(path, size, "%.*splugin.so", length, self.dli_fname);
  return fits > 0 && (size_t)fits < size;
}

__attribute__((visibility("default"))) const PJRT_Api* GetPjrtApi(void) {
  if (table != NULL) return table;
  char path[PATH_MAX];
  if (!plugin_path(path, sizeof(path))) {
    fail("the CPU plugin's path cannot be told", NULL);
    return NULL;
  }
  setenv("PJRT_NPROC", THREADS, 0);
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fail("the CPU plugin cannot be loaded", dlerror());
    return NULL;
  }
  const PJRT_Api* (*get)(void) = (const PJRT_Api* (*)(void))dlsym(library, "GetPjrtApi");
  cpu = get == NULL ? NULL : get();
  if (cpu == NULL || cpu->struct_size < PJRT_Api_STRUCT_SIZE ||
      cpu->pjrt_api_version.major_version != PJRT_API_MAJOR) {
    fail("the CPU plugin speaks another PJRT API", path);
    return NULL;
  }
  PJRT_Api* copy = malloc(cpu->struct_size);
  if (copy == NULL) return NULL;
  memcpy(copy, cpu, cpu->struct_size);
  for (size_t i = 0; i < MAX_OUTPUTS; i++) {
    output_kinds[i] = "device";
    output_kind_sizes[i] = sizeof("device") - 1;
  }
  copy->PJRT_Client_Create = client_create;
  copy->PJRT_Executable_OutputMemoryKinds = output_memory_kinds;
  copy->PJRT_Client_Compile = client_compile;
  copy->PJRT_LoadedExecutable_Execute = execute;
  copy->PJRT_LoadedExecutable_Destroy = destroy;
  if (cpu->PJRT_Plugin_Attributes != NULL) copy->PJRT_Plugin_Attributes = plugin_attributes;
  table = copy;
  return table;
}
