"""GGUF blocks whose codes are numbers of points of a grid: IQ2 and IQ3.

A point is the sizes of 8 weights, or of 4. Their signs are apart, a bit for each; where blocks have
seven of eight bits, the eighth makes the number of minus signs even. The scale of a run is the
block's float16 times an odd level times the type's share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GgufGrid:
    """points: int8 [points, weights of each]. fields: bytes [..., block_bytes] to numbers of points
    [..., points of a block], signs [..., 32], bit k of weight k, and levels [..., runs]."""

    points: NDArray[np.int8]
    share: float
    fields: Callable[[Bytes], tuple[NDArray[Any], Bytes, Bytes]]

    def values(self, numbers: NDArray[Any], signs: Bytes) -> NDArray[np.int8]:
        """Weights [..., 256] as multiples of their scales."""
        minus = np.unpackbits(signs, axis=-1, bitorder="little").astype(np.int8)
        sizes = self.points[numbers].reshape(minus.shape)
        found: NDArray[np.int8] = (sizes ^ -minus) + minus
        return found


_EVEN = np.array([signs | (signs.bit_count() & 1) << 7 for signs in range(128)], np.uint8)
"""Eight signs, by seven of them."""


def _words(cut: Bytes, dtype: str) -> NDArray[Any]:
    return np.ascontiguousarray(cut).view(dtype)


def _split(fields: NDArray[Any], bits: int, count: int) -> NDArray[Any]:
    """[..., n] to [..., n × count]: fields of this many bits, the lowest first."""
    split = fields[..., None] >> (bits * np.arange(count)).astype(fields.dtype)
    split &= fields.dtype.type((1 << bits) - 1)
    joined: NDArray[Any] = split.reshape(*fields.shape[:-1], -1)
    return joined


def _levels(fours: NDArray[Any]) -> Bytes:
    return (2 * fours + 1).astype(np.uint8)


def _of_words(words: NDArray[Any]) -> tuple[Bytes, Bytes]:
    """Signs and levels in words of four times seven signs and a level."""
    return _EVEN[_split(words, 7, 4)], _levels(words >> 28)


def _iq2_xxs(blocks: Bytes) -> tuple[NDArray[Any], Bytes, Bytes]:
    words = _words(blocks[..., 2:66], "<u4")
    return _split(words[..., 0::2], 8, 4), *_of_words(words[..., 1::2])


def _iq2_xs(blocks: Bytes) -> tuple[NDArray[Any], Bytes, Bytes]:
    words = _words(blocks[..., 2:66], "<u2")
    return words & 511, _EVEN[words >> 9], _levels(_split(blocks[..., 66:74], 4, 2))


def _iq2_s(blocks: Bytes) -> tuple[NDArray[Any], Bytes, Bytes]:
    numbers = blocks[..., 2:34].astype(np.uint16)
    numbers |= _split(blocks[..., 66:74], 2, 4).astype(np.uint16) << 8
    return numbers, blocks[..., 34:66], _levels(_split(blocks[..., 74:82], 4, 2))


def _iq3_xxs(blocks: Bytes) -> tuple[NDArray[Any], Bytes, Bytes]:
    return blocks[..., 2:66], *_of_words(_words(blocks[..., 66:98], "<u4"))


def _iq3_s(blocks: Bytes) -> tuple[NDArray[Any], Bytes, Bytes]:
    numbers = blocks[..., 2:66].astype(np.uint16)
    numbers |= _split(blocks[..., 66:74], 1, 8).astype(np.uint16) << 8
    return numbers, blocks[..., 74:106], _levels(_split(blocks[..., 106:110], 4, 2))


def _points(sizes: tuple[int, ...], columns: int, steps: str) -> NDArray[np.int8]:
    """The points, by their numbers in base 3, or 8, where the first weight is the last digit.

    steps: a letter for each number's distance from the one before: as many as it is past `#`; `~`
    is a part of a distance. In base 3 all numbers are even, and it is half of that.
    """
    letters = np.frombuffer(steps.encode(), np.uint8)
    ends = np.cumsum(letters - np.intp(ord("#"))) - 1
    base = len(sizes)
    numbers = ends[letters != ord("~")] * (2 if base == 3 else 1)
    found: NDArray[np.int8] = np.array(sizes, np.int8)[
        numbers[:, None] // base ** np.arange(columns) % base
    ]
    return found


_OF_8 = (8, 25, 43)
_OF_XXS = (2, 6, 10, 14, 18, 22, 26, 31)
"""Half of ggml's sizes, which are even."""
_OF_S = (1, 3, 5, 7, 9, 11, 13, 15)

_STEPS = {
    "IQ2_XXS": (
        "$$$$$$$&$%$$$&&%$&$&)'$&%*2))$,50$&($&$%)($&)&$%)*-$(/$,2,&%$&)%$&$.//?(F$&(',)&%*&),'(;(<&)"
        "%)-834*E$&,10%E:9$&.+'$<';$K$&,*71-S/);b=$&&%$&&'%($&,,1'%/'/'(2&)5+.(AL$&,%<8%(?3,&%&$5&/0:"
        "FK$/H68(&3AAJ&,/27?25%N$:f~3$&-11))CG$&%*,534.-,6LOH&)&:.7@<-(O}9l4.2HS~L;"
    ),
    "IQ2_XS": (
        "$$$$$$$$$$$$$%$$$$$$$%$&$$$%$%$($$$$$$$$$$&$$$%$&&%$&,$$$%$&($&%*'-$$$$$$$%$&$$$%$$%($&,$$$%"
        "$&($&('1$&*%$1/$$$$$$&%&$&&),'$$&,1&-,&9%($$$$$$$%$&$$$%$&'$$&,$$$%$&($&,)$*$$%,,5$$$%$&($%$"
        ")&1$&,>).;$&$+)-.%:E8$$$$$$$&($&,,($&,&+3-4/%$&+$>1(3)+A%&$(.-*@)/)6%$-$$$$$$$%$&$$$$$$&%&$&"
        ",$$$%$&($&,%+'$&$*$>$$$%$%$($&,)+$&)&9('.&:$&,%''4(-&+3J$$$%$&&%$&,1$&%*$=2<$$&(',(,'&;&73.'"
        ")+'41($Z/$&,)')-$V*2+*I,%9O=<C4'4$$$%$&'$$&,$.$$$$%,(&6,5$+&%$&$$*,+-2:-61&+.($.'S4&'(%$&,*+"
        "/-1H--%0&&C6$9P76A35$%$('::&4%$%-1,57k--($%;&&>$:$6+"
    ),
    "IQ2_S": (
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
        "=+<:-1$($%5-"
    ),
    "IQ3_XXS": (
        "$%%(%'$%*,<%'%(%*'&%*./+%%(*%*%'-)1')$%.F67(./%')63V:7'%813%(%*%(%%.$;%**%R%(%**E)%1,03.'FK'"
        "56/p1C%*%(%'&,B%%&%**>'$+%*)$%0$07*'O'D1;7->h%.:?*%*%80()%1,.%>%(08325`26))/>B58K87.1%/'p72$"
        "3)4ABH.D18p&%1U::+)3:B1C+L@.'F+:rO1U3%1@CAHG)iDHTK1U%%$53O-M>(9018D3B%5g"
    ),
    "IQ3_S": (
        "$$$&%$$$%%%$')(%&%%%(%*&&$$$%'$'&&'%'*0'()$'%$&&&'&')&%%%0&+)'&%*%&)'%0%'&.'%&))&)2-%/%'()'%"
        "2(.&%142*%%/%'(0'7$$%'$%%%$%*&%1%&,)$%&%'(*&)*%1)%-&%$'))&-&-*&&$&))$'(4).%(%0%*'%'8*&)*%2J'"
        "&0%>%(%*/'4)+$%%%$%%%&%'$%*%%&%0$&%&%)&'&&'&)*;&&-%(*%-'-&'%&',%(%*)1.),&*&'<&*(,0$.0+%(-?'7"
        "'0%.(=*%%%&*%%(%&%-)+%%*(%03-'%-)-%/<*'(%'$,%')1+)('*4)'0*%.(--066C%0%.F'))'&&**3-(%%*)())'7"
        "%(('-(2&)/(%(%*'F%5.$</%-D<47;(..)<)')1'&&/)(%%(*,C),-()0:($20(/))&/-/G/6%ZC%1Z%%/%833*@95)."
        "()+/(2X121&<78>L%X'&,%/%/)3*.2%?&')&*4<;&19')(;M3C:J"
    ),
}

GRIDS: Mapping[str, GgufGrid] = {
    name: GgufGrid(points=_points(sizes, columns, _STEPS[name]), share=share, fields=fields)
    for name, sizes, columns, share, fields in (
        ("IQ2_XXS", _OF_8, 8, 0.125, _iq2_xxs),
        ("IQ2_XS", _OF_8, 8, 0.125, _iq2_xs),
        ("IQ2_S", _OF_8, 8, 0.125, _iq2_s),
        ("IQ3_XXS", _OF_XXS, 4, 0.5, _iq3_xxs),
        ("IQ3_S", _OF_S, 4, 1.0, _iq3_s),
    )
}
"""By ggml's name of the type."""
