"""Stores for weights, keys and values: where they are kept, and when they move."""

from edge.offload.cache.derived_cache import DerivedCache, DerivedWriter
from edge.offload.cache.folder_cache import FolderCache, FolderUse, KeptFolder, note_model
from edge.offload.cache.shard_cache import ShardCache
from edge.offload.cache.verified_shard import CachedShard, ShardWriter
from edge.offload.errors import (
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreMissingError,
    StoreUnsupportedError,
)
from edge.offload.files.bounded_json import check_values, parse_json, read_file
from edge.offload.files.closing import Closing
from edge.offload.files.direct_reader import DirectReader, Read
from edge.offload.files.durable import disk_errors_as_store_errors, rename_durably, write_durably
from edge.offload.files.gguf_file import GgufFile, is_gguf
from edge.offload.files.gguf_header import GgufTensor
from edge.offload.files.gguf_header import Value as GgufValue
from edge.offload.files.gguf_store import GgufStore, all_parts, first_part, open_gguf
from edge.offload.files.gguf_types import BLOCK_TYPES, READ_TYPES, BlockType
from edge.offload.files.manifest import (
    PIECE_BYTES,
    Manifest,
    ManifestBuilder,
    TensorEntry,
    TensorPiece,
    numpy_dtype,
    piece_digest,
)
from edge.offload.files.safetensors_file import SafetensorsFile
from edge.offload.files.safetensors_writer import SafetensorsWriter
from edge.offload.files.weight_store import (
    INDEX_FILE,
    MAX_FILES,
    SINGLE_FILE,
    MemoryStore,
    SafetensorsStore,
    WeightStore,
    checked_runs,
    indexed_files,
    own_file,
)
from edge.offload.kv.disk_tier import DiskKVTier
from edge.offload.kv.pool import KVPool
from edge.offload.kv.prefix_memory import PrefixMemory
from edge.offload.kv.prefix_records import Pieces, PrefixPart, PrefixRecords, as_bytes
from edge.offload.kv.prefix_store import PrefixStore
from edge.offload.kv.tier import KVLayer, KVPlace, KVShape, KVTier, MemoryKVTier
from edge.offload.kv.two_tiers import KVTiers
from edge.offload.kv.window_rows import WindowRows
from edge.offload.streaming.checked_extents import Extent, ExtentSpan, Memory, padded
from edge.offload.streaming.device_window import Copier, DeviceWindow, Mark, MemoryCopier
from edge.offload.streaming.expert_cache import ExpertCache
from edge.offload.streaming.host_slots import HostSlots, Unpin, unpinned
from edge.offload.streaming.resident_layers import is_streamed
from edge.offload.streaming.weight_streamer import WeightStreamer

__all__ = [
    "BLOCK_TYPES",
    "INDEX_FILE",
    "MAX_FILES",
    "PIECE_BYTES",
    "READ_TYPES",
    "SINGLE_FILE",
    "BlockType",
    "CachedShard",
    "Closing",
    "Copier",
    "DerivedCache",
    "DerivedWriter",
    "DeviceWindow",
    "DirectReader",
    "DiskKVTier",
    "ExpertCache",
    "Extent",
    "ExtentSpan",
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
    "KeptFolder",
    "Manifest",
    "ManifestBuilder",
    "Mark",
    "Memory",
    "MemoryCopier",
    "MemoryKVTier",
    "MemoryStore",
    "Pieces",
    "PrefixMemory",
    "PrefixPart",
    "PrefixRecords",
    "PrefixStore",
    "Read",
    "SafetensorsFile",
    "SafetensorsStore",
    "SafetensorsWriter",
    "ShardCache",
    "ShardWriter",
    "StoreCorruptError",
    "StoreError",
    "StoreFullError",
    "StoreMissingError",
    "StoreUnsupportedError",
    "TensorEntry",
    "TensorPiece",
    "Unpin",
    "WeightStore",
    "WeightStreamer",
    "WindowRows",
    "all_parts",
    "as_bytes",
    "check_values",
    "checked_runs",
    "disk_errors_as_store_errors",
    "first_part",
    "indexed_files",
    "is_gguf",
    "is_streamed",
    "note_model",
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
