"""Constrained linear attention that pools its context, raj2026 (6)."""

from typing import TYPE_CHECKING, Annotated, Literal, Self

import pydantic

from mechicl.models.base import Model, of_kind, register
from mechicl.schema import Var
from mechicl.tasks import ContinuousTask, Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import torch
    from jaxtyping import Float
    from torch import Tensor
    from transformer_lens import HookedTransformer

EPS = 1e-5
"""Added to variances where rows are normalised: PyTorch's default."""


@register
class PooledAttention(Model):
    """L rounds of pooling a context into d channels, read by the queries (raj2026 (6), Fig. 3).

    A context is tokens z, of which a statistic φ_ℓ is pooled in each layer; a workspace p, of S
    entries and shared by all positions, collects it; with p_1 = ε·1 and x̄ for x normalised to mean
    0 and variance 1 along its last axis,

        K_ℓ = MLP̄_ℓ(p̄_ℓ),  φ_ℓ = ⟨(V_ℓ z) ⊙ (K_ℓ z)⟩,  p_{ℓ+1} = p_ℓ + O_ℓ(φ_ℓ ⊙ Q_ℓ p_ℓ)/√d.

    A query reads u = (x, 0) ⊕ p_{L+1} through a stack of MLPs, u ← u + MLP(ū) each, and a linear
    map to its prediction. MLPs have one hidden layer and GELU.

    Without `feedforward` there is one layer, no workspace and no MLP: ŷ = Σ_c O_c φ_c (Q z)_c with
    φ = ⟨(V z) ⊙ (K z)⟩, which is (W G_xy)ᵀx of a W of rank d for V that read y alone.

    The paper's models, at a budget of M = d·L measurements: A is `n_layers: M`; B is `n_channels:
    M`; C is B without `feedforward`. A prompt is read as (context, queries), as many queries as a
    target of the task has, one where a target is a number.

    Attributes
    ----------
    n_layers, n_channels
        L and d.
    feedforward
        Whether keys and the output come from MLPs.
    d_workspace
        S, at least d·L; None is K + 1.
    d_mlp
        Hidden units of every MLP; None is K + 1 + S, the width D of u.
    n_output_mlps
        MLPs that a query is read through.
    epsilon
        ε, every entry of the workspace at the start.
    """

    input_kind = "continuous"
    name: Literal["pooled_attention"] = "pooled_attention"  # pyright: ignore[reportIncompatibleVariableOverride]
    n_layers: Annotated[int, pydantic.Field(ge=1)] = 1
    n_channels: Annotated[int, pydantic.Field(ge=1)] = 1
    feedforward: bool = True
    d_workspace: Annotated[int, pydantic.Field(ge=1)] | None = None
    d_mlp: Annotated[int, pydantic.Field(ge=1)] | None = None
    n_output_mlps: Annotated[int, pydantic.Field(ge=1)] = 3
    epsilon: Annotated[float, pydantic.Field(gt=0)] = 0.1

    @pydantic.model_validator(mode="after")
    def _depth_needs_mlps(self) -> Self:
        if not self.feedforward and self.n_layers > 1:
            raise ValueError(
                f"n_layers = {self.n_layers} without feedforward; accepted: 1, for what a later "
                "layer measures is chosen by an MLP"
            )
        return self

    def refusal(self, task: Task) -> str | None:
        """Refuse tokens, several responses, and a workspace that cannot hold all measurements."""
        inherited = super().refusal(task)
        if inherited is not None or not isinstance(task, ContinuousTask):
            return inherited
        if not set(task.target_sizes) <= {"query"}:
            return (
                f"model {self.name!r} predicts one number a query, and a target of task "
                f"{task.name!r} has axes {', '.join(task.target_sizes)}"
            )
        budget, workspace = self.n_layers * self.n_channels, self.workspace(task)
        if self.feedforward and workspace < budget:
            return (
                f"model {self.name!r} makes {budget} measurements (n_layers times n_channels), and "
                f"its workspace has d_workspace = {workspace} entries; accepted: as many at least"
            )
        return None

    def workspace(self, task: Task) -> int:
        """Return S, the entries of the workspace."""
        return self.d_workspace or of_kind(self, task, ContinuousTask).d_model

    def parameters(self, task: Task) -> dict[str, Var]:
        """Declare V, Q, O of every layer, and its MLP and those of the output, or K."""
        del task
        lead, layer = ("seed", "step"), ("seed", "step", "layer")
        found = {"W_V": Var((*layer, "channel", "d_model"), "1", "values, V")}
        if not self.feedforward:
            return found | {
                "W_K": Var((*layer, "channel", "d_model"), "1", "keys, K"),
                "W_Q": Var((*layer, "channel", "d_model"), "1", "queries, Q"),
                "W_O": Var((*layer, "channel"), "1", "output, O"),
            }
        output = (*lead, "output_mlp")
        return found | {
            "W_Q": Var((*layer, "channel", "d_workspace"), "1", "gates, Q"),
            "W_O": Var((*layer, "d_workspace", "channel"), "1", "output, O"),
            "W_in": Var((*layer, "d_workspace", "d_mlp"), "1", "MLP of the keys, in"),
            "b_in": Var((*layer, "d_mlp"), "1", "MLP of the keys, bias in"),
            "W_out": Var((*layer, "d_mlp", "channel", "d_model"), "1", "MLP of the keys, out"),
            "b_out": Var((*layer, "channel", "d_model"), "1", "MLP of the keys, bias out"),
            "out_W_in": Var((*output, "d_residual", "d_mlp"), "1", "MLP of the output, in"),
            "out_b_in": Var((*output, "d_mlp"), "1", "MLP of the output, bias in"),
            "out_W_out": Var((*output, "d_mlp", "d_residual"), "1", "MLP of the output, out"),
            "out_b_out": Var((*output, "d_residual"), "1", "MLP of the output, bias out"),
            "W_U": Var((*lead, "d_residual"), "1", "readout of the prediction"),
            "b_U": Var(lead, "1", "bias of the prediction"),
        }

    def sizes(self, task: Task) -> dict[str, int]:
        """L, d, and where there are MLPs S, D and their hidden units; tokens have K + 1 entries."""
        width, workspace = of_kind(self, task, ContinuousTask).d_model, self.workspace(task)
        found = {"layer": self.n_layers, "channel": self.n_channels, "d_model": width}
        if not self.feedforward:
            return found
        return found | {
            "d_workspace": workspace,
            "d_residual": width + workspace,
            "d_mlp": self.d_mlp or width + workspace,
            "output_mlp": self.n_output_mlps,
        }

    def constants(self) -> "dict[str, tuple[Var, float | np.ndarray]]":
        """Return the budget M, whether there are MLPs, and ε."""
        return {
            "n_measurements": (
                Var((), "1", "measurements, layers times channels, M", 1),
                self.n_layers * self.n_channels,
            ),
            "feedforward": (Var((), "1", "1 where MLPs make the keys", 0, 1), self.feedforward),
            "epsilon": (Var((), "1", "entries of the workspace at the start", 0), self.epsilon),
        }

    def initial(self, task: Task, generator: "torch.Generator") -> "dict[str, Tensor]":
        """Draw V, Q, K and O from N(0, 1/fan_in), and MLPs as PyTorch's `nn.Linear` does.

        Those are U(−1/√fan_in, 1/√fan_in), biases as well. O without `feedforward` is 1.
        """
        import torch

        sizes = self.sizes(task)
        shapes = {
            name: tuple(sizes[dim] for dim in var.dims[2:])
            for name, var in self.parameters(task).items()
        }
        fan_in = {"W_V": "d_model", "W_K": "d_model", "W_O": "channel"}
        fan_in["W_Q"] = "d_workspace" if self.feedforward else "d_model"
        linear = {"in": "d_workspace", "out": "d_mlp", "out_in": "d_residual", "out_out": "d_mlp"}
        found = {}
        for name, shape in shapes.items():
            if name == "W_O" and not self.feedforward:
                found[name] = torch.ones(shape)
            elif name in fan_in:
                normals = torch.randn(shape, generator=generator)
                found[name] = normals / sizes[fan_in[name]] ** 0.5
            else:
                kind = name.replace("W_", "").replace("b_", "")
                bound = sizes["d_residual" if kind == "U" else linear[kind]] ** -0.5
                found[name] = (2 * torch.rand(shape, generator=generator) - 1) * bound
        return found

    def predict(
        self,
        task: Task,
        parameters: "Mapping[str, Float[Tensor, '*models layer ...']]",
        inputs: "Float[Tensor, '... batch pos d_model']",
    ) -> "Float[Tensor, '*models_batch_query']":
        """Evaluate (6) through the second moments of the context.

        φ_c = k_cᵀ G v_c with G = ⟨z zᵀ⟩, and V does not depend on the context: so G V of all
        layers is made at once by two products with the tokens, and a layer is left with products
        of its own K + 1 numbers. G itself is never formed.
        """
        context, queries = self.split(task, inputs)
        measured = _measured(context, parameters["W_V"])  # (*models, batch, layer, channel, entry)
        if self.feedforward:
            workspace = self._workspace(task, parameters, measured)
            predicted = self._read(parameters, workspace, queries)
        else:
            axes = self.layer_axes(task)
            w_k, w_q, w_o = (
                parameters[name].select(axes[name], 0) for name in ("W_K", "W_Q", "W_O")
            )
            pooled = (measured.squeeze(-3) * w_k[..., None, :, :]).sum(-1)
            gated = queries @ w_q[..., None, :, :].mT  # (*models, batch, query, channel)
            predicted = (gated * (pooled * w_o[..., None, :])[..., None, :]).sum(-1)
        return predicted if task.target_sizes else predicted[..., 0]

    def split(
        self, task: Task, inputs: "Float[Tensor, '*batch pos d_model']"
    ) -> "tuple[Float[Tensor, '*batch token d_model'], Float[Tensor, '*batch query d_model']]":
        """Return the context and the queries of prompts."""
        n_queries = task.target_sizes.get("query", 1)
        return inputs[..., :-n_queries, :], inputs[..., -n_queries:, :]

    def _workspace(
        self,
        task: Task,
        parameters: "Mapping[str, Float[Tensor, '*models layer ...']]",
        measured: "Float[Tensor, '*models batch layer channel d_model']",
    ) -> "Float[Tensor, '*models batch d_workspace']":
        """Return p_{L+1}."""
        import torch
        from torch.nn.functional import gelu

        layers = {
            name: parameters[name].unbind(axis) for name, axis in self.layer_axes(task).items()
        }
        *lead, _, n_channels, width = measured.shape
        size = parameters["W_Q"].shape[-1]
        p = torch.full((*lead, size), self.epsilon, dtype=measured.dtype, device=measured.device)
        for layer in range(self.n_layers):
            weights = {name: values[layer] for name, values in layers.items()}
            if layer:
                hidden = normalized(p) @ weights["W_in"] + weights["b_in"][..., None, :]
            else:  # p is constant, and normalised it is 0
                hidden = weights["b_in"][..., None, :]
            flat = gelu(hidden) @ weights["W_out"].flatten(-2)
            keys = flat.unflatten(-1, (n_channels, width)) + weights["b_out"][..., None, :, :]
            pooled = (normalized(keys) * measured[..., layer, :, :]).sum(-1)
            update = (pooled * (p @ weights["W_Q"].mT)) @ weights["W_O"].mT
            p = p + update / n_channels**0.5
        return p

    def _read(
        self,
        parameters: "Mapping[str, Float[Tensor, '*models ...']]",
        workspace: "Float[Tensor, '*models batch d_workspace']",
        queries: "Float[Tensor, '... batch query d_model']",
    ) -> "Float[Tensor, '*models batch query']":
        """Return what each query predicts from the workspace."""
        import torch
        from torch.nn.functional import gelu

        w_in, w_out = parameters["out_W_in"], parameters["out_W_out"]
        b_in, b_out = parameters["out_b_in"], parameters["out_b_out"]
        readout = parameters["W_U"][..., None]  # (*models, d_residual, 1)
        n_queries = queries.shape[-2]
        shared = workspace[..., None, :].expand(*workspace.shape[:-1], n_queries, -1)
        tokens = queries.expand(*shared.shape[:-1], -1)
        stream = torch.cat([tokens, shared], -1).flatten(-3, -2)  # (*models, batch query, D)

        def hidden(mlp: int) -> "Tensor":
            before = normalized(stream) @ w_in[..., mlp, :, :] + b_in[..., mlp, None, :]
            return gelu(before)

        last = self.n_output_mlps - 1
        for mlp in range(last):
            stream = stream + hidden(mlp) @ w_out[..., mlp, :, :] + b_out[..., mlp, None, :]
        # Of the last MLP the readout alone is wanted: its product with W_out is a vector.
        written = hidden(last) @ (w_out[..., last, :, :] @ readout)
        predicted = written + (stream + b_out[..., last, None, :]) @ readout
        predicted = predicted[..., 0] + parameters["b_U"][..., None]
        return predicted.unflatten(-1, (-1, n_queries))

    def hooked(self, task: Task, parameters: "Mapping[str, Tensor]") -> "HookedTransformer":
        """Return it as a HookedTransformer; see `mechicl.models.hooked_pooled`."""
        from mechicl.models.hooked_pooled import PooledTransformer

        return PooledTransformer(self, of_kind(self, task, ContinuousTask), parameters)

    def answers(
        self, task: Task, output: "Float[Tensor, '*variants batch query']"
    ) -> "Float[Tensor, '*variants_batch_query']":
        """All of it, or the one query of a target that is a number."""
        return output if task.target_sizes else output[..., 0]


def normalized(values: "Float[Tensor, '*batch entry']") -> "Float[Tensor, '*batch entry']":
    """Return values of mean 0 and variance 1 along the last axis; 0 where they are constant."""
    centred = values - values.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()


def _measured(
    context: "Float[Tensor, '... batch token d_model']",
    w_v: "Float[Tensor, '*models layer channel d_model']",
) -> "Float[Tensor, '*models batch layer channel d_model']":
    """Return G v of every channel: ⟨z (v z)⟩ over the context."""
    flat = w_v.flatten(-3, -2)[..., None, :, :]
    values = flat @ context.mT  # (*models, batch, layer channel, token)
    return (values @ context / context.shape[-2]).unflatten(-2, w_v.shape[-3:-1])
