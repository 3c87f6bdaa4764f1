"""An instance's own files from which it is graded: run_script.sh, parser.py, and the variables of its image.

    ROOT/<instance_id>/run_script.sh, parser.py
    ROOT/<instance_id>/{base,instance}.Dockerfile                       or, as in SWE-bench_Pro-os,
    ROOT/../dockerfiles/{base,instance}_dockerfile/<instance_id>/Dockerfile

Invariant: they come from this machine to a fresh sandbox; nothing of them was ever where the policy acted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..failure import InfraFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripts:
    """exports: shell lines that set what the image's ENV lines set."""

    run_script: str
    parser: str
    exports: str = ""


def find_scripts(root: Path, instance_id: str) -> Scripts:
    """Raises `InfraFailure` where they are missing: the policy has no part in that."""
    folder = root / instance_id
    texts = {}
    for name in ("run_script.sh", "parser.py"):
        try:
            texts[name] = (folder / name).read_text(encoding="utf-8")
        except OSError as error:
            raise InfraFailure(
                f"{folder / name} cannot be read ({error.strerror}), so {instance_id} cannot be graded\n"
                "  Set env.scripts to the run_scripts folder of a clone of SWE-bench_Pro-os."
            ) from None
    return Scripts(
        run_script=texts["run_script.sh"], parser=texts["parser.py"], exports=_exports(root, instance_id)
    )


def _exports(root: Path, instance_id: str) -> str:
    """Both images' ENV lines, in the order in which they were built."""
    found = []
    for kind in ("base", "instance"):
        beside = root / instance_id / f"{kind}.Dockerfile"
        apart = root.parent / "dockerfiles" / f"{kind}_dockerfile" / instance_id / "Dockerfile"
        for path in (beside, apart):
            if path.is_file():
                lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
                found += [line.replace("ENV", "export", 1) for line in lines if line.startswith("ENV ")]
                break
    return "".join(f"{line}\n" for line in found)
