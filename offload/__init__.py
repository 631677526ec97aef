"""Stores for weights, keys and values: where they are kept, and when they move."""

from offload.cache.derived_cache import DerivedCache, DerivedWriter
from offload.cache.folder_cache import FolderCache, FolderUse
from offload.cache.shard_cache import ShardCache
from offload.cache.verified_shard import CachedShard, ShardWriter
from offload.errors import (
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreMissingError,
    StoreUnsupportedError,
)
from offload.files.bounded_json import check_values, parse_json, read_file
from offload.files.closing import Closing
from offload.files.direct_reader import DirectReader, Read
from offload.files.durable import disk_errors_as_store_errors, rename_durably, write_durably
from offload.files.gguf_file import GgufFile, is_gguf
from offload.files.gguf_header import GgufTensor
from offload.files.gguf_header import Value as GgufValue
from offload.files.gguf_store import GgufStore, first_part, open_gguf
from offload.files.gguf_types import BLOCK_TYPES, READ_TYPES, BlockType
from offload.files.manifest import (
    PIECE_BYTES,
    Manifest,
    ManifestBuilder,
    Piece,
    TensorEntry,
    numpy_dtype,
    piece_digest,
)
from offload.files.safetensors_file import SafetensorsFile
from offload.files.safetensors_writer import SafetensorsWriter
from offload.files.weight_store import (
    INDEX_FILE,
    MAX_FILES,
    MemoryStore,
    SafetensorsStore,
    WeightStore,
    checked_runs,
    own_file,
)
from offload.kv.disk_tier import DiskKVTier
from offload.kv.pool import KVPool
from offload.kv.prefix_store import PrefixStore
from offload.kv.tier import KVLayer, KVPlace, KVShape, KVTier, MemoryKVTier
from offload.kv.two_tiers import KVTiers
from offload.streaming.device_window import Copier, DeviceWindow, Mark, MemoryCopier
from offload.streaming.host_slots import HostSlots, Unpin, unpinned
from offload.streaming.weight_streamer import (
    Extent,
    Memory,
    Span,
    WeightStreamer,
    is_streamed,
    padded,
)

__all__ = [
    "BLOCK_TYPES",
    "INDEX_FILE",
    "MAX_FILES",
    "PIECE_BYTES",
    "READ_TYPES",
    "BlockType",
    "CachedShard",
    "Closing",
    "Copier",
    "DerivedCache",
    "DerivedWriter",
    "DeviceWindow",
    "DirectReader",
    "DiskKVTier",
    "Extent",
    "FolderCache",
    "FolderUse",
    "GgufFile",
    "GgufStore",
    "GgufTensor",
    "GgufValue",
    "HostSlots",
    "KVLayer",
    "KVPlace",
    "KVPool",
    "KVShape",
    "KVTier",
    "KVTiers",
    "Manifest",
    "ManifestBuilder",
    "Mark",
    "Memory",
    "MemoryCopier",
    "MemoryKVTier",
    "MemoryStore",
    "Piece",
    "PrefixStore",
    "Read",
    "SafetensorsFile",
    "SafetensorsStore",
    "SafetensorsWriter",
    "ShardCache",
    "ShardWriter",
    "Span",
    "StoreCorruptError",
    "StoreError",
    "StoreFullError",
    "StoreMissingError",
    "StoreUnsupportedError",
    "TensorEntry",
    "Unpin",
    "WeightStore",
    "WeightStreamer",
    "check_values",
    "checked_runs",
    "disk_errors_as_store_errors",
    "first_part",
    "is_gguf",
    "is_streamed",
    "numpy_dtype",
    "open_gguf",
    "own_file",
    "padded",
    "parse_json",
    "piece_digest",
    "read_file",
    "rename_durably",
    "unpinned",
    "write_durably",
]
