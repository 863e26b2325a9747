"""What every configuration is: frozen, its keys known, its numbers finite."""

import pydantic


class Config(pydantic.BaseModel):
    """A frozen set of settings that refuses unknown keys, NaN and infinities."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
