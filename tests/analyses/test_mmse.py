import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from mechicl import analyses, plots
from mechicl.schema import flag_names
from mechicl.tasks.latents import TreePrior
from mechicl.theory import measurement, priors, strategies
from tests import trajectories
from tests.analyses import pooled_toy

PROBE = analyses.get("mmse")
QUICK = {"n_prompts": 200, "n_paths": 2000, "n_draws": 400, "spsa_steps": 2}
ON_TREE = (
    "adaptive",
    "non_adaptive",
    "symmetric_axes",
    "top_eigenvectors",
    "gauss_pc",
    "posterior_mean",
)


def at(result, strategy):
    codes = {name: code for code, name in flag_names(result["strategy"]).items()}
    return result.sel(strategy=codes[strategy])


def predicting(toy, function):
    """Return the Forward of a run, with models whose predictions are `function(inputs)`."""

    def predict(parameters, inputs):
        return np.broadcast_to(function(inputs), (len(parameters["W_V"]), len(inputs), 4))

    return replace(toy.forward(), predict=predict)


def linear(theta):
    """Return predictions θ̂ᵀx of the queries, θ̂ (batch, covariate) of the inputs."""
    return lambda inputs: np.einsum("bqk,bk->bq", inputs[:, -4:, :-1].astype(float), theta(inputs))


def moment(toy):
    return lambda inputs: toy.task.moments(inputs)[:, :-1, -1]


@pytest.fixture(scope="module")
def toy():
    return pooled_toy.random(pooled_toy.tree(), pooled_toy.model("A"), n_steps=2)


@pytest.fixture(scope="module")
def result(toy):
    return PROBE(toy.trajectory, toy.forward(), n_steps=2, **QUICK)


def test_losses_are_of_the_models_over_queries_and_contexts(toy, result) -> None:
    sample = toy.task.sample(200, seed=0)
    for seed, step in np.ndindex(2, 2):
        model = toy.model.hooked(
            toy.task, pooled_toy.weights_at(toy.trajectory.astype(np.float32), seed, step)
        )
        predicted = model(torch.from_numpy(sample["inputs"].values)).detach().numpy()
        errors = ((predicted - sample["targets"].values) ** 2).mean(-1)
        one = result.isel(seed=seed, step=step)
        assert one["loss"] == pytest.approx(errors.mean(), rel=1e-5)
        # Over contexts: the queries of one are not independent.
        assert one["loss_error"] == pytest.approx(errors.std(ddof=1) / 200**0.5, rel=1e-5)
        best = toy.task.references(sample["inputs"].values)["posterior_mean"]
        paired = errors - ((best - sample["targets"].values) ** 2).mean(-1)
        excess = at(one, "posterior_mean")
        assert excess["excess"] == pytest.approx(paired.mean(), rel=1e-5)
        assert excess["excess_error"] == pytest.approx(paired.std(ddof=1) / 200**0.5, rel=1e-5)


def test_strategies_meet_the_noise_of_n_tokens(toy, result) -> None:
    assert tuple(flag_names(result["strategy"]).values()) == ON_TREE
    noise = (0.1**2 + 1 / 512) ** 0.5
    assert result["tau_seen"] == pytest.approx(noise)
    exact = strategies.symmetric_loss(3, 0.5, 3, noise)
    assert at(result, "symmetric_axes")["strategy_loss"] == pytest.approx(exact)
    # CHECKED 2.1, written out: λ²/(λ + τ² + (1 + λ)/N).
    variances = priors.tree_variances(3, 0.5)[:3]
    known = (variances**2 / (variances + 0.1**2 + (1 + variances) / 512)).sum()
    assert at(result, "gauss_pc")["strategy_loss"] == pytest.approx(1 - known)
    loss, error = strategies.adaptive_loss(
        3, 0.5, 3, noise, n_draws=200_000, rng=np.random.default_rng(5)
    )
    found = at(result, "adaptive")
    spread = np.hypot(float(found["strategy_error"]), error)
    assert abs(float(found["strategy_loss"]) - loss) < 4 * spread
    assert result["strategy_loss"].notnull().all()
    assert (result["strategy_error"] >= 0).all()


@pytest.mark.parametrize(("n_measurements", "published"), [(1, 0.2322), (3, 0.0971)])
def test_published_losses_at_depth_6(n_measurements: int, published: float) -> None:
    """CHECKED 2.4, h = 6, τ = 0.1, N → ∞, to 1 % and the errors of both."""
    task = pooled_toy.tree(prior=TreePrior(depth=6), n_context=2**30)
    toy = pooled_toy.random(task, pooled_toy.model("B", n_measurements), n_seeds=1)
    given = QUICK | {"n_prompts": 8, "n_draws": 4096, "spsa_steps": 100}
    found = at(PROBE(toy.trajectory, toy.forward(), **given), "non_adaptive")
    assert abs(float(found["strategy_loss"]) - published) < 0.01 * published + 3 * float(
        found["strategy_error"]
    )


def test_the_posterior_mean_has_its_own_loss_and_holds(toy) -> None:
    best = predicting(toy, lambda inputs: toy.task.references(inputs)["posterior_mean"])
    low = toy.trajectory.assign(n_measurements=toy.trajectory["n_measurements"].copy(data=1))
    result = PROBE(low, best, **QUICK)
    own = at(result, "posterior_mean")
    assert (own["excess"] == 0).all()
    assert (own["excess_error"] == 0).all()
    assert (own["relative_excess"] == 0).all()
    assert (own["relative_excess_error"] <= 1e-12).all()
    assert flag_names(result["strategy"])[int(result["nearest"][0, 0])] == "posterior_mean"
    assert (result["holds"] == 1).all()


def test_zero_and_linear_estimates(toy) -> None:
    """Negative controls: no prediction, and Gauss-PC itself, are above every better strategy."""
    zero = PROBE(toy.trajectory, predicting(toy, lambda inputs: np.zeros((1, 4))), **QUICK)
    assert (abs(zero["loss"] - 1) < 5 * zero["loss_error"]).all()
    assert (zero["holds"] == 0).all()
    variances = priors.tree_variances(3, 0.5)
    noise = 0.1**2 + (1 + variances) / 512
    gains = variances / (variances + noise) * (np.arange(7) < 3)
    estimate = linear(lambda inputs: gains * moment(toy)(inputs))
    found = PROBE(toy.trajectory, predicting(toy, estimate), **QUICK | {"n_prompts": 4000})
    mine = at(found, "gauss_pc")
    assert (abs(mine["excess"]) < 4 * mine["excess_error"]).all()
    assert (mine["excess_error"] < 0.03 * mine["strategy_loss"]).all()
    assert flag_names(found["strategy"])[int(found["nearest"][0, 0])] == "gauss_pc"
    assert (found["holds"] == 0).all()


def test_the_margin_is_in_combined_standard_errors(toy) -> None:
    best = predicting(toy, lambda inputs: toy.task.references(inputs)["posterior_mean"] + 0.2)
    result = PROBE(toy.trajectory, best, **QUICK)
    fixed = at(result, "non_adaptive")
    combined = np.hypot(result["loss_error"], fixed["strategy_error"])
    np.testing.assert_allclose(fixed["excess_error"], combined)
    np.testing.assert_allclose(fixed["excess"], result["loss"] - fixed["strategy_loss"])
    one = predicting(toy, lambda inputs: toy.task.references(inputs)["posterior_mean"])
    low = toy.trajectory.assign(n_measurements=toy.trajectory["n_measurements"].copy(data=1))
    sure = at(PROBE(low, one, **QUICK), "non_adaptive")
    needed = float((-sure["excess"] / sure["excess_error"]).max())
    for factor, expected in ((0.99, 1), (1.01, 0)):
        again = PROBE(low, one, **QUICK, margin=factor * needed)
        assert (again["holds"] == expected).all()


def test_a_gaussian_prior_has_nothing_to_adapt_to() -> None:
    toy = pooled_toy.random(pooled_toy.gaussian(), pooled_toy.model("B", 2))
    best = predicting(toy, lambda inputs: toy.task.references(inputs)["posterior_mean"])
    result = PROBE(toy.trajectory, best, **QUICK)
    assert tuple(flag_names(result["strategy"]).values()) == ("gauss_pc", "posterior_mean")
    assert result["holds"].isnull().all()
    assert json.loads(result.attrs["n_undefined"])["gaussian_prior"] == 2
    # |θ|² is not 1 here: its mean is Tr C₀.
    power = sum(0.75**k for k in range(1, 5))
    assert result["tau_seen"] == pytest.approx((0.1**2 + power / 512) ** 0.5)
    for name in ("loss", "excess", "relative_excess", "nearest"):
        assert result[name].notnull().all()
    covariance = toy.trajectory["prior_covariance"].values
    # For long contexts (34) is (15) of the top axes.
    axes = measurement.principal_axes(covariance, 2)
    exact = np.trace(measurement.posterior_covariance(covariance, axes, 0.1))
    long = pooled_toy.random(pooled_toy.gaussian(n_context=2**30), pooled_toy.model("B", 2))
    there = PROBE(long.trajectory, long.forward(), **QUICK)
    assert at(there, "gauss_pc")["strategy_loss"] == pytest.approx(exact, rel=1e-6)
    top = linear(lambda inputs: (moment(toy)(inputs) @ axes.T) @ _gains(axes, covariance))
    found = PROBE(toy.trajectory, predicting(toy, top), **QUICK | {"n_prompts": 4000})
    mine = at(found, "gauss_pc")
    assert (abs(mine["excess"]) < 4 * mine["excess_error"]).all()
    plots.draw(result)


def _gains(axes, covariance):
    """Return the best linear map from what the axes read of 512 tokens to θ."""
    variances = np.diag(axes @ covariance @ axes.T)
    noise = 0.1**2 + (np.trace(covariance) + variances) / 512
    return (variances / (variances + noise))[:, None] * axes


def test_more_measurements_than_levels() -> None:
    for count in (4, 9):  # more than levels; more than covariates
        model = pooled_toy.model("B", count, d_workspace=9)
        toy = pooled_toy.random(pooled_toy.tree(), model)
        result = PROBE(toy.trajectory, toy.forward(), **QUICK)
        for name in ("adaptive", "symmetric_axes"):
            assert np.isnan(at(result, name)["strategy_loss"])
            assert at(result, name)["excess"].isnull().all()
        assert result["nearest"].notnull().all()
        assert (result["holds"] == 0).all()
        counts = json.loads(result.attrs["n_undefined"])
        assert counts["more_measurements_than_levels"] == 2
    # All 7 coordinates are read then: it is the posterior of θ + ξ.
    noise, leaves = float(result["tau_seen"]), priors.tree_leaves(3, 0.5)
    rng = np.random.default_rng(0)
    read = leaves[:, None] + noise * rng.normal(size=(8, 4000, 7))
    log = -((read[..., None, :] - leaves) ** 2).sum(-1) / (2 * noise**2)
    weights = np.exp(log - log.max(-1, keepdims=True))
    mean = weights @ leaves / weights.sum(-1, keepdims=True)
    loss = ((mean - leaves[:, None]) ** 2).sum(-1)
    found = at(result, "non_adaptive")
    spread = np.hypot(loss.std() / loss.size**0.5, float(found["strategy_error"]))
    assert abs(float(found["strategy_loss"]) - loss.mean()) < 4 * spread + 1e-12


def test_undefined() -> None:
    toy = pooled_toy.random(pooled_toy.tree(), pooled_toy.model("A"), n_seeds=3)
    trajectory = pooled_toy.poison(toy.trajectory, seed=1, from_index=0)
    values = np.array([0.0, 1.0, np.inf])[:, None, None]
    overflowing = replace(
        toy.forward(), predict=lambda _, inputs: np.tile(values, (1, len(inputs), 4))
    )
    result = PROBE(trajectory, overflowing, **QUICK)
    counts = json.loads(result.attrs["n_undefined"])
    assert (counts["nonfinite_parameters"], counts["nonfinite_loss"]) == (1, 1)
    assert result["loss"].isel(seed=0).notnull().all()
    for name in ("loss", "excess", "nearest", "holds"):
        assert result[name].isel(seed=2).isnull().all()
    assert result["strategy_loss"].notnull().all()


def test_a_strategy_without_error() -> None:
    task = pooled_toy.tree(prior=TreePrior(depth=1), n_context=2**20, tau=1e-4)
    toy = pooled_toy.random(task, pooled_toy.model("A", 1))
    result = PROBE(toy.trajectory, toy.forward(), **QUICK)
    perfect = at(result, "adaptive")
    assert perfect["strategy_loss"] == 0
    assert perfect["relative_excess"].isnull().all()
    assert perfect["excess"].notnull().all()
    assert json.loads(result.attrs["n_undefined"])["perfect_strategy"] == 2
    plots.draw(result)


def test_a_model_without_feedforward_is_compared_too() -> None:
    toy = pooled_toy.random(pooled_toy.tree(), pooled_toy.model("C"))
    result = PROBE(toy.trajectory, toy.forward(), **QUICK)
    assert result["loss"].notnull().all()
    assert result["holds"].notnull().all()


def test_runs_without_a_prior_are_refused() -> None:
    assert "the run has no" in str(PROBE.objection(trajectories.from_scales(0.1, 1.0)))
    toy = pooled_toy.random(pooled_toy.tree(), pooled_toy.model("A"))
    other = toy.trajectory.drop_vars(["depth", "leaves"])
    assert "another one" in str(PROBE.objection(other))
