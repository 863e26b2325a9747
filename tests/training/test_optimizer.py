"""Update rules against `torch.optim`, step by step."""

import math

import pytest
import torch

from mechicl.training import optimizer
from mechicl.training.recipe import OptimizerConfig

N_STEPS = 20
RULES = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def gradients(seed: int, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=stream, dtype=value.dtype)
        for name, value in like.items()
    }


def ours(
    config: OptimizerConfig, start: dict[str, torch.Tensor], n: int
) -> dict[str, torch.Tensor]:
    parameters, state = start, optimizer.initial_state(config, start)
    for step in range(1, n + 1):
        number = torch.tensor(float(step), dtype=torch.float64)
        parameters, state = optimizer.update(
            config, parameters, gradients(step, start), state, number, N_STEPS
        )
    return parameters


def schedule(
    config: OptimizerConfig, rule: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return torch's own scheduler of that rate; warm-up is over in the tests that have a decay."""
    if config.schedule == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(rule, N_STEPS)
    n = max(config.warmup_steps, 1)
    return torch.optim.lr_scheduler.LinearLR(rule, start_factor=1 / n, total_iters=n - 1)


def theirs(
    config: OptimizerConfig, start: dict[str, torch.Tensor], n: int
) -> dict[str, torch.Tensor]:
    """Train each stacked model alone with torch's own optimiser and clipping."""
    stacked: dict[str, list[torch.Tensor]] = {name: [] for name in start}
    for index in range(3):
        parameters = {name: value[index].clone().requires_grad_() for name, value in start.items()}
        settings = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        if config.name != "sgd":
            settings |= {"betas": config.betas, "eps": config.eps}
        rule = RULES[config.name](parameters.values(), **settings)
        rate = schedule(config, rule)
        for step in range(1, n + 1):
            for name, gradient in gradients(step, start).items():
                parameters[name].grad = gradient[index].clone()
            if config.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters.values(), config.clip_norm)
            rule.step()
            rate.step()
        for name, value in parameters.items():
            stacked[name].append(value.detach())
    return {name: torch.stack(values) for name, values in stacked.items()}


@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e6])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", list(RULES))
def test_equals_torch(name: str, weight_decay: float, clip_norm: float | None) -> None:
    config = OptimizerConfig(
        name=name, learning_rate=0.05, weight_decay=weight_decay, clip_norm=clip_norm
    )
    start = gradients(0, {"W": torch.zeros(3, 4, 2).double(), "b": torch.zeros(3, 5).double()})
    mine, reference = ours(config, start, 20), theirs(config, start, 20)
    assert mine.keys() == reference.keys()
    for key in mine:
        torch.testing.assert_close(mine[key], reference[key], rtol=1e-12, atol=1e-12)
        assert (mine[key] - start[key]).abs().max() > 1e-3, "nothing was trained"


@pytest.mark.parametrize(
    "settings", [{"schedule": "cosine"}, {"warmup_steps": 7}, {"warmup_steps": 1}]
)
@pytest.mark.parametrize("name", list(RULES))
def test_rates_follow_the_schedules_of_torch(name: str, settings: dict[str, object]) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.05, weight_decay=0.1, **settings)
    start = gradients(0, {"W": torch.zeros(3, 4, 2).double(), "b": torch.zeros(3).double()})
    mine, reference = ours(config, start, N_STEPS), theirs(config, start, N_STEPS)
    constant = ours(
        OptimizerConfig(name=name, learning_rate=0.05, weight_decay=0.1), start, N_STEPS
    )
    for key in mine:
        torch.testing.assert_close(mine[key], reference[key], rtol=1e-12, atol=1e-12)
        differs = bool((mine[key] - constant[key]).abs().max() > 1e-3)
        assert differs == (settings != {"warmup_steps": 1})


def test_both_schedules_multiply() -> None:
    config = OptimizerConfig(learning_rate=2.0, schedule="cosine", warmup_steps=4)
    rates = [
        float(optimizer.learning_rate(config, torch.tensor(float(n)).double(), 8))
        for n in range(1, 9)
    ]
    decay = [(1 + math.cos(math.pi * n / 8)) / 2 for n in range(8)]
    warm = [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    expected = [2 * one * other for one, other in zip(decay, warm, strict=True)]
    assert rates == pytest.approx(expected, rel=1e-6)
