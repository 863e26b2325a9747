"""`mechicl recipes`, `mechicl probes` and `mechicl mappings`: what there is."""

import inspect
from typing import Annotated

import typer


def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this recipe whole.")] = None,
    scale: Annotated[
        str | None, typer.Option(help="Size to show it at, such as paper.", show_default="its own")
    ] = None,
) -> None:
    """List the recipes, or show one with every setting."""
    import yaml

    from mechicl.cli.tables import show
    from mechicl.errors import InputError
    from mechicl.training import load_recipe, recipe_names, recipe_scales

    if name is not None:
        settings = load_recipe(name, scale=scale).settings()
        print(yaml.safe_dump(settings, sort_keys=False).rstrip())
        return
    if scale is not None:
        raise InputError("--scale is of one recipe; name it")
    rows = [
        [name, ", ".join(recipe_scales(name)), load_recipe(name).description]
        for name in recipe_names()
    ]
    show("recipes", ["name", "scales", "what it shows"], rows)


def probes(
    name: Annotated[str | None, typer.Argument(help="Show this probe whole.")] = None,
) -> None:
    """List the probes, or show one: what it computes, its parameters, its results."""
    from mechicl import analyses
    from mechicl.cli.tables import show

    if name is None:
        rows = [[name, analyses.get(name).summary] for name in analyses.names()]
        show("probes", ["name", "what it measures"], rows)
        return
    probe = analyses.get(name)
    print(f"{probe.name}\n\n{inspect.getdoc(probe.compute)}\n")
    defaults = probe.resolve({})
    rows = [
        [key, getattr(field.annotation, "__name__", str(field.annotation)), str(defaults[key])]
        for key, field in probe.parameters.model_fields.items()
    ]
    show("parameters (--set KEY=VALUE)", ["name", "type", "default"], rows)
    rows = [
        [key, ", ".join(var.dims), var.units, var.long_name] for key, var in probe.outputs.items()
    ]
    show("results", ["variable", "dims", "unit", "meaning"], rows)
    print("Source: " + "; ".join(probe.references))


def mappings(
    name: Annotated[
        str | None, typer.Argument(help="Show this mapping whole, to start from.")
    ] = None,
) -> None:
    """List the mappings that `mechicl import` has built in, or show one as YAML."""
    import yaml

    from mechicl.cli.tables import show
    from mechicl.importers.mapping import OURS, mapping_names, mapping_text

    if name is not None:
        print(mapping_text(name).rstrip())
        return
    texts = {OURS: "our own names and axes, as mechicl export writes them"}
    texts |= {
        each: yaml.safe_load(mapping_text(each))["description"]
        for each in mapping_names()
        if each != OURS
    }
    show("mappings", ["name", "what it is of"], [[each, texts[each]] for each in mapping_names()])
