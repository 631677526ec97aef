/* Products of rows with one matrix of blocks, or of each use of a row with one of several. */
#ifndef EDGE_PRODUCT_H
#define EDGE_PRODUCT_H

#include "blocks.h"

typedef struct {
  int type;              /* see blocks.h */
  int planes;            /* 2: what rounding took from the inputs is multiplied, too */
  size_t rows, columns;  /* of each matrix */
  size_t blocks, tiles;  /* of a row; of a matrix */
  size_t matrices;
} Sizes;

/* The uses of one matrix, in the order of `Work.order`. */
typedef struct {
  size_t matrix, first, count;
} Group;

/* What the parts of a product share. The caller fills in what stands first. */
typedef struct {
  const Kernels *kernels;
  const Sizes *sizes;
  const uint8_t *const *matrices;
  const float *x;        /* [rows, columns] */
  float *y;              /* [uses, rows of a matrix] */
  size_t rows, uses;     /* each row has as many uses */
  const int64_t *chosen; /* [uses]: the matrix of each, or -1: what it gives is 0. NULL: the first */

  void *memory;
  Inputs *rounded;       /* [rows, planes] */
  Inputs *inputs;        /* [uses, planes], in order */
  float *rest;           /* [rows, columns], if there are two planes */
  size_t *order;         /* [uses]: group by group */
  Group *groups;
  size_t tiles, chunks;  /* tiles of a part; parts of a group */
  size_t parts;
} Work;

enum { BEGUN, NO_MEMORY, NO_SUCH_MATRIX };

void *aligned(size_t bytes);
void release(void *memory);

Sizes sizes_of_product(int type, size_t rows, size_t columns, size_t matrices, int planes);
size_t matrix_bytes(const Sizes *sizes);

int begin(Work *work); /* one of the above; then all rows are rounded, and then all parts multiplied */
void round_row(void *work, size_t row);
void multiply(void *work, size_t part);

#endif
