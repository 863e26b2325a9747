"""Mappings: layouts, parts, alternatives, and every slip of a rule said at once."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from mechicl.errors import InputError
from mechicl.importers.mapping import load_mapping, mapping_names, mapping_text
from mechicl.importers.translate import Translator
from mechicl.training import Recipe, load_recipe
from tests.importers import theirs

REGRESSION = Recipe.model_validate(theirs.REGRESSION)
CHAIN = Recipe.model_validate(theirs.CHAIN)
H, D = 2, 6  # heads, and width of the model and of a head


def mapping(settings: Any, recipe: Recipe = REGRESSION) -> Any:
    return load_mapping(settings, recipe.model, recipe.task)


def translated(settings: Any, state: Any, recipe: Recipe = REGRESSION) -> dict[str, np.ndarray]:
    translator = Translator(mapping(settings, recipe), recipe.model, recipe.task)
    return translator(state, "the file").parameters


def linear_state() -> dict[str, torch.Tensor]:
    stream = torch.Generator().manual_seed(0)
    return {
        f"{name}_proj.weight": torch.randn(
            (D, H * D) if name == "o" else (H * D, D), generator=stream
        )
        for name in "qkvo"
    }


def test_stacked_projections_by_hand() -> None:
    state = linear_state()
    found = translated("linear", state)
    for head in range(H):
        rows = slice(head * D, (head + 1) * D)
        np.testing.assert_array_equal(found["W_Q"][0, head], state["q_proj.weight"][rows].T)
        np.testing.assert_array_equal(found["W_V"][0, head], state["v_proj.weight"][rows].T)
        np.testing.assert_array_equal(found["W_O"][0, head], state["o_proj.weight"][:, rows].T)


def test_a_fused_matrix_by_hand() -> None:
    fused, out = torch.arange(3 * H * D * D).reshape(D, -1).float(), torch.randn(H * D, D)
    rule = {"from": "c_attn", "layout": "d_model (qkv head d_head)"}
    parts = {"W_Q": "0 of 3", "W_K": "1 of 3", "W_V": "2 of 3"}
    rules: dict[str, Any] = {n: {**rule, "part": {"qkv": part}} for n, part in parts.items()}
    rules["W_O"] = {"from": "c_proj", "layout": "(head d_head) d_model", "scale": 0.5}
    found = translated({"parameters": rules}, {"c_attn": fused, "c_proj": out})
    for index, name in enumerate(parts):
        start = index * H * D + D  # of head 1
        np.testing.assert_array_equal(found[name][0, 1], fused[:, start : start + D])
    np.testing.assert_array_equal(found["W_O"][0, 1], 0.5 * out[D:])
    # Parts inside each head, as others have them, are elsewhere.
    inside = {**rule, "layout": "d_model (head qkv d_head)"}
    rules |= {n: {**inside, "part": {"qkv": part}} for n, part in parts.items()}
    found = translated({"parameters": rules}, {"c_attn": fused, "c_proj": out})
    np.testing.assert_array_equal(found["W_K"][0, 1], fused[:, 4 * D : 5 * D])


def test_layers_and_heads_in_names() -> None:
    rules = {
        name: {"from": f"h{{head}}.{{layer}}.{name}", "layout": layout}
        for name, layout in {
            "W_Q": "d_head d_model",
            "W_K": "d_head d_model",
            "W_V": "1 d_head d_model",
            "W_O": "d_model d_head",
        }.items()
    }
    state = {
        f"h{head}.0.{name}": torch.randn((1, D, D) if name == "W_V" else (D, D))
        for head in range(H)
        for name in rules
    }
    found = translated({"parameters": rules}, state)
    np.testing.assert_array_equal(found["W_Q"][0, 1], state["h1.0.W_Q"].T)
    np.testing.assert_array_equal(found["W_V"][0, 0], state["h0.0.W_V"][0].T)


def test_axes_of_another_length_are_padded_and_cut() -> None:
    rules = {n: {"sizes": {"d_head": 3}} for n in ("W_Q", "W_K", "W_V", "W_O")}
    state = {name: torch.randn((D, D)) for name in linear_state()}
    found = translated({"base": "linear", "parameters": rules}, state)
    np.testing.assert_array_equal(found["W_Q"][0, 1, :, :3], state["q_proj.weight"][3:].T)
    assert not found["W_Q"][..., 3:].any() and not found["W_O"][0, :, 3:].any()

    positions = {"from": "positions", "layout": "pos d_model", "sizes": {"pos": 10}}
    wide = {"base": "mechicl", "parameters": {"W_pos": positions}}
    sizes, declared = CHAIN.model.sizes(CHAIN.task), CHAIN.model.parameters(CHAIN.task)
    state = {n: torch.randn([sizes[d] for d in var.dims[2:]]) for n, var in declared.items()}
    state["positions"] = torch.randn(10, 8)
    found = translated(wide, {n: v for n, v in state.items() if n != "W_pos"}, CHAIN)
    np.testing.assert_array_equal(found["W_pos"], state["positions"][: sizes["pos"]])


def test_a_base_is_changed_rule_by_rule(tmp_path: Path) -> None:
    text = """
    base: linear
    prefix: net.
    parameters:
      W_Q: {from: query}
      W_O: {layout: "(head d_head) d_model"}
    ignore: ["*.mask"]
    """
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    found = mapping(str(path))
    assert found.name == "mine"
    assert found.parameters["W_Q"].source == ("query",)
    assert found.parameters["W_Q"].layout == "(head d_head) d_model"
    assert found.parameters["W_K"] == mapping("linear").parameters["W_K"]
    assert (found.ignore, found.zero) == (("*.mask",), ("*_proj.bias",))
    state = linear_state()
    theirs_now = {"net.query": state.pop("q_proj.weight"), "net.a.mask": torch.ones(1)}
    theirs_now |= {f"net.{name}": value for name, value in state.items()}
    theirs_now["net.o_proj.weight"] = state["o_proj.weight"].T
    changed = translated(str(path), theirs_now)
    plain = translated("linear", linear_state())
    for name, value in plain.items():
        np.testing.assert_array_equal(changed[name], value)


def test_what_is_recorded_is_read_again_to_the_same_mapping() -> None:
    for name in mapping_names():
        for recipe in (REGRESSION, CHAIN):
            try:
                found = mapping(name, recipe)
            except InputError as error:
                assert "no rule" in str(error)
                continue
            assert mapping(yaml.safe_load(yaml.safe_dump(found.settings())), recipe) == found


def test_every_built_in_mapping_is_of_some_model() -> None:
    fits = {
        "gpt2": CHAIN,
        "linear": REGRESSION,
        "mechicl": CHAIN,
        "multihead_attention": REGRESSION,
        "transformer_lens": CHAIN,
    }
    assert set(mapping_names()) == set(fits)
    for name, recipe in fits.items():
        assert set(mapping(name, recipe).parameters) == set(recipe.model.parameters(recipe.task))
        if name != "mechicl":
            assert "description" in yaml.safe_load(mapping_text(name))


Q = {"from": "q", "layout": "(head d_head) d_model"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("linnear", "there is no mapping 'linnear'; did you mean 'linear'?"),
        ("gone.yaml", "there is no mapping file 'gone.yaml'"),
        (7, "a mapping is a name, a path of YAML or a dict; given int"),
        ({"base": "lin"}, "there is no mapping 'lin'"),
        (
            {"base": "linear", "parameters": {"W_q": Q}},
            "no parameter of the model 'W_q'; did you mean",
        ),
        ({"parameters": [1]}, "parameters are rules by our names, as in W_Q: {from:"),
        ({"base": "linear", "ignore": "x"}, "ignore is a list of names; given 'x'"),
        ({"base": "linear", "ignores": []}, "did you mean 'ignore'"),
        ({"base": "linear", "parameters": {"W_Q": {"form": "q"}}}, "did you mean"),
        ({"parameters": {"W_Q": Q}}, "W_K, W_V, W_O of model 'softmax_attention' have no rule"),
        (
            {"base": "linear", "parameters": {"W_Q": {**Q, "fill": 0}}},
            "takes from, the name of their tensor, or fill",
        ),
        ({"parameters": {"W_Q": {"from": "q"}}}, "has no layout"),
        ({"parameters": {"W_Q": {**Q, "part": {"a": "3 of 3"}}}}, "part a: takes N of M"),
        ({"parameters": {"W_Q": {**Q, "part": {"a": "x"}}}}, "part a: takes N of M"),
        ({"base": "linear", "parameters": {"W_Q": {"layout": "(head d_head"}}}, "is none; as in"),
        ({"base": "linear", "parameters": {"W_Q": {"layout": "head, d"}}}, "is none, at ','"),
        (
            {"base": "linear", "parameters": {"W_Q": {"layout": "(head width) d_model"}}},
            "names width too many and d_head too few",
        ),
        (
            {"base": "linear", "parameters": {"W_Q": {"layout": "(head d_head d_head) d_model"}}},
            "has d_head twice",
        ),
        (
            {"base": "linear", "parameters": {"W_Q": {"from": "h.{block}.q"}}},
            "{block} in 'h.{block}.q' is none of our axes layer, head, d_model, d_head",
        ),
        (
            {"base": "linear", "parameters": {"W_Q": {"part": {"head": "0 of 3"}}}},
            "part head is one of our axes",
        ),
        (
            {"base": "linear", "parameters": {"W_Q": {"sizes": {"pos": 3}}}},
            "sizes has pos, which is no axis of ours",
        ),
    ],
)
def test_slips_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=re.escape(message)):
        mapping(settings)


def test_files_that_are_no_mapping(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for text, message in {
        "a: [": "is not YAML",
        "- a": "is not a mapping of settings",
        "prefix: a\nprefix: b": "prefix given twice",
    }.items():
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            mapping(path)
    with pytest.raises(InputError, match="scale is temperature, and task 'linear_regression' has"):
        translated(
            {"base": "linear", "parameters": {"W_Q": {"scale": "temperature"}}}, linear_state()
        )


def changed_state(**changes: Any) -> dict[str, torch.Tensor]:
    state = {**linear_state(), **{k.replace("__", "."): v for k, v in changes.items()}}
    return {name: value for name, value in state.items() if value is not None}


@pytest.mark.parametrize(
    ("state", "messages"),
    [
        (
            changed_state(**{"q_proj.weight": None, "qproj.weight": torch.ones(H * D, D)}),
            [
                "W_Q: there is no '*.0.*q_proj.weight' or '*q_proj.weight'; did you mean "
                "'qproj.weight'",
                "nothing reads qp",
            ],
        ),
        (
            changed_state(**{"a.q_proj.weight": torch.ones(H * D, D)}),
            ["W_Q: '*q_proj.weight' is any of a.q_proj.weight, q_proj.weight; name the one"],
        ),
        (
            changed_state(**{"q_proj.weight": torch.ones(D, D), "o_proj.weight": torch.ones(3)}),
            [
                "W_Q: q_proj.weight has shape (6, 6), and the layout '(head d_head) d_model' of "
                "head 2, d_head 6, d_model 6 is (12, 6)",
                "W_O: o_proj.weight has shape (3,)",
            ],
        ),
        (changed_state(extra=torch.ones(2)), ["nothing reads extra; give a rule for it, or list"]),
        (
            changed_state(**{"q_proj.bias": torch.ones(2), "other.bias": torch.ones(2)}),
            ["q_proj.bias is not 0, and model 'softmax_attention' has no", "other.bias is not 0"],
        ),
        (
            changed_state(**{"norm1.weight": torch.ones(D), "blocks.0.ln_1.bias": torch.zeros(D)}),
            [
                "norm1.weight, blocks.0.ln_1.bias: weights of a layer norm, which model",
                "another function",
            ],
        ),
        (
            changed_state(**{"q_proj.weight": torch.ones(H * D, D, dtype=torch.int32)}),
            ["W_Q: q_proj.weight is int32"],
        ),
        (
            changed_state(**{"q_proj.weight": torch.full((H * D, D), torch.inf)}),
            [],
        ),
    ],
)
def test_what_does_not_fit_is_said_at_once(state: Any, messages: list[str]) -> None:
    if not messages:
        assert np.isinf(translated("linear", state)["W_Q"]).all()
        return
    with pytest.raises(InputError) as caught:
        translated("linear", state)
    assert str(caught.value).startswith("the file does not fit mapping 'linear' and model")
    for message in messages:
        assert message in str(caught.value)


def test_biases_that_are_zero_are_dropped_and_said() -> None:
    state = linear_state() | {"q_proj.bias": torch.zeros(H * D)}
    translator = Translator(mapping("linear"), REGRESSION.model, REGRESSION.task)
    assert translator(state, "x").dropped == ("q_proj.bias",)
    assert translator(linear_state(), "x").dropped == ()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    "make",
    [
        lambda values: values.to(torch.float8_e4m3fn),
        lambda values: values.to_sparse(),
        lambda values: values[None].to_sparse_csr(),
    ],
)
def test_zeros_of_any_kind_are_zeros(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    values = torch.zeros(H * D)
    translated("linear", linear_state() | {"q_proj.bias": make(values)})
    for nonzero in (make(values + 1), make(values).to("meta")):
        with pytest.raises(InputError, match=r"q_proj.bias is not 0, and model"):
            translated("linear", linear_state() | {"q_proj.bias": nonzero})


def test_a_scale_that_overflows_is_refused() -> None:
    settings = {"base": "linear", "parameters": {"W_Q": {"scale": 1e30}}}
    state = linear_state() | {"q_proj.weight": torch.full((H * D, D), 1e10)}
    with pytest.raises(InputError, match=r"W_Q: q_proj.weight times 1e\+30 overflows float32"):
        translated(settings, state)


@pytest.mark.parametrize(
    "name", ["raj2026-tree-wide", "yuksel2026-minimal", "yuksel2026-two-block"]
)
def test_our_own_names_are_of_every_model(name: str) -> None:
    recipe = load_recipe(name)
    state = recipe.model.initial(recipe.task, torch.Generator().manual_seed(0))
    found = translated("mechicl", state, recipe)
    assert set(found) == set(state)
    for key, value in state.items():
        np.testing.assert_array_equal(found[key], value)
