"""Types of blocks whose codes are numbers of points of a grid: IQ2 and IQ3 of GGUF files.

A point has 8 columns, or 4, without signs. A row's block is:

    d                                   float16
    levels of scales                    a byte for each piece: one of 4 bits, or one for each run
    further bits of a piece's numbers   a byte for each piece
    and for each piece of 32 columns:
      numbers of points                 a byte each
      signs, set for a minus            byte j: in bit i of column 8 i + j,
                                        in bit 4 + i of column 8 i + 4 + j

Of types whose minus signs are even in number for each 8 columns, the last of eight is not there.
The last four bits are the level then, and there are no bytes of levels; or, with more than 256
points, they are the further bits of the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_MINUS = 8
"""The bit of a code for the sign; the others are a digit of a point."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PointGrid:
    """points: digits uint8 [points, columns of a point]. sizes: what digits stand for. share: what
    scales are multiplied by, beside their levels, which are odd."""

    points: Bytes
    sizes: tuple[int, ...]
    share: float
    has_even_signs: bool

    @property
    def columns(self) -> int:
        """Columns of a point."""
        return len(self.points[0])

    @property
    def table(self) -> NDArray[np.int8]:
        """What codes stand for: digits, and behind them those with a minus."""
        digits = np.zeros(_MINUS, np.int8)
        digits[: len(self.sizes)] = self.sizes
        return np.concatenate([digits, -digits])

    @property
    def more_bits(self) -> int:
        """Bits of a number beyond eight."""
        return len(self.points).bit_length() - 9

    @property
    def has_level_by_signs(self) -> bool:
        return self.has_even_signs and not self.more_bits

    @property
    def head_bytes(self) -> int:
        """Bytes of each piece beside its units of four bytes."""
        return (not self.has_level_by_signs) + (not self.has_even_signs)

    def packed(self, codes: Bytes, levels: Bytes) -> tuple[list[Bytes], Bytes]:
        """codes [..., pieces, 32], levels [..., pieces, runs of a piece] → the bytes of pieces,
        each [..., pieces], and their units [..., pieces, bytes]."""
        digits = (codes & np.uint8(_MINUS - 1)).reshape(*codes.shape[:-1], -1, self.columns)
        base = (len(self.sizes) ** np.arange(self.columns)).astype(np.float32)  # products are fast
        numbers_of = np.zeros(len(self.sizes) ** self.columns, np.uint32)
        numbers_of[(self.points @ base).astype(np.intp)] = np.arange(len(self.points))
        numbers = numbers_of[(digits @ base).astype(np.intp)]
        minus = (codes >= _MINUS).reshape(*codes.shape[:-1], 4, 2, 4).swapaxes(-1, -3)
        signs = np.packbits(minus.reshape(codes.shape), axis=-1, bitorder="little")
        words = _joined(signs, 8)
        more = _joined(numbers >> np.uint32(8), self.more_bits)
        steps = _joined(levels >> np.uint8(1), 4)
        if self.has_even_signs:
            words &= np.uint32(0x0FFFFFFF)
            words |= (more if self.more_bits else steps) << np.uint32(28)
        heads = [] if self.has_level_by_signs else [steps]
        heads += [] if self.has_even_signs else [more]
        units = np.concatenate(
            [numbers.astype(np.uint8), words[..., None].astype("<u4").view(np.uint8)], axis=-1
        )
        return [each.astype(np.uint8) for each in heads], units

    def unpacked(self, heads: list[Bytes], units: Bytes, runs: int) -> tuple[Bytes, Bytes]:
        """The inverse of `packed`. runs: of a piece."""
        words = np.ascontiguousarray(units[..., -4:]).view("<u4")[..., 0]
        numbers = units[..., :-4].astype(np.uint32)
        fours = words >> np.uint32(28)
        more = fours if self.has_even_signs else heads[1].astype(np.uint32)
        if self.more_bits:
            numbers |= _split(more, self.more_bits, numbers.shape[-1]).astype(np.uint32) << 8
        steps = _split(fours if self.has_level_by_signs else heads[0].astype(np.uint32), 4, runs)
        minus = np.unpackbits(units[..., -4:], axis=-1, bitorder="little")
        minus = minus.reshape(*units.shape[:-1], 4, 2, 4).swapaxes(-1, -3)
        if self.has_even_signs:
            minus[..., 1, 3] = 0
            minus[..., 1, 3] = minus.sum(axis=(-1, -2)) & 1
        digits = self.points[numbers].reshape(*units.shape[:-1], 32)
        codes = digits | minus.reshape(digits.shape) * np.uint8(_MINUS)
        return codes, 2 * steps + np.uint8(1)

    def random_codes(self, shape: tuple[int, ...], random: np.random.Generator) -> Bytes:
        """Codes [..., columns], all points and signs among them."""
        minus = random.integers(0, 2, (*shape[:-1], shape[-1] // 8, 8), np.uint8)
        if self.has_even_signs:
            minus[..., 7] = minus[..., :7].sum(axis=-1) & 1
        points = (*shape[:-1], shape[-1] // self.columns)
        digits = self.points[random.integers(0, len(self.points), points)]
        codes: Bytes = digits.reshape(shape) | minus.reshape(shape) * np.uint8(_MINUS)
        return codes


def _joined(fields: NDArray[Any], bits: int) -> NDArray[np.uint32]:
    """[..., fields] → the last axis side by side, the first one lowest."""
    places = (bits * np.arange(fields.shape[-1])).astype(np.uint32)
    found: NDArray[np.uint32] = np.bitwise_or.reduce(fields.astype(np.uint32) << places, axis=-1)
    return found


def _split(words: NDArray[np.uint32], bits: int, fields: int) -> Bytes:
    """The inverse of `_joined`, for fields of at most eight bits."""
    places = (bits * np.arange(fields)).astype(np.uint32)
    split = words[..., None] >> places & np.uint32((1 << bits) - 1)
    return split.astype(np.uint8)


def _points(steps: str, *, columns: int, base: int, step: int) -> Bytes:
    """The points, in the order of their numbers in this base; the first column is the last digit.

    steps: a letter for each number's distance from the one before, in `step`s: as many as it is
    past `#`; `~` is a part of a distance.
    """
    letters = np.frombuffer(steps.encode(), np.uint8)
    ends = np.cumsum(letters - np.intp(ord("#"))) - 1
    numbers = step * ends[letters != ord("~")]
    found: Bytes = (numbers[:, None] // base ** np.arange(columns) % base).astype(np.uint8)
    return found


def _of_eight(steps: str, *, has_even_signs: bool) -> PointGrid:
    points = _points(steps, columns=8, base=3, step=2)
    return PointGrid(points=points, sizes=(8, 25, 43), share=0.125, has_even_signs=has_even_signs)


IQ2_XXS = _of_eight(
    "$$$$$$$&$%$$$&&%$&$&)'$&%*2))$,50$&($&$%)($&)&$%)*-$(/$,2,&%$&)%$&$.//?(F$&(',)&%*&),'(;(<&)"
    "%)-834*E$&,10%E:9$&.+'$<';$K$&,*71-S/);b=$&&%$&&'%($&,,1'%/'/'(2&)5+.(AL$&,%<8%(?3,&%&$5&/0:"
    "FK$/H68(&3AAJ&,/27?25%N$:f~3$&-11))CG$&%*,534.-,6LOH&)&:.7@<-(O}9l4.2HS~L;",
    has_even_signs=True,
)

IQ2_XS = _of_eight(
    "$$$$$$$$$$$$$%$$$$$$$%$&$$$%$%$($$$$$$$$$$&$$$%$&&%$&,$$$%$&($&%*'-$$$$$$$%$&$$$%$$%($&,$$$%"
    "$&($&('1$&*%$1/$$$$$$&%&$&&),'$$&,1&-,&9%($$$$$$$%$&$$$%$&'$$&,$$$%$&($&,)$*$$%,,5$$$%$&($%$"
    ")&1$&,>).;$&$+)-.%:E8$$$$$$$&($&,,($&,&+3-4/%$&+$>1(3)+A%&$(.-*@)/)6%$-$$$$$$$%$&$$$$$$&%&$&"
    ",$$$%$&($&,%+'$&$*$>$$$%$%$($&,)+$&)&9('.&:$&,%''4(-&+3J$$$%$&&%$&,1$&%*$=2<$$&(',(,'&;&73.'"
    ")+'41($Z/$&,)')-$V*2+*I,%9O=<C4'4$$$%$&'$$&,$.$$$$%,(&6,5$+&%$&$$*,+-2:-61&+.($.'S4&'(%$&,*+"
    "/-1H--%0&&C6$9P76A35$%$('::&4%$%-1,57k--($%;&&>$:$6+",
    has_even_signs=True,
)

IQ2_S = _of_eight(
    "$$$$$$$$$$$$$%$$$$$$$%$$$$$$$%$&%%$$$$$$$$%$&$$$%$$$$%$%$&$$&$&$$$%$&'$$$$$%*%%%''$$$$$$$%$$"
    "$$$$$$$$$$$$$&$$$$%$%$&$$$$$$$$$%$%$$$$$$$%$&$$$%$&($$$$%*%$%$&($&,$$$%$$$$%%$$$$$$$$%$&%'*$"
    "$&$$$%'%$%$&(',($'%$(4)$$$$$$$%$$%$$$%$$$$$$$%$$%%$%$&$$$$$$$$$$$$%$$$$$$$%$&$$$%$+$%$%&$&%&"
    "$+$&,$$$%$$$$%$%$$$$$$$%$&$$$%$&($$$$$$$%$&$$$%$&($&,%$%$&($&,0$$$$$%$%'$$$%$&($/$$$%$&($&+."
    "(&,*7$$$%$$$$%%$$&$$'&'%*$$&$$&'$$&$&($&,')%$%&/$+%$$$$%$%$&$$$%$&($&,%$%$&($&*%1$&,+6%&$+$&"
    "0,$$&@.)1)$-$$$$$$$$$$$%$$$$$$$$$$$&$&%$%$&$$$%$$$$$$&$$$$$$$%$&$$$%$&($&$$$&&%$%$&($/$$$$$$"
    "$$$$$$%$$$$$$$%$&$$$%$&($$$$$$$%$&$$$%$&'$$&,$$$%$&($&,.&$%$$$$%$&$$$%$&)&,$$$%$&($&,**$&,>$"
    "$$%$$$$$$$%$$$$$$$%$&$$$%$+$$$$$$$%$&$$$%$&($&,%$%$&($&+$1$$$$$$$%$&$$$%$&($&,$$$%$&($&,1$&*"
    "%>$$$%$&($&'(1$&,>+8-%$$%$$$%$&%$%$&)&,$$$%$&($&,+*&,*3'%$%$&($&,1$&,'+*+D+$&7-)0M9'$$$%$%$%"
    "&$&$$$%'%&$+$%$$$$%$&$$$%$+$&+$%%$$+$&:$$$$$$$%'$$$%$&($&,$$$%$&($&,'-$&+$>%&$+$&6'$/.=.$),'"
    "$%$$$$&&$$$%$&($&,%&$+$&'6$&,<%$$$%$&($&,**$&,8%'3+4$&*%=$4%X,%%%'&$$&6&1.4&)%$2%$+%$&,4*&+V"
    "=+<:-1$($%5-",
    has_even_signs=False,
)

IQ3_XXS = PointGrid(
    points=_points(
        "$%%(%'$%*,<%'%(%*'&%*./+%%(*%*%'-)1')$%.F67(./%')63V:7'%813%(%*%(%%.$;%**%R%(%**E)%1,03."
        "'FK'56/p1C%*%(%'&,B%%&%**>'$+%*)$%0$07*'O'D1;7->h%.:?*%*%80()%1,.%>%(08325`26))/>B58K87."
        "1%/'p72$3)4ABH.D18p&%1U::+)3:B1C+L@.'F+:rO1U3%1@CAHG)iDHTK1U%%$53O-M>(9018D3B%5g",
        columns=4,
        base=8,
        step=1,
    ),
    sizes=(2, 6, 10, 14, 18, 22, 26, 31),
    share=0.5,
    has_even_signs=True,
)

IQ3_S = PointGrid(
    points=_points(
        "$$$&%$$$%%%$')(%&%%%(%*&&$$$%'$'&&'%'*0'()$'%$&&&'&')&%%%0&+)'&%*%&)'%0%'&.'%&))&)2-%/%'"
        "()'%2(.&%142*%%/%'(0'7$$%'$%%%$%*&%1%&,)$%&%'(*&)*%1)%-&%$'))&-&-*&&$&))$'(4).%(%0%*'%'8"
        "*&)*%2J'&0%>%(%*/'4)+$%%%$%%%&%'$%*%%&%0$&%&%)&'&&'&)*;&&-%(*%-'-&'%&',%(%*)1.),&*&'<&*("
        ",0$.0+%(-?'7'0%.(=*%%%&*%%(%&%-)+%%*(%03-'%-)-%/<*'(%'$,%')1+)('*4)'0*%.(--066C%0%.F'))'"
        "&&**3-(%%*)())'7%(('-(2&)/(%(%*'F%5.$</%-D<47;(..)<)')1'&&/)(%%(*,C),-()0:($20(/))&/-/G/"
        "6%ZC%1Z%%/%833*@95).()+/(2X121&<78>L%X'&,%/%/)3*.2%?&')&*4<;&19')(;M3C:J",
        columns=4,
        base=8,
        step=1,
    ),
    sizes=(1, 3, 5, 7, 9, 11, 13, 15),
    share=1.0,
    has_even_signs=False,
)
