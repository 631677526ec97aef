"""A property of all valid values; CONTRIBUTING.md shows it."""

import json

from hypothesis import given
from hypothesis import strategies as st

from edge.kernels.sampling.parameters import SamplingParameters


@given(temperature=st.floats(0, 9), top_p=st.floats(0, 1), seed=st.integers(0, 2**64 - 1))
def test_sampling_parameters_come_back_from_json(
    temperature: float, top_p: float, seed: int
) -> None:
    parameters = SamplingParameters(temperature=temperature, top_p=top_p, seed=seed)
    assert SamplingParameters.from_json(json.loads(json.dumps(parameters.to_json()))) == parameters
