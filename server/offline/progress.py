"""The progress bar of the offline `LLM`."""

from __future__ import annotations

from quire.server.startup.bar import Bar


class Progress:
    """A bar over prompts with the speed in tokens."""

    def __init__(self, num_requests: int, shown: bool):
        self.bar = Bar(
            total=num_requests,
            desc="Processed prompts",
            disable=not shown,
            postfix="est. speed input: 0.00 toks/s, output: 0.00 toks/s",
            dynamic_ncols=True,
        )
        self.num_input = self.num_output = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()

    def add(self, num_input: int, num_output: int) -> None:
        if self.bar.disable:
            return
        self.num_input += num_input
        self.num_output += num_output
        elapsed = max(self.bar.format_dict["elapsed"], 1e-9)
        self.bar.set_postfix_str(
            f"est. speed input: {self.num_input / elapsed:.2f} toks/s, output: {self.num_output / elapsed:.2f} toks/s",
            refresh=False,
        )
        self.bar.update()
