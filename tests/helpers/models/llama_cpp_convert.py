"""Converts a folder with llama.cpp's own converter, with a vocabulary of made-up tokens.

python -m tests.helpers.models.llama_cpp_convert LLAMA_CPP_DIR MODEL_DIR OUT.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main(llama_cpp: str, model: str, output: str) -> None:
    sys.path[:0] = [str(Path(llama_cpp, "gguf-py"))]
    sys.path.append(llama_cpp)
    import conversion
    import convert_hf_to_gguf
    from conversion import base

    base.ModelBase.no_mtp = True
    config = base.ModelBase.load_hparams(Path(model), False)
    conversion.get_model_class(base.get_model_architecture(config, base.ModelType.TEXT))  # imports the class
    _replace_vocabularies(base.ModelBase)
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", output, "--outtype", "f32"]
    convert_hf_to_gguf.main()


def _replace_vocabularies(cls: Any) -> None:
    if "set_vocab" in vars(cls):
        cls.set_vocab = _write_tokens
    for one in cls.__subclasses__():
        _replace_vocabularies(one)


def _write_tokens(self: Any) -> None:
    count = self.hparams["vocab_size"]
    self.gguf_writer.add_tokenizer_model("gpt2")
    self.gguf_writer.add_tokenizer_pre("gpt-2")
    self.gguf_writer.add_token_list([f"<{i}>" for i in range(count)])
    self.gguf_writer.add_token_types([1] * count)
    self.gguf_writer.add_eos_token_id(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
