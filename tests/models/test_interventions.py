"""Patches: against hooks written by hand, their identities, hooks left behind, what is refused."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformer_lens import HookedTransformer

from mechicl.errors import InputError
from mechicl.models import Model
from mechicl.models.decoder import Decoder
from mechicl.models.evaluate import one_thread_an_operation
from mechicl.models.hooked import hook_dims
from mechicl.models.interventions import Donor, Patch, patched, record, run_each, run_patched
from mechicl.models.linear_attention import LinearAttention
from mechicl.models.softmax_attention import SoftmaxAttention
from mechicl.models.sparse_attention import SparseAttention
from mechicl.tasks import Task
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.markov_chain import MarkovChain
from mechicl.tasks.streams import generator

VECTORS = LinearRegression(d=3, n_context=6)
TOKENS = MarkovChain(d=5, blocks=(1, 2), n_predictions=4, temperature=0.5)
Z, PRE = "blocks.0.attn.hook_z", "blocks.0.hook_resid_pre"
PATTERN = "blocks.0.attn.hook_pattern"

CASES: dict[str, tuple[Task, Model]] = {
    "softmax": (VECTORS, SoftmaxAttention(n_heads=2)),
    "linear": (VECTORS, LinearAttention(n_heads=3)),
    "sparse": (TOKENS, SparseAttention()),
    "sparse windows": (TOKENS, SparseAttention(context=3)),
    "decoder": (TOKENS, Decoder(n_layers=2, n_heads=2, d_head=3, d_mlp=7)),
    "decoder windows": (TOKENS, Decoder(n_layers=2, n_heads=2, d_head=3, d_mlp=7, context=2)),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Operations this small lose to any neighbour on more than one."""
    with one_thread_an_operation():
        yield


class Case(NamedTuple):
    """A model, what it reads, and what a donor reads."""

    task: Task
    model: Model
    hooked: HookedTransformer
    clean: Tensor
    other: Tensor

    def answers(self, output: Tensor) -> Tensor:
        return self.model.answers(self.task, output).detach()


def build(name: str, seed: int = 0) -> Case:
    task, model = CASES[name]
    drawn = model.initial(task, generator("test", seed))
    stream = torch.Generator().manual_seed(seed)
    weights = {
        key: value.double() + 0.5 * torch.randn(value.shape, generator=stream).double()
        for key, value in drawn.items()
    }
    prompts = torch.from_numpy(task.sample(12, seed=3)["inputs"].values)
    prompts = prompts.double() if prompts.is_floating_point() else prompts
    sequences = [model.windows(task, half) for half in prompts.split(6)]
    return Case(task, model, model.hooked(task, weights), *sequences)


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return build(request.param)


@pytest.fixture
def softmax() -> Case:
    return build("softmax")


def n_hooks(model: HookedTransformer) -> int:
    """Count the hooks of a model, PyTorch's own included."""
    return sum(len(point._forward_hooks) for point in model.hook_dict.values())


def by_hand(case: Case, name: str, edit: Callable[[Tensor], None]) -> Tensor:
    """Run with a hook of TransformerLens that edits a copy in place."""

    def hook(value: Tensor, hook: object) -> Tensor:
        value = value.clone()
        edit(value)
        return value

    return case.hooked.run_with_hooks(case.clean, fwd_hooks=[(name, hook)])


def cached(case: Case, sequences: Tensor) -> dict[str, Tensor]:
    return {**case.hooked.run_with_cache(sequences)[1]}


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_patches_are_hooks_written_by_hand(case: Case) -> None:
    """Every kind of value, at a head and a position, whole, and by slices."""
    donor, own = cached(case, case.other)[Z], cached(case, case.clean)[Z]
    zero, mean = torch.zeros_like(donor), donor.mean(0)

    def at_head(value: Tensor, new: Tensor) -> None:
        value[:, -1, 1] = new[..., -1, 1, :]

    def at_positions(value: Tensor, new: Tensor) -> None:
        value[:, 1:, 0] = new[..., 1:, 0, :]

    def whole(value: Tensor, new: Tensor) -> None:
        value[:] = new

    places = {
        at_head: {"head": 1, "pos": -1},
        at_positions: {"pos": slice(1, None), "head": [0]},
        whole: {},
    }
    values = [
        (donor, donor),
        (Donor(case.other), donor),
        (Donor(case.other, mean=True), mean),
        (mean[None], mean),
        ("zero", zero),
        ("mean", own.mean(0)),
    ]
    before, moved = case.hooked(case.clean), 0
    for (edit, at), (value, new) in product(places.items(), values):
        given = run_patched(case.hooked, case.clean, Patch(Z, value, at))
        same(given, by_hand(case, Z, lambda x, edit=edit, new=new: edit(x, new)))
        moved += not torch.allclose(given, before)
    assert moved == len(places) * len(values)


def test_indices_of_several_dims_are_met_together(softmax: Case) -> None:
    """Two queries and two keys are four entries, and not two."""
    at = {"head": 0, "query_pos": [2, -1], "key_pos": [0, 1]}
    given = run_patched(softmax.hooked, softmax.clean, Patch(PATTERN, "zero", at))

    def four(value: Tensor) -> None:
        for query, key in product((2, -1), (0, 1)):
            value[:, 0, query, key] = 0

    def two(value: Tensor) -> None:
        value[:, 0, [2, -1], [0, 1]] = 0

    same(given, by_hand(softmax, PATTERN, four))
    assert not torch.allclose(given, by_hand(softmax, PATTERN, two))


def test_patches_act_together_and_in_order(case: Case) -> None:
    first = Patch(PRE, "zero", {"pos": 0})
    second = Patch(Z, Donor(case.other), {"head": 0})
    both = run_patched(case.hooked, case.clean, [first, second])
    donor = cached(case, case.other)[Z]

    def of_residual(value: Tensor, hook: object) -> Tensor:
        value[:, 0] = 0
        return value

    def of_head(value: Tensor, hook: object) -> Tensor:
        value[:, :, 0] = donor[:, :, 0]
        return value

    hooks = [(PRE, of_residual), (Z, of_head)]
    same(both, case.hooked.run_with_hooks(case.clean, fwd_hooks=hooks))
    # The later one of a place has the last word.
    zero, given = Patch(Z, "zero"), Patch(Z, donor, {"head": 0})
    last = run_patched(case.hooked, case.clean, [given, zero])
    same(last, run_patched(case.hooked, case.clean, zero))
    other = run_patched(case.hooked, case.clean, [zero, given])
    assert not torch.allclose(other, last)


def test_a_donor_that_is_clean_moves_nothing_and_another_does(case: Case) -> None:
    before, counted = case.hooked(case.clean), 0
    fired = set(cached(case, case.clean))
    assert len(fired) > 8
    for name in fired:
        with pytest.warns(UserWarning, match=f"1 of 1 patches changed nothing.*{name}"):
            after = run_patched(case.hooked, case.clean, Patch(name, Donor(case.clean.clone())))
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        counted += 1
    assert counted == len(fired)
    after = run_patched(case.hooked, case.clean, Patch(Z, Donor(case.other)))
    assert (after - before).abs().max() > 1e-3


def test_the_whole_residual_stream_makes_the_donor(case: Case) -> None:
    """Before and after every block; without its last position it does not."""
    donor, before = (case.answers(case.hooked(x)) for x in (case.other, case.clean))
    assert not torch.allclose(donor, before)
    counted = 0
    for layer, place in product(range(case.hooked.cfg.n_layers), ("pre", "post")):
        name = f"blocks.{layer}.hook_resid_{place}"
        all_of_it = run_patched(case.hooked, case.clean, Patch(name, Donor(case.other)))
        same(case.answers(all_of_it), donor)
        some = Patch(name, Donor(case.other), {"pos": slice(0, -1)})
        assert not torch.allclose(
            case.answers(run_patched(case.hooked, case.clean, some)), donor
        ), name
        counted += 1
    assert counted == 2 * case.hooked.cfg.n_layers


def test_nothing_upstream_of_a_patch_moves(case: Case) -> None:
    """Hook points fire in the order of computation: those before stay, that one and later move."""
    before, other = (cached(case, x) for x in (case.clean, case.other))
    order = list(before)
    names = [name for name in order if name.endswith(("hook_z", "hook_resid_mid"))]
    for name in names:
        with patched(case.hooked, Patch(name, Donor(case.other))):
            _, cache = case.hooked.run_with_cache(case.clean)
        assert list(cache) == order
        at = order.index(name)
        for upstream in order[:at]:
            torch.testing.assert_close(cache[upstream], before[upstream], rtol=0, atol=0)
        torch.testing.assert_close(cache[name], other[name], rtol=0, atol=0)
        moved = [x for x in order[at:] if not torch.allclose(cache[x], before[x])]
        assert {name, order[-1]} <= set(moved)
    assert len(names) >= 1


@pytest.mark.parametrize("at_once", [1, 40, 10_000])
def test_stacked_variants_are_those_one_by_one(case: Case, at_once: int) -> None:
    n_heads, n_positions = case.hooked.cfg.n_heads, cached(case, case.clean)[Z].shape[1]
    donor = Donor(case.other)
    places = list(product(range(n_heads), range(n_positions)))[:: 1 if at_once == 40 else 5]
    variants: list[Patch | list[Patch]] = [
        Patch(Z, value, {"head": head, "pos": position})
        for value in (donor, "mean")
        for head, position in places
    ]
    last = f"blocks.{case.hooked.cfg.n_layers - 1}.hook_resid_post"
    variants += [
        [Patch(PRE, donor, {"pos": -1}), Patch(Z, "zero", {"head": 0})],
        Patch(last, Donor(case.other, mean=True)),
    ]
    runs: list[int] = []
    handle = case.hooked.register_forward_pre_hook(lambda module, args: runs.append(len(args[0])))
    given = run_each(case.hooked, case.clean, variants, at_once=at_once, unchanged="ignore")
    handle.remove()
    assert max(runs) <= max(at_once, len(case.clean))
    assert sum(runs) == len(case.clean) * (len(variants) + 1), "a donor was run more than once"
    assert not given.requires_grad
    alone = [
        run_patched(case.hooked, case.clean, each, unchanged="ignore").detach() for each in variants
    ]
    same(given, torch.stack(alone))
    assert len({round(float(each.square().sum()), 9) for each in alone}) > len(alone) / 2
    stacked = case.answers(given)
    assert stacked.shape == (len(variants), *case.answers(alone[0]).shape)
    same(stacked[3], case.answers(alone[3]))


def test_the_mean_of_a_variant_is_of_its_own_sequences(softmax: Case) -> None:
    """A first patch differs between variants, so that the batch's means do too."""
    variants = [
        [Patch(Z, value), Patch(Z, "mean")]
        for value in (torch.full((6, 7, 2, 4), 1.0), torch.full((6, 7, 2, 4), 3.0))
    ]
    one, three = run_each(softmax.hooked, softmax.clean, variants, unchanged="ignore")
    of_one = run_patched(softmax.hooked, softmax.clean, Patch(Z, torch.ones(1, 7, 2, 4)))
    same(one, of_one.detach())
    assert not torch.allclose(one, three)


def test_an_activation_that_passes_once_for_all_can_be_patched(softmax: Case) -> None:
    """As a key that no prompt changes: the batch begins after it."""

    def of_first(module: object, args: object, value: Tensor) -> Tensor:
        return value[:1]

    point = softmax.hooked.hook_dict[PRE]
    handle = point.register_forward_hook(of_first)
    variants = [Patch(PRE, "zero", {"pos": position}) for position in (0, 2)]
    given = run_each(softmax.hooked, softmax.clean, variants)
    assert given.shape[:2] == (2, 6)
    for each, variant in zip(given, variants, strict=True):
        alone = run_patched(softmax.hooked, softmax.clean, variant)
        torch.testing.assert_close(each, alone.expand_as(each).detach(), rtol=0, atol=1e-12)
    handle.remove()

    def of_two(module: object, args: object, value: Tensor) -> Tensor:
        return value[:3]

    point.register_forward_hook(of_two)
    with pytest.raises(InputError, match="is not the 6 sequences of 2 variants"):
        run_each(softmax.hooked, softmax.clean, variants)


def test_from_one_model_to_another_and_from_one_hook_point_to_another(case: Case) -> None:
    """A checkpoint or a seed is another model: donors of the same prompts."""
    donor = case.model.hooked(
        case.task,
        {
            key: value.double() + 0.3
            for key, value in case.model.initial(case.task, generator("test", 9)).items()
        },
    )
    given = run_patched(case.hooked, case.clean, Patch(Z, Donor(case.clean, donor)))
    _, cache = donor.run_with_cache(case.clean)
    same(given, by_hand(case, Z, lambda value: value.copy_(cache[Z])))
    assert not torch.allclose(given, case.hooked(case.clean))
    across = Patch(
        "blocks.0.hook_resid_pre", Donor(case.clean, donor, hook="blocks.0.hook_attn_out")
    )
    given = run_patched(case.hooked, case.clean, across)
    same(given, by_hand(case, PRE, lambda value: value.copy_(cache["blocks.0.hook_attn_out"])))


def test_hooks_of_the_users_stay_and_run_in_the_order_they_were_added(softmax: Case) -> None:
    model, log = softmax.hooked, []

    def halve(value: Tensor, hook: object) -> Tensor:
        log.append("before")
        return value / 2

    def see(value: Tensor, hook: object) -> None:
        log.append(float(value.detach().abs().sum()))

    model.add_hook(Z, halve)
    model.add_perma_hook(PRE, lambda value, hook: log.append("permanent"))
    own = n_hooks(model)
    halved = model(softmax.clean)
    with patched(model, Patch(Z, "zero", {"head": 0})):
        assert n_hooks(model) == own + 1
        model.add_hook(Z, see)
        # TransformerLens takes away those that were added through it, at this level.
        model.run_with_cache(softmax.clean, names_filter=[Z])
        log.clear()
        given = model(softmax.clean)
    assert log[:2] == ["permanent", "before"]
    # What the later hook sees is halved and patched: half of the other head is left.
    expected = 0.5 * cached_without_hooks(softmax)[Z][:, :, 1].abs().sum()
    assert log[2] == pytest.approx(float(expected.detach()))
    assert n_hooks(model) == own + 1
    assert not torch.allclose(given, halved)
    log.clear()
    model(softmax.clean)
    assert log[:2] == ["permanent", "before"]


def cached_without_hooks(case: Case) -> dict[str, Tensor]:
    fresh = build("softmax")
    return {**fresh.hooked.run_with_cache(case.clean)[1]}


def test_a_reset_inside_the_block_leaves_the_patch(softmax: Case) -> None:
    zero = Patch(Z, "zero")
    with patched(softmax.hooked, zero):
        softmax.hooked.reset_hooks(including_permanent=True)
        torch.testing.assert_close(softmax.hooked(softmax.clean), softmax.clean)
    assert n_hooks(softmax.hooked) == 0


def test_no_hook_is_left_whatever_goes_wrong(softmax: Case) -> None:
    model, counted = softmax.hooked, 0
    model.add_hook(Z, lambda value, hook: None)
    before = model(softmax.clean)

    def fail(value: Tensor, hook: object) -> None:
        raise ZeroDivisionError

    def in_block() -> None:
        with patched(model, Patch(Z, "zero")):
            raise KeyError

    def in_forward() -> None:
        with patched(model, Patch(Z, "zero")):
            model.run_with_hooks(softmax.clean, fwd_hooks=[("blocks.0.hook_attn_out", fail)])

    def in_donor() -> None:
        run_patched(model, softmax.clean, Patch(Z, Donor(torch.zeros(2, 7, 3))))

    def in_patch() -> None:
        run_each(model, softmax.clean, [Patch(Z, "zero"), Patch(Z, torch.zeros(1, 2))])

    def silent() -> None:
        record(model, softmax.clean, [Z, "blocks.0.attn.hook_result"])

    errors = (KeyError, ZeroDivisionError, InputError, InputError, InputError)
    for fault, error in zip(
        (in_block, in_forward, in_donor, in_patch, silent), errors, strict=True
    ):
        with pytest.raises(error):
            fault()
        assert n_hooks(model) == 1
        torch.testing.assert_close(model(softmax.clean), before, rtol=0, atol=0)
        counted += 1
    assert counted == 5
    with patched(model, Patch(Z, "zero")):
        assert not torch.allclose(model(softmax.clean), before)
        assert n_hooks(model) == 2, "the count sees nothing"


def test_blocks_may_be_nested(softmax: Case) -> None:
    first, second = Patch(Z, "zero", {"head": 0}), Patch(Z, "zero", {"head": 1})
    with patched(softmax.hooked, first), patched(softmax.hooked, second):
        torch.testing.assert_close(softmax.hooked(softmax.clean), softmax.clean)
    with patched(softmax.hooked, first):
        assert not torch.allclose(softmax.hooked(softmax.clean), softmax.clean)


def test_gradients_pass_a_patch_and_donors_are_not_changed(softmax: Case) -> None:
    value = torch.ones(1, 7, 2, 4, dtype=torch.float64, requires_grad=True)
    at = {"head": 0}
    run_patched(softmax.hooked, softmax.clean, Patch(Z, value, at))[:, -1, -1].sum().backward()
    assert (value.grad[:, -1, 0] != 0).all()
    assert not value.grad[:, :, 1].any()
    donor = record(softmax.hooked, softmax.other, [Z])[Z]
    kept = donor.clone()

    def spoil(z: Tensor, hook: object) -> Tensor:
        z[:] = 7.0
        return z

    with patched(softmax.hooked, Patch(Z, donor)):
        softmax.hooked.run_with_hooks(softmax.clean, fwd_hooks=[(Z, spoil)])
    torch.testing.assert_close(donor, kept, rtol=0, atol=0)


def test_a_patch_keeps_the_memory_order_of_what_it_replaces(softmax: Case) -> None:
    """What comes after would round otherwise: z is no contiguous tensor here."""
    strides: list[tuple[int, ...]] = []

    def see(value: Tensor, hook: object) -> None:
        strides.append(value.stride())

    softmax.hooked.run_with_hooks(softmax.clean, fwd_hooks=[(Z, see)])
    for at in ({}, {"head": 0}):
        with patched(softmax.hooked, Patch(Z, torch.ones(6, 7, 2, 4), at)):
            softmax.hooked.run_with_hooks(softmax.clean, fwd_hooks=[(Z, see)])
    assert strides[0] != torch.ones(6, 7, 2, 4).stride()
    assert strides == [strides[0]] * 3


def test_what_never_fires_is_an_error_and_what_changes_nothing_a_warning(softmax: Case) -> None:
    model, inputs = softmax.hooked, softmax.clean
    result = Patch("blocks.0.attn.hook_result", "zero")
    with pytest.raises(InputError, match=r"\['blocks.0.attn.hook_result'\] never fired"):
        run_patched(model, inputs, [Patch(Z, "zero"), result])
    with pytest.raises(InputError, match="never fired"):
        run_each(model, inputs, [Patch(Z, "zero"), result])
    with pytest.raises(InputError, match="never fired"), patched(model, Patch(Z, "zero")):
        pass
    model.set_use_attn_result(True)
    run_patched(model, inputs, result)
    own = record(model, inputs, [Z])[Z]
    idle = [Patch(Z, own, {"head": 0}), Patch(Z, "zero", {"head": 1})]
    with pytest.warns(UserWarning, match=r"1 of 2 patches changed nothing.*hook_z at head 0\)"):
        run_patched(model, inputs, idle)
    with pytest.warns(UserWarning, match=r"1 of 2 patches changed nothing"):
        run_each(model, inputs, idle, at_once=1)
    run_patched(model, inputs, idle, unchanged="ignore")
    run_each(model, inputs, idle[1:])


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (lambda: Patch("blocks.0.attn.hook_zz", "zero"), "did you mean 'blocks.0.attn.hook_z'"),
        (lambda: Patch("hook_z", "zero"), "did you mean 'blocks.0.attn.hook_z'"),
        (lambda: Patch(Z, "median"), "'zero' or 'mean'; given 'median'"),
        (lambda: Patch(Z, 0.0), "given 0.0"),
        (lambda: Patch(Z, "zero", {"query_pos": 1}), "dim of .*hook_z 'query_pos'.* head, pos"),
        (lambda: Patch(Z, "zero", {"head": 2}), "head is an index from -2 to 1.*given 2"),
        (lambda: Patch(Z, "zero", {"head": "0"}), "head is an index from -2 to 1"),
        # 1 and 0 are indices too, and not those that a mask means.
        (lambda: Patch(Z, "zero", {"head": [False, True]}), "head is an index from -2 to 1"),
        (lambda: Patch(Z, "zero", {"head": True}), "head is an index from -2 to 1"),
        (
            lambda: Patch(Z, "zero", {"head": torch.tensor([False, True])}),
            "head is an index from -2 to 1",
        ),
        (
            lambda: Patch(Z, torch.zeros(6, 2, 4)),
            r"given a value of shape \(6, 2, 4\).*\(6, 7, 2, 4\), and that fits, or \(1, 7, 2, 4\)",
        ),
        (lambda: Patch(Z, torch.zeros(2, 7, 2, 4)), r"given a value of shape \(2, 7, 2, 4\)"),
        (lambda: Patch(Z, Donor(torch.zeros(5, 7, 4))), r"given a value of shape \(5, 7, 2, 4\)"),
        (
            lambda: Patch(Z, Donor(torch.zeros(6, 7, 4), hook="blocks.1.hook_resid_pre")),
            "no hook point 'blocks.1.hook_resid_pre'; did you mean 'blocks.0.hook_resid_pre'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    softmax: Case, patch: Callable[[], Patch], message: str
) -> None:
    model = softmax.hooked.float()
    with pytest.raises(InputError, match=message):
        run_patched(model, softmax.clean.float(), patch())
    assert n_hooks(model) == 0


def test_requests_that_make_no_sense(softmax: Case) -> None:
    with pytest.raises(InputError, match="no variants"):
        run_each(softmax.hooked, softmax.clean, [])
    with pytest.raises(InputError, match="'warn' or 'ignore'"):
        run_patched(softmax.hooked, softmax.clean, Patch(Z, "zero"), unchanged="raise")
    with pytest.raises(InputError, match="at_once is an integer from 1"):
        run_each(softmax.hooked, softmax.clean, [Patch(Z, "zero")], at_once=0)
    for strange in ("zero", Z, None, [Patch(Z, "zero"), (Z, "zero")]):
        for run in (
            lambda given: run_patched(softmax.hooked, softmax.clean, given),
            lambda given: run_each(softmax.hooked, softmax.clean, [given]),
            lambda given: patched(softmax.hooked, given).__enter__(),
        ):
            with pytest.raises(InputError, match="accepted: a Patch, or several"):
                run(strange)
    assert hook_dims(Z) == ("batch", "pos", "head", "d_head")
