/* The operators `Attention`, `CodeAttention` and `NibbleAttention` of ONNX Runtime's graphs: new tokens of each request
 * attend to the keys and values of all tokens up to them, after their own were appended. Inputs, of which
 * those that may be missing stand in brackets:
 *   query [batch, rows, heads * size], or with keys and values behind it, [key], [value], keys, values
 *   [batch, kv_heads, context, size] (float; int8 of CodeAttention; of NibbleAttention uint8 with half the
 *   size, see attention.h), last int32 [batch] (the number of
 *   the newest key), [cos], [sin] [positions, turned / 2], [turns] int64 [batch, rows] (rows of these),
 *   [sinks] [heads], [key scales], [value scales] [kv_heads, size], [counts] int32 [requests],
 *   [unrounded] float [batch, 2 * kv_heads, 1 + newest, size], see attention.h, [sees all] bool scalar:
 *   whether a row sees those of its request behind it, too.
 * With counts, these are the rows of each request, which lie one behind the other; the caches say how many
 * requests there are.
 * Outputs: as the query [..., heads * size], keys, values and unrounded ones, if there are some; all but the
 * first are meant to be the inputs' memory.
 * Attributes: heads, kv_heads, size, turned (elements), interleaved (0 or 1), scale (the bits of a
 * float32), window (keys that a row sees, its own included; 0: all), is_ring (0 or 1: whether caches hold
 * the newest keys only, see attention.h), cap (the bits of a float32; 0: none), is_joined (0 or 1: whether keys
 * and values are halves of rows, see attention.h; then queries and output are [batch, rows, heads * 2 * size]).
 */
#include "attention.h"
#include "onnxruntime_abi.h"

#include <stdlib.h>
#include <string.h>

enum { QUERY, KEY, VALUE, KEYS, VALUES, LAST, COS, SIN, TURNS, SINKS, KEY_SCALES, VALUE_SCALES,
       COUNTS, UNROUNDED, SEES_ALL, INPUTS };
static const int64_t LARGEST = 1 << 20; /* of heads: no size overflows */
enum { FEW_ROWS = 8 /* which one thread prepares sooner */ };

typedef struct {
  const Api *api;
  Form form;
} Attention;

typedef struct {
  const Value *value;
  void *data;
  int64_t sizes[8];
  size_t rank, count;
} Input;

static void ORT_CALL destroy(void *kernel) { free(kernel); }

static float float_of(int64_t bits) {
  const uint32_t own = (uint32_t)bits;
  float found;
  memcpy(&found, &own, sizeof found);
  return found;
}

static Status *read_form(Attention *self, const Info *info) {
  int64_t heads, kv_heads, size, turned, interleaved, scale, window, is_ring, cap, is_joined;
  const struct {
    const char *name;
    int64_t *to;
  } read[] = {{"heads", &heads}, {"kv_heads", &kv_heads}, {"size", &size},
              {"turned", &turned}, {"interleaved", &interleaved}, {"scale", &scale},
              {"window", &window}, {"is_ring", &is_ring}, {"cap", &cap},
              {"is_joined", &is_joined}};
  for (size_t i = 0; i < sizeof read / sizeof *read; i++) {
    Status *error = ORT_INTEGER(self->api, info, read[i].name, read[i].to);
    if (error) return error;
  }
  if (kv_heads < 1 || heads < 1 || heads > LARGEST || heads % kv_heads || size < 8 || size % 8 ||
      size > MOST_SIZE || turned < 0 || turned > size || turned % 2 || window < 0 ||
      window > INT32_MAX || (is_ring && !window) ||
      (is_joined && (self->form.bits != 32 || kv_heads != 1 || turned || window)))
    return ORT_STATUS(self->api, ORT_INVALID_ARGUMENT, "heads of another form");
  self->form.scale = float_of(scale), self->form.cap = float_of(cap);
  self->form.window = (size_t)window, self->form.is_ring = is_ring != 0;
  self->form.is_joined = is_joined != 0;
  self->form.heads = (size_t)heads, self->form.kv_heads = (size_t)kv_heads;
  self->form.size = (size_t)size, self->form.turned = (size_t)turned;
  self->form.interleaved = (int)interleaved;
  return NULL;
}

static Status *create(const Api *api, const Info *info, int bits, void **to) {
  Attention *self = calloc(1, sizeof *self);
  if (!self) return ORT_STATUS(api, ORT_FAIL, "no memory");
  self->api = api;
  self->form.bits = bits;
  Status *error = read_form(self, info);
  if (error) {
    destroy(self);
    return error;
  }
  *to = self;
  return NULL;
}

static Status *ORT_CALL create_plain(const Operator *op, const Api *api, const Info *info, void **to) {
  return (void)op, create(api, info, 32, to);
}
static Status *ORT_CALL create_coded(const Operator *op, const Api *api, const Info *info, void **to) {
  return (void)op, create(api, info, 8, to);
}
static Status *ORT_CALL create_halved(const Operator *op, const Api *api, const Info *info, void **to) {
  return (void)op, create(api, info, 4, to);
}

static Status *read_inputs(const Api *api, Context *context, Input inputs[INPUTS]) {
  for (size_t i = 0; i < INPUTS; i++) {
    Input *input = inputs + i;
    Status *error = ORT_INPUT(api, context, i, &input->value);
    if (error || !input->value) {
      if (error) return error;
      continue;
    }
    error = sizes_of(api, input->value, input->sizes, &input->rank);
    if (!error) error = ORT_DATA(api, input->value, &input->data);
    if (error) return error;
    input->count = count_of(input->sizes, input->rank);
  }
  return NULL;
}

/* What is wrong with these inputs, or NULL. */
static const char *fault(const Form *form, const Input inputs[INPUTS], Attending *work) {
  const Input *keys = inputs + KEYS, *last = inputs + LAST;
  const size_t half = form->turned / 2, of_heads = form->kv_heads * form->size;
  if (!inputs[QUERY].data || !keys->data || !inputs[VALUES].data || !last->data || keys->rank != 4)
    return "an attention without keys";
  const Input *query = inputs + QUERY, *counts = inputs + COUNTS;
  work->requests = (size_t)keys->sizes[0], work->context = (size_t)keys->sizes[2];
  if (query->rank != 3) return "a query of another rank";
  const size_t batch = (size_t)query->sizes[0], new = batch * (size_t)query->sizes[1];
  work->rows = new;
  if (form->is_joined && form->is_packed) return "joined keys without rows";
  const size_t own = form->heads * form->size * (form->is_joined ? 2 : 1);
  const size_t tokens = form->is_packed ? own + 2 * of_heads : own;
  const size_t elements = form->bits == 4 ? form->size / 2 : form->size;
  if ((size_t)keys->sizes[1] != form->kv_heads || (size_t)keys->sizes[3] != elements ||
      inputs[VALUES].count != keys->count || last->count != work->requests ||
      (work->requests && !new) || query->count != new * tokens ||
      (counts->value ? counts->count : batch) != work->requests)
    return "an attention of other sizes";
  if (!form->is_packed && (inputs[KEY].count != new * of_heads ||
                           inputs[VALUE].count != new * of_heads))
    return "keys of other sizes";
  if (form->turned && (!inputs[COS].data || inputs[SIN].count != inputs[COS].count))
    return "no angles";
  if (inputs[TURNS].value && inputs[TURNS].count != new) return "turns of other requests";
  if (inputs[SINKS].value && inputs[SINKS].count != form->heads) return "sinks of other heads";
  const Input *unrounded = inputs + UNROUNDED;
  if (unrounded->value) {
    if (form->bits != 4 || unrounded->rank != 4 || unrounded->sizes[2] < 2)
      return "unrounded keys of another form";
    work->newest = (size_t)unrounded->sizes[2] - 1;
    if ((size_t)unrounded->sizes[0] != work->requests ||
        (size_t)unrounded->sizes[1] != 2 * form->kv_heads || (size_t)unrounded->sizes[3] != form->size)
      return "unrounded keys of other sizes";
  }
  if (form->bits != 32 &&
      (inputs[KEY_SCALES].count != of_heads || inputs[VALUE_SCALES].count != of_heads))
    return "codes without scales";
  if (form->is_ring && form->window > work->context) return "no room for a window";
  const Input *sees_all = inputs + SEES_ALL;
  if (sees_all->value && sees_all->count != 1) return "several answers to whether rows see all";
  work->sees_all = sees_all->value && *(const uint8_t *)sees_all->data;
  size_t left = new;
  for (size_t i = 0; i < work->requests; i++) {
    const int32_t at = ((const int32_t *)last->data)[i];
    const int32_t own = counts->value ? ((const int32_t *)counts->data)[i] : 1;
    if (own < 1 || (size_t)own > left) return "rows of other requests";
    const size_t rows = counts->value ? (size_t)own : (size_t)query->sizes[1];
    left -= rows;
    if (at < 0 || at == INT32_MAX || (!form->is_ring && (size_t)at >= work->context))
      return "a key behind the end";
    if ((size_t)at + 1 < rows) return "keys before the first";
    if (half && !inputs[TURNS].data && (size_t)at >= inputs[COS].count / half) return "no such angle";
  }
  if (left) return "rows of no request";
  for (size_t i = 0; half && inputs[TURNS].data && i < new; i++) {
    const int64_t turn = ((const int64_t *)inputs[TURNS].data)[i];
    if (turn < 0 || (size_t)turn >= inputs[COS].count / half) return "no such angle";
  }
  return NULL;
}

/* An output of the cache, which is the input's memory or a copy of it. */
static Status *present(const Api *api, Context *context, size_t output, const Input *past,
                       size_t element, void **data) {
  Value *value = NULL;
  Status *error = ORT_OUTPUT(api, context, output, past->sizes, past->rank, &value);
  if (!error && !value) return ORT_STATUS(api, ORT_INVALID_ARGUMENT, "an input without its output");
  if (!error) error = ORT_DATA(api, value, data);
  if (!error && *data != past->data) memcpy(*data, past->data, past->count * element);
  return error;
}

static Status *ORT_CALL compute(void *kernel, Context *context) {
  const Attention *self = kernel;
  const Api *api = self->api;
  Input inputs[INPUTS] = {{0}};
  Status *error = read_inputs(api, context, inputs);
  if (error) return error;
  Form form = self->form;
  form.is_packed = !inputs[KEY].value;
  Attending work = {
      .form = &form,
      .query = inputs[QUERY].data,
      .key = inputs[KEY].data,
      .value = inputs[VALUE].data,
      .last = inputs[LAST].data,
      .cos = inputs[COS].data,
      .sin = inputs[SIN].data,
      .turns = inputs[TURNS].data,
      .sinks = inputs[SINKS].data,
      .key_scales = inputs[KEY_SCALES].data,
      .value_scales = inputs[VALUE_SCALES].data,
      .counts = inputs[COUNTS].data,
  };
  const char *wrong = fault(&form, inputs, &work);
  if (wrong) return ORT_STATUS(api, ORT_INVALID_ARGUMENT, wrong);
  const size_t element = form.bits == 32 ? sizeof(float) : 1;
  const int64_t *of_query = inputs[QUERY].sizes;
  const size_t columns = form.heads * form.size * (form.is_joined ? 2 : 1);
  const int64_t sizes[] = {of_query[0], of_query[1], (int64_t)columns};
  Value *output = NULL;
  error = ORT_OUTPUT(api, context, 0, sizes, 3, &output);
  if (!error) error = ORT_DATA(api, output, (void **)&work.output);
  if (!error) error = present(api, context, 1, inputs + KEYS, element, &work.keys);
  if (!error) error = present(api, context, 2, inputs + VALUES, element, &work.values);
  if (!error && inputs[UNROUNDED].value)
    error = present(api, context, 3, inputs + UNROUNDED, sizeof(float), (void **)&work.unrounded);
  if (error || !work.requests) return error;
  if (!begin_attention(&work)) return ORT_STATUS(api, ORT_FAIL, "no memory for attention");
  if (work.rows < FEW_ROWS)
    for (size_t row = 0; row < work.rows; row++) prepare_row(&work, row);
  else
    error = ORT_PARALLEL(api, context, prepare_row, work.rows, 0, &work);
  const int is_prepared = !error;
  if (!error) error = ORT_PARALLEL(api, context, attend, work.parts, 0, &work);
  end_attention(&work, is_prepared, !error);
  return error;
}

static const char *ORT_CALL plain_name(const Operator *op) { return (void)op, "Attention"; }
static const char *ORT_CALL coded_name(const Operator *op) { return (void)op, "CodeAttention"; }
static const char *ORT_CALL halved_name(const Operator *op) { return (void)op, "NibbleAttention"; }
static int input_type(size_t i, int cache) {
  if (i == KEYS || i == VALUES) return cache;
  return i == LAST || i == COUNTS ? ORT_INT32 : i == SEES_ALL ? ORT_BOOL : i == TURNS ? ORT_INT64 : ORT_FLOAT;
}
static int ORT_CALL plain_input(const Operator *op, size_t i) {
  return (void)op, input_type(i, ORT_FLOAT);
}
static int ORT_CALL coded_input(const Operator *op, size_t i) {
  return (void)op, input_type(i, ORT_INT8);
}
static int ORT_CALL halved_input(const Operator *op, size_t i) {
  return (void)op, input_type(i, ORT_UINT8);
}
static int ORT_CALL plain_output(const Operator *op, size_t i) {
  return (void)op, (void)i, ORT_FLOAT;
}
static int ORT_CALL coded_output(const Operator *op, size_t i) {
  return (void)op, i == 1 || i == 2 ? ORT_INT8 : ORT_FLOAT;
}
static int ORT_CALL halved_output(const Operator *op, size_t i) {
  return (void)op, i == 1 || i == 2 ? ORT_UINT8 : ORT_FLOAT;
}
static int ORT_CALL output_kind(const Operator *op, size_t i) {
  return (void)op, i < 3 ? ORT_REQUIRED : ORT_OPTIONAL;
}
static int ORT_CALL input_kind(const Operator *op, size_t i) {
  return (void)op, i == QUERY || (KEYS <= i && i <= LAST) ? ORT_REQUIRED : ORT_OPTIONAL;
}
static size_t ORT_CALL inputs(const Operator *op) { return (void)op, INPUTS; }
static size_t ORT_CALL outputs(const Operator *op) { return (void)op, 4; }

#define DESCRIBED(which)                                                                           \
  {                                                                                                \
    .version = ORT_VERSION, .name = which##_name, .provider = on_cpu, .input_type = which##_input, \
    .inputs = inputs, .output_type = which##_output, .outputs = outputs, .destroy = destroy,       \
    .input_kind = input_kind, .output_kind = output_kind, .input_memory = default_memory,      \
    .variadic = {always_one, always_one, always_one, always_one},                                  \
    .create_checked = create_##which, .compute_checked = compute, .first_version = always_one,     \
    .last_version = always_one,                                                                    \
  }

const Operator *operator_of_attention(size_t number) {
  static const Operator described[] = {DESCRIBED(plain), DESCRIBED(coded), DESCRIBED(halved)};
  return number < sizeof described / sizeof *described ? described + number : NULL;
}
