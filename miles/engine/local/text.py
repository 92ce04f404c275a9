"""Text in, token ids out, and back: the `tokenizer.json` of a model folder, without importing transformers."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from miles.errors import EngineRefused


class Text:
    """Encodes and decodes with a model folder's tokenizer. Without one ids still work: decoded text is empty."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        self._path = path
        self._tokenizer = Tokenizer.from_file(str(path)) if path.exists() else None

    def encode(self, text: str) -> list[int]:
        """Ids with the special tokens that the tokenizer adds. Raises EngineRefused without a tokenizer."""
        ids: list[int] = self.require().encode(text).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def require(self) -> Tokenizer:
        """The tokenizer. Raises EngineRefused where there is none."""
        if self._tokenizer is None:
            raise EngineRefused(f"{self._path} does not exist, so this engine knows token ids only; send input_ids")
        return self._tokenizer
