"""Where what does not fit is kept, and when it moves."""

from offload.closing import Closing
from offload.derived_cache import DerivedCache, DerivedWriter
from offload.device_window import Copier, DeviceWindow, Mark, MemoryCopier
from offload.direct_reader import DirectReader, Read
from offload.durable import full_disk_as_store_full
from offload.errors import (
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreMissingError,
    StoreUnsupportedError,
)
from offload.folder_cache import FolderCache, FolderUse
from offload.host_slots import HostSlots, Unpin, unpinned
from offload.kv_disk import DiskKVTier
from offload.kv_pool import KVPool
from offload.kv_tier import KVPlace, KVShape, KVTier, MemoryKVTier
from offload.kv_tiers import KVTiers
from offload.manifest import (
    PIECE_BYTES,
    Manifest,
    ManifestBuilder,
    Piece,
    TensorEntry,
    numpy_dtype,
    piece_digest,
)
from offload.prefix_store import PrefixStore
from offload.safetensors_file import SafetensorsFile
from offload.safetensors_writer import SafetensorsWriter
from offload.shard_cache import ShardCache
from offload.shard_writer import CachedShard, ShardWriter
from offload.store import MemoryStore, SafetensorsStore, WeightStore
from offload.weight_streamer import Extent, Memory, Span, WeightStreamer, is_streamed, padded

__all__ = [
    "PIECE_BYTES",
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
    "HostSlots",
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
    "full_disk_as_store_full",
    "is_streamed",
    "numpy_dtype",
    "padded",
    "piece_digest",
    "unpinned",
]
