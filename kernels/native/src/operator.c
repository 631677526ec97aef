/* The operator `BlockProduct` of ONNX Runtime's graphs: x [..., columns] and blocks to y [..., rows].
 * With numbers of matrices [uses], of which each row of x has equally many, it is given the blocks of
 * several matrices, and y [1, uses, rows] has the product of each use's row with its matrix; -1 stands
 * for none of them, and gives 0. Inputs: x, the numbers or nothing, blocks of each matrix. Attributes:
 * type (see blocks.h), matrices, rows and columns of each, accurate (0 or 1: what rounding took from
 * the inputs is multiplied, too), holds (0 or 1: blocks are copied when the operator is made, and
 * these inputs are not read again).
 */
#include "attention.h"
#include "onnxruntime_abi.h"
#include "product.h"

#include <stdio.h>
#include <stdlib.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>
#elif defined(_WIN32)
#include <windows.h>
#endif

enum { FIRST_BLOCKS = 2, MOST_MATRICES = 1 << 12 };
static const int64_t LARGEST = 1 << 24; /* of rows and columns: no size overflows */

typedef struct {
  const Api *api;
  Sizes sizes;
  int64_t holds;
  uint8_t *held;
  const uint8_t **matrices; /* in `held`, if it holds them */
} Product;

static const Kernels *kernels;

#if defined(__aarch64__)
static int has_products_of_bytes(void) {
#if defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;
#elif defined(_WIN32)
  return IsProcessorFeaturePresent(43);
#else
  return 1; /* every Mac has them */
#endif
}
#endif

#if defined(__x86_64__)
enum { HAS_AVX2 = 1, HAS_AVX_VNNI = 2, HAS_AVX512 = 4 };

/* Asked of the processor itself: what some compilers have for it finds nothing. */
static int vectors_of_processor(void) {
  unsigned eax, ebx, ecx, edx, saved, rest;
  const unsigned first = 1u << 12 | 1u << 27 | 1u << 29; /* FMA, OSXSAVE, F16C */
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & first) != first) return 0;
  __asm__("xgetbv" : "=a"(saved), "=d"(rest) : "c"(0)); /* what the system saves of registers */
  if ((saved & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return 0;
  if (!(ebx & 1u << 5)) return 0;
  int found = HAS_AVX2;
#if defined(AVX2_ALONE) /* to measure what older processors do */
  return found;
#endif
  const unsigned wide = 1u << 16 | 1u << 30 | 1u << 31; /* AVX-512 F, BW, VL */
  if ((ebx & wide) == wide && ecx & 1u << 11 && (saved & 0xe6) == 0xe6) found |= HAS_AVX512;
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax & 1u << 4) found |= HAS_AVX_VNNI;
  return found;
}
#endif

static const Kernels *best_kernels(void) {
#if defined(__x86_64__)
  const int there = vectors_of_processor();
  if (there & HAS_AVX512) return avx512_kernels();
  if (there & HAS_AVX_VNNI) return avx_vnni_kernels();
  if (there & HAS_AVX2) return avx2_kernels();
#elif defined(__aarch64__)
  if (has_products_of_bytes()) return neon_kernels();
#endif
  return plain_kernels();
}

/* Pages of a mapped file that are not read again need not stay in memory: they are there twice. Any
 * other memory stays as it is. */
static void let_go(const uint8_t *const *memory, size_t count, size_t bytes) {
#if defined(__linux__)
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  FILE *mappings = fopen("/proc/self/maps", "re");
  if (!mappings) return;
  char line[512];
  while (fgets(line, sizeof line, mappings)) {
    unsigned long start, end, inode;
    if (sscanf(line, "%lx-%lx %*s %*s %*s %lu", &start, &end, &inode) != 3 || !inode) continue;
    for (size_t i = 0; i < count; i++) {
      const uintptr_t first = ((uintptr_t)memory[i] + page - 1) / page * page;
      const uintptr_t last = ((uintptr_t)memory[i] + bytes) / page * page;
      if (start <= first && last <= end && first < last)
        (void)madvise((void *)first, last - first, MADV_DONTNEED);
    }
  }
  fclose(mappings);
#else
  (void)memory, (void)count, (void)bytes;
#endif
}

/* The blocks of a matrix; they are as many bytes as this operator reads. */
static Status *blocks_of(const Product *self, const Value *value, const uint8_t **blocks) {
  int64_t sizes[8];
  size_t rank;
  if (!value) return ORT_STATUS(self->api, ORT_INVALID_ARGUMENT, "a matrix without blocks");
  Status *error = sizes_of(self->api, value, sizes, &rank);
  if (error) return error;
  if (count_of(sizes, rank) != matrix_bytes(&self->sizes))
    return ORT_STATUS(self->api, ORT_INVALID_ARGUMENT, "blocks of another size");
  return ORT_DATA(self->api, value, (void **)blocks);
}

static void ORT_CALL destroy(void *kernel) {
  Product *self = kernel;
  release(self->held);
  free(self->matrices);
  free(self);
}

static Status *read_sizes(Product *self, const Info *info) {
  int64_t type, matrices, rows, columns, accurate;
  int64_t *places[] = {&type, &matrices, &rows, &columns, &accurate, &self->holds};
  static const char *const names[] = {"type", "matrices", "rows", "columns", "accurate", "holds"};
  Status *error = NULL;
  for (int i = 0; i < 6 && !error; i++)
    error = ORT_INTEGER(self->api, info, names[i], places[i]);
  if (error) return error;
  if (type < 0 || type >= TYPES || rows < 1 || columns < 1 || rows > LARGEST || columns > LARGEST ||
      matrices < 1 || matrices > MOST_MATRICES)
    return ORT_STATUS(self->api, ORT_INVALID_ARGUMENT, "an unknown type, or no rows or columns");
  self->sizes = sizes_of_product((int)type, (size_t)rows, (size_t)columns, (size_t)matrices,
                                 accurate ? 2 : 1);
  return NULL;
}

/* Copies the blocks of all matrices. */
static Status *hold(Product *self, const Info *info) {
  const size_t count = self->sizes.matrices, bytes = matrix_bytes(&self->sizes);
  Status *error = NULL;
  for (size_t i = 0; i < count && !error; i++) {
    int is_constant = 0;
    const Value *value = NULL;
    error = ORT_CONSTANT(self->api, info, FIRST_BLOCKS + i, &is_constant, &value);
    if (!error && !is_constant)
      error = ORT_STATUS(self->api, ORT_INVALID_ARGUMENT, "blocks that are not constant");
    if (!error) error = blocks_of(self, value, self->matrices + i);
  }
  if (error) return error;
  if (!(self->held = aligned(count * bytes)))
    return ORT_STATUS(self->api, ORT_FAIL, "no memory for blocks");
  for (size_t i = 0; i < count; i++) memcpy(self->held + i * bytes, self->matrices[i], bytes);
  let_go(self->matrices, count, bytes);
  for (size_t i = 0; i < count; i++) self->matrices[i] = self->held + i * bytes;
  return NULL;
}

static Status *ORT_CALL create(const Operator *op, const Api *api, const Info *info, void **to) {
  (void)op;
  Product *self = calloc(1, sizeof *self);
  if (!self) return ORT_STATUS(api, ORT_FAIL, "no memory");
  self->api = api;
  Status *error = read_sizes(self, info);
  if (!error && self->holds) {
    self->matrices = calloc(self->sizes.matrices, sizeof *self->matrices);
    error = self->matrices ? hold(self, info) : ORT_STATUS(api, ORT_FAIL, "no memory");
  }
  if (error) {
    destroy(self);
    return error;
  }
  *to = self;
  return NULL;
}

/* Where the blocks are that the operator does not hold. */
static Status *find_matrices(const Product *self, Context *context, const uint8_t **matrices) {
  Status *error = NULL;
  for (size_t i = 0; i < self->sizes.matrices && !error; i++) {
    const Value *value = NULL;
    error = ORT_INPUT(self->api, context, FIRST_BLOCKS + i, &value);
    if (!error) error = blocks_of(self, value, matrices + i);
  }
  return error;
}

/* Sizes of y, of which there is one for each use. chosen: NULL, or the numbers of matrices. */
static Status *shapes(const Product *self, const Value *x, const Value *chosen, Work *work,
                      int64_t y_sizes[8], size_t *rank) {
  const Api *api = self->api;
  int64_t sizes[8];
  size_t chosen_rank = 0;
  Status *error = sizes_of(api, x, y_sizes, rank);
  if (error) return error;
  if (*rank < 1 || y_sizes[*rank - 1] != (int64_t)self->sizes.columns)
    return ORT_STATUS(api, ORT_INVALID_ARGUMENT, "inputs with another number of columns");
  work->rows = work->uses = count_of(y_sizes, *rank - 1);
  if (chosen) {
    error = sizes_of(api, chosen, sizes, &chosen_rank);
    if (error) return error;
    work->uses = count_of(sizes, chosen_rank);
    if (work->rows ? work->uses % work->rows : work->uses)
      return ORT_STATUS(api, ORT_INVALID_ARGUMENT, "rows with unequal numbers of uses");
    y_sizes[0] = 1, y_sizes[1] = (int64_t)work->uses, *rank = 3;
  }
  y_sizes[*rank - 1] = (int64_t)self->sizes.rows;
  return NULL;
}

static Status *run(Work *work, const Api *api, Context *context) {
  Status *error = NULL;
  switch (begin(work)) {
    case NO_MEMORY: return ORT_STATUS(api, ORT_FAIL, "no memory for rounded inputs");
    case NO_SUCH_MATRIX:
      return ORT_STATUS(api, ORT_INVALID_ARGUMENT, "the number of a matrix that is not there");
  }
  if (work->rows < 4) {
    for (size_t row = 0; row < work->rows; row++) round_row(work, row);
  } else {
    error = ORT_PARALLEL(api, context, round_row, work->rows, 0, work);
  }
  if (!error && work->parts) error = ORT_PARALLEL(api, context, multiply, work->parts, 0, work);
  release(work->memory);
  return error;
}

static Status *ORT_CALL compute(void *kernel, Context *context) {
  const Product *self = kernel;
  const Api *api = self->api;
  const Value *x = NULL, *chosen = NULL;
  Value *y = NULL;
  int64_t sizes[8];
  size_t rank = 0;
  Work work = {.kernels = kernels, .sizes = &self->sizes, .matrices = self->matrices};
  Status *error = ORT_INPUT(api, context, 0, &x);
  if (!error) error = ORT_INPUT(api, context, 1, &chosen);
  if (!error) error = shapes(self, x, chosen, &work, sizes, &rank);
  if (!error) error = ORT_DATA(api, x, (void **)&work.x);
  if (!error && chosen) error = ORT_DATA(api, chosen, (void **)&work.chosen);
  if (!error) error = ORT_OUTPUT(api, context, 0, sizes, rank, &y);
  if (!error) error = ORT_DATA(api, y, (void **)&work.y);
  if (error || !work.uses) return error;
  const uint8_t **found = NULL;
  if (!self->holds) {
    found = calloc(self->sizes.matrices, sizeof *found);
    if (!found) return ORT_STATUS(api, ORT_FAIL, "no memory");
    error = find_matrices(self, context, found);
    work.matrices = found;
  }
  if (!error) error = run(&work, api, context);
  free(found);
  return error;
}

static const char *ORT_CALL name(const Operator *op) { return (void)op, "BlockProduct"; }
static int ORT_CALL input_type(const Operator *op, size_t i) {
  return (void)op, i >= FIRST_BLOCKS ? ORT_UINT8 : i ? ORT_INT64 : ORT_FLOAT;
}
static int ORT_CALL output_type(const Operator *op, size_t i) {
  return (void)op, (void)i, ORT_FLOAT;
}
static size_t ORT_CALL three(const Operator *op) { return (void)op, 3; }
static size_t ORT_CALL one(const Operator *op) { return (void)op, 1; }
static int ORT_CALL input_kind(const Operator *op, size_t i) {
  static const int kinds[] = {ORT_REQUIRED, ORT_OPTIONAL, ORT_VARIADIC};
  return (void)op, kinds[i];
}

static const Operator operator_of_blocks = {
    .version = ORT_VERSION,
    .name = name,
    .provider = on_cpu,
    .input_type = input_type,
    .inputs = three,
    .output_type = output_type,
    .outputs = one,
    .destroy = destroy,
    .input_kind = input_kind,
    .output_kind = always_required,
    .input_memory = default_memory,
    .variadic = {always_one, always_one, always_one, always_one},
    .create_checked = create,
    .compute_checked = compute,
    .first_version = always_one,
    .last_version = always_one,
};

/* The name of the kernels that this processor takes. */
EXPORT const char *edge_kernels_name(void) { return best_kernels()->name; }

EXPORT int edge_kernels_layout(void) { return LAYOUT_VERSION; }

EXPORT int edge_kernels_operator(void) { return OPERATOR_VERSION; }

/* For tests: the product of x [count, columns] with matrices of ROWS rows, one after the other, into y
 * [uses, ROWS], by the kernels of this name, as far as this processor has them. chosen [uses]: see
 * product.h. 0: it has not these kernels, or a number is of no matrix. */
EXPORT int edge_kernels_try(const char *which, int type, const uint8_t *tiles, size_t matrices,
                            size_t columns, const float *x, size_t count, const int64_t *chosen,
                            size_t uses, float *y) {
  const Kernels *all[] = {
      plain_kernels(),
#if defined(__x86_64__)
      vectors_of_processor() & HAS_AVX2 ? avx2_kernels() : NULL,
      vectors_of_processor() & HAS_AVX_VNNI ? avx_vnni_kernels() : NULL,
#endif
      best_kernels(), /* which is one of these, or needs more than AVX2 */
  };
  const Kernels *own = NULL;
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (all[i] && !strcmp(all[i]->name, which)) own = all[i];
  if (!own || type < 0 || type >= TYPES) return 0;
  const Sizes sizes = sizes_of_product(type, ROWS, columns, matrices, 1);
  const uint8_t **each = calloc(matrices, sizeof *each);
  for (size_t i = 0; each && i < matrices; i++) each[i] = tiles + i * matrix_bytes(&sizes);
  Work work = {.kernels = own, .sizes = &sizes, .matrices = each, .x = x, .y = y, .rows = count,
               .uses = uses, .chosen = chosen};
  const int begun = each && begin(&work) == BEGUN;
  for (size_t row = 0; begun && row < count; row++) round_row(&work, row);
  for (size_t part = 0; begun && part < work.parts; part++) multiply(&work, part);
  if (begun) release(work.memory);
  free(each);
  return begun;
}

EXPORT Status *ORT_CALL RegisterCustomOps(Options *options, const ApiBase *base) {
  static Domain *shared; /* by all sessions; threads may make several at once */
  const Api *api = base->get(ORT_VERSION);
  if (!api) return NULL;
  __atomic_store_n(&kernels, best_kernels(), __ATOMIC_RELEASE);
  Domain *domain = __atomic_load_n(&shared, __ATOMIC_ACQUIRE);
  if (!domain) {
    Status *error = ORT_NEW_DOMAIN(api, "edge", &domain);
    if (!error) error = ORT_ADD_OPERATOR(api, domain, &operator_of_blocks);
    const Operator *attention;
    for (size_t i = 0; !error && (attention = operator_of_attention(i)); i++)
      error = ORT_ADD_OPERATOR(api, domain, attention);
    if (error) return error;
    __atomic_store_n(&shared, domain, __ATOMIC_RELEASE);
  }
  return ORT_ADD_DOMAIN(api, options, domain);
}
