"""Who runs what: pure functions from facts to a plan.

Facts about devices, the model and the work go in, a Plan comes out; the same facts always give the
same plan. Knows nothing of sockets, tensors or files, and needs only the standard library.
"""

from partition.describe import PlanRow, describe
from partition.errors import CapacityError, PartitionError, PlanError, Shortage
from partition.facts import ClusterSpec, DeviceSpec, LinkSpec, ModelFacts, Workload
from partition.memory import MemoryUse, memory_use
from partition.plan import Plan, Shard, Stage
from partition.ranges import kv_heads, split_by_shares, split_evenly
from partition.solve import Parallel, check_fit, solve

__all__ = [
    "CapacityError",
    "ClusterSpec",
    "DeviceSpec",
    "LinkSpec",
    "MemoryUse",
    "ModelFacts",
    "Parallel",
    "PartitionError",
    "Plan",
    "PlanError",
    "PlanRow",
    "Shard",
    "Shortage",
    "Stage",
    "Workload",
    "check_fit",
    "describe",
    "kv_heads",
    "memory_use",
    "solve",
    "split_by_shares",
    "split_evenly",
]
