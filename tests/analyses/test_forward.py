"""What forward probes ask of a run: prompts with and without what they are about."""

import numpy as np
import pytest

from mechicl.analyses import forward_of
from mechicl.models.softmax_attention import SoftmaxAttention
from mechicl.tasks.linear_regression import LinearRegression
from tests.analyses import pooled_toy


@pytest.mark.parametrize("prior", [pooled_toy.tree, pooled_toy.gaussian])
def test_a_sample_is_the_prompts_with_their_latents(prior) -> None:
    toy = pooled_toy.random(prior(), pooled_toy.model("A"))
    forward = toy.forward()
    sample = forward.sample(5, 3, part=2)
    inputs, targets = forward.prompts(5, 3, part=2)
    np.testing.assert_array_equal(sample["inputs"].values, inputs)
    np.testing.assert_array_equal(sample["targets"].values, targets)
    queries = inputs[:, -toy.task.n_queries :, :-1]
    expected = np.einsum("bqk,bk->bq", queries, sample["theta"].values)
    np.testing.assert_allclose(expected, targets, rtol=0, atol=1e-5)
    assert not np.array_equal(forward.sample(5, 3, part=1)["theta"], sample["theta"])
    assert ("leaf" in sample) == (prior is pooled_toy.tree)
    if "leaf" in sample:
        leaves = toy.task.prior.leaves[sample["leaf"].values]
        np.testing.assert_allclose(leaves, sample["theta"].values, rtol=0, atol=1e-6)


def test_a_task_without_latents_has_prompts_alone() -> None:

    forward = forward_of(LinearRegression(d=2, n_context=3), SoftmaxAttention())
    assert set(forward.sample(4, 0)) == {"inputs", "targets"}
