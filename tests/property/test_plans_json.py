"""Plans from outside: what is damaged is refused, and what is accepted is whole."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.partition import ModelFacts, Parallel, Plan, PlanError
from tests.property.plan_situations import PLANS, Situation, parallels, situations, solved
from tests.support.facts import facts_of


@PLANS
@given(situations(), parallels)
def test_json_comes_back_equal(situation: Situation, parallel: Parallel) -> None:
    plan = solved(situation, parallel)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def spots(tree: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON tree, as (container, key)."""
    keys: Any = range(len(tree)) if isinstance(tree, list) else list(tree)
    found = [(tree, key) for key in keys]
    for key in keys:
        if isinstance(tree[key], list | dict):
            found += spots(tree[key])
    return found


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-3, 12),
        st.floats(),
        st.text(max_size=5),
        st.just(10**300),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(("model", "version", "stages", "layers", "shards", "device", "x")),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@PLANS
@given(situations(most_devices=4), parallels, st.data())
def test_damaged_json_is_a_plan_error_or_a_plan(
    situation: Situation, parallel: Parallel, data: st.DataObject
) -> None:
    tree = solved(situation, parallel).to_json()
    for _ in range(data.draw(st.integers(1, 3))):
        places = spots(tree)
        if not places:
            break
        container, key = data.draw(st.sampled_from(places))
        match data.draw(st.sampled_from(("replace", "remove", "repeat", "add"))):
            case "replace":
                container[key] = data.draw(anything)
            case "remove":
                del container[key]
            case "repeat" if isinstance(container, list):
                container.insert(key, container[key])
            case _ if isinstance(container, dict):
                container[data.draw(st.text(max_size=4))] = data.draw(anything)
    model, cluster, _ = situation
    try:
        plan = Plan.from_json(tree)
        assert Plan.from_json(plan.to_json()) == plan
        plan.validate(model, cluster)
    except PlanError as error:
        problems = error.problems
    else:
        check_everything_is_covered(plan, model)
        return
    assert problems
    assert all(problem.endswith(".") for problem in problems)


def check_everything_is_covered(plan: Plan, model: ModelFacts) -> None:
    """What `validate` promises, by counting every piece of every layer."""
    layers = [layer for stage in plan.stages for layer in stage.layers]
    assert layers == list(range(model.num_layers))
    for stage in plan.stages:
        assert [head for shard in stage.slices for head in shard.heads] == list(
            range(facts_of(model).num_heads)
        )
        assert [column for shard in stage.slices for column in shard.ffn_columns] == list(
            range(facts_of(model).ffn_columns)
        )
        outer = stage in (plan.stages[0], plan.stages[-1])
        assert [row for shard in stage.slices for row in shard.vocab] == list(
            range(model.vocab_size if outer else 0)
        )
    assert len(set(plan.devices)) == len(plan.devices)


@PLANS
@given(anything)
def test_no_stray_value_is_a_plan(value: object) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(value)


@PLANS
@given(situations(), parallels, st.data())
def test_moving_any_boundary_breaks_a_plan(
    situation: Situation, parallel: Parallel, data: st.DataObject
) -> None:
    model, cluster, _ = situation
    tree: Any = solved(situation, parallel).to_json()
    stage = data.draw(st.sampled_from(tree["stages"]))
    shard = data.draw(st.sampled_from(stage["shards"]))
    name = data.draw(st.sampled_from(("layers", "heads", "ffn_columns", "vocab")))
    bounds = stage[name] if name == "layers" else shard[name]
    bounds[1] += data.draw(st.integers(1, 5))
    with pytest.raises(PlanError) as caught:
        Plan.from_json(tree).validate(model, cluster)
    assert caught.value.problems
