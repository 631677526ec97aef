"""Keys and values on disk: one file for each request, with a fixed place for every token.

They reveal prompts, so they are encrypted by AES-256 in counter mode, with a key for each file that
only this process knows. The offset of a byte is its counter, so tokens can be appended, and runs
read at once. Each place is written once. A repeated write after a failure writes the same bytes,
because keys and values follow from the tokens.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from edge.offload.errors import StoreCorruptError, StoreError, StoreFullError
from edge.offload.files.durable import write_all
from edge.offload.kv.tier import Allowance, KVPlace, KVShape, Room, Rows, check_size, checksum
from edge.system.files import allocate, forget_pages, nameless_file, read_ahead, read_into

Result = TypeVar("Result")

_BLOCK_BYTES = 4096

_PART_BYTES = 256 << 10
"""Bytes encrypted at once in a buffer: the smallest size without loss of speed."""
_KEY_BYTES = 32
_CIPHER_BYTES = 16


class DiskKVTier:
    """A tier of unnamed files under `folder`, which vanish when this process ends.

    Files are written and read in runs of tokens, one for each layer and head. The limit counts
    bytes of keys and values; a file system takes a little more.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        on_change: Callable[[int], None] = lambda _num_bytes: None,
        on_full: Callable[[int], bool] = lambda _num_bytes: False,
    ) -> None:
        """on_change: called with bytes that will be written, or are free again (< 0). on_full:
        called with bytes for which the disk has no room; returns True if it freed some.

        Raises StoreError if `folder` cannot be made or written."""
        self._folder = folder
        self._on_full = on_full
        self._allowance = Allowance(limit_bytes, on_change)
        self._places: dict[str, _DiskPlace] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.close(nameless_file(folder))
        except OSError as error:
            raise StoreError(
                f"keys and values cannot be kept in {folder}: {error.strerror}; choose another "
                "folder or repair its permissions"
            ) from error

    @property
    def used_bytes(self) -> int:
        return self._allowance.used_bytes

    @property
    def written_bytes(self) -> int:
        return self._allowance.written_bytes

    def place(self, request: str, shape: KVShape) -> KVPlace:
        place = self._places.get(request)
        if place is None:
            with _disk_errors(self._folder):
                place = _DiskPlace(self._folder, shape, self._allowance, self._on_full)
            self._places[request] = place
        return place

    def drop(self, request: str) -> None:
        place = self._places.pop(request, None)
        if place is not None:
            place.close()

    def close(self) -> None:
        for request in list(self._places):
            self.drop(request)


class _DiskPlace:
    """A request's file: runs of tokens for each layer's keys and values of each head, aligned to
    blocks."""

    def __init__(
        self,
        folder: Path,
        shape: KVShape,
        allowance: Allowance,
        on_full: Callable[[int], bool],
    ) -> None:
        self._folder = folder
        self._on_full = on_full
        self._shape = shape
        self._room = Room(shape, allowance)
        self._run_bytes = [
            -(-shape.context_tokens * layer.row_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
            for layer in shape.layers
        ]
        self._sums = [[0] * (2 * layer.num_kv_heads) for layer in shape.layers]
        sizes = [len(sums) * run for sums, run in zip(self._sums, self._run_bytes, strict=True)]
        self._begins = list(itertools.accumulate(sizes, initial=0))
        self._tokens = [0] * shape.num_layers
        self._key = AES256(os.urandom(_KEY_BYTES))
        self._file = nameless_file(folder)

    def tokens(self, layer: int) -> int:
        return self._tokens[layer]

    def reserve(self, tokens: int) -> None:
        with self._room.growing(range(self._shape.num_layers), tokens) as num_bytes:
            if num_bytes:
                self._where_full(num_bytes, lambda: self._allocate(tokens, num_bytes))

    def append(self, layer: int, keys: Rows, values: Rows) -> None:
        tokens = self._tokens[layer] + keys.shape[1]
        num_bytes = keys.nbytes + values.nbytes
        with self._room.growing([layer], tokens):
            self._sums[layer] = self._where_full(
                num_bytes, lambda: self._write(layer, keys, values)
            )
        self._tokens[layer] = tokens
        self._room.wrote(layer, keys.shape[1])

    def read(self, layer: int, keys: Rows, values: Rows) -> None:
        check_size(self._tokens[layer], keys, values)
        for number, rows in enumerate((*keys, *values)):  # the disk is busy while we copy
            read_ahead(self._file, self._offset(layer, number), rows.nbytes)
        for number, rows in enumerate((*keys, *values)):
            # A view, because the rows of one head follow each other in the pool.
            content = rows.reshape(-1).view(np.uint8).data
            self._fill(content, self._offset(layer, number))
            if checksum(content, 0) != self._sums[layer][number]:
                raise StoreCorruptError(
                    f"the disk under {self._folder} returned other keys and values than were "
                    "written; it may be failing: choose another one for --kv-disk"
                )

    def close(self) -> None:
        os.close(self._file)
        self._room.give_back()

    def _where_full(self, num_bytes: int, attempt: Callable[[], Result]) -> Result:
        """Retry while `on_full` frees room."""
        while True:
            try:
                return attempt()
            except StoreFullError:
                if not self._on_full(num_bytes):
                    raise

    def _allocate(self, tokens: int, num_bytes: int) -> None:
        """Allocate disk blocks for `tokens` in every layer, in place of holes in the file."""
        with _disk_errors(self._folder, num_bytes):
            for layer, known in enumerate(self._tokens):
                if known < tokens:
                    size = self._shape.layers[layer].row_bytes
                    for number in range(len(self._sums[layer])):
                        offset = self._offset(layer, number) + known * size
                        allocate(self._file, offset, (tokens - known) * size)

    def _write(self, layer: int, keys: Rows, values: Rows) -> list[int]:
        """Append tokens. Returns their checksums."""
        sums = list(self._sums[layer])
        begin = self._tokens[layer] * self._shape.layers[layer].row_bytes
        with _disk_errors(self._folder, keys.nbytes + values.nbytes):
            for number, rows in enumerate((*keys, *values)):
                content = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
                self._write_at(self._offset(layer, number) + begin, content)
                sums[number] = checksum(content, sums[number])
        return sums

    def _offset(self, layer: int, number: int) -> int:
        return self._begins[layer] + number * self._run_bytes[layer]

    def _write_at(self, offset: int, content: memoryview) -> None:
        cipher, room = self._cipher(offset), _room(content)
        for begin in range(0, content.nbytes, _PART_BYTES):
            count = cipher.update_into(content[begin : begin + _PART_BYTES], room)
            write_all(self._file, room[:count], offset + begin)

    def _fill(self, content: memoryview, offset: int) -> None:
        cipher, room = self._cipher(offset), _room(content)
        with _disk_errors(self._folder):
            for begin in range(0, content.nbytes, _PART_BYTES):
                part = content[begin : begin + _PART_BYTES]
                self._read_at(offset + begin, room[: part.nbytes])
                cipher.update_into(room[: part.nbytes], part)
            forget_pages(self._file, offset, content.nbytes)

    def _read_at(self, offset: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = read_into(self._file, into[done:], offset + done)
            if not count:
                raise StoreCorruptError(f"a file of keys and values in {self._folder} is truncated")
            done += count

    def _cipher(self, offset: int) -> CipherContext:
        """The cipher from `offset` on; encryption and decryption are the same."""
        block, skipped = divmod(offset, _CIPHER_BYTES)
        cipher = Cipher(self._key, CTR(block.to_bytes(_CIPHER_BYTES))).encryptor()
        cipher.update(bytes(skipped))
        return cipher


def _room(content: memoryview) -> memoryview:
    return memoryview(bytearray(min(content.nbytes, _PART_BYTES)))


@contextlib.contextmanager
def _disk_errors(folder: Path, num_bytes: int = 0) -> Iterator[None]:
    """Turns OSError into StoreError. num_bytes: that were to be written."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise StoreFullError(
                f"the disk under {folder} is full: no room for {num_bytes:,} bytes of keys and "
                "values; free some, or choose another folder for --kv-disk"
            ) from error
        raise StoreError(f"the disk under {folder} failed: {error.strerror}") from error
