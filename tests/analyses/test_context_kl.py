"""Divergences from predictors of restricted context: closed forms, dips, what is undefined."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from scipy.special import log_softmax, rel_entr

import mechicl
from mechicl import analyses
from mechicl.analyses import Forward
from mechicl.analyses.probe import Against
from mechicl.errors import DamagedRunError, InputError, NothingToAnalyseError
from mechicl.schema import flag_names
from tests import trajectories
from tests.analyses import markov_toy
from tests.analyses.markov_toy import Toy, chain, on_blocks
from tests.checkpoints.common import chunk, flip_bit

PROBE = analyses.get("context_kl")
BIGRAM = np.log([[0.9, 0.1], [0.2, 0.8]])
UNIGRAM = np.log([2 / 3, 1 / 3])


def measure(toy: Toy, forward: Forward | None = None, **settings: object) -> xr.Dataset:
    return PROBE(toy.trajectory, forward or toy.forward(), **({"n_prompts": 200} | settings))


def names(result: xr.Dataset) -> list[str]:
    return list(flag_names(result["reference"]).values())


def counts(result: xr.Dataset) -> dict[str, int]:
    return json.loads(result.attrs["n_undefined"])


def written(
    model: np.ndarray, references: Mapping[str, np.ndarray], tokens: tuple[int, ...] = (0, 0, 1)
) -> tuple[xr.Dataset, Forward]:
    """Return prompts of one token each, and predictors that are tables (token, next token).

    `model` has tables by step, (step, token, next token), as logits in float32. The law of the
    tokens is the stationary one of the bigram: two of 0 for one of 1.
    """
    task = chain(d=2, blocks=((0,),), n_predictions=1)
    steps = model.shape[0]
    toy = markov_toy.sparse(task, np.ones((1, steps, 1, 1)))
    kq = toy.trajectory["KQ"].copy(
        data=np.arange(steps, dtype=float)[None, :, None, None, None, None]
        + 0 * toy.trajectory["KQ"].values
    )

    def prompts(n: int, seed: int, *, part: int = 0, n_context: int | None = None):
        inputs = np.resize(tokens, n)[:, None]
        return inputs, np.zeros((n, 1), int)

    def predict(parameters: Mapping[str, np.ndarray], inputs: np.ndarray) -> np.ndarray:
        step = int(parameters["KQ"].flat[0])
        return model[step].astype(np.float32)[inputs][None]

    def predictors(inputs: np.ndarray) -> dict[str, np.ndarray]:
        return {name: table[inputs] for name, table in references.items()}

    return toy.trajectory.assign(KQ=kq), Forward(predict, prompts, predictors)


def test_the_bigram_against_the_unigram():
    """The mutual information of neighbours: 0.25299137818778483 nat."""
    run = written(UNIGRAM + np.zeros((1, 2, 2)) + 3.0, {"generator": BIGRAM})
    result = PROBE(*run, n_prompts=9)
    assert names(result) == ["KL(generator||model)"]
    assert result["kl"].item() == pytest.approx(0.25299137818778483, rel=1e-6)
    other = PROBE(*run, n_prompts=9, direction="model_to_reference")
    assert names(other) == ["KL(model||generator)"]
    q, p = np.exp(UNIGRAM), np.exp(BIGRAM)
    want = 2 / 3 * rel_entr(q, p[0]).sum() + 1 / 3 * rel_entr(q, p[1]).sum()
    assert other["kl"].item() == pytest.approx(want, rel=1e-6)
    assert want > 0.27
    # The model that is the bigram: 0, in both directions.
    for direction in ("reference_to_model", "model_to_reference"):
        same = written(BIGRAM[None], {"generator": BIGRAM})
        assert PROBE(*same, n_prompts=9, direction=direction)["kl"].item() < 1e-12


def test_the_entropy_floor_and_the_loss_by_hand():
    run = written(UNIGRAM + np.zeros((1, 2, 2)), {"generator": BIGRAM})
    result = PROBE(*run, n_prompts=9)
    entropy = -(np.exp(BIGRAM) * BIGRAM).sum(-1)
    floor = 2 / 3 * entropy[0] + 1 / 3 * entropy[1]
    assert result["entropy_floor"].item() == pytest.approx(floor)
    # Targets are token 0 throughout.
    assert result["loss"].item() == pytest.approx(-UNIGRAM[0], rel=1e-6)
    assert result["loss_error"].item() == pytest.approx(0, abs=1e-8)
    assert result["excess"].item() == pytest.approx(-UNIGRAM[0] - floor, rel=1e-6)
    spread = np.std(np.resize(entropy[[0, 0, 1]], 9), ddof=1) / 3
    assert result["excess_error"].item() == pytest.approx(spread, rel=1e-6)


def test_mass_that_is_missing_is_infinite_and_counted_apart():
    """After token 0 the reference never says 1; after token 1 it is like the model."""
    with np.errstate(divide="ignore"):
        never = np.log([[1.0, 0.0], [0.5, 0.5]])
    run = written(np.zeros((1, 2, 2)), {"generator": never})
    result = PROBE(*run, n_prompts=9)
    # 0 log 0 = 0: log 2 after token 0, and 0 after token 1.
    assert result["kl"].item() == pytest.approx(2 / 3 * np.log(2))
    assert result["n_infinite"].item() == 0
    other = PROBE(*run, n_prompts=9, direction="model_to_reference")
    assert other["kl"].item() == pytest.approx(0, abs=1e-12)
    assert other["n_infinite"].item() == 6
    assert other["undefined"].item() == 0


def test_infinite_on_all_prompts_has_no_mean():
    with np.errstate(divide="ignore"):
        never = np.log([[1.0, 0.0], [0.0, 1.0]])
    run = written(np.zeros((1, 2, 2)), {"generator": never})
    result = PROBE(*run, n_prompts=9, direction="model_to_reference")
    assert np.isnan(result["kl"].item()) and np.isnan(result["kl_error"].item())
    assert result["n_infinite"].item() == 9
    assert counts(result)["infinite_everywhere"] == 1
    assert np.isfinite(result["loss"].item())


def test_the_model_that_is_the_chain_and_the_one_that_sees_one_block():
    task = chain()
    mass = [[[[1.0, 0.0], [0.0, 1.0]]]]
    both = task.features[None, None]
    whole = measure(markov_toy.sparse(task, on_blocks(task, mass), both))
    assert names(whole) == ["KL(blocks_1||model)", "KL(generator||model)"]
    first, all_ = whole["kl"][0, 0]
    assert all_ < 1e-10 < 0.01 < first
    assert abs(whole["excess"].item()) < 4 * whole["excess_error"].item()
    one = both.copy()
    one[..., 1, :, :] = 0.0
    part = measure(markov_toy.sparse(task, on_blocks(task, mass), one))
    first, all_ = part["kl"][0, 0]
    assert first < 1e-10 < 0.01 < all_
    assert part["excess"].item() == pytest.approx(all_.item(), abs=4 * part["excess_error"].item())


def test_values_by_hand_over_parts(monkeypatch):
    monkeypatch.setattr("mechicl.analyses.context_kl._AT_ONCE", 64)
    toy = markov_toy.learning(2)
    result = measure(toy, n_prompts=150, evaluation_seed=3, n_steps=2)
    drawn = [markov_toy.sampled(toy.task, n, 3, part) for part, n in enumerate((64, 64, 22))]
    inputs, targets = (np.concatenate(each) for each in zip(*drawn, strict=True))
    references = toy.task.references(inputs)
    for seed, step in np.ndindex(2, 2):
        one = toy.trajectory.sel(step=result["step"][step]).isel(seed=seed)
        parameters = {name: one[name].values for name in ("KQ", "OV")}
        law = log_softmax(toy.forward().predict(parameters, inputs).astype(float), -1)
        mine = result.isel(seed=seed, step=step)
        for number, name in enumerate(("blocks_1", "blocks_2", "generator")):
            each = rel_entr(np.exp(references[name]), np.exp(law)).sum(-1).mean(-1)
            np.testing.assert_allclose(mine["kl"][number], each.mean(), rtol=1e-9)
            error = each.std(ddof=1) / 150**0.5
            np.testing.assert_allclose(mine["kl_error"][number], error, rtol=1e-9)
        each = -np.take_along_axis(law, targets[..., None], -1).mean((-2, -1))
        np.testing.assert_allclose(mine["loss"], each.mean(), rtol=1e-9)
        np.testing.assert_allclose(
            mine["loss_error"], each.std(ddof=1) / 150**0.5, rtol=1e-9, atol=1e-15
        )
        p = np.exp(references["generator"])
        excess = each + (p * references["generator"]).sum(-1).mean(-1)
        np.testing.assert_allclose(mine["excess"], excess.mean(), rtol=1e-6)
        np.testing.assert_allclose(mine["excess_error"], excess.std(ddof=1) / 150**0.5, rtol=1e-9)


def test_dips_and_falls_of_a_run_in_stages():
    """Heads on block 1, then one on block 2: the model comes near blocks_1 and leaves it."""
    result = measure(markov_toy.learning(2), n_prompts=500)
    steps = result["step"].values
    for seed in range(2):
        curves = result["kl"].isel(seed=seed).values.T
        np.testing.assert_array_equal(result["lowest"][seed], steps[curves.argmin(-1)])
    dip, fall = result["dip"].values, result["fall"].values
    assert (dip[:, 0] >= 100).all() and (dip[:, 0] <= 400).all()
    assert (dip[:, 0] <= dip[:, 1]).all() and np.isnan(dip[:, 2]).all()
    assert np.isnan(fall[:, 0]).all() and np.isfinite(fall[:, 2]).all()


def test_a_run_that_does_not_learn_has_neither():
    toy = markov_toy.learning(1)
    toy.trajectory["OV"].values[...] *= 0.01
    result = measure(toy)
    assert result["dip"].isnull().all() and result["fall"].isnull().all()
    assert np.isfinite(result["kl"]).all()


def test_exact_conditionals():
    toy = markov_toy.sparse(chain(), on_blocks(chain(), [[[[1.0, 0.0], [0.0, 1.0]]]]), 0.3)
    result = measure(toy, conditional=(0, 2, 4, 9))
    assert names(result)[2:] == [f"KL(conditional_{c}||model)" for c in (0, 2, 4, 9)]
    inputs, _ = markov_toy.sampled(toy.task, 200, 0, 0)
    parameters = {name: toy.trajectory[name].values[0, 0] for name in ("KQ", "OV")}
    law = np.exp(log_softmax(toy.forward().predict(parameters, inputs).astype(float), -1))
    for number, c in enumerate((0, 2), start=2):
        exact = np.exp(toy.task.exact_conditional(inputs, c))
        want = rel_entr(exact, law).sum(-1).mean()
        np.testing.assert_allclose(result["kl"][0, 0, number], want, rtol=1e-9)
    # From w tokens on it is the chain.
    np.testing.assert_allclose(result["kl"][0, 0, 4:], result["kl"][0, 0, 1], rtol=1e-12)


def test_exact_conditionals_know_weights_and_temperature():
    task = chain(blocks=((0, 2), (3,)), weights=((0.8, 0.2), (1.0,)), temperature=0.5)
    toy = markov_toy.sparse(task, np.full((1, 1, 1, 4), 0.25))
    result = measure(toy, conditional=(1, 4))
    np.testing.assert_allclose(result["kl"][0, 0, 3], result["kl"][0, 0, 1], rtol=1e-12)
    inputs, _ = markov_toy.sampled(task, 200, 0, 0)
    exact = task.exact_conditional(inputs, 1)
    # The model knows nothing: log d less the entropy.
    want = np.log(4) + (np.exp(exact) * exact).sum(-1).mean()
    np.testing.assert_allclose(result["kl"][0, 0, 2], want, rtol=1e-6)


def test_a_chain_too_large_for_exact_conditionals_is_refused():
    task = chain(d=20, blocks=((0, 1, 2), (3, 4, 5)))
    toy = markov_toy.sparse(task, np.full((1, 1, 1, 6), 1 / 6))
    with pytest.raises(InputError, match="d = 20 tokens and a window of w = 6"):
        measure(toy, conditional=(3,))
    assert measure(toy, conditional=(6,))["kl"].sizes["reference"] == 3


def table_run(toy: Toy, tables: Mapping[int, np.ndarray]) -> Against:
    """Return a run whose model of a seed says the same law after every prompt."""

    def predict(inputs: np.ndarray) -> np.ndarray:
        shape = (len(tables), len(inputs), toy.task.n_predictions, toy.task.d)
        rows = np.stack(list(tables.values()))[:, None, None]
        return np.broadcast_to(rows, shape).astype(np.float32)

    return Against(np.array(list(tables)), 7, "other", predict)


def silent(n_seeds: int) -> Toy:
    """Return models that say every token alike."""
    return markov_toy.sparse(chain(), np.full((n_seeds, 1, 1, 4), 0.25))


def test_trained_runs_are_matched_by_the_label_of_the_seed():
    toy = silent(3)
    tables = {2: np.array([3.0, 0, 0, 0]), 0: np.zeros(4)}
    forward = replace(toy.forward(), against={"c4": table_run(toy, tables)})
    result = measure(toy, forward)
    assert names(result)[-1] == "KL(trained:c4||model)"
    kl = result["kl"][:, 0, -1].values
    law = np.exp(log_softmax(tables[2]))
    assert kl[0] == pytest.approx(0, abs=1e-12)
    assert kl[2] == pytest.approx(np.log(4) + (law * np.log(law)).sum(), rel=1e-6)
    # Seed 1 is not in the other run: NaN there alone, with the reason.
    assert np.isnan(kl[1]) and np.isfinite(result["kl"][1, 0, :-1]).all()
    assert np.isnan(result["n_infinite"][1, 0, -1]) and np.isnan(result["dip"][1, -1])
    assert counts(result)["no_model_of_this_seed"] == 1
    reasons = flag_names(result["undefined"])
    assert reasons[int(result["undefined"][1, 0])] == "no_model_of_this_seed"
    assert json.loads(result.attrs["against"]) == {"c4": "other"}


def test_a_trained_run_that_diverged_has_no_model():
    toy = silent(2)
    tables = {0: np.zeros(4), 1: np.array([np.nan, 0, 0, 0])}
    forward = replace(toy.forward(), against={"c4": table_run(toy, tables)})
    result = measure(toy, forward, direction="model_to_reference")
    assert names(result)[-1] == "KL(model||trained:c4)"
    np.testing.assert_array_equal(np.isnan(result["kl"][:, 0, -1]), [False, True])
    assert counts(result)["no_model_of_this_seed"] == 1


def test_a_seed_that_diverged():
    toy = markov_toy.learning(2)
    trajectory = markov_toy.poison(toy.trajectory, seed=1, from_index=4)
    result = measure(replace(toy, trajectory=trajectory))
    whole = measure(toy)
    np.testing.assert_array_equal(result["kl"][0], whole["kl"][0])
    np.testing.assert_array_equal(result["kl"][1, :4], whole["kl"][1, :4])
    for name in ("kl", "kl_error", "n_infinite", "loss", "excess"):
        assert result[name][1, 4:].isnull().all()
    for name in ("lowest", "dip", "fall"):
        assert result[name][1].isnull().all() and result[name][0].notnull().any()
    assert counts(result)["nonfinite_parameters"] == 3
    assert sum(counts(result).values()) == 3


def test_predictions_that_overflow():
    toy = markov_toy.learning(1)
    toy.trajectory["OV"].values[0, -1] = 3e38
    toy.trajectory["OV"].values[0, -1, 0, 0] = -3e38
    forward = toy.forward()

    def predict(parameters: Mapping[str, np.ndarray], inputs: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return forward.predict(parameters, inputs) * np.float32(10)

    result = measure(toy, replace(forward, predict=predict))
    assert result["kl"][0, -1].isnull().all() and result["kl"][0, :-1].notnull().all()
    assert counts(result)["nonfinite_predictions"] == 1


def test_a_model_of_shorter_context():
    task = chain()
    toy = markov_toy.sparse(task, [[[[0.5, 0.5]]]], task.features[None, None, :1], context=2)
    result = measure(toy)
    first, all_ = result["kl"][0, 0]
    assert first < 1e-10 < 0.01 < all_


def test_other_tasks_are_refused():
    with pytest.raises(NothingToAnalyseError, match="the run has no lag_weights, features, temp"):
        PROBE(trajectories.learning(), markov_toy.learning().forward())


@pytest.mark.parametrize(
    "settings", [{"direction": "both"}, {"conditional": (-1,)}, {"dip_rise": 0}, {"n_prompts": 1}]
)
def test_wrong_settings_are_refused(settings):
    with pytest.raises(InputError, match=next(iter(settings))):
        measure(silent(1), **settings)


def test_trained_runs_from_the_facade(tmp_path: Path):
    overrides: dict[str, object] = {
        "task": {"name": "markov_chain", "d": 3, "blocks": [1, 1], "n_predictions": 3},
        "batch_size": 8,
        "n_steps": 2,
        "checkpoints": {"every": 1},
    }

    def train(name: str, seeds: list[int], **model: object) -> mechicl.run.Run:
        changed = overrides | {"seeds": seeds} | {f"model.{k}": v for k, v in model.items()}
        where = tmp_path / name
        return mechicl.train("yuksel2026-minimal", where, overrides=changed, compile=False)

    run, short = train("full", [0, 1]), train("c1", [1], context=1)
    result = run.analyze("context_kl", against=short, n_prompts=20)
    assert names(result) == [
        "KL(blocks_1||model)",
        "KL(generator||model)",
        "KL(trained:c1||model)",
    ]
    assert result["kl"][0, :, -1].isnull().all() and result["kl"][1, :, -1].notnull().all()
    assert counts(result)["no_model_of_this_seed"] == result.sizes["step"]
    itself = run.analyze("context_kl", against={"me": run}, n_prompts=20)
    np.testing.assert_allclose(itself["kl"][:, -1, -1], 0, atol=1e-12)
    run.save(result, figure=False)
    with pytest.raises(InputError, match="a run or its path, or several; given 3"):
        run.analyze("context_kl", against=3)  # pyright: ignore[reportArgumentType]
    short.path.rename(tmp_path / "c 1")
    with pytest.raises(InputError, match="without blanks, as NAME=RUN"):
        run.analyze("context_kl", against=tmp_path / "c 1")
    flip_bit(chunk(tmp_path / "c 1", "OV"))
    with pytest.raises(DamagedRunError, match=r"\(OV, seed 1, step 2\).*--skip-damaged"):
        run.analyze("context_kl", against={"c1": tmp_path / "c 1"}, n_prompts=20)
    with pytest.warns(UserWarning, match="left out as NaN"):
        without = run.analyze(
            "context_kl", against={"c1": tmp_path / "c 1"}, n_prompts=20, skip_damaged=True
        )
    assert without["kl"][..., -1].isnull().all() and without["kl"][..., :-1].notnull().all()
    assert counts(without)["no_model_of_this_seed"] == 2 * result.sizes["step"]
