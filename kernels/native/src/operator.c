/* The operator `BlockProduct` of ONNX Runtime's graphs: x [..., columns] and blocks to
 * y [..., rows]. Attributes: type (see blocks.h), rows, columns, accurate (0 or 1: what rounding took
 * from the inputs is multiplied, too), holds (0 or 1: blocks are copied when the operator is made,
 * and the input is not read again).
 */
#include "blocks.h"
#include "onnxruntime_abi.h"

#include <stdio.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>
#elif defined(_WIN32)
#include <malloc.h>
#include <windows.h>
#endif

enum { TILES_AT_ONCE = 8, WHOLE_PAGE = 2 << 20, MOST_AT_ONCE = 16 };
static const int64_t LARGEST = 1 << 24; /* of rows and columns: no size overflows */

typedef struct {
  const Api *api;
  int64_t type, rows, columns, accurate, holds;
  size_t blocks, tiles;
  uint8_t *held;
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

static const Kernels *best_kernels(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
    return avx512_kernels();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    return __builtin_cpu_supports("avxvnni") ? avx_vnni_kernels() : avx2_kernels();
#elif defined(__aarch64__)
  if (has_products_of_bytes()) return neon_kernels();
#endif
  return plain_kernels();
}

static void *aligned(size_t bytes) {
#ifdef _WIN32
  return _aligned_malloc(bytes, 64);
#else
  void *found = NULL;
  const size_t by = bytes >= WHOLE_PAGE ? WHOLE_PAGE : 64;
  if (posix_memalign(&found, by, bytes)) return NULL;
#ifdef MADV_HUGEPAGE
  if (by == WHOLE_PAGE) (void)madvise(found, bytes, MADV_HUGEPAGE);
#endif
  return found;
#endif
}

/* Pages of a mapped file that are not read again need not stay in memory: they are there twice. Any
 * other memory stays as it is. */
static void let_go(const uint8_t *memory, size_t bytes) {
#if defined(__linux__)
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  const uintptr_t first = ((uintptr_t)memory + page - 1) / page * page;
  const uintptr_t last = ((uintptr_t)memory + bytes) / page * page;
  FILE *mappings = fopen("/proc/self/maps", "re");
  if (!mappings) return;
  char line[512];
  while (fgets(line, sizeof line, mappings)) {
    unsigned long start, end, inode;
    if (sscanf(line, "%lx-%lx %*s %*s %*s %lu", &start, &end, &inode) != 3) continue;
    if (start <= first && last <= end && inode && first < last)
      (void)madvise((void *)first, last - first, MADV_DONTNEED);
  }
  fclose(mappings);
#else
  (void)memory, (void)bytes;
#endif
}

static void release(void *memory) {
#ifdef _WIN32
  _aligned_free(memory);
#else
  free(memory);
#endif
}

static size_t bytes_of(const Product *self) {
  return self->tiles * self->blocks * (size_t)tile_bytes((int)self->type);
}

/* Sizes of a value; NULL, or the error. */
static Status *sizes_of(const Api *api, const Value *value, int64_t sizes[8], size_t *rank) {
  Shape *shape = NULL;
  Status *error = ORT_SHAPE(api, value, &shape);
  if (error) return error;
  error = ORT_RANK(api, shape, rank);
  if (!error && *rank > 8) error = ORT_STATUS(api, ORT_INVALID_ARGUMENT, "more than 8 dimensions");
  if (!error) error = ORT_SIZES(api, shape, sizes, *rank);
  ORT_FREE_SHAPE(api, shape);
  return error;
}

/* The bytes of the blocks; they are as many as this operator reads. */
static Status *blocks_of(const Product *self, const Value *value, const uint8_t **blocks) {
  int64_t sizes[8], total = 1;
  size_t rank;
  Status *error = sizes_of(self->api, value, sizes, &rank);
  if (error) return error;
  for (size_t i = 0; i < rank; i++) total *= sizes[i];
  if ((size_t)total != bytes_of(self))
    return ORT_STATUS(self->api, ORT_INVALID_ARGUMENT, "blocks of another size");
  return ORT_DATA(self->api, value, (void **)blocks);
}

static void ORT_CALL destroy(void *kernel) {
  release(((Product *)kernel)->held);
  free(kernel);
}

static Status *ORT_CALL create(const Operator *op, const Api *api, const Info *info, void **to) {
  (void)op;
  Product *self = calloc(1, sizeof *self);
  if (!self) return ORT_STATUS(api, ORT_FAIL, "no memory");
  self->api = api;
  int64_t *places[] = {&self->type, &self->rows, &self->columns, &self->accurate, &self->holds};
  static const char *const names[] = {"type", "rows", "columns", "accurate", "holds"};
  Status *error = NULL;
  for (int i = 0; i < 5 && !error; i++) error = ORT_INTEGER(api, info, names[i], places[i]);
  if (!error && (self->type < 0 || self->type >= TYPES || self->rows < 1 || self->columns < 1 ||
                 self->rows > LARGEST || self->columns > LARGEST))
    error = ORT_STATUS(api, ORT_INVALID_ARGUMENT, "an unknown type, or no rows or columns");
  if (!error) {
    const size_t block = (size_t)block_of((int)self->type);
    self->blocks = ((size_t)self->columns + block - 1) / block;
    self->tiles = ((size_t)self->rows + ROWS - 1) / ROWS;
  }
  if (!error && self->holds) {
    int is_constant = 0;
    const Value *value = NULL;
    const uint8_t *blocks = NULL;
    error = ORT_CONSTANT(api, info, 1, &is_constant, &value);
    if (!error && (!is_constant || !value))
      error = ORT_STATUS(api, ORT_INVALID_ARGUMENT, "blocks that are not constant");
    if (!error) error = blocks_of(self, value, &blocks);
    if (!error && !(self->held = aligned(bytes_of(self))))
      error = ORT_STATUS(api, ORT_FAIL, "no memory for blocks");
    if (!error) {
      memcpy(self->held, blocks, bytes_of(self));
      let_go(blocks, bytes_of(self));
    }
  }
  if (error) {
    destroy(self);
    return error;
  }
  *to = self;
  return NULL;
}

/* What the parts of a product share. */
typedef struct {
  const Product *self;
  const uint8_t *blocks;
  const float *x;
  float *y;
  Inputs *inputs; /* [count] */
  float *rest;    /* [rows of x, columns], if accurate; else NULL */
  size_t rows, count, padded, tiles; /* count: rows of inputs. tiles: of a part */
} Work;

static void round_row(void *data, size_t row) {
  const Work *work = data;
  const size_t columns = (size_t)work->self->columns, planes = work->count / work->rows;
  float *rest = work->rest ? work->rest + row * columns : NULL;
  const float *x = work->x + row * columns;
  for (size_t plane = 0; plane < planes; plane++, x = rest) {
    const Inputs *to = work->inputs + row * planes + plane;
    kernels->round(x, columns, work->padded, (int8_t *)to->codes, (float *)to->scales,
                   (int32_t *)to->sums, (float *)to->totals, plane + 1 < planes ? rest : NULL);
  }
}

/* A row of x is one or two of inputs, and has the sum of their products. */
static void multiply(void *data, size_t part) {
  const Work *work = data;
  const Product *self = work->self;
  const size_t planes = work->count / work->rows, rows = (size_t)self->rows;
  const size_t first = part * work->tiles;
  const size_t last = first + work->tiles < self->tiles ? first + work->tiles : self->tiles;
  const size_t bytes = self->blocks * (size_t)tile_bytes((int)self->type);
  float found[MOST_AT_ONCE * ROWS];
  for (size_t at = 0; at < work->count; at += MOST_AT_ONCE) {
    const size_t count = work->count - at < MOST_AT_ONCE ? work->count - at : MOST_AT_ONCE;
    for (size_t tile = first; tile < last; tile++) {
      kernels->products[self->type](work->blocks + tile * bytes, self->blocks, work->inputs + at,
                                    (int)count, found);
      const size_t there = rows - tile * ROWS < ROWS ? rows - tile * ROWS : ROWS;
      for (size_t row = 0; row < count / planes; row++) {
        float *y = work->y + (at / planes + row) * rows + tile * ROWS;
        const float *own = found + row * planes * ROWS;
        if (planes == 1) {
          memcpy(y, own, there * sizeof *y);
        } else {
          for (size_t i = 0; i < there; i++) y[i] = own[i] + own[ROWS + i];
        }
      }
    }
  }
}

static size_t up(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Inputs in memory of their own, one after the other: codes, scales, sums and totals. */
static uint8_t *laid_out(Work *work) {
  const size_t pieces = work->padded / PIECE;
  const size_t sums_at = up(work->padded) + up(pieces * sizeof(float));
  const size_t totals_at = sums_at + up(2 * pieces * sizeof(int32_t));
  const size_t each = totals_at + up(pieces * sizeof(float));
  const size_t table = up(work->count * sizeof(Inputs));
  const size_t rests =
      work->count > work->rows ? up(work->rows * (size_t)work->self->columns * sizeof(float)) : 0;
  uint8_t *memory = aligned(table + rests + work->count * each);
  if (!memory) return NULL;
  work->inputs = (Inputs *)memory;
  if (rests) work->rest = (float *)(memory + table);
  for (size_t i = 0; i < work->count; i++) {
    const uint8_t *own = memory + table + rests + i * each;
    work->inputs[i] = (Inputs){(const int8_t *)own, (const float *)(own + up(work->padded)),
                               (const int32_t *)(own + sums_at), (const float *)(own + totals_at)};
  }
  return memory;
}

static Status *ORT_CALL compute(void *kernel, Context *context) {
  const Product *self = kernel;
  const Api *api = self->api;
  const Value *x = NULL, *blocks = NULL;
  Value *y = NULL;
  int64_t sizes[8];
  size_t rank = 0;
  Work work = {.self = self, .blocks = self->held, .rows = 1};
  Status *error = ORT_INPUT(api, context, 0, &x);
  if (!error) error = sizes_of(api, x, sizes, &rank);
  if (!error && (rank < 1 || sizes[rank - 1] != self->columns))
    error = ORT_STATUS(api, ORT_INVALID_ARGUMENT, "inputs with another number of columns");
  if (!error && !self->holds) {
    error = ORT_INPUT(api, context, 1, &blocks);
    if (!error) error = blocks_of(self, blocks, &work.blocks);
  }
  if (error) return error;
  for (size_t i = 0; i + 1 < rank; i++) work.rows *= (size_t)sizes[i];
  sizes[rank - 1] = self->rows;
  error = ORT_DATA(api, x, (void **)&work.x);
  if (!error) error = ORT_OUTPUT(api, context, 0, sizes, rank, &y);
  if (!error) error = ORT_DATA(api, y, (void **)&work.y);
  if (error || !work.rows) return error;
  work.count = work.rows * (self->accurate ? 2 : 1);
  work.padded = self->blocks * (size_t)block_of((int)self->type);
  uint8_t *memory = laid_out(&work);
  if (!memory) return ORT_STATUS(api, ORT_FAIL, "no memory for rounded inputs");
  if (work.rows < 4) {
    for (size_t row = 0; row < work.rows; row++) round_row(&work, row);
  } else {
    error = ORT_PARALLEL(api, context, round_row, work.rows, 0, &work);
  }
  /* Few parts cost little; many share the work evenly. */
  work.tiles = self->tiles / 32 < 1 ? 1 : self->tiles / 32;
  if (work.tiles > TILES_AT_ONCE) work.tiles = TILES_AT_ONCE;
  const size_t parts = (self->tiles + work.tiles - 1) / work.tiles;
  if (!error) error = ORT_PARALLEL(api, context, multiply, parts, 0, &work);
  release(memory);
  return error;
}

static const char *ORT_CALL name(const Operator *op) { return (void)op, "BlockProduct"; }
static const char *ORT_CALL provider(const Operator *op) {
  return (void)op, "CPUExecutionProvider";
}
static int ORT_CALL input_type(const Operator *op, size_t i) {
  return (void)op, i ? ORT_UINT8 : ORT_FLOAT;
}
static int ORT_CALL output_type(const Operator *op, size_t i) {
  return (void)op, (void)i, ORT_FLOAT;
}
static size_t ORT_CALL two(const Operator *op) { return (void)op, 2; }
static size_t ORT_CALL one(const Operator *op) { return (void)op, 1; }
static int ORT_CALL required(const Operator *op, size_t i) { return (void)op, (void)i, 0; }
static int ORT_CALL first_only(const Operator *op) { return (void)op, 1; }

static const Operator operator_of_blocks = {
    .version = ORT_VERSION,
    .name = name,
    .provider = provider,
    .input_type = input_type,
    .inputs = two,
    .output_type = output_type,
    .outputs = one,
    .destroy = destroy,
    .input_kind = required,
    .output_kind = required,
    .input_memory = required,
    .variadic = {first_only, first_only, first_only, first_only},
    .create_checked = create,
    .compute_checked = compute,
    .first_version = first_only,
    .last_version = first_only,
};

/* The name of the kernels that this processor takes. */
EXPORT const char *edge_kernels_name(void) { return best_kernels()->name; }

EXPORT int edge_kernels_layout(void) { return LAYOUT_VERSION; }

/* For tests: rounds x [count, columns] and multiplies it with a tile's rows into y [count, ROWS], by
 * the kernels of this name, as far as this processor has them. 0: it has not. */
EXPORT int edge_kernels_try(const char *which, int type, const uint8_t *tiles, size_t columns,
                            const float *x, int count, float *y) {
  const Kernels *all[] = {
      plain_kernels(),
#if defined(__x86_64__)
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? avx2_kernels() : NULL,
      __builtin_cpu_supports("avxvnni") ? avx_vnni_kernels() : NULL,
#endif
      best_kernels(), /* which is one of these, or needs more than AVX2 */
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    if (!all[i] || strcmp(all[i]->name, which) || type < 0 || type >= TYPES) continue;
    const Product self = {.columns = (int64_t)columns};
    const size_t block = (size_t)block_of(type), blocks = (columns + block - 1) / block;
    Work work = {.self = &self, .rows = (size_t)count, .count = (size_t)count,
                 .padded = blocks * block};
    uint8_t *memory = laid_out(&work);
    if (!memory) return 0;
    for (int row = 0; row < count; row++) {
      const Inputs *to = work.inputs + row;
      all[i]->round(x + (size_t)row * columns, columns, work.padded, (int8_t *)to->codes,
                    (float *)to->scales, (int32_t *)to->sums, (float *)to->totals, NULL);
    }
    all[i]->products[type](tiles, blocks, work.inputs, count, y);
    release(memory);
    return 1;
  }
  return 0;
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
    if (error) return error;
    __atomic_store_n(&shared, domain, __ATOMIC_RELEASE);
  }
  return ORT_ADD_DOMAIN(api, options, domain);
}
