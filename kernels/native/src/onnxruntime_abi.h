/* The part of ONNX Runtime's C interface that an operator of one's own needs.
 *
 * The interface is a table of functions whose places never change; a newer version only adds to its
 * end. So these few declarations stand for its header, which no wheel has. Places and signatures:
 * onnxruntime_c_api.h, version 17.
 */
#ifndef EDGE_ONNXRUNTIME_ABI_H
#define EDGE_ONNXRUNTIME_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef _WIN32
#define ORT_CALL __stdcall
#else
#define ORT_CALL
#endif

enum { ORT_VERSION = 17 };
enum { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };
enum { ORT_FLOAT = 1, ORT_UINT8 = 2, ORT_INT8 = 3, ORT_INT32 = 6, ORT_INT64 = 7, ORT_BOOL = 9 };
enum { ORT_REQUIRED, ORT_OPTIONAL, ORT_VARIADIC };

typedef struct Status Status; /* NULL: success */
typedef struct Options Options;
typedef struct Domain Domain;
typedef struct Value Value;
typedef struct Shape Shape;
typedef struct Info Info;
typedef struct Context Context;
typedef void (*Api)(void); /* one function of the table */

typedef struct {
  const Api *(ORT_CALL *get)(uint32_t version);
  const char *(ORT_CALL *version)(void);
} ApiBase;

typedef struct Operator {
  uint32_t version;
  void *(ORT_CALL *create)(const struct Operator *, const Api *, const Info *);
  const char *(ORT_CALL *name)(const struct Operator *);
  const char *(ORT_CALL *provider)(const struct Operator *);
  int(ORT_CALL *input_type)(const struct Operator *, size_t);
  size_t(ORT_CALL *inputs)(const struct Operator *);
  int(ORT_CALL *output_type)(const struct Operator *, size_t);
  size_t(ORT_CALL *outputs)(const struct Operator *);
  void(ORT_CALL *compute)(void *, Context *);
  void(ORT_CALL *destroy)(void *);
  int(ORT_CALL *input_kind)(const struct Operator *, size_t);
  int(ORT_CALL *output_kind)(const struct Operator *, size_t);
  int(ORT_CALL *input_memory)(const struct Operator *, size_t);
  int(ORT_CALL *variadic[4])(const struct Operator *);
  Status *(ORT_CALL *create_checked)(const struct Operator *, const Api *, const Info *, void **);
  Status *(ORT_CALL *compute_checked)(void *, Context *);
  Status *(ORT_CALL *infer)(const struct Operator *, void *);
  int(ORT_CALL *first_version)(const struct Operator *);
  int(ORT_CALL *last_version)(const struct Operator *);
  size_t(ORT_CALL *may_alias)(int **, int **);
  void(ORT_CALL *release_may_alias)(int *, int *);
  size_t(ORT_CALL *aliases)(int **, int **);
  void(ORT_CALL *release_aliases)(int *, int *);
} Operator;

#define ORT_STATUS(api, code, text) \
  ((Status * (ORT_CALL *)(int, const char *))(api)[0])(code, text)
#define ORT_NEW_DOMAIN(api, name, to) \
  ((Status * (ORT_CALL *)(const char *, Domain **))(api)[26])(name, to)
#define ORT_ADD_OPERATOR(api, domain, op) \
  ((Status * (ORT_CALL *)(Domain *, const Operator *))(api)[27])(domain, op)
#define ORT_ADD_DOMAIN(api, options, domain) \
  ((Status * (ORT_CALL *)(Options *, Domain *))(api)[28])(options, domain)
#define ORT_DATA(api, value, to) \
  ((Status * (ORT_CALL *)(const Value *, void **))(api)[51])(value, to)
#define ORT_RANK(api, shape, to) \
  ((Status * (ORT_CALL *)(const Shape *, size_t *))(api)[61])(shape, to)
#define ORT_SIZES(api, shape, to, rank) \
  ((Status * (ORT_CALL *)(const Shape *, int64_t *, size_t))(api)[62])(shape, to, rank)
#define ORT_SHAPE(api, value, to) \
  ((Status * (ORT_CALL *)(const Value *, Shape **))(api)[65])(value, to)
#define ORT_INTEGER(api, info, name, to) \
  ((Status * (ORT_CALL *)(const Info *, const char *, int64_t *))(api)[86])(info, name, to)
#define ORT_INPUT(api, context, index, to) \
  ((Status * (ORT_CALL *)(const Context *, size_t, const Value **))(api)[90])(context, index, to)
#define ORT_OUTPUT(api, context, index, sizes, rank, to)                                      \
  ((Status * (ORT_CALL *)(Context *, size_t, const int64_t *, size_t, Value **))(api)[91])( \
      context, index, sizes, rank, to)
#define ORT_FREE_SHAPE(api, shape) ((void(ORT_CALL *)(Shape *))(api)[99])(shape)
#define ORT_CONSTANT(api, info, index, is, to)                                           \
  ((Status * (ORT_CALL *)(const Info *, size_t, int *, const Value **))(api)[249])( \
      info, index, is, to)
#define ORT_PARALLEL(api, context, function, total, batches, data)                          \
  ((Status * (ORT_CALL *)(const Context *, void (*)(void *, size_t), size_t, size_t, void *))( \
      api)[274])(context, function, total, batches, data)

/* Sizes of a value; NULL, or the error. */
static inline Status *sizes_of(const Api *api, const Value *value, int64_t sizes[8], size_t *rank) {
  Shape *shape = NULL;
  Status *error = ORT_SHAPE(api, value, &shape);
  if (error) return error;
  error = ORT_RANK(api, shape, rank);
  if (!error && *rank > 8) error = ORT_STATUS(api, ORT_INVALID_ARGUMENT, "more than 8 dimensions");
  if (!error) error = ORT_SIZES(api, shape, sizes, *rank);
  ORT_FREE_SHAPE(api, shape);
  return error;
}

static inline size_t count_of(const int64_t *sizes, size_t rank) {
  size_t count = 1;
  for (size_t i = 0; i < rank; i++) count *= (size_t)sizes[i];
  return count;
}

/* Of an operator's description. */
static inline const char *ORT_CALL on_cpu(const Operator *op) {
  return (void)op, "CPUExecutionProvider";
}
static inline int ORT_CALL always_one(const Operator *op) { return (void)op, 1; }
static inline int ORT_CALL default_memory(const Operator *op, size_t i) {
  return (void)op, (void)i, 0;
}
static inline int ORT_CALL always_required(const Operator *op, size_t i) {
  return (void)op, (void)i, ORT_REQUIRED;
}

#endif
