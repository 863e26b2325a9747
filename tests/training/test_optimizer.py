"""Update rules against `torch.optim`, step by step."""

import pytest
import torch

from mechicl.training import optimizer
from mechicl.training.recipe import OptimizerConfig

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
            config, parameters, gradients(step, start), state, number
        )
    return parameters


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
        for step in range(1, n + 1):
            for name, gradient in gradients(step, start).items():
                parameters[name].grad = gradient[index].clone()
            if config.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters.values(), config.clip_norm)
            rule.step()
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
