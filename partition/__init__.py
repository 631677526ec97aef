"""Who runs what: pure functions from facts to a plan.

The input is facts about devices, the model and the workload; the output is a Plan. The same facts
always give the same plan. The package knows nothing of sockets, tensors or files. It needs only the
standard library, and HiGHS to place whole experts.
"""

from edge.partition.cost.drafts import Guessing, draft_length, guessing, most_in_turn
from edge.partition.cost.estimate import Estimate, estimate, step_s
from edge.partition.cost.graph_estimate import estimate_graph
from edge.partition.cost.message_times import check_links
from edge.partition.cost.terms import Term
from edge.partition.errors import CapacityError, PartitionError, PlanError, Shortage
from edge.partition.fit.check import check_fit
from edge.partition.fit.memory import memory_use
from edge.partition.fit.placement import Parallel
from edge.partition.fit.plan_table import HeldLayers, PlanRow, describe
from edge.partition.fit.weight_tiers import WeightTiers, weight_tiers
from edge.partition.losses.holdings import Seat
from edge.partition.losses.joining import Move, UnderWay, join
from edge.partition.losses.repair import Repair, can_repair, repair
from edge.partition.plan.facts import (
    ClusterSpec,
    CrowdSpec,
    DeviceSpec,
    LayerFacts,
    LinkSpec,
    ModelFacts,
    Workload,
)
from edge.partition.plan.graph_plan import (
    AtomFacts,
    GraphDevice,
    GraphEstimate,
    GraphFacts,
    GraphPlan,
    GraphStage,
    Objective,
    StageEstimate,
)
from edge.partition.plan.plan import MOST_SHARDS, Plan, Stage
from edge.partition.plan.ranges import kv_heads, split_by_shares
from edge.partition.plan.rates import ComputeRates
from edge.partition.plan.shard import LayerSlice, Shard, whole_shard
from edge.partition.plan.share import MemoryUse
from edge.partition.plan.what_if import what_if
from edge.partition.search.choose import (
    LEAST_GAIN,
    Choice,
    Solo,
    choose,
    describe_plan_in_words,
)
from edge.partition.search.graph_cut import GraphChoice, choose_graph_plan
from edge.partition.search.left_out import LeftOut
from edge.partition.search.whole_experts import with_whole_experts

__all__ = [
    "LEAST_GAIN",
    "MOST_SHARDS",
    "AtomFacts",
    "CapacityError",
    "Choice",
    "ClusterSpec",
    "ComputeRates",
    "CrowdSpec",
    "DeviceSpec",
    "Estimate",
    "GraphChoice",
    "GraphDevice",
    "GraphEstimate",
    "GraphFacts",
    "GraphPlan",
    "GraphStage",
    "Guessing",
    "HeldLayers",
    "LayerFacts",
    "LayerSlice",
    "LeftOut",
    "LinkSpec",
    "MemoryUse",
    "ModelFacts",
    "Move",
    "Objective",
    "Parallel",
    "PartitionError",
    "Plan",
    "PlanError",
    "PlanRow",
    "Repair",
    "Seat",
    "Shard",
    "Shortage",
    "Solo",
    "Stage",
    "StageEstimate",
    "Term",
    "UnderWay",
    "WeightTiers",
    "Workload",
    "can_repair",
    "check_fit",
    "check_links",
    "choose",
    "choose_graph_plan",
    "describe",
    "describe_plan_in_words",
    "draft_length",
    "estimate",
    "estimate_graph",
    "guessing",
    "join",
    "kv_heads",
    "memory_use",
    "most_in_turn",
    "repair",
    "split_by_shares",
    "step_s",
    "weight_tiers",
    "what_if",
    "whole_shard",
    "with_whole_experts",
]
