"""Convert a folder that `make_model.py` wrote for llama.cpp, with llama.cpp's own converter.

    python benchmarks/to_gguf.py LLAMA_CPP_DIR MODEL_DIR OUT.gguf        (bf16; `llama-quantize` makes Q8_0 and Q4_0 of
    it)

The converter needs `pip install gguf sentencepiece`. It refuses tokenizers that it does not know by their hash. Ours
splits text as GPT-2 does, as it is told here.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(llama_cpp: str, model: str, output: str) -> None:
    sys.path.insert(0, str(Path(llama_cpp).resolve()))
    import convert_hf_to_gguf
    from conversion import base, phi

    base.ModelBase.no_mtp = True  # no model of make_model.py has layers that draft tokens
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    phi.Phi3MiniModel.set_vocab = base.TextModel.set_vocab  # instead of sentencepiece's
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", output, "--outtype", "bf16"]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
