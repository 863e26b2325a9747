"""`mechicl info`."""

from mechicl.cli.options import RunDir


def info(
    run_dir: RunDir,
) -> None:
    """Say what a run is, how far it got, and which probes apply to it."""
    from mechicl import analyses
    from mechicl.cli.tables import show
    from mechicl.run import open_run

    run = open_run(run_dir)
    show(str(run.path), ["", ""], [[name, value] for name, value in run.about().items()])
    objections = {name: run.objection(name) for name in analyses.names()}
    rows = [[name, f"no: {why}" if why else "yes"] for name, why in objections.items()]
    show("probes", ["name", "applies"], rows)
