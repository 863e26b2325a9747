import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mechicl.checkpoints import Schedule
from mechicl.errors import InputError


def test_dense_at_the_start_then_every():
    steps = Schedule(every=50, per_decade=4).steps(200)
    assert steps.dtype == np.int64
    assert steps.tolist() == [0, 1, 2, 3, 6, 10, 18, 32, 50, 56, 100, 150, 200]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"every": None, "per_decade": 0}, [0, 103]),
        ({"every": 40, "per_decade": 0}, [0, 40, 80, 103]),
        ({"every": None, "per_decade": 1}, [0, 1, 10, 100, 103]),
        ({"every": None, "per_decade": 0, "at": (7, 3, 7)}, [0, 3, 7, 103]),
        ({"every": 1000, "per_decade": 0}, [0, 103]),
    ],
)
def test_each_part_alone(settings, expected):
    assert Schedule(**settings).steps(103).tolist() == expected


def test_log_points_stop_where_they_are_sparser_than_every():
    every_ten = set(range(0, 10_001, 10))
    more = sorted(set(Schedule(every=10, per_decade=8).steps(10_000).tolist()) - every_ten)
    assert more[0] == 1
    assert max(more) < 60


def test_the_dense_start_ends_where_it_is_as_wide_as_every():
    """32 to 42 is a gap of 10 steps: not closer together than every 10."""
    steps = Schedule(every=10, per_decade=8).steps(100).tolist()
    assert 32 in steps
    assert 42 not in steps
    assert 42 in Schedule(every=11, per_decade=8).steps(100)


@given(
    st.integers(0, 5000),
    st.none() | st.integers(1, 700),
    st.integers(0, 20),
    st.lists(st.integers(0, 5000), max_size=4),
)
def test_always_increasing_from_first_to_last(n_steps, every, per_decade, at):
    at = tuple(step for step in at if step <= n_steps)
    steps = Schedule(every=every, per_decade=per_decade, at=at).steps(n_steps)
    assert (steps[0], steps[-1]) == (0, n_steps)
    assert (np.diff(steps) > 0).all()
    assert set(at) <= set(steps.tolist())
    if every:
        assert set(range(0, n_steps + 1, every)) <= set(steps.tolist())


def test_steps_beyond_the_end_are_refused():
    with pytest.raises(InputError, match=r"at \[300, 900\], but training ends at step 200"):
        Schedule(at=(900, 10, 300)).steps(200)
    with pytest.raises(InputError, match="-1 steps"):
        Schedule().steps(-1)


@pytest.mark.parametrize("every", [None, 1])
def test_more_points_than_anyone_can_mean_are_refused(every):
    """At once: their list would fill the memory."""
    with pytest.raises(InputError, match=r"smaller checkpoints\.per_decade"):
        Schedule(every=every, per_decade=10**10).steps(100)
    with pytest.raises(InputError, match="give a larger"):
        Schedule(every=1).steps(10**8)
    assert Schedule(every=every, per_decade=10**6).steps(100).tolist() == list(range(101))


@pytest.mark.parametrize("wrong", [{"every": 0}, {"per_decade": -1}, {"at": (-1,)}, {"evry": 5}])
def test_settings_are_checked(wrong):
    with pytest.raises(ValidationError):
        Schedule(**wrong)
    with pytest.raises(ValidationError, match="frozen"):
        Schedule().every = 3  # type: ignore[misc]
