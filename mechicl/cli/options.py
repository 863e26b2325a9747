"""Options that several commands have, said alike in each."""

from typing import Annotated

import typer

RunDir = Annotated[str, typer.Argument(metavar="RUN", help="Run directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="Draw figures.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="Compile training steps.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that is there.")]
Scale = Annotated[
    str | None, typer.Option(help="Size of the recipe, such as paper.", show_default="its own")
]
RecipeSettings = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Change a setting of the recipe; may be repeated."),
]
ProbeSettings = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[PROBE.]KEY=VALUE", help="Change a parameter of a probe; may be repeated."
    ),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]RUN", help="Run that comparative probes compare with; may be repeated."
    ),
]
