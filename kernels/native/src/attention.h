/* Attention of new tokens of each request to its keys and values, and to those of their own before them. */
#ifndef EDGE_ATTENTION_H
#define EDGE_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

enum {
  MOST_SIZE = 512,   /* elements of a head, which are a multiple of 8 */
  MOST_QUERIES = 24, /* of a block, which share keys and values: heads of rows */
  PART_KEYS = 512,   /* keys of a part: where they are summed up does not depend on threads */
  ENOUGH_PARTS = 32, /* with fewer, parts of a block's keys are computed apart */
};

typedef struct {
  size_t heads, kv_heads, size;
  size_t turned; /* the first elements of a head are turned; 0: none, or they are already */
  size_t window; /* keys that a row sees, its own included; 0: all before it */
  int interleaved, is_packed;
  int bits;      /* of an element of the caches: 32 of floats, 8 or 4 of codes */
  int is_ring;   /* whether a cache has the newest keys only: see `first_kept` */
  int is_joined; /* whether a row of the one cache and that of the other, one behind the other, are both a
                  * key and its value, as in latent attention: of floats, of one key head, without a window;
                  * queries and outputs are as long */
  float scale, cap; /* cap: scores become cap * tanh(score / cap); 0: they stay */
} Form;

/* What the parts share. The caller fills in what stands first. */
typedef struct {
  const Form *form;
  size_t requests, rows, context;  /* of all requests; rows of a cache */
  const int32_t *counts;           /* [requests]: rows of each, at least one; NULL: as many of each */
  const float *query, *key, *value; /* [rows, heads · size]; all of a row, if they are packed */
  void *keys, *values;             /* [requests, kv_heads, context, size]: float, int8, or code + 8 in
                                    * half a byte, the even element's in the lower */
  const int32_t *last;             /* [requests]: the number of the newest key */
  const float *cos, *sin;          /* [positions, turned / 2] */
  const int64_t *turns;            /* [rows]: rows of these; NULL: the new keys' numbers */
  const float *sinks;              /* [heads], or NULL */
  const float *key_scales, *value_scales; /* [kv_heads, size] of codes */
  float *unrounded; /* [requests, 2 * kv_heads, 1 + newest, size], or NULL, with codes of 4 bits alone: keys
                     * and values over their scales, of key 0, and behind it of the newest: key k in row
                     * 1 + k % newest */
  size_t newest;    /* of the keys that a row sees, its own included, which it sees unrounded */
  int sees_all;     /* whether rows see those behind them, too */
  float *output;                   /* [rows, heads · size] */

  void *memory;
  size_t *starts, *firsts;         /* [requests + 1]: rows before each; blocks before each */
  size_t *bases;                   /* [requests]: the key in the first row of its caches */
  size_t *stages;                  /* [requests + 1]: bytes of `staged` before its own, see `is_staged` */
  char *staged;
  float *turned;                   /* scaled queries, by half: of each request [kv_heads, its rows, heads of a
                                    * key head, size] */
  float *fresh;                    /* unrounded keys of all rows, as `turned`, then their values */
  float *found;                    /* [blocks of all, chunks, halves, queries of this block, 2 + size] */
  int is_divided;                  /* whether each chunk of a block is a part */
  size_t chunks, parts;            /* of a block, at most; of all */
} Attending;

/* 0: there is no memory. Then all rows are prepared, which appends the new keys and values;
 * then all parts attend; then `end_attention` puts them together, if all did, and frees. It keeps
 * new keys only if all rows were prepared. */
int begin_attention(Attending *work);
void prepare_row(void *work, size_t row);
void attend(void *work, size_t part);
void end_attention(Attending *work, int is_prepared, int is_whole);

struct Operator;
const struct Operator *operator_of_attention(size_t number); /* NULL behind the last */

#endif
