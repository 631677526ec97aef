"""Who runs what: pure functions from facts to a plan.

Facts about devices, the model and the work go in, a Plan comes out; the same facts always give the
same plan. Knows nothing of sockets, tensors or files, and needs only the standard library.
"""

from partition.cost.estimate import Estimate, estimate
from partition.cost.message_times import check_links
from partition.cost.terms import Term
from partition.errors import CapacityError, PartitionError, PlanError, Shortage
from partition.fit.check import check_fit
from partition.fit.memory import memory_use
from partition.fit.placement import Parallel
from partition.fit.plan_table import HeldLayers, PlanRow, describe
from partition.fit.resident_layers import WeightTiers, weight_tiers
from partition.plan.facts import (
    ClusterSpec,
    CrowdSpec,
    DeviceSpec,
    LayerFacts,
    LinkSpec,
    ModelFacts,
    Workload,
)
from partition.plan.plan import MOST_SHARDS, Plan, Stage
from partition.plan.ranges import kv_heads, split_by_shares
from partition.plan.rates import ComputeRates
from partition.plan.shard import LayerSlice, Shard, whole_shard
from partition.plan.share import MemoryUse
from partition.plan.what_if import what_if
from partition.search.choose import Choice, Solo, choose, describe_plan_in_words
from partition.search.left_out import LeftOut

__all__ = [
    "MOST_SHARDS",
    "CapacityError",
    "Choice",
    "ClusterSpec",
    "ComputeRates",
    "CrowdSpec",
    "DeviceSpec",
    "Estimate",
    "HeldLayers",
    "LayerFacts",
    "LayerSlice",
    "LeftOut",
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
    "Solo",
    "Stage",
    "Term",
    "WeightTiers",
    "Workload",
    "check_fit",
    "check_links",
    "choose",
    "describe",
    "describe_plan_in_words",
    "estimate",
    "kv_heads",
    "memory_use",
    "split_by_shares",
    "weight_tiers",
    "what_if",
    "whole_shard",
]
