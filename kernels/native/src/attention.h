/* Attention of one token of each request to its keys and values. */
#ifndef EDGE_ATTENTION_H
#define EDGE_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

enum {
  MOST_SIZE = 512,   /* elements of a head, which are a multiple of 8 */
  MOST_SHARING = 8,  /* heads of a part, which share keys and values */
  PART_KEYS = 512,   /* keys of a part: where they are summed up does not depend on threads */
};

typedef struct {
  size_t heads, kv_heads, size;
  size_t turned; /* the first elements of a head are turned; 0: none, or they are already */
  int interleaved, is_packed, has_codes;
  float scale;
} Form;

/* What the parts share. The caller fills in what stands first. */
typedef struct {
  const Form *form;
  size_t batch, context;           /* rows of a cache */
  const float *query, *key, *value; /* [batch, heads · size]; all of a request, if they are packed */
  void *keys, *values;             /* [batch, kv_heads, context, size]: float, or int8 */
  const int32_t *last;             /* [batch]: the number of the new key */
  const float *cos, *sin;          /* [positions, turned / 2] */
  const int64_t *turns;            /* [batch]: rows of these; NULL: the new keys' numbers */
  const float *sinks;              /* [heads], or NULL */
  const float *key_scales, *value_scales; /* [kv_heads, size] of codes */
  float *output;                   /* [batch, heads · size] */

  void *memory;
  float *turned;                   /* [batch, heads, size]: the query, scaled */
  float *found;                    /* [parts, heads of a group, 2 + size]: largest score, sum of weights,
                                      sum of values */
  size_t groups, chunks, parts;    /* of a key head; of a group; of all */
} Attending;

/* Appends the new keys and values. 0: there is no memory. Then all parts attend, and then `merge` puts
 * them together and frees. */
int begin_attention(Attending *work);
void attend(void *work, size_t part);
void merge_parts(Attending *work);

struct Operator;
const struct Operator *operator_of_attention(int has_codes);

#endif
