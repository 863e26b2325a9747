"""`mechicl verify`."""

from typing import TYPE_CHECKING

from mechicl.cli.options import Json, RunDir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mechicl.checkpoints import Finding


def verify(
    run_dir: RunDir,
    json: Json = False,
) -> int:
    """Check a run, every byte of every checkpoint: what is lost, altered, odd or left behind."""
    from mechicl import checkpoints
    from mechicl.checkpoints.reader import is_url
    from mechicl.paths import expanded

    local = run_dir.strip() and not is_url(run_dir)
    findings = checkpoints.verify(expanded(run_dir) if local else run_dir)
    damaged = [finding for finding in findings if finding.severity == "damage"]
    if json:
        _print_json(run_dir, findings, damaged=bool(damaged))
    else:
        _print_table(run_dir, findings, len(damaged))
    return 1 if damaged else 0


def _print_json(run_dir: str, findings: "Sequence[Finding]", *, damaged: bool) -> None:
    import json
    from dataclasses import asdict

    found = [asdict(finding) for finding in findings]
    print(json.dumps({"run": run_dir, "damaged": damaged, "findings": found}))


def _print_table(run_dir: str, findings: "Sequence[Finding]", n_damaged: int) -> None:
    from mechicl.checkpoints.chunks import listed
    from mechicl.cli.tables import show

    if findings:
        rows = [
            [
                finding.severity,
                finding.what.replace("_", " "),
                finding.array or "",
                listed(finding.seeds),
                listed(finding.steps),
                f"{finding.file} {finding.message}",
            ]
            for finding in findings
        ]
        columns = ["", "what", "array", "seeds", "steps", "where and why"]
        show(run_dir, columns, rows)
    remarks = len(findings) - n_damaged
    said = f"; {remarks} remark{'s' * (remarks != 1)}" if remarks else ""
    if n_damaged:
        print(
            f"{run_dir} is damaged in {n_damaged} place{'s' * (n_damaged != 1)}{said}. Restore "
            "these files from a copy, or analyse the rest with --skip-damaged."
        )
    else:
        print(f"{run_dir} is whole{said}.")
