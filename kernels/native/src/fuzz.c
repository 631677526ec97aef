/* Random bytes as blocks and as inputs, for every type and all kernels of this processor, which must
 * agree bit for bit: fuzz SECONDS. scripts/fuzz-kernels builds it with sanitizers.
 */
#include "attention.h"
#include "blocks.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int edge_kernels_try(const char *, int, const uint8_t *, size_t, size_t, const float *, size_t,
                     const int64_t *, size_t, float *);
int edge_kernels_round(int, const float *, size_t, uint8_t *, float *, float *, uint8_t *,
                       uint8_t *);

static uint64_t state = 1;
static uint32_t next(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 32);
}

/* Any floats, of all sizes and none, rounded to blocks. */
static void round_some(int type) {
  const size_t blocks = 1 + next() % 40, columns = (size_t)block_of(type);
  const size_t runs = columns / (size_t)run_of(type);
  float *weights = malloc(blocks * columns * sizeof *weights);
  float *scales = malloc(blocks * sizeof *scales), *minima = malloc(blocks * sizeof *minima);
  uint8_t *codes = malloc(blocks * columns);
  uint8_t *levels = malloc(blocks * runs), *least = malloc(blocks * runs);
  const uint32_t finite = next() % 2;
  for (size_t i = 0; i < blocks * columns; i++) {
    const uint32_t bits = next();
    memcpy(weights + i, &bits, sizeof bits);
    if (finite) weights[i] = (float)(int32_t)bits / 1e9f;
  }
  (void)edge_kernels_round(type, weights, blocks, codes, scales, minima, levels, least);
  free(weights), free(scales), free(minima), free(codes), free(levels), free(least);
}

int plain_begin(Attending *);
void plain_prepare(void *, size_t);
void plain_attend(void *, size_t);
void plain_end(Attending *, int, int);

static float *any_floats(size_t count, float most) {
  float *found = malloc(count * sizeof *found);
  for (size_t i = 0; i < count; i++) {
    const uint32_t bits = next();
    memcpy(found + i, &bits, sizeof bits);
    if (most != 0) found[i] = (float)(int32_t)bits / 2147483648.0f * most;
  }
  return found;
}

/* Attention in buffers of the exact sizes, by the kernels of this processor and by plain ones. */
static int attend_some(void) {
  static const int64_t no_turns[80];
  const float most = next() % 2 ? 0 : 4; /* 0: any bits */
  Form form = {.kv_heads = 1 + next() % 3, .size = 8 * (1 + next() % (next() % 2 ? 20 : 64)), .scale = 0.2f};
  form.heads = form.kv_heads * (1 + next() % 11);
  form.turned = next() % 2 ? form.size : 0;
  form.interleaved = next() % 2, form.is_packed = next() % 2;
  form.bits = (const int[]){32, 8, 4}[next() % 3];
  const size_t batch = 1 + next() % 2, context = 1 + next() % 1200, half = form.turned / 2;
  const size_t most_rows = context < 40 ? context : 40;
  const int32_t both = next() % 2 ? 1 : 1 + (int32_t)(next() % most_rows);
  const int32_t counts[] = {both, next() % 2 ? both : 1 + (int32_t)(next() % most_rows)};
  const size_t rows = (size_t)(counts[0] + (batch > 1 ? counts[1] : 0));
  if (next() % 2) form.window = 1 + next() % context, form.is_ring = next() % 2;
  if (next() % 3 == 0) form.cap = 5;
  if (form.bits == 32 && !form.window && next() % 2) {
    form.is_joined = 1, form.heads = 1 + next() % 40, form.kv_heads = 1;
    form.turned = 0, form.is_packed = 0;
  }
  const size_t positions = form.is_ring ? 3 * context : context;
  const int is_uneven = batch > 1 && counts[0] != counts[1];
  const size_t shared = form.kv_heads * form.size;
  const size_t query = form.heads * form.size * (form.is_joined ? 2 : 1);
  const size_t cache = batch * shared * context * (size_t)form.bits / 8;
  const size_t newest = form.bits == 4 && next() % 2 ? 1 + next() % 50 : 0;
  const size_t kept = batch * 2 * shared * (1 + newest);
  const size_t columns = query + (form.is_packed ? 2 * shared : 0);
  const uint32_t has_sinks = next() % 2;
  int32_t last[2];
  for (size_t i = 0; i < batch; i++)
    last[i] = counts[i] - 1 + (int32_t)(next() % (positions + 1 - (size_t)counts[i]));
  float *floats[] = {
      any_floats(rows * columns, most), any_floats(rows * shared, most),
      any_floats(rows * shared, most),  any_floats(positions * half, 1),
      any_floats(positions * half, 1),  any_floats(form.heads, most),
      any_floats(shared, 1),            any_floats(shared, 1),
  };
  float *output[2];
  for (int i = 0; i < 2; i++) output[i] = malloc(rows * query * sizeof(float));
  void *caches[6];
  const size_t sizes[] = {(cache + 3) / 4 * 4, (cache + 3) / 4 * 4, kept * sizeof(float)};
  for (int i = 0; i < 6; i += 2) {
    caches[i] = any_floats(sizes[i / 2] / 4, most);
    caches[i + 1] = malloc(sizes[i / 2]);
    memcpy(caches[i + 1], caches[i], sizes[i / 2]);
  }
  for (int plain = 0; plain < 2; plain++) {
    Attending work = {
        .form = &form, .requests = batch, .rows = rows, .context = context,
        .counts = is_uneven || context % 2 ? counts : NULL, .query = floats[0], .key = floats[1],
        .value = floats[2], .keys = caches[plain], .values = caches[2 + plain], .last = last,
        .cos = floats[3], .sin = floats[4], .turns = context > 8 ? NULL : no_turns,
        .sinks = has_sinks ? floats[5] : NULL, .key_scales = floats[6], .value_scales = floats[7],
        .output = output[plain], .unrounded = newest ? caches[4 + plain] : NULL, .newest = newest,
        .sees_all = has_sinks && context % 3 == 0,
    };
    if (!(plain ? plain_begin : begin_attention)(&work)) return 0;
    for (size_t row = 0; row < rows; row++)
      (plain ? plain_prepare : prepare_row)(&work, row);
    for (size_t part = 0; part < work.parts; part++) (plain ? plain_attend : attend)(&work, part);
    (plain ? plain_end : end_attention)(&work, 1, 1);
  }
  /* NaN may have other bits in the cache. */
  int same = most == 0 || (!memcmp(caches[0], caches[1], cache) &&
                           !memcmp(caches[2], caches[3], cache) &&
                           !memcmp(caches[4], caches[5], sizes[2]));
  for (size_t i = 0; i < rows * query; i++)
    same &= !memcmp(output[0] + i, output[1] + i, sizeof(float)) ||
            (isnan(output[0][i]) && isnan(output[1][i]));
  for (int i = 0; i < 8; i++) free(floats[i]);
  for (int i = 0; i < 6; i++) free(caches[i]);
  free(output[0]), free(output[1]);
  if (!same) fprintf(stderr, "attention differs from plain\n");
  return same;
}

int main(int count, char **words) {
  static const char *const names[] = {"avx2", "avx_vnni", "avx512", "neon"};
  const time_t end = time(NULL) + (count > 1 ? atoi(words[1]) : 1);
  long tried = 0, compared = 0;
  do {
    const int type = (int)(next() % TYPES);
    const size_t rows = 1 + next() % 9, columns = 1 + next() % 700, block = (size_t)block_of(type);
    const size_t matrices = next() % 2 ? 1 : 1 + next() % 5;
    const size_t uses = matrices > 1 ? rows * (1 + next() % 4) : rows;
    const size_t bytes = matrices * ((columns + block - 1) / block) * (size_t)tile_bytes(type);
    uint8_t *tile = malloc(bytes); /* of the exact size: what is read beyond it is found */
    float *x = malloc(rows * columns * sizeof *x);
    float *y = malloc(uses * ROWS * sizeof *y), *z = malloc(uses * ROWS * sizeof *z);
    int64_t *chosen = malloc(uses * sizeof *chosen); /* some of no matrix */
    for (size_t i = 0; i < uses; i++) chosen[i] = (int64_t)(next() % (matrices + 1)) - 1;
    const int64_t *given = matrices > 1 ? chosen : NULL;
    for (size_t i = 0; i < bytes; i++) tile[i] = (uint8_t)next();
    for (size_t i = 0; i < rows * columns; i++) {
      const uint32_t bits = next();
      if (tried % 2)
        x[i] = (float)(int32_t)bits / 65536;
      else
        memcpy(x + i, &bits, sizeof bits);
    }
    if (!edge_kernels_try("plain", type, tile, matrices, columns, x, rows, given, uses, y)) return 1;
    for (int name = 0; name < 4; name++) {
      if (!edge_kernels_try(names[name], type, tile, matrices, columns, x, rows, given, uses, z))
        continue;
      compared++;
      for (size_t i = 0; i < uses * ROWS; i++)
        if (memcmp(y + i, z + i, sizeof *y) && !(isnan(y[i]) && isnan(z[i]))) {
          fprintf(stderr, "%s differs from plain in type %d with %zu columns: %g, not %g\n",
                  names[name], type, columns, z[i], y[i]);
          return 1;
        }
    }
    chosen[next() % uses] = next() % 2 ? (int64_t)matrices : -2 - (int64_t)(next() % 9);
    if (edge_kernels_try("plain", type, tile, matrices, columns, x, rows, chosen, uses, y)) {
      fprintf(stderr, "a number of no matrix was taken\n");
      return 1;
    }
    free(tile), free(x), free(y), free(z), free(chosen);
    round_some(type);
    if (!attend_some()) return 1;
    tried++;
  } while (time(NULL) < end);
  printf("%ld products tried, %ld compared\n", tried, compared);
  return 0;
}
