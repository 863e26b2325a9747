"""Claims: a published statement as data, and the verdict on what was measured.

A claim's file names a registered check, the runs that it needs, and what the paper says of each
quantity that the check measures. It has no language of its own: whatever has to be computed is a
check in Python, and there is one comparison a claim.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from mechicl.config import Config, parse_yaml, read_yaml
from mechicl.errors import invalid, unknown
from mechicl.paths import expanded

_PACKAGE = "mechicl.claims"

_Tolerance = Annotated[float, pydantic.Field(ge=0)]

Comparison = Literal["relative", "absolute", "at_most", "at_least"]
Verdict = Literal["reproduced", "partly", "not reproduced"]


class RunNeeded(Config):
    """A run that a claim measures.

    Attributes
    ----------
    recipe
        Name of a recipe.
    set
        Settings over it, as `mechicl train --set` takes them.
    """

    recipe: str
    set: Mapping[str, Any] = pydantic.Field(default_factory=dict)


class Claim(Config):
    """A published statement and how it is tested.

    Attributes
    ----------
    id
        PAPER.NAME, the name of its file.
    statement, source
        What is claimed, in a sentence, and where: paper, figure, equation.
    check, parameters
        A registered check (`mechicl.studies.checks`) and its settings.
    runs
        The runs that the check measures, by the label under which it sees them; none for theory.
    published
        The value of each quantity that counts for the verdict; the check may measure others.
    comparison
        `relative`: |measured/published − 1| ≤ tolerance. `absolute`: |measured − published| ≤
        tolerance. `at_most`, `at_least`: not beyond published by more than tolerance.
    tolerance, tolerance_reason
        One number, or one for each quantity; and why it is that large.
    """

    id: Annotated[str, pydantic.Field(pattern=r"^[a-z0-9]+\.[a-z0-9_]+$")]
    statement: str
    source: str
    check: str
    parameters: Mapping[str, Any] = pydantic.Field(default_factory=dict)
    runs: Mapping[str, RunNeeded] = pydantic.Field(default_factory=dict)
    published: Annotated[Mapping[str, float], pydantic.Field(min_length=1)]
    comparison: Comparison
    tolerance: _Tolerance | Mapping[str, _Tolerance]
    tolerance_reason: str

    @pydantic.model_validator(mode="after")
    def _tolerances_are_of_quantities(self) -> "Claim":
        if isinstance(self.tolerance, Mapping) and set(self.tolerance) != set(self.published):
            raise ValueError(
                f"tolerance names {sorted(self.tolerance)}, published {sorted(self.published)}"
            )
        if self.comparison == "relative" and 0.0 in self.published.values():
            raise ValueError("a relative comparison needs published values other than 0")
        return self

    @property
    def paper(self) -> str:
        """The paper's short name."""
        return self.id.partition(".")[0]

    def tolerance_of(self, quantity: str) -> float:
        """Return the tolerance of one quantity."""
        return self.tolerance[quantity] if isinstance(self.tolerance, Mapping) else self.tolerance

    def met(self, quantity: str, measured: float) -> bool:
        """Return whether a measured value is what was published; NaN is not."""
        published, tolerance = self.published[quantity], self.tolerance_of(quantity)
        if self.comparison == "relative":
            return abs(measured / published - 1) <= tolerance
        if self.comparison == "absolute":
            return abs(measured - published) <= tolerance
        if self.comparison == "at_most":
            return measured <= published + tolerance
        return measured >= published - tolerance


def verdict(met: Sequence[bool]) -> Verdict:
    """Sum up whether each seed that counts met the claim; none that counts is not reproduced."""
    if met and all(met):
        return "reproduced"
    return "partly" if any(met) else "not reproduced"


def wilson(n_met: int, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a fraction; (0, 1) of none."""
    from scipy.stats import binomtest

    if n == 0:
        return 0.0, 1.0
    interval = binomtest(n_met, n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def claim_names() -> tuple[str, ...]:
    """Return the ids of the claims that come with mechicl, sorted."""
    found = (Path(str(entry)) for entry in files(_PACKAGE).iterdir())
    return tuple(sorted(path.stem for path in found if path.suffix == ".yaml"))


def load_claim(source: str | Path) -> Claim:
    """Read a claim.

    Parameters
    ----------
    source
        Id of a claim that comes with mechicl, or path of a YAML file.

    Raises
    ------
    InputError
        For an unknown id, with the nearest match, and for a file that is no claim.
    """
    path = expanded(source)
    if path.suffix in (".yaml", ".yml"):
        name, settings = path.stem, read_yaml(path, "claim")
    else:
        if str(source) not in claim_names():
            raise unknown("claim", source, claim_names())
        name = str(source)
        text = files(_PACKAGE).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
        settings = parse_yaml(text, f"claim {name!r}")
    try:
        return Claim.model_validate({"id": name, **settings})
    except pydantic.ValidationError as error:
        raise invalid(f"claim {name!r}", error, known=Claim.model_fields) from None


def chosen(asked: Sequence[str]) -> list[str]:
    """Return the claims that are meant by ids, papers, `all` and paths, each once, in order.

    Raises InputError for what is none of these, with the nearest match.
    """
    known = claim_names()
    papers = dict.fromkeys(name.partition(".")[0] for name in known)
    found: dict[str, None] = {}
    for name in asked:
        if name == "all":
            found |= dict.fromkeys(known)
        elif name in papers:
            found |= dict.fromkeys(each for each in known if each.startswith(f"{name}."))
        elif name in known or Path(name).suffix in (".yaml", ".yml"):
            found[name] = None
        else:
            raise unknown("claim", name, [*known, *papers, "all"])
    return list(found)
