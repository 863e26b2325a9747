"""Axes that runs share: what is joined by label, by name and by place."""

import numpy as np
import pytest

from mechicl.errors import InputError
from mechicl.studies.axes import Labels, axis, merged_flags


def labelled(*rows: object, **attrs: object) -> list[Labels]:
    arrays = [np.asarray(row) for row in rows]
    return [Labels(array.size, array, attrs) for array in arrays]


def named(*tables: str) -> list[Labels]:
    """Axes whose labels have names, numbered from 0."""
    return [
        Labels(
            len(names := table.split()),
            np.arange(len(names)),
            {"flag_values": list(range(len(names))), "flag_meanings": table},
        )
        for table in tables
    ]


def test_steps_of_an_outer_join_are_all_of_them() -> None:
    found = axis("step", labelled([0, 10, 30], [0, 20, 30, 40]), "outer")
    assert found.labels.tolist() == [0, 10, 20, 30, 40]
    assert [each.tolist() for each in found.target] == [[0, 1, 3], [0, 2, 3, 4]]
    assert [each.tolist() for each in found.source] == [[0, 1, 2], [0, 1, 2, 3]]
    assert not found.by_place


def test_steps_of_an_inner_join_are_those_in_common() -> None:
    found = axis("step", labelled([0, 10, 30], [0, 20, 30, 40]), "inner")
    assert found.labels.tolist() == [0, 30]
    assert [each.tolist() for each in found.source] == [[0, 2], [0, 2]]
    with pytest.raises(InputError, match="the 2 runs have no step in common"):
        axis("step", labelled([1, 2], [3]), "inner")


def test_seeds_are_joined_by_place_for_seed_3_of_two_runs_share_nothing() -> None:
    found = axis("seed", labelled([0, 3], [7]), "outer")
    assert found.labels.tolist() == [0, 1]
    assert [each.tolist() for each in found.own] == [[0, 3], [7]]
    assert [each.tolist() for each in found.target] == [[0, 1], [0]]
    assert found.by_place
    same = axis("seed", labelled([0, 1], [0, 1]), "outer")
    assert [each.tolist() for each in same.own] == [[0, 1], [0, 1]], "always told, also then"


def test_heads_have_places_alone() -> None:
    found = axis("head", [Labels(2), Labels(4)], "outer")
    assert (found.size, found.labels, found.own) == (4, None, None)
    assert [each.tolist() for each in found.target] == [[0, 1], [0, 1, 2, 3]]


def test_whole_numbers_are_joined_by_label_and_others_by_place() -> None:
    assert axis("length", labelled([10, 40], [20, 40]), "inner").labels.tolist() == [10, 20, 40]
    assert axis("length", labelled([10.0], [20.0]), "outer").labels.tolist() == [10, 20]
    grid = axis("kq_scale", labelled([0.1, 0.2], [0.15, 0.3, 0.4]), "outer")
    assert grid.size == 3
    assert [each.tolist() for each in grid.own] == [[0.1, 0.2], [0.15, 0.3, 0.4]]
    shared = axis("kq_scale", labelled([0.1, 0.2], [0.1, 0.2]), "outer")
    assert shared.labels.tolist() == [0.1, 0.2]
    assert shared.own is None


def test_named_labels_are_joined_by_name() -> None:
    found = axis("reference", named("bayes ridge", "ridge zero"), "outer")
    assert found.attrs["flag_meanings"] == "bayes ridge zero"
    assert found.labels.tolist() == [0, 1, 2]
    assert [each.tolist() for each in found.target] == [[0, 1], [1, 2]]
    assert list(found.codes) == [{0: 0, 1: 1}, {0: 1, 1: 2}]


def test_codes_stay_where_runs_agree() -> None:
    table = {-1: "negative", 0: "dummy", 1: "positive"}
    attrs = {"flag_values": [-1, 0, 1], "flag_meanings": "negative dummy positive", "units": "1"}
    codes, merged = merged_flags([table, table], attrs)
    assert codes == [{-1: -1, 0: 0, 1: 1}] * 2
    assert merged == attrs
    codes, merged = merged_flags([{0: "a"}, {0: "b"}], {"units": "1"})
    assert codes == [{0: 0}, {0: 1}]
    assert merged == {"units": "1", "flag_values": [0, 1], "flag_meanings": "a b"}
