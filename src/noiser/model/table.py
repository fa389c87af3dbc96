"""What is needed of a checkpoint whose layers are loaded elsewhere: tokenizer, configuration and embedding table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from noiser.errors import ModelError
from noiser.files import parse_json
from noiser.model.catalog import BUILT_IN
from noiser.model.checkpoint import Options, quiet_transformers
from noiser.model.conversion import built_in_entry, gguf_entry
from noiser.model.hub import check_hub_id, model_not_found
from noiser.model.store import folder_sha256, reading

_TABLES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "tok_embeddings.weight")
"""How the names of embedding tables end, in the families that vLLM runs."""


class Checkpoint(NamedTuple):
    """A folder with a model's files; of a model of the hub, with all but its weights.

    Attributes:
        folder: its path.
        revision: as in `ModelIdentity`.
        trust_remote_code: whether code that comes with it may run.
        hub_id: of a model of the hub.
    """

    folder: str
    revision: str | None
    trust_remote_code: bool = False
    hub_id: str | None = None

    @classmethod
    def of(cls, name: str, options: Options) -> Checkpoint:
        """The checkpoint of that name; see `noiser.load_model`.

        Raises:
            ModelNotFoundError: there is none.
            ModelError: it cannot be read.
        """
        path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path's own raises for a user that does not exist
        if name in BUILT_IN or os.path.isfile(path):  # noqa: PTH113
            converted = built_in_entry(BUILT_IN[name]) if name in BUILT_IN else gguf_entry(path)
            converted.ensure()
            return cls(str(converted.folder), converted.sha256, options.trust_remote_code)
        if os.path.isdir(path) and name.strip():  # noqa: PTH112 - Path's own raises for names that are too long
            with reading(path):
                return cls(str(path.resolve()), folder_sha256(path.resolve()), options.trust_remote_code)
        from huggingface_hub import snapshot_download

        online = check_hub_id(name, options.revision)
        patterns = ["*.json", "*.jinja", "*.txt", "*.py", "tokenizer*"]
        try:
            folder = snapshot_download(
                name, revision=options.revision, allow_patterns=patterns, local_files_only=not online
            )
        except Exception as error:  # of the hub's and its HTTP library's many kinds
            raise model_not_found(name, f"{error}.") from error
        return cls(folder, Path(folder).name, options.trust_remote_code, name)

    def config(self) -> Any:
        """Its configuration, of transformers."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)

    def generation_config(self) -> Any:
        """Its settings for generating, of transformers; None without any."""
        from transformers import GenerationConfig

        has_one = Path(self.folder, "generation_config.json").is_file()
        return GenerationConfig.from_pretrained(self.folder) if has_one else None

    def tokenizer(self) -> Any:
        """Its tokenizer."""
        from transformers import AutoTokenizer

        with quiet_transformers():
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)

    def embedding_table(self) -> Float[Tensor, "vocab dim"]:
        """The embedding table, read from the one file that holds it.

        Raises:
            ModelError: no safetensors file, or no tensor whose name is that of an embedding table.
        """
        from safetensors import safe_open

        folder = Path(self.folder)
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files: dict[str, str] = parse_json(index.read_bytes())["weight_map"]
        else:
            files = {}
            for name in ["model.safetensors"] if self.hub_id else sorted(p.name for p in folder.glob("*.safetensors")):
                with safe_open(self._file(name), "pt") as file:
                    files |= dict.fromkeys(file.keys(), name)
        names = [name for name in files if name.endswith(_TABLES)]
        if len(names) != 1:
            raise ModelError(
                f"{folder} has {', '.join(names) or 'no tensor'} for an embedding table; expected one tensor in a "
                f".safetensors file whose name ends with {', '.join(_TABLES)}. Save the model with save_pretrained."
            )
        with safe_open(self._file(files[names[0]]), "pt") as file:
            return file.get_tensor(names[0])

    def _file(self, name: str) -> str:
        """The path of one file, which is downloaded if the model is the hub's."""
        if self.hub_id is None:
            return str(Path(self.folder, name))
        from huggingface_hub import hf_hub_download

        return hf_hub_download(self.hub_id, name, revision=self.revision)
