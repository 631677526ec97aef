/* A piece of 32 columns in a type with a grid, as whole numbers.
 *
 * A row has numbers of points, a byte each, and four bytes of signs: byte j has in bit i the sign of
 * column 8 i + j, and in bit 4 + i of column 8 i + 4 + j. Where the last four bits are no signs, they
 * are the level of a scale, or further bits of the numbers. The block's head has for each piece a byte
 * of such levels, and a byte of such bits, where they are not there.
 */
/* What the four bits of a column, or of two, stand for, plus `zero_of` these. */
static const uint8_t OF_TWO[2][16] = {
    {136, 153, 171, 0, 136, 153, 171, 0, 136, 153, 171},
    {136, 136, 136, 0, 153, 153, 153, 0, 171, 171, 171},
};
static const uint8_t OF_IQ3_XXS[16] = {34, 38, 42, 46, 50, 54, 58, 63};
static const uint8_t OF_IQ3_S[16] = {17, 19, 21, 23, 25, 27, 29, 31};

typedef struct {
  B spread[8]; /* a byte has four bits of a column, or of one and the fourth after it */
  B signs;     /* a bit for each column, set for a minus */
  B levels[2];
} JOIN(Piece, NAME);

/* Four times four bits, of two that each row has, as bytes. */
INLINE B JOIN(spread, NAME)(const B two, const int is_second) {
  const B low = is_second ? W_RIGHT(two, 16) : two;
  return B_OR(W_AND(low, 0x0f0f),
              W_AND(is_second ? W_RIGHT(two, 4) : W_LEFT(two, 12), 0x0f0f0000));
}

/* bytes: of the block's head. */
INLINE JOIN(Piece, NAME) JOIN(piece, NAME)(const int type, const uint8_t *bytes,
                                           const uint8_t *units, const int piece) {
  JOIN(Piece, NAME) found;
  const int is_even = has_even_signs(type), by_signs = has_level_by_signs(type);
  const int quads = 8 / columns_of_point(type), points = count_of_points(type);
  const B word = B_LOAD(units + 64 * quads);
  found.signs = word;
  if (is_even) { /* the last of eight is the sum of the others */
    const B seven = W_AND(word, 0x0fffffff), two = B_XOR(seven, W_RIGHT(seven, 4));
    const B four = B_XOR(two, W_LEFT(two, 8)), all = B_XOR(four, W_LEFT(four, 16));
    found.signs = B_OR(seven, W_AND(W_LEFT(all, 4), 0xf0000000));
  }
  if (by_signs) {
    found.levels[0] = found.levels[1] = B_OR(W_RIGHT(word, 27), W_ALL(1));
  } else {
    const B both = W_BYTES(bytes + ROWS * piece);
    found.levels[0] = B_OR(W_AND(W_LEFT(both, 1), 30), W_ALL(1));
    found.levels[1] = B_OR(W_AND(W_RIGHT(both, 3), 30), W_ALL(1));
  }
  B more = word;
  if (!is_even) more = W_BYTES(bytes + ROWS * (256 / PIECE + piece));
  if (is_even && points > 256) more = W_RIGHT(word, 28);
#pragma GCC unroll 2
  for (int quad = 0; quad < quads; quad++) {
    const B four = B_LOAD(units + 64 * quad);
    B even = W_AND(four, 0x00ff00ff), odd = W_AND(W_RIGHT(four, 8), 0x00ff00ff);
    if (points > 256) {
      const int bits = points == 1024 ? 2 : 1, step = 8 - bits, mask = bits == 2 ? 3 : 1;
      const B own = W_RIGHT(more, 4 * quad);
      even = B_OR(even, B_OR(W_AND(W_LEFT(own, 8), mask << 8),
                             W_AND(W_LEFT(own, 8 + 2 * step), mask << 24)));
      odd = B_OR(odd, B_OR(W_AND(W_LEFT(own, step), mask << 8),
                           W_AND(W_LEFT(own, 3 * step), mask << 24)));
    }
    W_POINTS(GRID_POINTS[type - IQ2_XXS], points, &even, &odd);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      found.spread[4 * quad + 2 * i] = JOIN(spread, NAME)(even, i);
      found.spread[4 * quad + 2 * i + 1] = JOIN(spread, NAME)(odd, i);
    }
  }
  return found;
}

/* Bytes of four columns, of eight times four. */
INLINE B JOIN(four, NAME)(const int type, const JOIN(Piece, NAME) *own, const int number) {
  const int is_of_eight = columns_of_point(type) == 8;
  const uint8_t *table = is_of_eight ? OF_TWO[number & 1] : type == IQ3_S ? OF_IQ3_S : OF_IQ3_XXS;
  const B found = B_LOOK_UP(table, own->spread[is_of_eight ? number / 2 : number]);
  return B_SIGN(found, own->signs, 4 * (number & 1) + number / 2, 2 * zero_of(type));
}
