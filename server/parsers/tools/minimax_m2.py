"""MiniMax M2: every argument in a tag.

<minimax:tool_call>\\n<invoke name="NAME">\\n<parameter name="KEY">VALUE</parameter>\\n</invoke>\\n</minimax:tool_call>
"""

from __future__ import annotations

from quire.server.parsers.recognition import HasToken
from quire.server.parsers.tools.xml import XmlCalls


class MinimaxM2(XmlCalls):
    name = "minimax_m2"
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")
    style = "minimax_xml"
    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    call = ('<invoke name="', '">', "</invoke>")
    argument = ('<parameter name="', '">', "</parameter>")
    layout = ("\n", "\n", "", "\n")

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        if "<minimax:tool_call>" in template:
            return "the chat template writes <minimax:tool_call>"
        return None
