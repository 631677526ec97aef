"""Why a running model moves to another plan, and what devices take over, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from edge.partition import Plan
from edge.planning.proposal import Proposal


def move_reason(
    before: Proposal,
    to: Proposal | None,
    factors: Mapping[str, float],
    names: Mapping[str, str],
) -> str:
    """What has changed since the plan of `before` was made, and what moves to which device."""
    told, paced = [], False
    for device in before.cluster.devices:
        factor = factors.get(device.id, 1.0)
        if factor != device.slowed and device.id in names:
            paced = True
            told.append(
                f"{names[device.id]} is busy ({factor:.1f} x slower)"
                if factor > 1
                else f"{names[device.id]} is no longer busy"
            )
    known = {device.id for device in before.cluster.devices}
    new = [id for id in names if id not in known]
    used = [id for id in new if to is None or id in to.plan.devices]
    if used or not told:
        told.append(f"{', '.join(names[id] for id in used or new)} joined")
    reason = ", ".join(told)
    if to is not None and paced:
        reason += f": {taken_layers(before.plan, to.plan, names)}"
    return reason


def taken_layers(before: Plan, to: Plan, names: Mapping[str, str]) -> str:
    """The layers that go to devices with more layers than before, in words."""
    had = _layers(before)
    told = []
    for id, layers in _layers(to).items():
        new = layers - had.get(id, set())
        if len(layers) > len(had.get(id, ())):
            firsts = sorted(each for each in new if each - 1 not in new)
            lasts = sorted(each for each in new if each + 1 not in new)
            runs = (
                str(first) if first == last else f"{first}-{last}"
                for first, last in zip(firsts, lasts, strict=True)
            )
            told.append(f"{names.get(id, id)} takes layer{'s' * (len(new) > 1)} {', '.join(runs)}")
    return " and ".join(told) or "layers are divided anew"


def _layers(plan: Plan) -> dict[str, set[int]]:
    """The layers of which each device holds at least a part."""
    found: dict[str, set[int]] = {}
    for stage in plan.stages:
        for shard in stage.shards:
            found.setdefault(shard.device, set()).update(stage.layers)
    return found
