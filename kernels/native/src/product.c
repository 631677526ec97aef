#include "product.h"

#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#elif defined(_WIN32)
#include <malloc.h>
#endif

enum { TILES_AT_ONCE = 8, WHOLE_PAGE = 2 << 20, MOST_AT_ONCE = 16 };

void *aligned(size_t bytes) {
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

void release(void *memory) {
#ifdef _WIN32
  _aligned_free(memory);
#else
  free(memory);
#endif
}

Sizes sizes_of_product(int type, size_t rows, size_t columns, size_t matrices, int planes) {
  const size_t block = (size_t)block_of(type);
  return (Sizes){.type = type, .planes = planes, .rows = rows, .columns = columns,
                 .blocks = (columns + block - 1) / block, .tiles = (rows + ROWS - 1) / ROWS,
                 .matrices = matrices};
}

size_t matrix_bytes(const Sizes *sizes) {
  return sizes->tiles * sizes->blocks * (size_t)tile_bytes(sizes->type);
}

static size_t up(size_t bytes) { return (bytes + 63) / 64 * 64; }

static size_t padded(const Sizes *sizes) { return sizes->blocks * (size_t)block_of(sizes->type); }

/* Memory for everything, and rounded inputs one after the other: codes, scales, sums and totals. */
static int lay_out(Work *work) {
  const Sizes *sizes = work->sizes;
  const size_t planes = (size_t)sizes->planes, columns = padded(sizes), pieces = columns / PIECE;
  const size_t most_groups = work->uses < sizes->matrices ? work->uses : sizes->matrices;
  const size_t sums_at = up(columns) + up(pieces * sizeof(float));
  const size_t totals_at = sums_at + up(2 * pieces * sizeof(int32_t));
  const size_t each = totals_at + up(pieces * sizeof(float));
  const size_t rounded = up(work->rows * planes * sizeof(Inputs));
  const size_t inputs = work->chosen ? up(work->uses * planes * sizeof(Inputs)) : 0;
  const size_t order = up(work->uses * sizeof(size_t)), groups = up(most_groups * sizeof(Group));
  const size_t rest = planes > 1 ? up(work->rows * sizes->columns * sizeof(float)) : 0;
  uint8_t *at = aligned(rounded + inputs + order + groups + rest + work->rows * planes * each);
  if (!at) return 0;
  work->memory = at;
  work->rounded = work->inputs = (Inputs *)at, at += rounded;
  if (inputs) work->inputs = (Inputs *)at, at += inputs;
  work->order = (size_t *)at, at += order;
  work->groups = (Group *)at, at += groups;
  work->rest = rest ? (float *)at : NULL, at += rest;
  for (size_t i = 0; i < work->rows * planes; i++, at += each)
    work->rounded[i] = (Inputs){(const int8_t *)at, (const float *)(at + up(columns)),
                                (const int32_t *)(at + sums_at), (const float *)(at + totals_at)};
  return 1;
}

/* Sorts uses by their matrices, so that each tile is read once for all of them. */
static size_t group(Work *work) {
  const Sizes *sizes = work->sizes;
  size_t groups = 0, placed = 0;
  size_t *places = calloc(sizes->matrices + 1, sizeof *places);
  if (!places) return SIZE_MAX;
  for (size_t use = 0; use < work->uses; use++) places[work->chosen[use] + 1]++;
  places[0] = 0; /* those of -1 stand nowhere */
  for (size_t matrix = 0; matrix < sizes->matrices; matrix++) {
    const size_t count = places[matrix + 1];
    if (count) work->groups[groups++] = (Group){matrix, placed, count};
    places[matrix + 1] = placed, placed += count;
  }
  const size_t planes = (size_t)sizes->planes, of_row = work->uses / work->rows;
  for (size_t use = 0; use < work->uses; use++) {
    if (work->chosen[use] < 0) {
      memset(work->y + use * sizes->rows, 0, sizes->rows * sizeof *work->y);
      continue;
    }
    const size_t place = places[work->chosen[use] + 1]++;
    work->order[place] = use;
    memcpy(work->inputs + place * planes, work->rounded + use / of_row * planes,
           planes * sizeof(Inputs));
  }
  free(places);
  return groups;
}

int begin(Work *work) {
  const Sizes *sizes = work->sizes;
  for (size_t use = 0; work->chosen && use < work->uses; use++)
    if (work->chosen[use] < -1 || work->chosen[use] >= (int64_t)sizes->matrices)
      return NO_SUCH_MATRIX;
  if (!lay_out(work)) return NO_MEMORY;
  size_t groups = 1;
  if (work->chosen) {
    groups = group(work);
    if (groups == SIZE_MAX) {
      release(work->memory);
      return NO_MEMORY;
    }
  } else {
    for (size_t use = 0; use < work->uses; use++) work->order[use] = use;
    work->groups[0] = (Group){0, 0, work->uses};
  }
  /* Few parts cost little; many share the work evenly. */
  const size_t tiles = groups * sizes->tiles / 32;
  work->tiles = tiles < 1 ? 1 : tiles < TILES_AT_ONCE ? tiles : TILES_AT_ONCE;
  work->chunks = (sizes->tiles + work->tiles - 1) / work->tiles;
  work->parts = groups * work->chunks;
  return BEGUN;
}

void round_row(void *data, size_t row) {
  const Work *work = data;
  const size_t columns = work->sizes->columns, planes = (size_t)work->sizes->planes;
  float *rest = work->rest ? work->rest + row * columns : NULL;
  const float *x = work->x + row * columns;
  for (size_t plane = 0; plane < planes; plane++, x = rest) {
    const Inputs *to = work->rounded + row * planes + plane;
    work->kernels->round(x, columns, padded(work->sizes), (int8_t *)to->codes,
                         (float *)to->scales, (int32_t *)to->sums, (float *)to->totals,
                         plane + 1 < planes ? rest : NULL);
  }
}

/* A use is one or two rows of inputs, and has the sum of their products. */
void multiply(void *data, size_t part) {
  const Work *work = data;
  const Sizes *sizes = work->sizes;
  const Group group = work->groups[part / work->chunks];
  const size_t planes = (size_t)sizes->planes, at_once = MOST_AT_ONCE / planes;
  const size_t first = part % work->chunks * work->tiles;
  const size_t last = first + work->tiles < sizes->tiles ? first + work->tiles : sizes->tiles;
  const size_t bytes = sizes->blocks * (size_t)tile_bytes(sizes->type);
  const uint8_t *tiles = work->matrices[group.matrix];
  float found[MOST_AT_ONCE * ROWS];
  for (size_t at = 0; at < group.count; at += at_once) {
    const size_t count = group.count - at < at_once ? group.count - at : at_once;
    const Inputs *inputs = work->inputs + (group.first + at) * planes;
    const size_t *order = work->order + group.first + at;
    for (size_t tile = first; tile < last; tile++) {
      work->kernels->products[sizes->type](tiles + tile * bytes, sizes->blocks, inputs,
                                           (int)(count * planes), found);
      const size_t left = sizes->rows - tile * ROWS, there = left < ROWS ? left : ROWS;
      for (size_t use = 0; use < count; use++) {
        float *y = work->y + order[use] * sizes->rows + tile * ROWS;
        const float *own = found + use * planes * ROWS;
        if (planes == 1) {
          memcpy(y, own, there * sizeof *y);
        } else {
          for (size_t i = 0; i < there; i++) y[i] = own[i] + own[ROWS + i];
        }
      }
    }
  }
}
