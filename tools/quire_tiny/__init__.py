"""How the embedded model `configs/quire-tiny` is made: data from rules, a tokenizer, a training loop, an evaluation.

Not part of the installed package.
"""
